"""The stages of online learning: a policy is served to live traffic, and what that has finished becomes a batch."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from functools import partial

from rollout_core.agents.adapters.ended import look_up
from rollout_core.agents.adapters.samples import adapt_rollouts
from rollout_core.agents.code import AgentCode
from rollout_core.agents.live import LiveRollouts, OnlineState, queued, with_retries
from rollout_core.agents.session import POLICY, RESOURCE, ServedPolicy, Setting
from rollout_core.base.errors import Recoverable, in_words
from rollout_core.base.ids import ContentId
from rollout_core.base.settings import require_secret
from rollout_core.base.stopping import run_async
from rollout_core.config import AgentGRPO, LearnOnlineConfig, RunnersConfig
from rollout_core.inference.base import ModelRef
from rollout_core.objects import ObjectStore
from rollout_core.objects.local_trees import forget_local_tree
from rollout_core.objects.records import AgentRollouts, AgentSource, Record
from rollout_core.promotion.history import Change, change_latest
from rollout_core.store import LLM, LightningStore, NamedResources, ProxyLLM, SqlLightningStore
from tasks.agents import sessions
from tasks.runtime import connections, events
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, retry, stage

FEED_SECONDS = 0.25
"""Between looks for live rollouts that wait for a runner."""


NOT_HELD_OUT = "nothing is held out"
"""Why a model became the latest that nothing was compared with."""


class ServedModel(Record):
    """A model that answers live agents."""

    model: ContentId
    url: str


class LiveBatch(Record):
    """What is to be learnt from."""

    rollouts: AgentRollouts | None
    """None: the time was up before there was enough."""


@stage(version=1, cached=False, time="agents")
def serve_policy(
    model: ContentId,
    config: LearnOnlineConfig,
    source: AgentSource | None,
    *,
    promoted: bool = False,
    label: str = "",
) -> ServedModel:
    """Have a model answer live agents, without their noticing, and publish where they find it as the resource ``llm``;
    with ``promoted`` the model itself too, under the name of `[promotion]`."""
    url = run_async(_live.serve(current_stage().objects, config, source, model))
    resources: NamedResources = {}
    if promoted:
        # With held-out tasks `promote` has done so, with its evidence.
        change = Change("promote", config.promotion.resource, model, f"flow run {current_stage().run_id}", NOT_HELD_OUT)
        run_async(_live.note(current_stage().objects, change))
        events.emit(events.Promoted(resource=change.resource, model=model, reason=NOT_HELD_OUT))
        resources[config.promotion.resource] = LLM(endpoint="", model=model, sampling_parameters={})
    run_async(_live.publish(config, resources))
    return ServedModel(model=model, url=url)


@stage(version=1, cached=False, time="agents")
def take_live_batch(
    model: ContentId,
    config: LearnOnlineConfig,
    source: AgentSource | None,
    *,
    seconds: float | None = None,
    label: str = "",
) -> LiveBatch:
    """Wait until live traffic has finished enough rollouts to learn from, and note which, with the content of their
    spans; from then on they are the run's batch until it is concluded. None after ``seconds`` without."""
    objects = current_stage().objects
    # After a try in which the engine failed it is loaded again.
    run_async(_live.serve(objects, config, source, model))
    rollouts = run_async(_live.next_batch(objects, config, model, seconds))
    if rollouts is not None:
        left_out = _live.state.left_out
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "none"
        stage_logger().info("%d live rollouts to learn from; left out: %s", rollouts.num_rollouts, reasons)
    return LiveBatch(rollouts=rollouts)


class _Live:
    """What this process serves to live traffic, and how far its run is."""

    def __init__(self) -> None:
        self._policy: ServedPolicy | None = None
        self._store: SqlLightningStore | None = None
        self._state: OnlineState[AgentRollouts] | None = None
        self._rollouts: LiveRollouts | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._exits = AsyncExitStack()

    @property
    def state(self) -> OnlineState[AgentRollouts]:
        """How far the run is."""
        assert self._state is not None, "begin_online was called"
        return self._state

    def begin(self, state: OnlineState[AgentRollouts]) -> None:
        """Read what live traffic finishes anew, from where this state is."""
        self._state, self._rollouts = state, None

    async def serve(
        self, objects: ObjectStore, config: LearnOnlineConfig, source: AgentSource | None, model: ContentId
    ) -> str:
        """Have the model answer, and runners work on live rollouts where the run is to; the model's URL."""
        return await sessions.thread.run(self._serve(objects, config, source, model))

    async def _serve(
        self, objects: ObjectStore, config: LearnOnlineConfig, source: AgentSource | None, model: ContentId
    ) -> str:
        if self._store is None:
            self._store = await self._exits.enter_async_context(connections.open_store())
        if self._policy is None:
            store = self._store
            self._policy = ServedPolicy.on_engine(
                store,
                config.backend,
                config.runners,
                api_key=await with_retries(lambda: _key(store, config.runners)),
                tool_parser=config.tool_parser,
                seed=config.seed,
                say=stage_logger().info,
            )
            sessions.policy = self._policy
        sampling, loaded = config.algorithm.sampling, self._policy.loaded
        if loaded is None or (loaded[0].content_id, loaded[1]) != (model, sampling) or self._policy.problem is not None:
            folder = await asyncio.to_thread(objects.local_tree, model, connections.cache_folder())
            await self._policy.load(ModelRef(model, folder), sampling)
        if config.work_live and (self._feeding is None or self._feeding.done()):
            assert source is not None and config.agent is not None, "the configuration says so"
            code = AgentCode.from_document(json.loads(objects.get_bytes(source.code)))
            setting = Setting(code, config.agent, config.backend, config.runners, config.seed)
            await sessions.open(setting)  # raises where the agent cannot be loaded
            self._feeding = asyncio.create_task(self._feed(self._store, setting))
        return self._policy.proxy.url

    async def _feed(self, store: LightningStore, setting: Setting) -> None:
        """Have runners of this run take what live traffic has queued, until this is cancelled or they fail."""
        try:
            while True:
                began = time.monotonic()
                session = await sessions.open(setting)
                await session.fleet.take_on(await with_retries(lambda: queued(store)))
                await asyncio.sleep(max(FEED_SECONDS, 10 * (time.monotonic() - began)))
        except Exception:
            await sessions.end()  # what state its runners are in is not known; a stage that uses them fails for now
            raise

    async def publish(self, config: LearnOnlineConfig, resources: NamedResources) -> None:
        """Add the model's address and these to the store's latest resources, where they are not there yet."""
        assert self._policy is not None and self._store is not None, "it is served"
        store, wanted = self._store, {RESOURCE: self._policy.as_resource(config.algorithm.sampling), **resources}

        async def add() -> None:
            latest = await store.get_latest_resources()
            known = latest.resources if latest else {}
            if any(known.get(name) != resource for name, resource in wanted.items()):
                await store.add_resources({**wanted, **known, **wanted})  # the address first

        await with_retries(add)

    async def note(self, objects: ObjectStore, change: Change) -> None:
        """Make the model the latest, and say so in the history."""
        assert self._store is not None, "it is served"
        store = self._store
        await with_retries(lambda: change_latest(store, objects, change))

    async def next_batch(
        self, objects: ObjectStore, config: LearnOnlineConfig, model: ContentId, seconds: float | None
    ) -> AgentRollouts | None:
        """See `take_live_batch`. Raises Recoverable where the engine or the runners have failed."""
        assert self._policy is not None and self._store is not None, "it is served"
        policy, store, state = self._policy, self._store, self.state
        if self._rollouts is None:
            self._rollouts = LiveRollouts(
                store,
                state,
                config.live,
                group_size=group_size(config),
                adapt=lambda ids: adapt_rollouts(store, objects, ids, form=config.form, model=POLICY),
                flush=policy.proxy.flush,
            )
        until = None if seconds is None else time.monotonic() + seconds
        while state.batch is None:
            self._raise_problem()
            chosen = await self._rollouts.next_batch()
            if chosen:
                state.batch = await with_retries(partial(look_up, store, objects, chosen, model))
                self._rollouts.take(chosen)
                break
            if self._rollouts.is_due_to_save():
                await asyncio.to_thread(save_online, objects, config, state)
            if until is not None and time.monotonic() > until:
                return None
            await asyncio.sleep(self._rollouts.pause)
        await asyncio.to_thread(save_online, objects, config, state)
        return state.batch

    def _raise_problem(self) -> None:
        if self._policy is not None and self._policy.problem is not None:
            raise Recoverable(f"the engine no longer answers: {self._policy.problem}")
        if self._feeding is not None and self._feeding.done() and not self._feeding.cancelled():
            error = self._feeding.exception()
            raise Recoverable(f"the runners of live rollouts have ended: {in_words(error) if error else 'no reason'}")

    async def close(self) -> None:
        """End the runners, then what is served: calls under way get a few seconds."""
        feeding, self._feeding = self._feeding, None
        if feeding is not None:
            feeding.cancel()
            await asyncio.wait([feeding])
        await sessions.end()
        policy, self._policy, sessions.policy = self._policy, None, None
        exits, self._exits, self._store = self._exits, AsyncExitStack(), None
        self._state = self._rollouts = None
        try:
            if policy is not None:
                await policy.close()
        finally:
            await exits.aclose()


_live = _Live()


def begin_online(objects: ObjectStore, config: LearnOnlineConfig, start: ContentId) -> OnlineState[AgentRollouts]:
    """How far the run of this name is; what it finds is read from there. Raises ConfigError where it began with
    another model."""
    state = retry(lambda: OnlineState[AgentRollouts].begin(objects, _ref(config), config.run.name, start))
    _live.begin(state)
    return state


def save_online(objects: ObjectStore, config: LearnOnlineConfig, state: OnlineState[AgentRollouts]) -> None:
    """Note how far the run is."""
    retry(lambda: state.save(objects, _ref(config)))


def _ref(config: LearnOnlineConfig) -> str:
    return f"learn-online/{config.run.name}"


def forget_models(models: Iterable[ContentId]) -> None:
    """Take models that answer no more out of this machine's cache, which would else grow with every update. Who needs
    one fetches it again."""
    for model in models:
        forget_local_tree(model, connections.cache_folder())


def group_size(config: LearnOnlineConfig) -> int:
    """So many rollouts of equal input are compared with each other."""
    return config.algorithm.samples_per_prompt if isinstance(config.algorithm, AgentGRPO) else 1


async def _key(store: LightningStore, runners: RunnersConfig) -> str:
    """What live agents show. Without a secret it is one that was published before for the same address, so that agents
    that have it can work after a restart, or else a new one."""
    if runners.api_key is not None:
        return require_secret(runners.api_key)
    latest = await store.get_latest_resources()
    llm = latest.resources.get(RESOURCE) if latest else None
    if isinstance(llm, ProxyLLM) and f"//{runners.host}:{runners.model_port}/" in llm.get_base_url("any", "any"):
        return llm.api_key or secrets.token_urlsafe(24)
    return secrets.token_urlsafe(24)


def close_live() -> None:
    """Serve nothing more to live traffic: runners end first, calls under way get a few seconds."""
    asyncio.run(sessions.thread.run(_live.close()))

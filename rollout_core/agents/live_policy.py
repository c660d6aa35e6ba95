"""A policy that answers live agents from update to update, and the batches that come of what they do with it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rollout_core.agents.adapters.ended import look_up
from rollout_core.agents.adapters.span_samples import adapt_rollouts
from rollout_core.agents.code import AgentCode
from rollout_core.agents.live import LiveRollouts, OnlineState, queued, with_retries
from rollout_core.agents.session import POLICY, RESOURCE, ServedPolicy, Sessions, Setting
from rollout_core.base.errors import Recoverable, in_words
from rollout_core.base.ids import ContentId
from rollout_core.base.settings import require_secret
from rollout_core.config import LearnOnlineConfig, RunnersConfig
from rollout_core.inference.backend import ModelRef
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import AgentRollouts, AgentSource
from rollout_core.store import LightningStore, NamedResources, ProxyLLM

log = logging.getLogger(__name__)

FEED_SECONDS = 0.25
"""Between looks for live rollouts that wait for a runner."""


class LivePolicy:
    """What this process serves to live agents, and how far its run is. It lives on the loop of ``sessions``, whose
    runners work on live rollouts and on held-out tasks by the same policy.

    Args:
        open_store, logger: as of `Sessions`.
        cache: local folder for models.
    """

    def __init__(
        self,
        sessions: Sessions,
        open_store: Callable[[], AbstractAsyncContextManager[LightningStore]],
        cache: Callable[[], Path],
        logger: Callable[[], Any] = lambda: log,
    ) -> None:
        self._sessions, self._open_store, self._cache, self._logger = sessions, open_store, cache, logger
        self._policy: ServedPolicy | None = None
        self._store: LightningStore | None = None
        self._state: OnlineState[AgentRollouts] | None = None
        self._save: Callable[[], None] = lambda: None
        self._rollouts: LiveRollouts | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._exits = AsyncExitStack()

    @property
    def state(self) -> OnlineState[AgentRollouts]:
        """How far the run is."""
        assert self._state is not None, "begin was called"
        return self._state

    @property
    def store(self) -> LightningStore:
        """Where live rollouts are."""
        assert self._store is not None, "it is served"
        return self._store

    @property
    def policy(self) -> ServedPolicy:
        """What is served."""
        assert self._policy is not None, "it is served"
        return self._policy

    def begin(self, state: OnlineState[AgentRollouts], save: Callable[[], None]) -> None:
        """Read what live traffic finishes anew, from where this state is; ``save`` notes how far it is."""
        self._state, self._save, self._rollouts = state, save, None

    async def serve(
        self, objects: ObjectStore, config: LearnOnlineConfig, source: AgentSource | None, model: ContentId
    ) -> str:
        """Have the model answer, and runners work on live rollouts where the run is to; the model's URL."""
        return await self._sessions.thread.run(self._serve(objects, config, source, model))

    async def _serve(
        self, objects: ObjectStore, config: LearnOnlineConfig, source: AgentSource | None, model: ContentId
    ) -> str:
        if self._store is None:
            self._store = await self._exits.enter_async_context(self._open_store())
        store = self._store
        if self._policy is None:
            self._policy = ServedPolicy.on_engine(
                store,
                config.backend,
                config.runners,
                api_key=await with_retries(lambda: _key(store, config.runners)),
                tool_parser=config.tool_parser,
                seed=config.seed,
                say=self._logger().info,
            )
            self._sessions.policy = self._policy
        sampling, loaded = config.algorithm.sampling, self._policy.loaded
        if loaded is None or (loaded[0].content_id, loaded[1]) != (model, sampling) or self._policy.problem is not None:
            folder = await asyncio.to_thread(objects.local_tree, model, self._cache())
            await self._policy.load(ModelRef(model, folder), sampling)
        if config.work_live and (self._feeding is None or self._feeding.done()):
            assert source is not None and config.agent is not None, "the configuration says so"
            code = AgentCode.filed(objects, source)
            setting = Setting(code, config.agent, config.backend, config.runners, config.seed)
            await self._sessions.open(setting)  # raises where the agent cannot be loaded
            self._feeding = asyncio.create_task(self._feed(store, setting))
        return self._policy.proxy.url

    async def _feed(self, store: LightningStore, setting: Setting) -> None:
        """Have runners of this run take what live traffic has queued, until this is cancelled or they fail."""
        try:
            while True:
                began = time.monotonic()
                session = await self._sessions.open(setting)
                await session.fleet.take_on(await with_retries(lambda: queued(store)))
                await asyncio.sleep(max(FEED_SECONDS, 10 * (time.monotonic() - began)))
        except Exception:
            # What state its runners are in is not known; who uses them fails for now.
            await self._sessions.end()
            raise

    async def publish(self, config: LearnOnlineConfig, resources: NamedResources) -> None:
        """Add the model's address and these to the store's latest resources, where they are not there yet."""
        store, wanted = self.store, {RESOURCE: self.policy.as_resource(config.algorithm.sampling), **resources}

        async def add() -> None:
            latest = await store.get_latest_resources()
            known = latest.resources if latest else {}
            if any(known.get(name) != resource for name, resource in wanted.items()):
                await store.add_resources({**wanted, **known, **wanted})  # the address first

        await with_retries(add)

    async def next_batch(
        self, objects: ObjectStore, config: LearnOnlineConfig, model: ContentId, seconds: float | None
    ) -> AgentRollouts | None:
        """Wait until live traffic has finished enough rollouts to learn from, and note which, with the content of their
        spans; None after ``seconds`` without. Raises Recoverable where the engine or the runners have failed."""
        store, state = self.store, self.state
        if self._rollouts is None:
            self._rollouts = LiveRollouts(
                store,
                state,
                config.live,
                group_size=config.algorithm.group_size,
                adapt=lambda ids: adapt_rollouts(store, objects, ids, form=config.form, model=POLICY),
                flush=self.policy.proxy.flush,
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
                await asyncio.to_thread(self._save)
            if until is not None and time.monotonic() > until:
                return None
            await asyncio.sleep(self._rollouts.pause)
        await asyncio.to_thread(self._save)
        return state.batch

    def _raise_problem(self) -> None:
        if self.policy.problem is not None:
            raise Recoverable(f"the engine no longer answers: {self.policy.problem}")
        if self._feeding is not None and self._feeding.done() and not self._feeding.cancelled():
            error = self._feeding.exception()
            raise Recoverable(f"the runners of live rollouts have ended: {in_words(error) if error else 'no reason'}")

    def close(self) -> None:
        """End the runners, then what is served: calls under way get a few seconds."""
        asyncio.run(self._sessions.thread.run(self._close()))

    async def _close(self) -> None:
        feeding, self._feeding = self._feeding, None
        if feeding is not None:
            feeding.cancel()
            await asyncio.wait([feeding])
        await self._sessions.end()
        policy, self._policy, self._sessions.policy = self._policy, None, None
        exits, self._exits, self._store = self._exits, AsyncExitStack(), None
        self._state = self._rollouts = None
        try:
            if policy is not None:
                await policy.close()
        finally:
            await exits.aclose()


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

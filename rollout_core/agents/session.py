"""What an agent works with while it is trained: a policy that is served, and the runners.

    runners --claim tasks--> queue of these rollouts over the store
    agents  --chat---------> LLMProxy (spans with token ids) --> EngineServer --> the process's engine

All of it stays up from one set of tasks to the next, with new weights in the engine.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rollout_core.agents.adapters.calls import POLICY as POLICY
from rollout_core.agents.code import AgentCode
from rollout_core.agents.proxy.proxy_server import LLMProxy
from rollout_core.agents.proxy.upstreams import ModelEntry, Upstream
from rollout_core.agents.runner_fleet import Fleet
from rollout_core.base.errors import Recoverable, in_words
from rollout_core.base.loops import LoopThread
from rollout_core.base.settings import require_secret
from rollout_core.config import AgentConfig, EngineConfig, RunnersConfig, SamplingParams
from rollout_core.inference.backend import ModelRef
from rollout_core.inference.serving import EngineServer
from rollout_core.store import LLM, LightningStore, NamedResources

log = logging.getLogger(__name__)

RESOURCE = "llm"
_LOOK_SECONDS = 0.2


class PolicyServer(Protocol):
    """An OpenAI-compatible server of a policy's weights, such as `rollout_core.inference.serving.EngineServer`."""

    @property
    def url(self) -> str: ...
    async def start(self, model: ModelRef, sampling: SamplingParams | None = None) -> None: ...
    async def load(self, model: ModelRef, sampling: SamplingParams | None = None) -> None: ...
    async def stop(self) -> None: ...


class ServedPolicy:
    """A policy behind the proxy that records agents' calls, whose weights are swapped while agents work. Its methods
    may be called from any event loop, one at a time.

    Args:
        server: of the weights, under the name ``policy``.
        proxy: in front of it; also in front of other models, where it is not the policy's own.
        server_key: what the server asks of its clients.
        owns_proxy: whether the proxy starts and stops with the policy.
    """

    def __init__(
        self, server: PolicyServer, proxy: LLMProxy, *, server_key: str | None = None, owns_proxy: bool = True
    ) -> None:
        self.proxy = proxy
        self.loaded: tuple[ModelRef, SamplingParams] | None = None
        """The weights that answer, and how they draw; None: none were loaded, or loading failed."""
        self._server, self._server_key, self._owns_proxy = server, server_key, owns_proxy
        self._others: list[ModelEntry] | None = None
        """Models that the proxy also serves; None until the policy is served."""

    @classmethod
    def on_engine(
        cls,
        store: LightningStore,
        backend: EngineConfig,
        runners: RunnersConfig,
        *,
        api_key: str,
        tool_parser: Literal["hermes"] | None = "hermes",
        seed: int = 0,
        say: Callable[[str], None] = log.info,
    ) -> ServedPolicy:
        """On this process's engine, with a proxy of its own where ``runners`` says that the model listens."""
        # Nobody but the proxy calls the engine, or calls would not be recorded.
        key = secrets.token_urlsafe(24)
        server = EngineServer(backend, name=POLICY, tool_parser=tool_parser, seed=seed, api_key=key, say=say)
        public_url = f"http://{runners.public_host}:{runners.model_port}" if runners.public_host is not None else None
        proxy = LLMProxy(runners.model_port, store=store, host=runners.host, api_key=api_key, public_url=public_url)
        return cls(server, proxy, server_key=key)

    @property
    def problem(self) -> str | None:
        """Why nothing is answered until the next `load`, where that is so."""
        return getattr(self._server, "problem", None)

    async def load(self, model: ModelRef, sampling: SamplingParams) -> None:
        """Have these weights answer, drawing as given; the first time, start to serve. Agents' calls wait meanwhile,
        none fails. Nothing is done where they answer already. Raises what the engine raises, and ConfigError where the
        proxy's port cannot be had."""
        wanted = (model, sampling)
        if self.loaded == wanted and self.problem is None:
            return
        self.loaded = None
        if self._others is None:
            await self._start(model, sampling)
        else:
            async with self.proxy.paused(POLICY, model_id=model.content_id):
                await self._server.load(model, sampling)
        self.loaded = wanted

    async def _start(self, model: ModelRef, sampling: SamplingParams) -> None:
        await self._server.start(model, sampling)
        others = [entry for entry in self.proxy.model_list if entry.name != POLICY]
        upstream = Upstream(
            url=self._server.url, model=POLICY, api_key=self._server_key, seeds=True, model_id=model.content_id
        )
        try:
            await self.proxy.update_model_list([*others, ModelEntry(POLICY, (upstream,))])
            if self._owns_proxy:
                await self.proxy.start()
        except BaseException:
            await self._server.stop()
            raise
        self._others = others

    def as_resource(self, sampling: SamplingParams) -> LLM:
        """What agents reach it by."""
        parameters = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
        return self.proxy.as_resource(model=POLICY, sampling_parameters=parameters)

    async def close(self) -> None:
        """Serve no more: calls under way get a few seconds, and what was recorded is stored. Harmless where nothing is
        served."""
        others, self._others, self.loaded = self._others, None, None
        if others is None:
            return
        try:
            if self._owns_proxy:
                await self.proxy.stop()
            else:
                await self.proxy.update_model_list(others)
        finally:
            await self._server.stop()


@dataclass(frozen=True)
class Setting:
    """What a session is made for."""

    code: AgentCode
    agent: AgentConfig
    backend: EngineConfig
    runners: RunnersConfig
    seed: int = 0


class AgentSession:
    """Open it as an asynchronous context; every use on one event loop.

    Args:
        policy: to work with, which stays up; default: one of its own, on the setting's backend.
        log_folder, say: see `Fleet`.

    Raises ConfigError for an agent that cannot be loaded, before the engine starts.
    """

    def __init__(
        self,
        store: LightningStore,
        setting: Setting,
        *,
        policy: ServedPolicy | None = None,
        log_folder: Path | None = None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        runners = setting.runners
        # A key of its own where nobody else is to come: agents of other users of this machine get no answers either.
        key = secrets.token_urlsafe(24) if runners.api_key is None else require_secret(runners.api_key)
        self._owns_policy = policy is None
        self._policy = policy or ServedPolicy.on_engine(
            store,
            setting.backend,
            runners,
            api_key=key,
            tool_parser=setting.agent.tool_parser,
            seed=setting.seed,
            say=say,
        )
        self.fleet = Fleet(
            store,
            setting.code,
            runners,
            api_key=key,
            max_failures=setting.agent.max_attempts,
            log_folder=log_folder,
            say=say,
        )

    async def __aenter__(self) -> AgentSession:
        # The runners first: an agent that cannot be loaded is known in a second, an engine's start takes half a minute.
        await self.fleet.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        # The runners first again: what agents have under way would else fail for want of a model.
        try:
            await self.fleet.__aexit__()
        finally:
            if self._owns_policy:
                await self._policy.close()

    async def run(
        self,
        model: ModelRef,
        sampling: SamplingParams,
        rollout_ids: Sequence[str],
        *,
        resources: NamedResources | None = None,
        retry_failed: bool = False,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Have agents work on these rollouts with this model behind them, until all have finished; see `Fleet.run`.

        They get it as the resource ``llm``, with the ``resources`` given. Raises Recoverable when the engine has
        failed too often: no more tasks are tried then.
        """
        await self._policy.load(model, sampling)
        self.fleet.set_resources({**(resources or {}), RESOURCE: self._policy.as_resource(sampling)})
        work = asyncio.ensure_future(self.fleet.run(rollout_ids, retry_failed=retry_failed, on_progress=on_progress))
        watch = asyncio.ensure_future(self._until_engine_fails())
        try:
            done, _ = await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
        finally:
            for future in (work, watch):
                future.cancel()
            await asyncio.wait({work, watch})
        await self._policy.proxy.flush()

    async def _until_engine_fails(self) -> None:
        while self._policy.problem is None:
            await asyncio.sleep(_LOOK_SECONDS)
        raise Recoverable(f"the engine no longer answers: {self._policy.problem}")


class Sessions:
    """The session of this process: kept from one use to the next, replaced where another is asked for. Those who use it
    at the same time have it in turn, for there is one engine.

    Args:
        open_store: the store of a session that begins.
        log_folder: where its runners write what agents print.
        logger: what a session that begins says things to.
    """

    policy: ServedPolicy | None = None
    """What sessions that begin work with, where it is served already; default: each serves its own."""

    def __init__(
        self,
        open_store: Callable[[], AbstractAsyncContextManager[LightningStore]],
        log_folder: Callable[[], Path],
        logger: Callable[[], Any] = lambda: log,
    ) -> None:
        self._open_store, self._log_folder, self._logger = open_store, log_folder, logger
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._setting: Setting | None = None
        self._session: AgentSession | None = None
        self._exits = AsyncExitStack()
        self._turn, self._changing = asyncio.Lock(), asyncio.Lock()
        """Held while the session is used, and while it is replaced or ended; of the thread's loop."""

    @property
    def thread(self) -> LoopThread:
        """Whose loop all sessions live on."""
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread("rollout-agents")
                self._turn, self._changing = asyncio.Lock(), asyncio.Lock()
            return self._thread

    async def run(
        self,
        setting: Setting,
        model: ModelRef,
        sampling: SamplingParams,
        rollout_ids: Sequence[str],
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        **options: Any,
    ) -> None:
        """`AgentSession.run` of the session for ``setting``, on the loop that it lives on. ``on_progress`` is called on
        the caller's loop, in the caller's context."""
        here, context = asyncio.get_running_loop(), contextvars.copy_context()

        def show(done: int, total: int) -> None:
            here.call_soon_threadsafe(on_progress, done, total, context=context)

        async def work() -> None:
            async with self._turn:
                try:
                    session = await self.open(setting)
                    await session.run(model, sampling, rollout_ids, on_progress=show, **options)
                except BaseException:
                    # What state it is in is not known; the next try starts afresh.
                    try:
                        await self.end()
                    except Exception as error:  # noqa: BLE001 - whatever it is, the caller fails by the first error
                        log.error("The session of agents did not end as it should: %s", in_words(error))
                    raise

        await self.thread.run(work())

    async def open(self, setting: Setting) -> AgentSession:
        """The session for ``setting``, begun where there is another or none; on the loop of the sessions."""
        async with self._changing:
            if self._session is None or self._setting != setting:
                await self._end()
                self._session = await self._exits.enter_async_context(
                    self._made(setting, await self._exits.enter_async_context(self._open_store()))
                )
                self._setting = setting
            return self._session

    def _made(self, setting: Setting, store: LightningStore) -> AgentSession:
        say = self._logger().info
        return AgentSession(store, setting, policy=self.policy, log_folder=self._log_folder(), say=say)

    async def end(self) -> None:
        """End the session, if there is one; on the loop of the sessions."""
        async with self._changing:
            await self._end()

    async def _end(self) -> None:
        self._session = None
        exits, self._exits = self._exits, AsyncExitStack()
        await exits.aclose()

    def close(self) -> None:
        """End the session and its loop, if there are any."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return

        async def end() -> None:
            async with self._turn:
                await self.end()

        try:
            asyncio.run(thread.run(end()))
        finally:
            thread.stop()

"""What an agent works with while it is trained: a policy that is served, and the runners.

    runners --claim tasks--> queue of these rollouts over the store
    agents  --chat---------> LLMProxy (spans with token ids) --> EngineServer --> the process's engine

All of it stays up from one set of tasks to the next, with new weights in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rollout_core.agents.code import AgentCode
from rollout_core.agents.fleet import Fleet
from rollout_core.agents.proxy.server import LLMProxy
from rollout_core.agents.proxy.upstreams import ModelEntry, Upstream
from rollout_core.base.errors import Recoverable
from rollout_core.base.settings import require_secret
from rollout_core.config import AgentConfig, EngineConfig, RunnersConfig, SamplingParams
from rollout_core.inference.base import ModelRef
from rollout_core.inference.serving import EngineServer
from rollout_core.store import LLM, LightningStore, NamedResources

log = logging.getLogger(__name__)

POLICY = "policy"
"""The model's name for agents."""
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

"""The trainer: puts an agent, an algorithm and what they need together, and runs them to the end."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rollout_core.agents.adapters.adapter import Adapter
from rollout_core.agents.adapters.triplets import TracerTraceToTriplet
from rollout_core.agents.agent_calls import ExecutionEvent
from rollout_core.agents.algorithm import Algorithm, Dataset
from rollout_core.agents.baseline import Baseline, FastAlgorithm
from rollout_core.agents.components import ComponentSpec, build_component
from rollout_core.agents.execution import (
    ClientServerExecutionStrategy,
    ExecutionStrategy,
    SharedMemoryExecutionStrategy,
)
from rollout_core.agents.handover import CannotBeImported
from rollout_core.agents.hooks import Hook
from rollout_core.agents.lit_agent import CURRENT_TRAINER, LitAgent
from rollout_core.agents.otel import OtelTracer
from rollout_core.agents.proxy.proxy_server import LLMProxy
from rollout_core.agents.runner import LitAgentRunner, Runner
from rollout_core.agents.tracing import Tracer
from rollout_core.base.errors import ConfigError
from rollout_core.base.stopping import in_thread
from rollout_core.store import InMemoryLightningStore, LightningStore, NamedResources

logger = logging.getLogger(__name__)

STRATEGIES = {"shm": SharedMemoryExecutionStrategy, "cs": ClientServerExecutionStrategy}
_LOOK_SECONDS = 0.1


class Trainer:
    """Components are given as instances or as how to make them, see ``ComponentSpec``.

    Args:
        algorithm: None: only the runners work, until they have ended (``max_rollouts``) or the process is stopped.
        n_runners: how many; a strategy that was given its own number keeps it.
        max_rollouts: of each runner; None: no limit.
        initial_resources: for the algorithm to publish first; the proxy's resource, as ``llm``, if only that is given.
        adapter: what algorithms read spans by; default TracerTraceToTriplet.
        llm_proxy: started for the run unless it serves already.
        strategy: ``shm``, ``cs`` (the default) or an ExecutionStrategy.
        port: of the strategy's server, also of a strategy that has another; without one it means nothing.
        dev: the default algorithm is Baseline.
    """

    def __init__(
        self,
        *,
        algorithm: ComponentSpec = None,
        n_runners: int = 1,
        max_rollouts: int | None = None,
        initial_resources: NamedResources | None = None,
        tracer: ComponentSpec = None,
        adapter: ComponentSpec = None,
        store: ComponentSpec = None,
        runner: ComponentSpec = None,
        strategy: ComponentSpec = None,
        llm_proxy: ComponentSpec = None,
        hooks: Hook | Sequence[Hook] | None = None,
        port: int | None = None,
        dev: bool = False,
    ) -> None:
        if n_runners < 1:
            raise ConfigError(f"n_runners is {n_runners}; expected 1 or more")
        self.initial_resources = initial_resources
        self.max_rollouts = max_rollouts
        self.hooks = (hooks,) if isinstance(hooks, Hook) else tuple(hooks or ())
        self.tracer = _made(build_component("tracer", tracer, Tracer, default=OtelTracer))
        self.store = _made(build_component("store", store, LightningStore, default=InMemoryLightningStore))
        known: Mapping[str, Any] = {
            "tracer": self.tracer,
            "max_rollouts": max_rollouts,
            "n_runners": n_runners,
            "store": self.store,
            **({"server_port": port} if port is not None else {}),
        }
        self.runner = _made(build_component("runner", runner, Runner, default=LitAgentRunner, known=known))
        default_algorithm = Baseline if dev else None
        self.algorithm = build_component("algorithm", algorithm, Algorithm, default=default_algorithm, known=known)
        self.adapter = build_component("adapter", adapter, Adapter, default=TracerTraceToTriplet, known=known)
        self.llm_proxy = build_component("llm_proxy", llm_proxy, LLMProxy, known=known)
        self.strategy = _made(
            build_component(
                "strategy",
                strategy,
                ExecutionStrategy,
                default=ClientServerExecutionStrategy,
                known=known,
                names=STRATEGIES,
            )
        )
        if port is not None and isinstance(self.strategy, ClientServerExecutionStrategy):
            self.strategy.server_port = port
        self.n_runners = self.strategy.n_runners
        # A port, or a role, says that others are to reach this program's store.
        split = "AGL_CURRENT_ROLE" in os.environ
        self._may_use_threads = strategy is None and port is None and not split
        self._check_heartbeats()

    def _check_heartbeats(self) -> None:
        """A worker that beats less often than it may be silent would be taken for dead at work."""
        if not isinstance(self.strategy, ClientServerExecutionStrategy) or not isinstance(self.runner, LitAgentRunner):
            return
        interval, limit = self.runner.heartbeat_interval, self.strategy.worker_timeout
        if 0 < limit < 3 * interval:
            raise ConfigError(
                f"heartbeat_interval is {interval} s, and worker_timeout {limit} s; expected at least three times the "
                "interval, or 0 for no limit"
            )

    def fit(
        self, agent: LitAgent[Any], train_dataset: Dataset | None = None, *, val_dataset: Dataset | None = None
    ) -> None:
        """Run the algorithm and the runners until the algorithm returns. Raises what made the run fail;
        KeyboardInterrupt after Ctrl-C and SystemExit(143) after SIGTERM."""
        self._run(agent, self.algorithm, train_dataset, val_dataset)

    def dev(
        self, agent: LitAgent[Any], train_dataset: Dataset | None = None, *, val_dataset: Dataset | None = None
    ) -> None:
        """``fit`` to try an agent out: by Baseline, unless the algorithm is a FastAlgorithm itself. Raises TypeError if
        it is another one."""
        algorithm = self.algorithm or Baseline()
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(
                f"dev runs a FastAlgorithm, such as Baseline, but the algorithm is a {type(algorithm).__name__}"
            )
        self._run(agent, algorithm, train_dataset, val_dataset)

    def _run(
        self, agent: LitAgent[Any], algorithm: Algorithm | None, train: Dataset | None, val: Dataset | None
    ) -> None:
        if not isinstance(agent, LitAgent):
            raise TypeError(
                f"the agent is a {type(agent).__name__}; expected a LitAgent, or a function decorated with @rollout"
            )
        published = threading.Event()

        async def run_algorithm(store: LightningStore, event: ExecutionEvent) -> None:
            async with _running(self.llm_proxy, store) as proxy:
                resources: NamedResources | None = self.initial_resources
                if resources is None and proxy is not None and proxy.model_list:
                    resources = {"llm": proxy.as_resource()}
                if algorithm is None:
                    if resources is not None:
                        await store.add_resources(resources)
                    published.set()
                    while not event.is_set():
                        await asyncio.sleep(_LOOK_SECONDS)
                    return
                run: Any = algorithm.run
                algorithm.set_store(store)
                algorithm.set_adapter(self.adapter)
                algorithm.set_initial_resources(resources)
                algorithm.set_llm_proxy(proxy)
                if algorithm.is_async():
                    await run(train_dataset=train, val_dataset=val)
                else:
                    await asyncio.wrap_future(in_thread(lambda: run(train_dataset=train, val_dataset=val)))

        if algorithm is None:
            run_algorithm.only_publishes = published  # pyright: ignore[reportFunctionMemberAccess]
        work = RunnerWork(self.runner, agent, self.hooks)
        before = CURRENT_TRAINER.set(self)
        try:
            self.strategy.execute(run_algorithm, work, self.store)
        except CannotBeImported as error:
            if not self._may_use_threads:
                raise
            logger.warning("The runners are threads of this process, and no processes of their own: %s", error)
            SharedMemoryExecutionStrategy(self.n_runners).execute(run_algorithm, work, self.store)
        finally:
            CURRENT_TRAINER.reset(before)


@dataclass(frozen=True)
class RunnerWork:
    """What each runner does, in a thread of this process or in a process of its own."""

    runner: Runner[Any]
    agent: LitAgent[Any]
    hooks: tuple[Hook, ...]

    @property
    def imports(self) -> Sequence[str]:
        """See ``Tracer.imports``."""
        return [__name__, *self.runner.imports()]

    async def __call__(self, store: LightningStore, number: int, event: ExecutionEvent) -> None:
        """Work as runner ``number`` until ``event`` is set."""
        ready = self.runner.for_worker().run_context(agent=self.agent, store=store, hooks=self.hooks, worker_id=number)
        with ready as runner:
            await runner.iter(event=event)


@asynccontextmanager
async def _running(proxy: LLMProxy | None, store: LightningStore) -> AsyncIterator[LLMProxy | None]:
    """The proxy, which serves while the block runs; one that served before keeps serving."""
    if proxy is None:
        yield None
        return
    proxy.set_store(store)
    is_ours = not proxy.is_running()
    if is_ours:
        await proxy.start()
    try:
        yield proxy
    finally:
        if is_ours:
            await proxy.stop()


def _made(component: Any) -> Any:
    assert component is not None, "it has a default"
    return component

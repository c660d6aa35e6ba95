"""Algorithms: what decides which tasks run, and what is learned of them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, get_args

from rollout_core.agents.delivery import retried
from rollout_core.agents.lit_agent import CURRENT_TRAINER, current, warn_of
from rollout_core.base.errors import ConfigError
from rollout_core.store import (
    EnqueueRolloutRequest,
    LightningStore,
    NamedResources,
    Rollout,
    RolloutConfig,
    RolloutStatus,
)
from rollout_core.store.forwarding_store import StoreView
from rollout_core.store.lifecycle import FINISHED

logger = logging.getLogger(__name__)

Item = TypeVar("Item", covariant=True)


class Dataset(Protocol[Item]):
    """Tasks: JSON values, by place. Any sequence is one."""

    def __getitem__(self, place: int, /) -> Item:
        """The task at this place."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...


AGENT_KIND = "agent"
"""In the metadata of rollouts that a flow or an algorithm of ours has enqueued for an agent."""
PATIENCE_SECONDS = 120.0
"""How long a store may be away before an algorithm of ours fails."""
INJECTED = ("store", "adapter", "llm_proxy", "initial_resources", "train_dataset", "val_dataset")


class Algorithm:
    """Override ``run``. A trainer sets what the other methods return before it runs.

    A synchronous ``run`` gets a thread of its own, so it may block; it reaches the store by ``asyncio.run``.
    """

    _store: LightningStore | None = None
    _adapter: Any = None
    _llm_proxy: Any = None
    _initial_resources: NamedResources | None = None

    def is_async(self) -> bool:
        """Whether ``run`` is a coroutine function."""
        return inspect.iscoroutinefunction(self.run)

    def run(self, train_dataset: Dataset | None = None, val_dataset: Dataset | None = None) -> Awaitable[None] | None:
        """Enqueue tasks, learn from what comes of them, publish resources. The run ends when this returns."""
        raise NotImplementedError(f"{type(self).__name__} does not define run")

    def set_trainer(self, trainer: Any) -> None:
        """Deprecated, and without effect: see `get_trainer`."""
        warn_of("set_trainer")

    def get_trainer(self) -> Any:
        """Deprecated: the trainer sets what an algorithm needs. Raises ConfigError outside of ``Trainer.fit``."""
        return current(CURRENT_TRAINER, "trainer")

    def set_store(self, store: LightningStore) -> None:
        """Where rollouts are."""
        self._store = store

    def get_store(self) -> LightningStore:
        """Raises ConfigError before one is set."""
        if self._store is None:
            raise ConfigError("the algorithm has no store; run it by a Trainer, or call set_store")
        return self._store

    def set_adapter(self, adapter: Any) -> None:
        """What makes training data of spans."""
        self._adapter = adapter

    def get_adapter(self) -> Any:
        """Raises ConfigError before one is set."""
        if self._adapter is None:
            raise ConfigError("the algorithm has no adapter; give the Trainer one, or call set_adapter")
        return self._adapter

    def set_llm_proxy(self, llm_proxy: Any) -> None:
        """The proxy in front of the model; None without one."""
        self._llm_proxy = llm_proxy

    def get_llm_proxy(self) -> Any:
        """None without one."""
        return self._llm_proxy

    def set_initial_resources(self, resources: NamedResources | None) -> None:
        """What is published before the first task."""
        self._initial_resources = resources

    def get_initial_resources(self) -> NamedResources | None:
        """None if none were given."""
        return self._initial_resources


class FunctionalAlgorithm(Algorithm):
    """A function as an algorithm. Arguments are given by name: those of INJECTED that it names.

    Raises ConfigError for a function with another parameter that has no default.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        self._named = [parameter.name for parameter in parameters if parameter.name in INJECTED]
        other = [
            parameter.name
            for parameter in parameters
            if parameter.name not in INJECTED
            and parameter.default is parameter.empty
            and parameter.kind != parameter.VAR_KEYWORD
        ]
        if other:
            raise ConfigError(
                f"@algo: no value for the parameters {', '.join(other)}; expected any of {', '.join(INJECTED)}"
            )
        functools.update_wrapper(self, function)  # type: ignore[arg-type] - for its name and docstring

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself."""
        return self._function(*args, **kwargs)

    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)

    def run(self, train_dataset: Dataset | None = None, val_dataset: Dataset | None = None) -> Awaitable[None] | None:
        values = {
            "store": self._store,
            "adapter": self._adapter,
            "llm_proxy": self._llm_proxy,
            "initial_resources": self._initial_resources,
            "train_dataset": train_dataset,
            "val_dataset": val_dataset,
        }
        unused = [
            name for name in ("train_dataset", "val_dataset") if values[name] is not None and name not in self._named
        ]
        if unused:
            raise TypeError(f"{unused[0]} was given, but the algorithm has no such parameter")
        return self._function(**{name: values[name] for name in self._named})


def algo(function: Callable[..., Any]) -> FunctionalAlgorithm:
    """Make a function an algorithm, see ``FunctionalAlgorithm``."""
    return FunctionalAlgorithm(function)


def with_store(function: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """A coroutine method of an Algorithm that gets the algorithm's store before its other arguments."""

    @functools.wraps(function)
    async def call(self: Algorithm, *args: Any, **kwargs: Any) -> Any:
        return await function(self, self.get_store(), *args, **kwargs)

    return call


def with_llm_proxy(
    required: bool = False, auto_start: bool = True
) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Any]]:
    """A coroutine method of an Algorithm that gets the algorithm's proxy, or None, before its other arguments.

    With ``auto_start`` a proxy that does not run is started for the call. Raises ConfigError where a proxy is
    ``required`` and there is none.
    """

    def decorate(function: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def call(self: Algorithm, *args: Any, **kwargs: Any) -> Any:
            proxy = self.get_llm_proxy()
            if proxy is None and required:
                raise ConfigError("the algorithm needs an LLM proxy and has none; give the Trainer an llm_proxy")
            if proxy is None or not auto_start or proxy.is_running():
                return await function(self, proxy, *args, **kwargs)
            await proxy.start()
            try:
                return await function(self, proxy, *args, **kwargs)
            finally:
                await proxy.stop()

        return call

    return decorate


class PatientStore(StoreView):
    """A store for callers all of whose calls may be made twice: while it is away, it is asked again for a while."""

    async def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the store's method of this name."""
        return await retried(partial(super().forward, name, *args, **kwargs), PATIENCE_SECONDS)


async def wait_until_finished(
    store: LightningStore, rollout_ids: Sequence[str], timeout: float | None = None
) -> Sequence[Rollout]:
    """``wait_for_rollouts`` for any number of seconds, which HTTP clients do not take: they wait for a moment, or until
    all have finished."""
    waiting = asyncio.ensure_future(store.wait_for_rollouts(rollout_ids=rollout_ids))
    try:
        await asyncio.wait({waiting}, timeout=timeout)
        if waiting.done():
            return waiting.result()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    found = await store.query_rollouts(rollout_id_in=rollout_ids)
    return [rollout for rollout in found if rollout.status in FINISHED]


def retrying(timeout_seconds: float | None, max_attempts: int) -> RolloutConfig:
    """The config of rollouts whose attempts end at a time limit, and are tried again whatever they failed by.

    Raises ConfigError for numbers that cannot be meant.
    """
    if max_attempts < 1 or (timeout_seconds is not None and timeout_seconds <= 0):
        raise ConfigError(
            f"timeout_seconds is {timeout_seconds}, max_attempts {max_attempts}; expected seconds above 0 or None, and "
            "1 or more"
        )
    return RolloutConfig(
        timeout_seconds=timeout_seconds,
        max_attempts=max_attempts,
        retry_condition=["failed", "timeout", "unresponsive"],
    )


async def set_aside(store: LightningStore, run: str) -> None:
    """Cancel the unfinished rollouts of an earlier process of this run, which was killed: runners would take them up
    before what they need is served again. `enqueue_once` queues them again."""
    unfinished = [status for status in get_args(RolloutStatus) if status not in FINISHED]
    found = await store.query_rollouts(status_in=unfinished)
    # One that a runner elsewhere finishes meanwhile keeps its status; the attempts of the others can end no more.
    await store.cancel_rollouts([item.rollout_id for item in found if (item.metadata or {}).get("run") == run])


async def enqueue_once(store: LightningStore, requests: Sequence[EnqueueRolloutRequest]) -> list[str]:
    """Enqueue rollouts under the ids they are given with, but for those that have succeeded or failed before."""
    rollouts: Sequence[Rollout] = await store.enqueue_many_rollouts(requests)
    for rollout in rollouts:
        if rollout.status == "cancelled":
            await store.update_rollout(rollout.rollout_id, status="queuing")
    return [rollout.rollout_id for rollout in rollouts]

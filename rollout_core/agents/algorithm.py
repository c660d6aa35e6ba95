"""Algorithms: what decides which tasks run, and what is learned of them."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from rollout_core.base.errors import ConfigError
from rollout_core.store import LightningStore, NamedResources

if TYPE_CHECKING:
    from rollout_core.agents.trainer import Trainer

logger = logging.getLogger(__name__)

Dataset = Sequence[Any]
"""Tasks: JSON values, by place."""
INJECTED = ("store", "adapter", "llm_proxy", "initial_resources", "train_dataset", "val_dataset")


class Algorithm:
    """Override ``run``. A trainer sets what the other methods return before it runs.

    A synchronous ``run`` gets a thread of its own, so it may block; it reaches the store by ``asyncio.run``.
    """

    _trainer: weakref.ref[Trainer] | None = None
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

    def set_trainer(self, trainer: Trainer) -> None:
        """Refer to the trainer, weakly."""
        self._trainer = weakref.ref(trainer)

    def get_trainer(self) -> Trainer:
        """Raises ConfigError outside a trainer."""
        trainer = self._trainer() if self._trainer is not None else None
        if trainer is None:
            raise ConfigError("the algorithm has no trainer now; it has one while Trainer.fit runs")
        return trainer

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

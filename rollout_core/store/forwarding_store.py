"""Stores that hand every call on to another one: chosen at each call, or one call at a time."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from rollout_core.base.loops import LoopLock
from rollout_core.store.contract import LightningStore
from rollout_core.store.types import LightningStoreCapabilities


class ForwardingLightningStore(LightningStore, ABC):
    """Every coroutine of the contract but ``close``, forwarded to ``backend()``."""

    @abstractmethod
    def backend(self) -> LightningStore:
        """The store that is to serve the present call."""

    async def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method of this name of ``backend()``. Overridden where something is to be done around each call."""
        return await getattr(self.backend(), name)(*args, **kwargs)


def _forwarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def forward(self: ForwardingLightningStore, *args: Any, **kwargs: Any) -> Any:
        return await self.forward(name, *args, **kwargs)

    return forward


for _name, _method in inspect.getmembers(LightningStore, inspect.iscoroutinefunction):
    # ``find_*`` is what a store's own ``query_*`` calls.
    if not _name.startswith(("_", "find_")) and _name != "close":
        setattr(ForwardingLightningStore, _name, _forwarded(_name, _method))


UNLOCKED = frozenset({"wait_for_rollouts", "wait_for_work", "wait_for_changes", "statistics"})
"""Calls that do not wait for their turn."""


class StoreView(ForwardingLightningStore):
    """``store``, to which subclasses add something. Closing the view closes nothing: the store is its owner's."""

    def __init__(self, store: LightningStore) -> None:
        self.store = store

    def backend(self) -> LightningStore:
        """The store itself."""
        return self.store

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Those of the store."""
        return self.store.capabilities

    def otlp_traces_endpoint(self) -> str:
        return self.store.otlp_traces_endpoint()

    async def close(self) -> None:
        """Nothing."""


class LightningStoreThreaded(StoreView):
    """Delegates to ``store``, one call at a time, from any thread. Make it before the threads that use it.

    Queries wait for their turn too: they may run the watchdog. Calls that wait for something and ``statistics`` do not,
    so a waiting caller holds nobody up. A store that is safe for threads itself gets all calls as they come: it has its
    own, finer way to keep them apart. A pickled copy wraps a pickled copy of the store, if that allows it.
    """

    def __init__(self, store: LightningStore) -> None:
        super().__init__(store)
        self._lock = nullcontext() if store.capabilities.get("thread_safe") else LoopLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store,)

    async def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the store's method of this name, while no other call is in it."""
        if name in UNLOCKED:
            return await super().forward(name, *args, **kwargs)
        async with self._lock:
            return await super().forward(name, *args, **kwargs)

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Those of the store, and safe for threads and tasks."""
        return {**self.store.capabilities, "thread_safe": True, "async_safe": True}

    async def close(self) -> None:
        await self.forward("close")

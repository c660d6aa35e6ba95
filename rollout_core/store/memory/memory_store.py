"""The LightningStore in this process's memory, the quickest one and gone with the process, and its collections."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NoReturn, TypeVar

from sortedcontainers import SortedSet

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.machine import machine_memory
from rollout_core.store.lifecycle import due_time, is_watched
from rollout_core.store.memory.collection import Collection, KeyValue, LightningCollections, Queue
from rollout_core.store.memory.collection_based import CollectionBasedLightningStore
from rollout_core.store.memory.list_collection import ListBasedCollection
from rollout_core.store.operations import Loaded
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.stored_spans import copy_stored, unread_body
from rollout_core.store.types import (
    Attempt,
    LightningStoreCapabilities,
    LightningStoreStatistics,
    Rollout,
    Worker,
)

Element = TypeVar("Element")
Key = TypeVar("Key")
Value = TypeVar("Value")

SPAN_BYTES = 1_000
"""What a span takes besides the text of its body."""
SHORT_BLOCK_SECONDS = 0.005
"""How long an event loop stands still for a block of another thread."""


class _ByValue:
    """Stands for an item that cannot be hashed, such as a model: found by comparing it with all others of its kind."""

    __slots__ = ("item",)

    def __init__(self, item: Any) -> None:
        self.item = item

    def __hash__(self) -> int:
        return hash(type(self.item))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByValue) and self.item == other.item


def _key(item: Any) -> Any:
    try:
        hash(item)
    except TypeError:
        return _ByValue(item)
    return item


class DequeBasedQueue(Queue[Element]):
    """A queue over ``collections.deque``: each call costs constant time an item, if items can be hashed."""

    def __init__(self, item_type: type[Element], items: Iterable[Element] = ()) -> None:
        self._item_type = item_type
        self._items = deque(items)
        # A removed item stays in the deque until it comes to the front. Whatever waits of it now is removed at once,
        # so its dead entries are always ahead of its live ones, and counting them is enough.
        self._waiting = Counter(map(_key, self._items))
        self._dead: Counter[Any] = Counter()
        self._num_dead = 0

    def item_type(self) -> type[Element]:
        return self._item_type

    async def size(self) -> int:
        return len(self._items) - self._num_dead

    async def has(self, item: Element) -> bool:
        return _key(item) in self._waiting

    async def enqueue(self, items: Sequence[Element]) -> Sequence[Element]:
        self._items.extend(items)
        self._waiting.update(map(_key, items))
        return items

    async def dequeue(self, limit: int = 1) -> Sequence[Element]:
        taken: list[Element] = []
        while self._items and len(taken) < limit:
            item = self._items.popleft()
            key = _key(item)
            if self._dead.get(key):
                self._num_dead -= 1
                _count_down(self._dead, key)
            else:
                _count_down(self._waiting, key)
                taken.append(item)
        return taken

    async def put_back(self, items: Sequence[Element]) -> None:
        if any(_key(item) in self._dead for item in items):
            self._bury()  # what is dead must stay ahead of what lives
        self._items.extendleft(reversed(items))
        self._waiting.update(map(_key, items))

    async def peek(self, limit: int = 1) -> Sequence[Element]:
        return list(islice(self._live(), max(limit, 0)))

    async def remove(self, items: Sequence[Element]) -> None:
        for key in map(_key, items):
            waiting = self._waiting.pop(key, 0)
            if waiting:
                self._dead[key] += waiting
                self._num_dead += waiting
        if self._num_dead > 64 + len(self._items) // 2:
            self._bury()

    def _bury(self) -> None:
        """Take dead entries out."""
        self._items = deque(self._live())
        self._dead.clear()
        self._num_dead = 0

    def _live(self) -> Iterable[Element]:
        dead = dict(self._dead)
        for item in self._items:
            key = _key(item)
            if dead.get(key):
                dead[key] -= 1
            else:
                yield item


def _count_down(counter: Counter[Any], key: Any) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


class DictBasedKeyValue(KeyValue[Key, Value]):
    """A plain dictionary."""

    def __init__(self, items: dict[Key, Value] | None = None) -> None:
        self._items: dict[Key, Value] = dict(items or {})

    async def size(self) -> int:
        return len(self._items)

    async def has(self, key: Key) -> bool:
        return key in self._items

    async def get(self, key: Key, default: Value | None = None) -> Value | None:
        return self._items.get(key, default)

    async def set(self, key: Key, value: Value) -> None:
        self._items[key] = value

    async def pop(self, key: Key, default: Value | None = None) -> Value | None:
        return self._items.pop(key, default)


class _ProcessLock:
    """A lock for blocks that never wait for anything else, as an asynchronous context manager.

    No coroutine here is ever suspended, so a plain lock guards against other threads and their event loops. A block is
    short, unless its batch is large: who waits for such a one lets its event loop go on meanwhile. A forked child gets
    a fresh lock: the thread that held it is not in the child.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._lock = threading.Lock()
        self._process = os.getpid()

    async def __aenter__(self) -> Any:
        if os.getpid() != self._process:
            self._lock, self._process = threading.Lock(), os.getpid()
        while not (self._lock.acquire(blocking=False) or self._lock.acquire(timeout=SHORT_BLOCK_SECONDS)):
            await asyncio.sleep(SHORT_BLOCK_SECONDS)
        return self._value

    async def __aexit__(self, *error: object) -> None:
        self._lock.release()


class InMemoryLightningCollections(LightningCollections):
    """All collections in this process's memory. Safe for threads: atomic blocks exclude each other.

    A block, ``execute``'s callback included, must not wait for anything but these collections.
    """

    def __init__(self) -> None:
        self._rollouts = ListBasedCollection([], Rollout, ["rollout_id"], indexed=["status"])
        self._attempts = ListBasedCollection([], Attempt, ["rollout_id", "attempt_id"])
        self._spans = ListBasedCollection([], Span, ["rollout_id", "attempt_id", "span_id"])
        self._resources = ListBasedCollection([], ResourcesUpdate, ["resources_id"], indexed=["update_time"])
        self._workers = ListBasedCollection([], Worker, ["worker_id"])
        self._rollout_queue = DequeBasedQueue(str)
        self._span_sequence_ids = DictBasedKeyValue[str, int]()
        self._lock = _ProcessLock(self)

    @property
    def rollouts(self) -> Collection[Rollout]:
        return self._rollouts

    @property
    def attempts(self) -> Collection[Attempt]:
        return self._attempts

    @property
    def spans(self) -> Collection[Span]:
        return self._spans

    @property
    def resources(self) -> Collection[ResourcesUpdate]:
        return self._resources

    @property
    def workers(self) -> Collection[Worker]:
        return self._workers

    @property
    def rollout_queue(self) -> Queue[str]:
        return self._rollout_queue

    @property
    def span_sequence_ids(self) -> KeyValue[str, int]:
        return self._span_sequence_ids

    def atomic(self, *args: Any, **kwargs: Any) -> Any:
        return self._lock

    async def evict_spans_for_rollout(self, rollout_id: str) -> None:
        """Forget all spans of a rollout."""
        self._spans.drop(rollout_id)


class InMemoryLightningStore(CollectionBasedLightningStore[InMemoryLightningCollections]):
    """A LightningStore in memory, for any number of tasks, threads and event loops of one process.

    Nothing outlives the process. A forked child has a copy of its own, whose changes nobody else sees; to share a store
    between processes, serve it over HTTP or use a SqlLightningStore.

    When spans take more than ``eviction_memory_threshold``, those of whole rollouts are dropped, oldest rollout first,
    until they take at most ``safe_memory_threshold``. Reading the spans of such a rollout raises Fatal, a RuntimeError.
    A threshold is a number of bytes, or as a float up to 1 a share of the memory that this process may use; by default
    0.7 of it, and 0.8 of the first threshold. ``span_size_estimator`` gives the bytes of a span.

    What calls return is the caller's own.
    """

    def __init__(
        self,
        eviction_memory_threshold: float | int | None = None,
        safe_memory_threshold: float | int | None = None,
        span_size_estimator: Callable[[Span], int] | None = None,
        *,
        scan_debounce_seconds: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(InMemoryLightningCollections(), scan_debounce_seconds=scan_debounce_seconds, clock=clock)
        self._capacity = machine_memory()[1]
        eviction = 0.7 if eviction_memory_threshold is None else eviction_memory_threshold
        self._eviction_bytes = _bytes_of(eviction, self._capacity, "eviction_memory_threshold")
        if safe_memory_threshold is None:
            self._safe_bytes = int(0.8 * self._eviction_bytes)
        else:
            self._safe_bytes = _bytes_of(safe_memory_threshold, self._capacity, "safe_memory_threshold")
        if self._safe_bytes > self._eviction_bytes:
            raise ConfigError(
                f"safe_memory_threshold is {self._safe_bytes} bytes, above eviction_memory_threshold with"
                f" {self._eviction_bytes}; evicting would never reach it"
            )
        self._estimate = span_size_estimator or estimate_span_size
        self._span_bytes: dict[str, int] = {}
        self._total_span_bytes = 0
        self._evicted: set[str] = set()
        self._alarms = Alarms()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an InMemoryLightningStore cannot be pickled, because the copy would be another store; serve it over HTTP"
            " and pass a LightningStoreClient, or use a SqlLightningStore"
        )

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Safe for tasks and threads; other processes do not see it."""
        return LightningStoreCapabilities(thread_safe=True, async_safe=True, zero_copy=False, otlp_traces=False)

    async def statistics(self) -> LightningStoreStatistics:
        """Counts of everything stored, and the memory that spans take and may take."""
        return {
            **await super().statistics(),
            "total_span_bytes": self._total_span_bytes,
            "eviction_threshold_bytes": self._eviction_bytes,
            "safe_threshold_bytes": self._safe_bytes,
            "memory_capacity_bytes": self._capacity,
        }

    # The watchdog looks only at rollouts whose alarm has gone off.

    async def _tell(self, loaded: Loaded[Rollout]) -> None:
        rollout, attempt = loaded.record, loaded.latest
        due = None
        if attempt is not None and is_watched(rollout.status, attempt):
            due = due_time(rollout.config, attempt.start_time, attempt.last_heartbeat_time)
        self._alarms.set(rollout.rollout_id, due)
        await super()._tell(loaded)

    async def get_lost_rollouts(self, collections: InMemoryLightningCollections, now: float, limit: int) -> list[str]:
        return self._alarms.passed(now, limit)

    # Eviction

    async def on_spans_added(self, collections: InMemoryLightningCollections, spans: Sequence[Span]) -> None:
        for span in spans:
            size = self._estimate(copy_stored(span))  # who reads it reads the copy
            self._span_bytes[span.rollout_id] = self._span_bytes.get(span.rollout_id, 0) + size
            self._total_span_bytes += size
        for rollout_id in self._evicted.intersection(span.rollout_id for span in spans):
            await self._evict(collections, rollout_id)  # a part of a trace is of no use to anybody
        if self._total_span_bytes > self._eviction_bytes:
            with_spans = await collections.rollouts.query({"rollout_id": {"within": list(self._span_bytes)}})
            for rollout in with_spans:
                if self._total_span_bytes <= self._safe_bytes:
                    break
                await self._evict(collections, rollout.rollout_id)

    async def _evict(self, collections: InMemoryLightningCollections, rollout_id: str) -> None:
        await collections.evict_spans_for_rollout(rollout_id)
        self._total_span_bytes -= self._span_bytes.pop(rollout_id)
        self._evicted.add(rollout_id)

    async def check_spans_kept(self, rollout_ids: Sequence[str]) -> None:
        for rollout_id in rollout_ids:
            if rollout_id in self._evicted:
                raise Fatal(
                    f"spans of rollout {rollout_id} were evicted, because spans took more than"
                    f" {self._eviction_bytes} bytes; raise eviction_memory_threshold, or use a SqlLightningStore"
                )


class Alarms:
    """For each name at most one time, and which of them have passed, at a cost that does not depend on how many."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._order = SortedSet()

    def set(self, name: str, time: float | None) -> None:
        """Set the time of ``name``, or clear it."""
        before = self._times.pop(name, None)
        if before is not None:
            self._order.remove((before, name))
        if time is not None:
            self._times[name] = time
            self._order.add((time, name))

    def passed(self, now: float, limit: int) -> list[str]:
        """Up to ``limit`` names whose time is before ``now``, the earliest first."""
        found: list[str] = []
        for due, name in islice(self._order, max(limit, 0)):
            if due >= now:
                break
            found.append(name)
        return found


def estimate_span_size(span: Span) -> int:
    """About how many bytes of memory a span takes as it is kept, its body as text."""
    body = unread_body(span)
    return SPAN_BYTES + sys.getsizeof(span.model_dump_json() if body is None else body)


def _bytes_of(threshold: float | int, capacity: int, name: str) -> int:
    """A threshold in bytes. Raises ConfigError if it is not a share of memory or a number of bytes."""
    valid = isinstance(threshold, (int, float)) and not isinstance(threshold, bool) and math.isfinite(threshold)
    if not valid or threshold <= 0:
        raise ConfigError(f"{name} is {threshold!r}; expected a float up to 1 (a share of memory) or a number of bytes")
    if isinstance(threshold, float) and threshold <= 1:
        return int(threshold * capacity)
    return int(threshold)

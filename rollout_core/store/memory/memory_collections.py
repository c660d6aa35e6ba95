"""The collections in this process's memory: nested dicts for the primary keys, and indices for what is asked often."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

from rollout_core.store.memory.collection import Collection, KeyValue, LightningCollections, Queue
from rollout_core.store.memory.list_collection import ListBasedCollection
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.types import Attempt, Rollout, Worker

Element = TypeVar("Element")
Key = TypeVar("Key")
Value = TypeVar("Value")


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

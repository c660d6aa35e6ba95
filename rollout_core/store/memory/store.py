"""The LightningStore in this process's memory: the quickest one, and gone with the process."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from sortedcontainers import SortedSet

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.store.lifecycle import due_time, is_watched
from rollout_core.store.memory.collection_based import CollectionBasedLightningStore
from rollout_core.store.memory.memory_collections import InMemoryLightningCollections
from rollout_core.store.spans import Span
from rollout_core.store.types import (
    AttemptedRollout,
    LightningStoreCapabilities,
    LightningStoreStatistics,
    Rollout,
)

SPAN_BYTES = 4_000
"""What a span without attributes takes."""
PART_BYTES = 200
"""What the name of an attribute takes, or an event or link."""


class InMemoryLightningStore(CollectionBasedLightningStore[InMemoryLightningCollections]):
    """A LightningStore in memory, for any number of tasks, threads and event loops of one process.

    Nothing outlives the process. A forked child has a copy of its own, whose changes nobody else sees; to share a store
    between processes, serve it over HTTP or use a SqlLightningStore.

    When spans take more than ``eviction_memory_threshold``, those of whole rollouts are dropped, oldest rollout first,
    until they take at most ``safe_memory_threshold``. Reading the spans of such a rollout raises Fatal, a RuntimeError.
    A threshold is a number of bytes, or as a float up to 1 a share of the memory that this process may use; by default
    0.7 of it, and 0.8 of the first threshold. ``span_size_estimator`` gives the bytes of a span.

    What calls return is the caller's own, but for values within the attributes of spans: treat those as read-only.
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
        self._capacity = memory_capacity()
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

    async def on_rollout_update(self, rollout: Rollout) -> None:
        due = None
        if isinstance(rollout, AttemptedRollout) and is_watched(rollout.status, rollout.attempt):
            due = due_time(rollout.config, rollout.attempt.start_time, rollout.attempt.last_heartbeat_time)
        self._alarms.set(rollout.rollout_id, due)

    async def get_lost_rollouts(self, collections: InMemoryLightningCollections, now: float, limit: int) -> list[str]:
        return self._alarms.passed(now, limit)

    # Eviction

    async def on_spans_added(self, collections: InMemoryLightningCollections, spans: Sequence[Span]) -> None:
        for span in spans:
            size = self._estimate(span)
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
    """About how many bytes of memory a span takes; long lists are taken to hold values of one size."""
    parts = len(span.attributes) + len(span.events) + len(span.links)
    return SPAN_BYTES + PART_BYTES * parts + _size_of(span.attributes)


def _size_of(value: Any) -> int:
    size = sys.getsizeof(value)
    if type(value) is dict:
        for entry in value.values():
            size += _size_of(entry)
    elif type(value) is list and value:
        size += len(value) * _size_of(value[0])
    return size


def memory_capacity() -> int:
    """Bytes of memory this process may use: the machine's, or the limit of its container if that is less."""
    capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return capacity
    return min(capacity, int(limit)) if limit.isdigit() else capacity


def _bytes_of(threshold: float | int, capacity: int, name: str) -> int:
    """A threshold in bytes. Raises ConfigError if it is not a share of memory or a number of bytes."""
    valid = isinstance(threshold, (int, float)) and not isinstance(threshold, bool) and math.isfinite(threshold)
    if not valid or threshold <= 0:
        raise ConfigError(f"{name} is {threshold!r}; expected a float up to 1 (a share of memory) or a number of bytes")
    if isinstance(threshold, float) and threshold <= 1:
        return int(threshold * capacity)
    return int(threshold)

"""The record of a flow run, for tables, curves and comparisons of runs, without any server.

A record is a head, small enough to read thousands of, and a detail: configuration, calls of stages with their results,
figures of the step under way. A ref below ``run-records/`` names the head, the head names the detail and the metrics of
updates, and so keeps them. It does not keep models, samples or states: the detail is compressed, and garbage collection
finds no ids in it. What a detail names may therefore be gone.

A record describes; nothing is decided or computed by it, and a run that cannot write one continues.
"""

from __future__ import annotations

import gzip
import logging
import re
import time
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from threading import Lock
from typing import Any, Literal, get_args

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from rollout_core.base.errors import (
    ConfigError,
    CorruptObject,
    CorruptRef,
    MissingObject,
    NotFound,
    RolloutError,
)
from rollout_core.base.ids import ContentId
from rollout_core.objects import ObjectStore
from rollout_core.objects.files import RUN_RECORD_REFS, ref_key
from rollout_core.objects.retention.run_leases import live_leases

log = logging.getLogger(__name__)

MOST_CALLS = 2_000
"""Calls of stages in a record: the last ones."""
MOST_LIVE_ROWS = 1_000
MOST_AT_WORK = 8
SILENT_SECONDS = 180.0
"""A run under way renews its record every minute; one that was not heard of for so long may be lost."""
SHORT_DIGITS = 8
"""Least digits of a run's id where it is shown short."""
_READ_TRIES = 3
_AT_ONCE = 200
"""Heads that are read side by side."""
_SETTLED_SECONDS = 10.0
_NOT_FILED = ContentId("0" * 64)
_TIME = "%Y%m%dT%H%M%S%f"
"""To the microsecond: names sort by it, and runs may begin within one second. Older names have whole seconds."""

RunState = Literal["running", "completed", "failed", "stopped"]
LOST = "lost"
"""In place of running, where the run's process is gone."""
SHOWN_STATES = (*get_args(RunState), LOST)


class MetricsOf(BaseModel):
    """The figures of the steps of one update."""

    model_config = ConfigDict(frozen=True)

    stage: str
    label: str
    metrics: ContentId
    """JSON lines, one an optimizer step."""


class Moment(BaseModel):
    """A held-out evaluation of a run."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Such as ``before`` or ``after PPO``."""
    reward: float
    """Mean over its samples."""


class AtWork(BaseModel):
    """A call of a stage that has not ended."""

    model_config = ConfigDict(frozen=True)

    title: str
    """Stage and label."""
    since: AwareDatetime


class RunHead(BaseModel):
    """What a table of runs shows."""

    model_config = ConfigDict(frozen=True)

    id: str
    """Of the flow run; a retry has the same."""
    name: str
    """By its configuration."""
    flow: str
    flow_run_name: str = ""
    tags: tuple[str, ...] = ()
    state: RunState
    error: str | None = None
    began: AwareDatetime
    """The first try."""
    written: AwareDatetime
    """When this record was; of a run that has ended, when it did."""
    tries: int = 1
    seconds: float = 0.0
    """Wall-clock time of all tries, until the record was written."""
    computed_seconds: float = 0.0
    """In which stages were computed; with the price of all tries, too."""
    gpu_seconds: float = 0.0
    price: float = 0.0
    currency: str = ""
    model: str | None = None
    """Where the run's model comes from."""
    algorithm: str | None = None
    data: str | None = None
    held_out: tuple[Moment, ...] = ()
    """In order."""
    suites: tuple[str, ...] = ()
    """Names of those by which the run has evaluated a model."""
    promoted: bool | None = None
    """None where nothing was to be promoted."""
    reason: str = ""
    counts: dict[str, int] = {}
    """Calls of stages: computed, cached, checked, failed."""
    metrics: tuple[MetricsOf, ...] = ()
    at_work: tuple[AtWork, ...] = ()
    """Calls that are under way, the first `MOST_AT_WORK`."""
    heard: AwareDatetime | None = None
    """When the record of a run under way was last written or renewed, by the storage's clock; set where it is read."""
    detail: ContentId = _NOT_FILED
    """Of the `RunDetail`, compressed."""

    @property
    def gain(self) -> float | None:
        """Held-out reward at the end less that at the beginning; None with fewer than two moments."""
        return self.held_out[-1].reward - self.held_out[0].reward if len(self.held_out) > 1 else None


class StageCall(BaseModel):
    """One call of a stage."""

    model_config = ConfigDict(frozen=True)

    stage: str
    label: str
    state: str
    """As of `tasks.runtime.journal.StageEntry`."""
    ended: float
    """Seconds since the epoch."""
    seconds: float
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    kind: str | None = None
    """Class of its result, such as ``Checkpoint``."""
    result: dict[str, Any] = {}


class Live(BaseModel):
    """The update under way."""

    model_config = ConfigDict(frozen=True)

    title: str
    """Stage and label."""
    num_steps: int
    rows: tuple[dict[str, float | None], ...] = ()
    """Its last steps, as in the metrics of a checkpoint."""


class RunDetail(BaseModel):
    """What a page of one run shows below its head."""

    model_config = ConfigDict(frozen=True)

    run: str = ""
    """Id of the flow run. With it no two runs have the same bytes, and each may delete its own."""
    config: dict[str, Any]
    facts: dict[str, str] = {}
    calls: tuple[StageCall, ...] = ()
    """In order of finishing, the last `MOST_CALLS`."""
    live: Live | None = None

    def results(self, kind: str) -> Iterator[tuple[StageCall, dict[str, Any]]]:
        """Calls with a result of this class, in order."""
        return ((call, call.result) for call in self.calls if call.kind == kind)


def encode_detail(detail: RunDetail) -> bytes:
    """Compressed; the same detail gives the same bytes."""
    return gzip.compress(detail.model_dump_json().encode(), compresslevel=6, mtime=0)


class RunRecords:
    """The records in an object store."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._reading = Lock()
        self._known: dict[str, tuple[float, RunHead]] = {}
        """Heads that were read, by ref, with the time when the ref was set."""
        self._written: dict[str, str] = {}
        """Refs by the run's id: to look for one, all are listed."""
        self._ids: list[str] = []
        """Of all runs as they were listed last, sorted."""

    def write(self, head: RunHead, detail: RunDetail) -> None:
        """``head.detail`` is set here. Takes the place of the run's record before. Raises what the storage raises."""
        name = self._written.get(head.id) or self._name_of(head.id)
        name = name or f"{RUN_RECORD_REFS}/{head.began.astimezone(UTC):{_TIME}}-{head.id}"
        self._written[head.id] = name
        before = self._objects.get_ref(name)
        old = None if before is None else self._read(name)
        filed = self._objects.put_bytes(encode_detail(detail.model_copy(update={"run": head.id})))
        now = self._objects.put_json(head.model_copy(update={"detail": filed}))
        self._objects.set_ref(name, now)
        # Only this record names them: both hold the run's id.
        if before is not None and old is not None and before != now:
            with suppress(RolloutError):
                self._objects.delete(before)
                if old.detail != filed:
                    self._objects.delete(old.detail)

    def heads(self, keep: Callable[[RunHead], bool] = lambda head: True, *, limit: int | None = None) -> list[RunHead]:
        """Those of which ``keep`` is true, the newest first, at most ``limit``. What cannot be read is left out, with a
        warning. Heads that did not change since the last call are not read again; one call reads at a time."""
        with self._reading:
            return self._heads(keep, limit)

    def _heads(self, keep: Callable[[RunHead], bool], limit: int | None) -> list[RunHead]:
        dated = {key.removeprefix("refs/"): stat.modified for key, stat in self._objects.files.list(_KEYS)}
        for gone in self._known.keys() - dated.keys():
            del self._known[gone]
        self._ids = sorted(map(_id_in, dated))
        found: list[RunHead] = []
        names = sorted(dated, reverse=True)
        step = limit if limit is not None and limit < _AT_ONCE else _AT_ONCE
        for start in range(0, len(names), step):
            page = names[start : start + step]
            stale = [name for name in page if name not in self._known or self._known[name][0] != dated[name]]
            read = dict(zip(stale, self._objects.in_parallel(self._read, stale), strict=True))
            for name in page:
                head = read[name] if name in read else self._known[name][1]
                if head is None:
                    continue
                # Storage may date by whole seconds, within which a record may change; one that ended long ago does not.
                if head.state != "running" and time.time() - dated[name] > _SETTLED_SECONDS:
                    self._known[name] = (dated[name], head)
                if head.state == "running":
                    head = head.model_copy(update={"heard": datetime.fromtimestamp(dated[name], UTC)})
                if keep(head):
                    found.append(head)
            if limit is not None and len(found) >= limit:
                return found[:limit]
        return found

    def find(self, run: str) -> RunHead:
        """By the first digits of its id, at least 4; by its name, or ``latest``, the last such run. Raises NotFound,
        and ConfigError where several are meant."""
        if run == "latest":
            found = self.heads(limit=1)
        else:
            ids = [name for name in self._listed() if _id_in(name).startswith(run)]
            named = self.heads(lambda head: head.name == run, limit=1) if len(ids) != 1 else []
            if len(ids) > 1 and len(run) >= _LEAST_DIGITS and not named:
                shown = ", ".join(sorted(_id_in(name) for name in ids)[:4])
                raise ConfigError(f"run {run!r}: expected digits that only one run begins with, got those of {shown}")
            read = self._read_now(ids[0]) if len(ids) == 1 and len(run) >= _LEAST_DIGITS else None
            found = [read] if read is not None else named or self.heads(lambda head: head.name == run, limit=1)
        if not found:
            raise NotFound(
                f"no run is recorded under {run!r} in {self._objects.url}; `rollout runs` lists those that are"
            )
        return found[0]

    def detail(self, head: RunHead) -> tuple[RunHead, RunDetail]:
        """The whole record of a run, as it is now."""
        for _ in range(_READ_TRIES):
            try:
                data = gzip.decompress(self._objects.get_bytes(head.detail))
                return head, RunDetail.model_validate_json(data)
            except MissingObject:  # the run has written another meanwhile
                head = self.find(head.id)
            except (OSError, EOFError, zlib.error, ValidationError) as error:
                raise NotFound(
                    f"the record of run {head.id} in {self._objects.url} has a form that this version does not read "
                    f"({type(error).__name__})"
                ) from error
        raise NotFound(f"the record of run {head.id} in {self._objects.url} is not whole: a part of it is gone")

    def renew(self, run: str) -> None:
        """Say that a run of which a record was written here is still under way."""
        name = self._written.get(run)
        named = None if name is None else self._objects.get_ref(name)
        if name is not None and named is not None:
            self._objects.set_ref(name, named)

    def short(self, run: str) -> str:
        """The first digits of a run's id, as many as tell it from all others: ids of scheduled runs, which a server
        makes together, have the same first ones."""
        if not self._ids:
            self._listed()
        place = bisect_left(self._ids, run)
        others = [other for other in self._ids[max(0, place - 1) : place + 2] if other != run]
        shared = max((_num_shared(run, other) for other in others), default=0)
        return run[: max(SHORT_DIGITS, shared + 1)]

    def _listed(self) -> list[str]:
        names = self._objects.ref_names(RUN_RECORD_REFS)
        self._ids = sorted(map(_id_in, names))
        return names

    def _read_now(self, name: str) -> RunHead | None:
        """`_read`, with when it was last heard of a run under way."""
        head = self._read(name)
        if head is None or head.state != "running":
            return head
        stat = self._objects.files.stat(ref_key(name))
        return head if stat is None else head.model_copy(update={"heard": datetime.fromtimestamp(stat.modified, UTC)})

    def _name_of(self, run: str) -> str | None:
        return next((name for name in self._objects.ref_names(RUN_RECORD_REFS) if _id_in(name) == run), None)

    def _read(self, name: str) -> RunHead | None:
        for _ in range(_READ_TRIES):
            try:
                named = self._objects.get_ref(name)
                return None if named is None else RunHead.model_validate_json(self._objects.get_bytes(named))
            except MissingObject:
                continue
            except (CorruptRef, CorruptObject, ValidationError) as error:
                why = " ".join(str(error).split()) if not isinstance(error, ValidationError) else "it has another form"
                log.warning("the record of a run, ref %s, cannot be read (%s); it is left out", name, why)
                return None
        log.warning("the record of a run, ref %s, is gone; it is left out", name)
        return None


_KEYS = f"refs/{RUN_RECORD_REFS}"
_LEAST_DIGITS = 4


def _num_shared(one: str, other: str) -> int:
    """How many first characters are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _id_in(name: str) -> str:
    """The run's id in the name of its ref."""
    return name.rpartition("/")[2].partition("-")[2]


@dataclass(frozen=True)
class Difference:
    """A key of the configuration that runs do not agree in."""

    key: str
    """Dotted."""
    values: tuple[Any, ...]
    """Of each run; `ABSENT` where it has no such key."""


ABSENT = "(not set)"


def differences(configs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Keys whose values differ, in the order in which they are met."""
    flat = [dict(_flattened(config)) for config in configs]
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = (Difference(key, tuple(each.get(key, ABSENT) for each in flat)) for key in keys)
    return [row for row in rows if any(value != row.values[0] for value in row.values[1:])]


def _flattened(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flattened(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def runs_under_way(objects: ObjectStore) -> frozenset[str]:
    """Ids of the flow runs whose processes hold a lease of this storage."""
    held = (re.search(r"\(flow run ([^()]+)\)$", lease.holder) for lease in live_leases(objects, clear=False))
    return frozenset(match[1] for match in held if match)


def shown_state(head: RunHead, under_way: Collection[str]) -> str:
    """Its state, or `LOST`. A run that is written as running and holds no lease was killed; once it is tried again it
    runs again."""
    return LOST if head.state == "running" and head.id not in under_way else head.state


def silent_seconds(head: RunHead, state: str) -> float | None:
    """For how long nothing was heard of a run that is shown as under way; None where that is not long."""
    if state != "running" or head.heard is None:
        return None
    seconds = (datetime.now(UTC) - head.heard).total_seconds()
    return seconds if seconds > SILENT_SECONDS else None


def state_in_words(head: RunHead, state: str) -> str:
    """Its state; of a run under way of which nothing is heard, since when."""
    seconds = silent_seconds(head, state)
    return state if seconds is None else f"{state}, last heard of {in_words(seconds)} ago"


def in_words(seconds: float) -> str:
    """Such as ``7 min``."""
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"


def work_in_words(head: RunHead, state: str) -> str:
    """Which stages a run under way is at, and since when; empty where it is at none."""
    if state != "running" or not head.at_work:
        return ""
    first, *others = head.at_work
    more = f", and {len(others)} more" if others else ""
    return f"{first.title} since {first.since.astimezone(UTC):%H:%M:%S} UTC{more}"


def next_step(head: RunHead, state: str) -> str:
    """What a person does about a run that ended so; empty where there is nothing to be done."""
    again = "start the run again (by the same command; one of a deployment by "
    again += f"`prefect flow-run retry {head.id}`); done stages are cached"
    if state == "failed":
        return f"mend what the error names, then {again}"
    return again if state in ("stopped", LOST) else ""


def shown_seconds(head: RunHead, state: str) -> float:
    """How long it took, or of a run under way has taken until now."""
    waited = datetime.now(UTC) - head.written if state == "running" else timedelta(0)
    return head.seconds + max(0.0, waited.total_seconds())

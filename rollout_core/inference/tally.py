"""How far a run is and what it did, for people: kept beside its results, which do not depend on it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import orjson

from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId, new_run_id
from rollout_core.inference.batch import Progress, Work
from rollout_core.objects import ObjectStore

LATENCY_BUCKETS_PER_DECADE = 20
_FIRST_BUCKET_SECONDS = 1e-3
REPORT_SECONDS = 2.0


@dataclass(frozen=True)
class FailureLimit:
    """How many samples of a run may fail."""

    max_share: float
    num_samples: int

    def check(self, tally: Tally) -> None:
        """Raises Fatal where more have failed, of those that are noted."""
        if tally.failed > self.max_share * self.num_samples:
            raise Fatal(
                f"{tally.failed} of {self.num_samples} samples failed, more than failures.max_share = "
                f"{self.max_share:g} allows; such as: {tally.total().first_failure}. What is complete is kept: mend "
                "the input and run again, or raise the limit"
            )


class Tally:
    """Progress of one run's shards in this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shards: dict[str, Progress] = {}
        self._report: Callable[[str, Progress], None] | None = None
        self._reported: dict[str, float] = {}
        self._earlier = 0
        self._failed = 0

    def report_to(self, report: Callable[[str, Progress], None]) -> None:
        """Tell ``report`` of every shard from now on: every two seconds at most, and of its end."""
        with self._lock:
            self._report = report

    def note(self, shard: str, progress: Progress) -> None:
        """How far a shard is now."""
        now = time.monotonic()
        with self._lock:
            before = self._shards.get(shard)
            if before is None:
                self._earlier += progress.done
            self._failed += progress.failed - (0 if before is None else before.failed)
            self._shards[shard] = progress
            report = self._report
            due = now - self._reported.get(shard, -math.inf) >= REPORT_SECONDS
            due = due or 0 < progress.total == progress.done
            if due:
                self._reported[shard] = now
        if report is not None and due:
            report(shard, progress)

    @property
    def earlier(self) -> int:
        """Samples that were done when their shard was first noted: this run did not generate them."""
        with self._lock:
            return self._earlier

    @property
    def failed(self) -> int:
        """Samples that failed, of all shards noted so far."""
        with self._lock:
            return self._failed

    def of(self, shard: str) -> Progress:
        """How far a shard is, as far as noted."""
        with self._lock:
            return self._shards.get(shard, Progress(0, 0, 0))

    def total(self) -> Progress:
        """All shards noted so far together."""
        with self._lock:
            shards = list(self._shards.values())
        return Progress(
            done=sum(shard.done for shard in shards),
            total=sum(shard.total for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            failed=sum(shard.failed for shard in shards),
            first_failure=next((shard.first_failure for shard in shards if shard.first_failure), None),
        )


_tallies: dict[str, Tally] = {}
_lock = threading.Lock()


def tally(run_id: str) -> Tally:
    """The tally of a run in this process."""
    with _lock:
        return _tallies.setdefault(run_id, Tally())


def forget_tally(run_id: str) -> None:
    """The run is over."""
    with _lock:
        _tallies.pop(run_id, None)


@dataclass
class RunWork:
    """What a part of a run generated, in any process of it."""

    samples: int = 0
    tokens: int = 0
    started: float = float("inf")
    """Seconds since the epoch; of the earliest part, after its wait for an engine."""
    ended: float = 0.0
    latencies: dict[int, int] = field(default_factory=dict)
    """Samples by bucket of their seconds in the engine; 20 buckets a decade."""

    @classmethod
    def of(cls, work: Work, started: float, ended: float) -> RunWork:
        """The summary of ``work``."""
        made = cls(work.samples, work.tokens, started + work.waited_seconds, ended)
        for seconds in work.latencies:
            bucket = _bucket(seconds)
            made.latencies[bucket] = made.latencies.get(bucket, 0) + 1
        return made

    def add(self, other: RunWork) -> None:
        """Count ``other`` in."""
        self.samples += other.samples
        self.tokens += other.tokens
        self.started = min(self.started, other.started)
        self.ended = max(self.ended, other.ended)
        for bucket, count in other.latencies.items():
            self.latencies[bucket] = self.latencies.get(bucket, 0) + count

    @property
    def seconds(self) -> float:
        """From the beginning of the first part to the end of the last."""
        return max(0.0, self.ended - self.started) if self.samples else 0.0

    def latency(self, share: float) -> float:
        """Seconds that ``share`` of the samples took at most, within 12 %."""
        seen, wanted = 0, share * sum(self.latencies.values())
        for bucket, count in sorted(self.latencies.items()):
            seen += count
            if seen >= wanted:
                return _FIRST_BUCKET_SECONDS * 10 ** ((bucket + 1) / LATENCY_BUCKETS_PER_DECADE)
        return 0.0


def _bucket(seconds: float) -> int:
    return max(0, math.floor(LATENCY_BUCKETS_PER_DECADE * math.log10(max(seconds, 1e-9) / _FIRST_BUCKET_SECONDS)))


def note_work(objects: ObjectStore, run_id: str, shard: ContentId, work: RunWork) -> None:
    """File what a part of a run did where `work_of` finds it, from whatever machine."""
    document = asdict(work) | {"latencies": {str(bucket): count for bucket, count in work.latencies.items()}}
    objects.set_ref(f"work/{run_id}/{shard}-{new_run_id()}", objects.put_bytes(orjson.dumps(document)))


def work_of(objects: ObjectStore, run_id: str) -> RunWork:
    """What all parts of a run did together."""
    total = RunWork()
    for name in objects.ref_names(f"work/{run_id}"):
        noted = objects.cached_bytes(name)
        if noted is None:
            continue
        document = orjson.loads(noted)
        document["latencies"] = {int(bucket): count for bucket, count in document["latencies"].items()}
        total.add(RunWork(**document))
    return total


def forget_work(objects: ObjectStore, run_id: str) -> None:
    """Drop what `work_of` summed up."""
    for name in objects.ref_names(f"work/{run_id}"):
        objects.delete_ref(name)

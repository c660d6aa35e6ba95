"""A run of batch inference: which output folder it belongs to, with which parameters it was started, and how far it is.

A run's id is that of ``--resume``, else what the folder's file ``run-id`` says, else a new one that is written there.
What determines a run's completions is noted in the object store under the id, before the first sample: resuming with
other parameters is refused. How far a run is and what it did is for people, and its results do not depend on it:
progress in memory, work in the object store, an event on stderr for each sample that ended.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson

from rollout_core.base.errors import ConfigError, Conflict, CorruptObject, Fatal, NotFound
from rollout_core.base.ids import ContentId, new_run_id
from rollout_core.config import InferBatchConfig, Settings, identity
from rollout_core.data.samples import Sample
from rollout_core.inference.batch import Progress, Work
from rollout_core.inference.folders import OutputFolder
from rollout_core.inference.ledger import BLOB_ATTRIBUTE, ROW_ATTRIBUTE, this_worker
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import ShardCompletions
from rollout_core.store import Attempt, AttemptUpdate, LightningStore
from rollout_core.store.encoded_spans import EncodedSpan
from rollout_core.store.forwarding_store import StoreView

RUN_ID_FILE = "run-id"
RUN_REFS = "runs"
MODEL = "model"
"""Parameter that holds the content id of the model with its tokenizer."""
_ULID = re.compile("[0-7][0-9A-HJKMNP-TV-Z]{25}")
LATENCY_BUCKETS_PER_DECADE = 20
_FIRST_BUCKET_SECONDS = 1e-3
REPORT_SECONDS = 2.0


def resolve_run_id(folder: OutputFolder, requested: str | None) -> str:
    """Run id of an output folder: the requested one, else the folder's own, else a new one that is written there.

    Raises ConfigError as `earlier_run_id`.
    """
    run_id = earlier_run_id(folder, requested)
    while run_id is None:
        made = new_run_id()
        # Where another process was quicker, its run is this one too.
        run_id = made if folder.create(RUN_ID_FILE, made.encode() + b"\n") else earlier_run_id(folder, None)
    return run_id


def earlier_run_id(folder: OutputFolder, requested: str | None) -> str | None:
    """The run to resume: the requested one, else the output folder's own; None where a new one will start.

    Raises ConfigError for an id that is no ULID, or a ``run-id`` file that holds none.
    """
    if requested is not None:
        return _checked(requested, "run id")
    data = folder.read(RUN_ID_FILE)
    return None if data is None else _checked(data.decode("utf-8", "replace").strip(), folder.where(RUN_ID_FILE))


def _checked(run_id: str, where: str) -> str:
    if not _ULID.fullmatch(run_id):
        raise ConfigError(f"{where}: {run_id!r} is no run id; expected a ULID (26 characters)")
    return run_id


def parameters_of(config: InferBatchConfig, model: ContentId | None = None) -> dict[str, Any]:
    """What determines a run's completions, by dotted names; without ``model``, as far as the configuration says.

    The input is no part of it: rows may be added or changed, and output always follows the input. Nor are workers,
    places and forms of output, which change no completion.
    """
    sampling = identity(config.sampling.params)
    counted = {"sampling": {**sampling, "n": config.sampling.n}, "backend": identity(config.backend)}
    if config.environment is not None:
        counted["environment"] = identity(config.environment)
    return dict(_flat(counted)) | ({} if model is None else {MODEL: model})


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in table.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return found


def begin_run(
    objects: ObjectStore, run_id: str, parameters: Mapping[str, Any], folder: OutputFolder, requested: str | None
) -> bool:
    """Note a run's parameters, before its first sample; True where it was started before.

    Raises ConfigError as `check_run`.
    """
    noted = check_run(objects, run_id, parameters, folder, requested)
    document = noted or {"run_id": run_id, "begun": datetime.now(UTC).isoformat(), "parameters": parameters}
    # Also where it is there: garbage collection goes by when it was last set.
    objects.set_ref(_ref(run_id), objects.put_json(document))
    return noted is not None


def check_run(
    objects: ObjectStore, run_id: str, parameters: Mapping[str, Any], folder: OutputFolder, requested: str | None
) -> dict[str, Any] | None:
    """What was noted when the run was started; None where it was not, as far as the object store knows.

    Raises ConfigError where it was started with other parameters, naming each, and where a requested run is unknown.
    The model is compared where it is among ``parameters``.
    """
    document = _noted(objects, run_id)
    if document is None:
        if requested is not None:
            raise ConfigError(
                f"run {run_id} is unknown to the object store {objects.url}; expected the id of a run that was started "
                "there: leave out --resume to start a new one"
            )
        return None
    noted = document["parameters"]
    differing = [
        f"{name}: got {_shown(parameters, name)}, expected {_shown(noted, name)}"
        for name in sorted({*parameters, *noted})
        if parameters.get(name) != noted.get(name) and (name != MODEL or MODEL in parameters)
    ]
    if differing:
        other = "leave out --resume" if requested is not None else f"remove {folder.where(RUN_ID_FILE)}"
        raise ConfigError(
            f"run {run_id} was started with other parameters: {'; '.join(differing)}. Resume with those, or start a "
            f"new run: give another output.dir, or {other}"
        )
    return document


def _noted(objects: ObjectStore, run_id: str) -> dict[str, Any] | None:
    known = objects.cached_bytes(_ref(run_id))
    return None if known is None else orjson.loads(known)


def _shown(parameters: Mapping[str, Any], name: str) -> str:
    return orjson.dumps(parameters[name]).decode() if name in parameters else "its default"


def _ref(run_id: str) -> str:
    return f"{RUN_REFS}/{run_id}"


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
        """Call ``report`` for every shard from now on: every two seconds at most, and at its end."""
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


@dataclass(frozen=True)
class ShardReport:
    """What a run hears of one of its shards, from whichever worker is on it."""

    run_id: str
    """Of the flow run."""
    shard: ContentId
    failures: FailureLimit

    def progress(self, progress: Progress) -> None:
        """How far the shard is. Raises Fatal where more samples of the run have failed than may."""
        noted = tally(self.run_id)
        noted.note(self.shard, progress)
        self.failures.check(noted)

    def help(self, progress: Progress) -> None:
        """What a helper generated. How much of the shard is done is its own worker's to say."""
        tally(self.run_id).note(f"{self.shard} {this_worker()}", Progress(0, 0, progress.tokens))

    def file(self, objects: ObjectStore, work: Work, started: float) -> None:
        """File what was done since ``started`` where `work_of` finds it, from whatever machine."""
        if not work.samples:
            return
        document = asdict(RunWork.of(work, started, time.time()))
        document["latencies"] = {str(bucket): count for bucket, count in document["latencies"].items()}
        ref = f"work/{self.run_id}/{self.shard}-{new_run_id()}"
        objects.set_ref(ref, objects.put_bytes(orjson.dumps(document)))


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


def closing_figures(
    config: InferBatchConfig, records: Sequence[ShardCompletions], work: RunWork, workers: float
) -> dict[str, Any]:
    """Figures of a finished run, by name. ``workers``: their average number over the run."""
    reasons: Counter[str] = Counter()
    for record in records:
        reasons.update(record.finish_reasons)
    figures: dict[str, Any] = {
        "samples": sum(record.num_samples for record in records),
        "failed": sum(record.num_failed for record in records),
        "prompt tokens": sum(record.num_prompt_tokens for record in records),
        "completion tokens": sum(record.num_tokens for record in records),
        **{f"finish: {reason}": count for reason, count in sorted(reasons.items())},
        "generated now": work.samples,
        "generated now, tokens": work.tokens,
        "seconds, without the engine's start": round(work.seconds, 2),
    }
    if work.seconds:
        figures["samples/s"] = round(work.samples / work.seconds, 1)
        figures["tokens/s"] = round(work.tokens / work.seconds, 1)
        for share in (0.5, 0.9, 0.99):
            figures[f"latency, {share:.0%} of samples (s)"] = float(f"{work.latency(share):.3g}")
    if config.workers.price_per_hour is not None and work.tokens:
        cost = config.workers.price_per_hour * workers * work.seconds / 3600
        figures["cost per million tokens"] = round(1e6 * cost / work.tokens, 4)
    return figures


@dataclass(frozen=True)
class SampleEnd:
    """How a sample ended."""

    sample: ContentId
    finish_reason: str
    num_tokens: int
    error: str | None


OnSamples = Callable[[Sequence[SampleEnd]], None]


class WatchedStore(StoreView):
    """A store whose ledger of samples is watched: ``on_samples`` receives those that ended, a commit at a time.

    Only an attempt that the store let succeed or fail counts, so a sample is reported once. What it became is read back
    from the blob that its span names.
    """

    def __init__(self, store: LightningStore, objects: ObjectStore, on_samples: OnSamples) -> None:
        super().__init__(store)
        self._objects = objects
        self._on_samples = on_samples

    async def close(self) -> None:
        await self.store.close()

    async def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        result = await super().forward(name, *args, **kwargs)
        if name == "end_attempts":
            await self._report(args[0], result)
        return result

    async def _report(
        self, ends: Sequence[tuple[EncodedSpan, AttemptUpdate]], outcomes: Sequence[Attempt | Conflict]
    ) -> None:
        ended: dict[ContentId, list[int]] = {}
        for (span, _), outcome in zip(ends, outcomes, strict=True):
            attributes = span.fields()["attributes"]
            if BLOB_ATTRIBUTE in attributes and not isinstance(outcome, Conflict):
                ended.setdefault(ContentId(attributes[BLOB_ATTRIBUTE]), []).append(attributes[ROW_ATTRIBUTE])
        for blob, rows in ended.items():
            self._on_samples(await asyncio.to_thread(self._read, blob, rows))

    def _read(self, blob: ContentId, rows: Sequence[int]) -> list[SampleEnd]:
        try:
            lines = self._objects.get_bytes(blob).splitlines()
        except (NotFound, CorruptObject):
            return []  # whoever needs the completions says so
        return [_sample_end(orjson.loads(lines[row])) for row in rows]


def _sample_end(row: Mapping[str, Any]) -> SampleEnd:
    return SampleEnd(ContentId(row["id"]), row["finish_reason"], len(row["token_ids"]), row.get("error"))


class Reporting(Settings):
    """What is reported of a shard while it is worked on; no part of its cache key."""

    run_id: str
    events: bool
    failures: FailureLimit
    """Of all shards together; more end the run."""

    def cache_identity(self) -> Any:
        return None


@dataclass(frozen=True)
class EventLog:
    """Writes a line of JSON to stderr for each sample that ends."""

    run_id: str
    shard: str
    """Its number among the run's shards, such as ``3/17``."""

    def watching(self, store: LightningStore, objects: ObjectStore, samples: Sequence[Sample]) -> LightningStore:
        """``store``, through which the samples of the shard are worked on from now on."""
        row_ids = {sample.id: sample.row_id for sample in samples}
        return WatchedStore(store, objects, lambda ends: self._write(ends, row_ids))

    def _write(self, ends: Sequence[SampleEnd], row_ids: Mapping[ContentId, str | None]) -> None:
        lines = [orjson.dumps(self._event(end, row_ids.get(end.sample))) for end in ends]
        # One write, so that lines of several shards do not mix.
        sys.stderr.write(b"\n".join([*lines, b""]).decode())
        sys.stderr.flush()

    def _event(self, end: SampleEnd, row_id: str | None) -> dict[str, Any]:
        event = {
            "topic": "sample_completed" if end.error is None else "sample_failed",
            "run_id": self.run_id,
            "sample": end.sample,
            "id": row_id,
            "shard": self.shard,
            "finish_reason": end.finish_reason,
            "tokens": end.num_tokens,
        }
        return event if end.error is None else {**event, "error": end.error}

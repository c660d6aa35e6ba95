"""Batch inference: every sample of a set gets exactly one outcome, whatever is killed on the way.

Samples are claimed in blocks, stream through the engine and are committed in groups as they finish; a second run
generates only what is missing, and starts no engine where nothing is. Where the engine's output depends on what else is
in a batch and ``deterministic`` is asked for, the whole set is the unit instead: generated in fixed order, committed at
once, generated again if interrupted.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import orjson

from rollout_core.base.errors import Recoverable, RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.config import SamplingParams
from rollout_core.data.samples import (
    Failure,
    Outcome,
    Sample,
    length_problem,
    usage_in,
)
from rollout_core.inference.backend import Request
from rollout_core.inference.lanes import Lane, Lanes
from rollout_core.inference.ledger import Answer, SampleLedger, ShardStatus
from rollout_core.inference.spending import Account
from rollout_core.objects import ObjectStore
from rollout_core.store import Attempt, LightningStore
from rollout_core.store.types import RolloutMode

STALE_AFTER_SECONDS = 300.0
"""The attempts of a worker silent for longer may be taken over by another."""
COMMITS_AT_ONCE = 2
"""Commits under way while the engine generates; beyond that, samples wait in memory."""


@dataclass(frozen=True)
class Progress:
    """How far a set is."""

    done: int
    """Completed or failed for good."""
    total: int
    tokens: int
    """Tokens of this run's own completions."""
    failed: int = 0
    first_failure: str | None = None
    """Why one of them did."""
    samples: int = 0
    """That this run completed itself."""
    running: int = 0
    """Requests that the engine has taken and not answered."""
    waiting: int = 0
    """Samples of this run that it was not given yet."""


@dataclass
class Work:
    """What this run generated itself and the store took, for people: it differs from run to run."""

    samples: int = 0
    tokens: int = 0
    latencies: list[float] = field(default_factory=list)
    """Seconds from the engine's taking a request to its outcome."""
    waited_seconds: float = 0.0
    """Until the engine was ready, before anything could be generated: its start, other weights, its turn."""

    def add(self, drawn: Drawn) -> None:
        """Count an outcome in, if it is an engine's."""
        if drawn.latency is None:
            return
        self.samples += 1
        self.latencies.append(drawn.latency)
        if not isinstance(drawn.outcome, Failure):
            self.tokens += len(drawn.outcome.token_ids)


class Drawn(NamedTuple):
    """An outcome that is not committed yet."""

    attempt: Attempt
    outcome: Outcome
    latency: float | None = None
    """None where no engine was needed."""


@dataclass(frozen=True)
class BatchOptions:
    """How a set is run; none of it changes what its backend generates."""

    mode: RolloutMode = "train"
    deterministic: bool = True
    exclusive: bool = True
    """No other process works on these samples (the caller holds their lock)."""
    commit_size: int = 2048
    """Samples made durable together; fewer when ``commit_seconds`` pass first, so this bounds memory, not what a kill
    costs. Together with ``claim_size`` it decides how often the store is called where the engine is the faster one."""
    commit_seconds: float = 1.0
    keep_done: bool = False
    """Where the set is the unit: samples that are done stay so, and only the others are generated together. Else one
    missing sample has all generated again, as in a run of which nothing was there."""
    claim_size: int = 1024
    """Samples claimed together. Claimed ones wait for this worker; others may take those that are not."""
    max_model_len: int | None = None
    """Samples that would be longer fail, without an engine."""
    generator: str = ""
    """Identity of what answers besides the model (software, dtype, device); completions of another do not count."""
    stale_after_seconds: float = STALE_AFTER_SECONDS
    wait_seconds: float = 1.0
    """Time between looks at samples that another worker is generating."""
    account: Account | None = None
    """In which answers of an endpoint count, also those that are there before."""


class Engine(Protocol):
    """A model on a backend that is started when a sample needs it."""

    @property
    def model_id(self) -> ContentId:
        """Content of the weights."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """See `InferenceBackend`."""
        ...

    def open(self) -> AbstractContextManager[Lanes]:
        """The running engine; entering blocks while it starts."""
        ...


@dataclass(frozen=True)
class Completed:
    """Outcomes of a set, and what this run did for them."""

    lines: list[bytes]
    """An encoded outcome for each sample, in order."""
    ended: list[float]
    """When each was, in seconds since the epoch."""
    passing_failures: int
    """Of the failures, those that another run would try again."""
    work: Work


async def complete_samples(
    store: LightningStore,
    objects: ObjectStore,
    engine: Engine,
    samples: Sequence[Sample],
    params: SamplingParams,
    *,
    source: ContentId,
    worker_id: str,
    options: BatchOptions | None = None,
    problems: Mapping[ContentId, str] | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Completed:
    """Bring every sample to its outcome. ``source`` names where the samples come from, in their rollouts' metadata;
    those with ``problems`` fail for that reason."""
    options = options or BatchOptions()
    ledger = ledger_of(store, objects, worker_id, options)
    run = _BatchRun(ledger, engine, samples, params, options, on_progress, problems or {}, source)
    return await run.finish()


async def assist(
    store: LightningStore,
    objects: ObjectStore,
    engine: Engine,
    samples: Sequence[Sample],
    params: SamplingParams,
    *,
    worker_id: str,
    options: BatchOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Work:
    """Generate samples that the worker of this set has not claimed yet, from the end; return when there are none.

    That worker runs `complete_samples` without ``exclusive``. Sets that are generated as a whole cannot be shared.
    """
    if options.deterministic and not engine.batch_invariant:
        return Work()
    ledger = ledger_of(store, objects, worker_id, options)
    run = _BatchRun(ledger, engine, samples[::-1], params, options, on_progress, {}, None)
    await run.help()
    return run.work


def ledger_of(store: LightningStore, objects: ObjectStore, worker_id: str, options: BatchOptions) -> SampleLedger:
    """The ledger that these options are of."""
    return SampleLedger(
        store,
        objects,
        worker_id=worker_id,
        stale_after_seconds=options.stale_after_seconds,
        generator=options.generator,
        limit=options.max_model_len,
    )


def request_of(sample: Sample, params: SamplingParams, account: Account | None = None) -> Request:
    """What an engine is asked for a sample, whose answer is counted in ``account``."""
    return Request(
        key=str(sample.id),
        prompt_token_ids=sample.prompt_token_ids,
        params=params,
        seed=sample.seed,
        prompt_text=sample.prompt if isinstance(sample.prompt, str) else "",
        messages=() if isinstance(sample.prompt, str) else sample.prompt,
        tools=sample.tools,
        ends=sample.ends,
        continuation=sample.continuation,
        scored=sample.scored,
        account=account,
    )


@asynccontextmanager
async def opened_lane(engine: Engine, work: Work, *, few: int = 0, keeps_turn: bool = True) -> AsyncIterator[Lane]:
    """A lane of the running engine, whose start and end block a thread and not the loop; see `Lanes.open`."""
    opened = engine.open()
    began = time.monotonic()
    lanes = await asyncio.to_thread(opened.__enter__)
    work.waited_seconds += time.monotonic() - began
    try:
        lane = lanes.open(few=few, keeps_turn=keeps_turn)
        try:
            yield lane
        finally:
            await asyncio.to_thread(lane.close)
    except BaseException as error:
        await asyncio.to_thread(opened.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(opened.__exit__, None, None, None)


@asynccontextmanager
async def beating(ledger: SampleLedger, exclusive: bool, options: BatchOptions) -> AsyncIterator[None]:
    """Show other workers, inside the block, that this one is alive and its claims hold; needless where it is alone."""

    async def beat() -> None:
        while True:
            with suppress(Recoverable):
                await ledger.heartbeat()
            await asyncio.sleep(options.stale_after_seconds / 5)

    task = None if exclusive else asyncio.create_task(beat())
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


class _BatchRun:
    """One process's work on one set of samples."""

    def __init__(
        self,
        ledger: SampleLedger,
        engine: Engine,
        samples: Sequence[Sample],
        params: SamplingParams,
        options: BatchOptions,
        on_progress: Callable[[Progress], None],
        problems: Mapping[ContentId, str],
        source: ContentId | None,
    ) -> None:
        self.ledger = ledger
        self._engine = engine
        self._samples = {sample.id: sample for sample in samples}
        self._order = [sample.id for sample in samples]
        self._params = params
        self.options = options
        self._exclusive = options.exclusive
        self._on_progress = on_progress
        self._problems = problems
        self._source = source
        """Where the samples come from; None: only those are worked on that their own worker has made known."""
        self._lines: dict[ContentId, bytes] = {}
        self._ended: dict[ContentId, float] = {}
        self._failed: set[ContentId] = set()
        self._first_failure: str | None = None
        self._open_lane: Lane | None = None
        self._passing: set[ContentId] = set()
        self.whole = options.deterministic and not engine.batch_invariant
        """Whether the set is generated and committed as one."""
        self.work = Work()

    async def finish(self) -> Completed:
        """The outcome of every sample."""
        if not self._exclusive and self._source is not None:
            # Known at once, so that others can help.
            samples = list(self._samples.values())
            rollouts = await self.ledger.enqueue(samples, mode=self.options.mode, source=self._source)
            standing = await self.ledger.shard_status_of(rollouts, exclusive=False)
        else:
            standing = await self._look(list(self._samples))
        while True:
            self._note(standing)
            wanted = standing.free
            if self.whole and wanted and standing.busy:
                wanted = []
            elif self.whole and wanted and not self.options.keep_done:
                self._lines.clear()
                wanted = list(self._samples)
            if wanted:
                await self._generate(wanted, standing)
            elif standing.busy:
                await asyncio.sleep(self.options.wait_seconds)
            if len(self._lines) == len(self._samples):
                if (account := self.options.account) is not None:
                    account.settle(self._order)
                lines = [self._lines[sample] for sample in self._order]
                return Completed(lines, [self._ended[sample] for sample in self._order], len(self._passing), self.work)
            # Someone else superseded our attempts, so we were not alone: from now on their claims are respected.
            self._exclusive = False
            if self.whole and not self.options.keep_done:
                self._lines.clear()
            standing = await self._look(self._missing())

    async def help(self) -> None:
        """Generate what is free, and leave the rest to its worker."""
        self._exclusive = False
        while (standing := await self._look(self._missing())).free:
            self._note(standing)
            await self._generate(standing.free, standing)

    def _missing(self) -> list[ContentId]:
        return [sample for sample in self._samples if sample not in self._lines]

    async def _look(self, sample_ids: Sequence[ContentId]) -> ShardStatus:
        return await self.ledger.shard_status(
            sample_ids, exclusive=self._exclusive, unknown_are_free=self._source is not None
        )

    def _note(self, standing: ShardStatus) -> None:
        if (account := self.options.account) is not None:
            for sample, line in standing.done.items():
                if sample not in self._lines and (usage := usage_in(line)) is not None:
                    account.note(str(sample), usage)
        self._lines.update(standing.done)
        self._ended.update(standing.ended)
        self._failed |= standing.failed
        if self._first_failure is None and standing.failed:
            self._first_failure = orjson.loads(standing.done[min(standing.failed)])["error"]
        self._report()

    async def _generate(self, sample_ids: Sequence[ContentId], standing: ShardStatus) -> None:
        # Heartbeats begin before the engine does, which may take half a minute.
        async with beating(self.ledger, self._exclusive, self.options), self._lane() as lane:
            wanted = set(sample_ids)
            blocks = [[sample for sample in self._order if sample in wanted]]
            if not self.whole:
                size = self.options.claim_size
                blocks = [blocks[0][start : start + size] for start in range(0, len(blocks[0]), size)]
            await _Round(self, lane, deque(blocks), standing).run()

    @asynccontextmanager
    async def _lane(self) -> AsyncIterator[Lane]:
        async with opened_lane(self._engine, self.work, few=self.options.claim_size) as lane:
            self._open_lane = lane
            try:
                yield lane
            finally:
                self._open_lane = None

    async def claim(
        self, block: Sequence[ContentId], standing: ShardStatus, claimed: dict[ContentId, Attempt]
    ) -> list[ContentId]:
        """Those of a block that are this worker's now, whose attempts are added to ``claimed``, all that there are even
        where this fails; those that another finished are noted."""
        if not self._exclusive and not self.whole:
            standing = await self._look(block)
            self._note(standing)
            block = standing.free
        unknown = [self._samples[sample] for sample in block if sample not in standing.attempts]
        await self.ledger.claim([sample for sample in block if sample in standing.attempts], standing, claimed)
        if unknown and self._source is not None:
            await self.ledger.begin(unknown, claimed, mode=self.options.mode, source=self._source)
        ours = [sample for sample in block if sample in claimed]
        if self.whole and len(ours) < len(block):
            # A part of a whole is never generated; others finished the rest, so look again.
            await self.ledger.release(claimed.values())
            self.ledger.let_go(claimed.values())
            claimed.clear()
            return []
        return ours

    def request(self, sample_id: ContentId) -> Request | Failure:
        """The engine's request for a sample, or why there can be none."""
        sample = self._samples[sample_id]
        problem = self._problems.get(sample_id) or length_problem(
            len(sample.prompt_token_ids), self._params.max_tokens, self.options.max_model_len
        )
        if problem is not None:
            return Failure(str(sample_id), problem)
        return request_of(sample, self._params, self.options.account)

    async def commit(self, group: Sequence[Drawn]) -> None:
        """Make outcomes durable; those of attempts that were superseded are dropped."""
        answers = [Answer.of(drawn.attempt, drawn.outcome, self._params) for drawn in group]
        for drawn, answer, ended in zip(group, answers, await self.ledger.commit(answers), strict=True):
            if ended is None:
                continue
            self.work.add(drawn)
            sample = cast(ContentId, answer.attempt.rollout_id)
            self._lines[sample] = answer.line
            self._ended[sample] = ended
            if answer.failure is not None:
                self._failed.add(sample)
                self._first_failure = self._first_failure or answer.failure
            if answer.passing:
                self._passing.add(sample)
        self._report()

    def is_done(self, sample: ContentId) -> bool:
        return sample in self._lines

    def _report(self) -> None:
        done, total, failed = len(self._lines), len(self._samples), len(self._failed)
        running = len(self._open_lane.started) if self._open_lane is not None else 0
        own = self.work.tokens, failed, self._first_failure, self.work.samples
        self._on_progress(Progress(done, total, *own, running, max(0, total - done - running)))


class _Round:
    """Blocks of samples on their way through an engine: claimed ahead of need, committed in groups."""

    def __init__(self, run: _BatchRun, lane: Lane, blocks: deque[list[ContentId]], standing: ShardStatus) -> None:
        self._run = run
        self._lane = lane
        self._blocks = blocks
        self._standing = standing
        self._claimed: dict[ContentId, Attempt] = {}
        self._under_way = 0
        self._group: list[Drawn] = []
        self._group_began = time.monotonic()
        self._commits: deque[asyncio.Task[None]] = deque()
        self._claiming: asyncio.Task[list[ContentId]] | None = None

    async def run(self) -> None:
        """Until all blocks are committed, or an error, after which what is claimed and unfinished is given back."""
        commit_seconds = math.inf if self._run.whole else self._run.options.commit_seconds
        try:
            await self._lane.turn()
            while True:
                await self._claim_ahead()
                self._forget_finished_commits()
                if not self._under_way and self._claiming is None:
                    break
                for outcome in await self._lane.outcomes(timeout=min(commit_seconds, 5.0) if self._group else None):
                    self._take(outcome)
                    await self._commit_if_full()
                if self._group and time.monotonic() - self._group_began > commit_seconds:
                    await self._commit()
            await self._commit()
            while self._commits:
                await self._commits.popleft()
        finally:
            await self._give_back()

    async def _claim_ahead(self) -> None:
        """Hand what was claimed to the engine, and claim the next block as soon as there is room for it."""
        if self._claiming is not None and self._claiming.done():
            claiming, self._claiming = self._claiming, None
            await self._submit(claiming.result())
            if not self._blocks:
                self._lane.end()
        if self._claiming is None and self._blocks and self._lane.waiting < self._run.options.claim_size:
            claim = self._run.claim(self._blocks.popleft(), self._standing, self._claimed)
            self._claiming = asyncio.create_task(claim)
            self._claiming.add_done_callback(lambda _: self._lane.wake())

    async def _submit(self, samples: Sequence[ContentId]) -> None:
        requests: list[Request] = []
        for sample in samples:
            request = self._run.request(sample)
            if isinstance(request, Failure):
                self._group.append(Drawn(self._claimed[sample], request))
            else:
                requests.append(request)
        self._under_way += len(requests)
        self._lane.submit(requests)
        await self._commit_if_full()

    async def _give_back(self) -> None:
        """Wait for what is under way to the store, and release what is claimed and unfinished."""
        under_way = [*self._commits, *filter(None, [self._claiming])]
        await asyncio.gather(*under_way, return_exceptions=True)
        unfinished = [attempt for sample, attempt in self._claimed.items() if not self._run.is_done(sample)]
        if unfinished:
            # Those that nobody took over; and why they are unfinished is more telling than a failure to say so.
            with suppress(RolloutError):
                await self._run.ledger.release(unfinished)
        self._run.ledger.let_go(self._claimed.values())

    def _take(self, outcome: Outcome) -> None:
        if not self._group:
            self._group_began = time.monotonic()
        self._under_way -= 1
        latency = time.monotonic() - self._lane.started.pop(outcome.key)
        self._group.append(Drawn(self._claimed[cast(ContentId, outcome.key)], outcome, latency))

    async def _commit_if_full(self) -> None:
        if not self._run.whole and len(self._group) >= self._run.options.commit_size:
            await self._commit()

    async def _commit(self) -> None:
        if not self._group:
            return
        if len(self._commits) == COMMITS_AT_ONCE:
            await self._commits.popleft()
        group, self._group, self._group_began = self._group, [], time.monotonic()
        commit = asyncio.create_task(self._run.commit(group))
        commit.add_done_callback(lambda _: self._lane.wake())
        self._commits.append(commit)

    def _forget_finished_commits(self) -> None:
        """Raises what one of them raised: answers that the engine waits for may be long in coming."""
        for commit in [commit for commit in self._commits if commit.done()]:
            commit.result()
            self._commits.remove(commit)

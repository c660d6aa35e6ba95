"""Samples that are asked for one by one, by something that needs an answer to ask the next question.

Each is kept in the ledger before its answer is given, so what asks may be killed and begin again: it is given the same
answers up to where it was, and the engine draws only what is new. Those that are asked for at the same time are looked
up, claimed and committed together, and share the engine's batches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import cast

from rollout_core.base.errors import Recoverable, RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.config import SamplingParams
from rollout_core.data.samples import Sample, encode_samples, usage_in
from rollout_core.inference.batch import (
    BatchOptions,
    Drawn,
    Engine,
    Progress,
    Work,
    beating,
    ledger_of,
    opened_lane,
    request_of,
)
from rollout_core.inference.lanes import Lane
from rollout_core.inference.ledger import Answer, ShardStatus
from rollout_core.objects import ObjectStore
from rollout_core.store import Attempt, LightningStore


@dataclass(eq=False)
class _Wanted:
    """A sample that is waited for."""

    sample: Sample
    params: SamplingParams
    answer: asyncio.Future[bytes]


class OnDemand:
    """Completes samples of a model as they are asked for; inside `running`, in one event loop.

    What others have claimed is waited for: nobody knows beforehand what is asked, so ``options.exclusive`` does not
    count.
    """

    def __init__(
        self,
        store: LightningStore,
        objects: ObjectStore,
        engine: Engine,
        *,
        worker_id: str,
        options: BatchOptions,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._objects, self._engine, self._options, self._on_progress = objects, engine, options, on_progress
        self._ledger = ledger_of(store, objects, worker_id, options)
        self._new: list[_Wanted] = []
        self._is_new = asyncio.Event()
        self._open: dict[ContentId, _Wanted] = {}
        """All that are waited for."""
        self._claimed: dict[ContentId, Attempt] = {}
        self._lane: Lane | None = None
        self._needs_lane = asyncio.Event()
        self._has_lane = asyncio.Event()
        self._error: BaseException | None = None
        self._is_ended = False
        self._done: dict[ContentId, None] = {}
        """In order."""
        self.work = Work()

    async def complete(self, sample: Sample, params: SamplingParams) -> bytes:
        """The line of a completions blob for a sample; with an ``error`` where there is no completion for good.

        One that is waited for is not drawn again. Raises Recoverable where another try may succeed, and what ends the
        engine or the store.
        """
        if self._error is not None:
            raise self._error
        wanted = self._open.get(sample.id)
        if wanted is None:
            wanted = self._open[sample.id] = _Wanted(sample, params, asyncio.get_running_loop().create_future())
            self._want([wanted])
        return await asyncio.shield(wanted.answer)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[OnDemand]:
        """Inside the block samples are completed. An engine starts when one is not there yet."""
        admitting, generating = (asyncio.create_task(self._guarded(work)) for work in (self._admit, self._generate))
        try:
            async with beating(self._ledger, False, self._options):
                yield self
        except BaseException:
            generating.cancel()
            raise
        finally:
            self._is_ended = True
            admitting.cancel()
            self._needs_lane.set()
            if self._lane is not None:
                self._lane.wake()
            await asyncio.gather(admitting, generating, return_exceptions=True)
            for wanted in self._open.values():
                wanted.answer.cancel()
            if (account := self._options.account) is not None:
                account.settle(self._done)
            if self._claimed:
                with suppress(RolloutError):  # why they are unfinished is more telling than a failure to say so
                    await self._ledger.release(self._claimed.values())
                self._ledger.let_go(self._claimed.values())

    def _want(self, wanted: Sequence[_Wanted]) -> None:
        self._new += wanted
        self._is_new.set()

    def _want_later(self, wanted: Sequence[_Wanted]) -> None:
        if wanted:
            asyncio.get_running_loop().call_later(self._options.wait_seconds, self._want, wanted)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """What ends one part ends all that wait."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - handed over to those that wait, who raise it
            self._error = error
            for wanted in self._open.values():
                if not wanted.answer.done():
                    wanted.answer.set_exception(error)

    async def _admit(self) -> None:
        """Look up what is asked for, and hand to the engine what is not there."""
        while True:
            await self._is_new.wait()
            self._is_new.clear()
            group, self._new = {wanted.sample.id: wanted for wanted in self._new}, []
            standing = await self._ledger.shard_status(list(group), exclusive=False, unknown_are_free=True)
            for sample, line in standing.done.items():
                if (account := self._options.account) is not None and (usage := usage_in(line)) is not None:
                    account.note(str(sample), usage)
                self._give(sample, line)
            claimed = await self._claim([group[sample] for sample in standing.free], standing)
            if claimed:
                self._needs_lane.set()
                await self._has_lane.wait()
                assert self._lane is not None, "it was set"
                self._lane.submit(
                    [request_of(wanted.sample, wanted.params, self._options.account) for wanted in claimed]
                )
            others = [wanted for wanted in group.values() if wanted not in claimed and not wanted.answer.done()]
            self._want_later(others)  # another worker has them

    async def _claim(self, free: Sequence[_Wanted], standing: ShardStatus) -> list[_Wanted]:
        known = [wanted.sample.id for wanted in free if wanted.sample.id in standing.attempts]
        unknown = [wanted.sample for wanted in free if wanted.sample.id not in standing.attempts]
        if known:
            await self._ledger.claim(known, standing, self._claimed)
        if unknown:
            source = await asyncio.to_thread(self._objects.put_bytes, encode_samples(unknown))
            await self._ledger.begin(unknown, self._claimed, mode=self._options.mode, source=source)
        return [wanted for wanted in free if wanted.sample.id in self._claimed]

    async def _generate(self) -> None:
        """Commit what the engine completes, and give it to those that wait."""
        await self._needs_lane.wait()
        if self._is_ended:
            return
        async with opened_lane(self._engine, self.work, keeps_turn=False) as lane:
            self._lane = lane
            self._has_lane.set()
            while not self._is_ended:
                drawn = [
                    Drawn(self._claimed[key], outcome, time.monotonic() - lane.started.pop(outcome.key))
                    for outcome in await lane.outcomes()
                    if (key := cast(ContentId, outcome.key)) in self._open
                ]
                if drawn:
                    await self._commit(drawn)

    async def _commit(self, drawn: Sequence[Drawn]) -> None:
        samples = [cast(ContentId, each.attempt.rollout_id) for each in drawn]
        answers = [
            Answer.of(each.attempt, each.outcome, self._open[sample].params)
            for sample, each in zip(samples, drawn, strict=True)
        ]
        commit = asyncio.ensure_future(self._ledger.commit(answers))
        try:
            ends = await asyncio.shield(commit)
        finally:
            await asyncio.wait([commit])  # also where this ends meanwhile: what is drawn may be paid for
            self._ledger.let_go([self._claimed.pop(sample) for sample in samples])
        for sample, each, answer, ended in zip(samples, drawn, answers, ends, strict=True):
            if ended is None:  # another worker took it over, which may be at work on it
                self._want_later([self._open[sample]])
                continue
            self.work.add(each)
            if answer.passing:
                self._refuse(sample, Recoverable(answer.failure or ""))
            else:
                self._give(sample, answer.line)

    def _give(self, sample: ContentId, line: bytes) -> None:
        wanted = self._open.pop(sample)
        if not wanted.answer.done():
            wanted.answer.set_result(line)
        self._done[sample] = None
        running = len(self._claimed)
        self._on_progress(
            Progress(
                len(self._done),
                len(self._done) + len(self._open),
                self.work.tokens,
                samples=self.work.samples,
                running=running,
                waiting=len(self._open) - running,
            )
        )

    def _refuse(self, sample: ContentId, error: Exception) -> None:
        wanted = self._open.pop(sample)
        if not wanted.answer.done():
            wanted.answer.set_exception(error)

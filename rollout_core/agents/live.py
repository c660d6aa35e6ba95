"""What online learning learns from: the rollouts that live traffic has finished, read once each, and how far a run is.

The algorithm of a Trainer, `rollout_core.agents.online_learning.OnlineLearning`, and the flow `learn-online` use both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr

from rollout_core.agents.algorithm import AGENT_KIND
from rollout_core.agents.delivery import retried
from rollout_core.base.errors import ConfigError, Conflict, Fatal, Recoverable, Stopped
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.stopping import is_stopping
from rollout_core.config import LiveTraffic
from rollout_core.inference.ledger import SAMPLE_KIND
from rollout_core.inference.training_samples import Adapted, TokenSample
from rollout_core.objects import Checkpoint, ObjectStore
from rollout_core.store import LightningStore, Rollout

log = logging.getLogger(__name__)

Batch = TypeVar("Batch", bound=BaseModel)
T = TypeVar("T")

NOT_LEARNABLE = (ConfigError, Fatal)
"""What a learner raises where a batch teaches nothing, however often it is tried."""
_MOST_SKIPPED = 3
_LONGEST_PAUSE = 30.0
_PAGE = 500
_LATE_SECONDS = 60.0
"""So long after a rollout has ended it may become visible, with the time of its end."""
_SAVE_SECONDS = 600.0
_AWAY_SECONDS = 300.0
"""So long the store may be away."""
_MOST_HISTORY = 1_000
_MAY_CHANGE = {"no finite reward", "unfinished"}
"""Reasons to learn nothing from a rollout that its later spans may remove."""


class PastUpdate(BaseModel):
    """The outcome of a batch."""

    number: int
    """From 0, over all batches of the run."""
    outcome: Literal["promoted", "refused", "skipped"]
    """``skipped``: nothing could be learnt from it."""
    reason: str
    mean_reward: float
    """Of what was learnt from, under the weights before."""
    num_rollouts: int
    model: str | None = None
    """First digits of the new weights' content id. Whole, they would be kept in the object store."""


class OnlineState(BaseModel, Generic[Batch]):
    """How far a run is. Written before an update and after it, so that every rollout is learnt from once."""

    model_config = ConfigDict(extra="forbid")

    versions: list[ContentId]
    """The first weights, then the last of those that were in use, oldest first."""
    train_state: ContentId | None = None
    num_updates: int = 0
    num_refused: int = 0
    """Updates that did not pass the gate."""
    num_skipped: int = 0
    """Batches from which nothing could be learnt; they are no updates."""
    since: float = 0.0
    """All rollouts that ended before are dealt with."""
    done: dict[str, float] = {}
    """Those dealt with that ended since, with the times of their ends."""
    batch: Batch | None = None
    """What the update under way learns from."""
    rollouts: list[str] = []
    """Of the batch; they are among those dealt with."""
    held: dict[str, float] = {}
    """Those of the batch and of skipped ones right before it, with the times of their ends: they are given back, to be
    learnt from under other settings, where too many batches in a row are skipped."""
    left_out: dict[str, int] = {}
    """Rollouts since the batch before, by why nothing is learnt from them."""
    history: list[PastUpdate] = []
    """The last thousand batches."""

    _saved: ContentId | None = PrivateAttr(default=None)
    """What stands in the object store."""
    _num_skipped_in_row: int = PrivateAttr(default=0)

    @classmethod
    def begin(cls, objects: ObjectStore, ref: str, name: str, start: ContentId) -> OnlineState[Batch]:
        """How far the run called ``name`` is, as ``ref`` says. A new one starts with the weights ``start``, and with
        what ends from now on, which is saved. Raises ConfigError where it began with other weights."""
        found = objects.get_ref(ref)
        if found is None:
            state = cls(versions=[start], since=time.time() - _LATE_SECONDS)
            state.save(objects, ref)
            return state
        state = cls.model_validate(objects.get_json(found))
        state._saved = found
        if state.versions[0] != start:
            raise ConfigError(
                f"the run {name!r} began with model {state.versions[0].short}, and this one with {start.short}; give "
                "it another name"
            )
        return state

    def save(self, objects: ObjectStore, ref: str) -> None:
        """Make it what the next process of the run reads. Raises Conflict where another process has saved since.

        It finds a second process that was started by mistake, at its next save. It is no lock: of two that save within
        the same moment the later one wins, and the other finds out at its next save.
        """
        found = objects.get_ref(ref)
        new = objects.put_json(self.model_dump(mode="json"))
        if found not in (self._saved, new):  # ``new``: an earlier try of this save, whose answer was lost
            raise Conflict(f"another process runs under this name ({ref}); stop one of them, or give it another name")
        objects.set_ref(ref, new)
        self._saved = new

    def check_learnable(self) -> None:
        """Raise Fatal where this process has skipped several batches in a row: then they are not to blame, and
        `conclude` has given them back."""
        if self._num_skipped_in_row >= _MOST_SKIPPED:
            raise Fatal(
                f"nothing could be learnt from {self._num_skipped_in_row} batches in a row; the last: "
                f"{self.history[-1].reason}. Correct the settings, and start the run again under its name: it begins "
                "with these batches"
            )

    def promote(self, checkpoint: Checkpoint, max_staleness: int) -> None:
        """These weights answer from now on."""
        # The ref keeps all that it names in the object store, so it names no more than are asked for.
        later = [*self.versions[1:], checkpoint.model]
        self.versions = [self.versions[0], *later[-(max_staleness + 1) :]]
        self.train_state = checkpoint.train_state

    def conclude(
        self,
        outcome: Literal["promoted", "refused", "skipped"],
        reason: str,
        *,
        mean_reward: float = 0.0,
        model: ContentId | None = None,
    ) -> None:
        """The batch is dealt with."""
        self._num_skipped_in_row = self._num_skipped_in_row + 1 if outcome == "skipped" else 0
        past = PastUpdate(
            number=self.num_updates + self.num_skipped,
            outcome=outcome,
            reason=reason,
            mean_reward=mean_reward,
            num_rollouts=len(self.rollouts),
            model=None if model is None else model.short,
        )
        self.history = [*self.history, past][-_MOST_HISTORY:]
        self.num_updates += outcome != "skipped"
        self.num_refused += outcome == "refused"
        self.num_skipped += outcome == "skipped"
        self.batch, self.rollouts, self.left_out = None, [], {}
        if self._num_skipped_in_row >= _MOST_SKIPPED:
            self.done = {name: end for name, end in self.done.items() if name not in self.held}
        if outcome != "skipped" or self._num_skipped_in_row >= _MOST_SKIPPED:
            self.held = {}


@dataclass(frozen=True)
class LiveRollout:
    """What is kept of a live rollout that has ended until it is dealt with."""

    end_time: float
    looked_at: float
    reason: str | None = None
    """Why nothing can be learnt from it, as it is now; None: it can."""
    written_by: frozenset[str | None] = frozenset()
    """The weights that answered."""
    task: ContentId | None = None
    """Equal for equal inputs."""


class Selection(BaseModel):
    """What of the ended rollouts is learnt from now, and what never will be."""

    chosen: list[str]
    settled: dict[str, list[str]]
    """Rollouts by why nothing is learnt from them."""


class OnlineRun(Generic[Batch]):
    """Online learning batch by batch: what it learns, who judges the new weights, and what answers from then on.

    Where the work is done, subclasses say. Those whose methods block, as stages of a flow do, run it by `blocking`.
    """

    def __init__(self, state: OnlineState[Batch], max_staleness: int, logger: Callable[[], Any] = lambda: log) -> None:
        self.state = state
        self._max_staleness, self._logger = max_staleness, logger

    @property
    def serving(self) -> ContentId:
        """The weights that were promoted last."""
        return self.state.versions[-1]

    async def update(self, batch: Batch) -> tuple[Checkpoint, float]:
        """The outcome of an update by the batch, and the mean reward of what it learnt from. Raises NOT_LEARNABLE."""
        raise NotImplementedError

    async def judge(self, checkpoint: Checkpoint) -> tuple[bool, str]:
        """Whether the new weights are to answer, and why; asked only where they are others."""
        raise NotImplementedError

    async def serve(self, checkpoint: Checkpoint, is_promoted: bool) -> None:
        """Have the promoted weights answer, or the present ones again."""
        raise NotImplementedError

    async def save(self) -> None:
        """Store the state."""
        raise NotImplementedError

    async def learn(self) -> None:
        """Learn from the batch of the state. Raises Fatal where nothing is learnt from several batches in a row."""
        state = self.state
        assert state.batch is not None, "there is something to learn from"
        try:
            checkpoint, mean_reward = await self.update(state.batch)
        except NOT_LEARNABLE as error:  # it would else be tried for ever
            self.skip(error)
        else:
            is_promoted, reason = False, "the update left the weights as they are"
            if checkpoint.model != self.serving:
                is_promoted, reason = await self.judge(checkpoint)
            # Noted only after it answers: where that fails, the same update is tried again.
            await self.serve(checkpoint, is_promoted)
            if is_promoted:
                state.promote(checkpoint, self._max_staleness)
            self.note(checkpoint, is_promoted, mean_reward)
            outcome = "promoted" if is_promoted else "refused"
            state.conclude(outcome, reason, mean_reward=mean_reward, model=checkpoint.model)
        await self.save()
        state.check_learnable()

    def skip(self, error: Exception) -> None:
        """Learn nothing from the batch."""
        self._logger().warning("nothing is learnt from %d live rollouts: %s", len(self.state.rollouts), error)
        self.state.conclude("skipped", str(error))

    def note(self, checkpoint: Checkpoint, is_promoted: bool, mean_reward: float) -> None:
        """Called with the outcome of an update, before the batch is concluded."""


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, without an event loop: what it calls may have loops of its own."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise RuntimeError("the coroutine waits for something; await it on an event loop")


def until_over(step: Callable[[], bool], warn: Callable[[str], None]) -> None:
    """Call ``step`` until it says that the run is over. Where it fails for a passing reason, such as a database that is
    away, it is called again, with growing pauses, for some minutes in a row; then, and when the process is to stop, the
    error is raised."""
    failing_since: float | None = None
    pause = 1.0
    while True:
        try:
            if step():
                return
            failing_since, pause = None, 1.0
        except Recoverable as error:
            failing_since = failing_since or time.monotonic()
            is_over = time.monotonic() - failing_since > _AWAY_SECONDS
            if isinstance(error, Stopped) or is_stopping() or is_over:
                raise
            warn(f"{error}; trying again in {pause:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


class LiveRollouts:
    """What live traffic has finished and nobody has dealt with.

    A rollout is read when it is new, and then only while it may still get its reward, ever more seldom. What is kept of
    each is a line, not its samples. Of more rollouts than a batch may have the latest are taken, and the others given
    up, so nothing piles up where traffic is faster than learning.

    Args:
        adapt: gives the samples of rollouts, see ``adapt_rollouts``.
        flush: has all calls that have ended stored.
        state: of the run; what is dealt with is noted in it.
    """

    def __init__(
        self,
        store: LightningStore,
        state: OnlineState[Any],
        live: LiveTraffic,
        *,
        group_size: int,
        adapt: Callable[[Sequence[str]], Awaitable[Adapted]],
        flush: Callable[[], Awaitable[None]],
    ) -> None:
        self.state = state
        self.seconds = 0.0
        """How long the last look took."""
        self._store, self._live, self._group_size = store, live, group_size
        self._adapt, self._flush = adapt, flush
        self._waiting: dict[str, LiveRollout] = {}
        self._newest = state.since
        self._saved = time.monotonic()

    async def next_batch(self) -> list[str]:
        """The rollouts to learn from now, oldest first, none if there are too few; `take` takes them.

        Raises as `with_retries` where the store stays away.
        """
        began = time.monotonic()
        await with_retries(self._look)
        state, live = self.state, self._live
        selection = select(
            self._waiting,
            versions=state.versions,
            max_staleness=live.max_staleness,
            group_size=self._group_size,
            patience=live.reward_patience_seconds,
            most=live.max_rollouts or 4 * live.min_rollouts,
            now=time.time(),
        )
        for reason, names in selection.settled.items():
            state.left_out[reason] = state.left_out.get(reason, 0) + len(names)
            self._deal_with(names)
        self.seconds = time.monotonic() - began
        return selection.chosen if len(selection.chosen) >= live.min_rollouts else []

    def take(self, chosen: Sequence[str]) -> None:
        """These are learnt from; the state, which is to be saved then, knows it."""
        self.state.held |= {name: self._waiting[name].end_time for name in chosen}
        self._deal_with(chosen)
        self.state.rollouts = list(chosen)

    @property
    def pause(self) -> float:
        """Seconds until the next look: a store so large that looking takes long is looked at less often."""
        return max(self._live.poll_seconds, 10 * self.seconds)

    def is_due_to_save(self) -> bool:
        """Whether to save the state although there is no update, for what was given up; true every ten minutes."""
        if time.monotonic() - self._saved < _SAVE_SECONDS:
            return False
        self._saved = time.monotonic()
        return True

    async def _look(self) -> None:
        """Read what has ended since the last look, and again what may have got its reward since."""
        newest = self._newest
        async for page in ended_since(self._store, max(self.state.since, newest - _LATE_SECONDS)):
            newest = max(newest, min(time.time(), max(page.values())))  # a clock may be ahead
            new = {name: end for name, end in page.items() if name not in self._waiting and name not in self.state.done}
            await self._read(new)
        self._newest = newest  # now that all pages were read: pages begin with the latest
        now, patience = time.time(), self._live.reward_patience_seconds
        due = {
            name: item.end_time
            for name, item in self._waiting.items()
            if item.reason is not None and _is_due(item, now, patience)
        }
        names = list(due)
        for start in range(0, len(names), _PAGE):
            await self._read({name: due[name] for name in names[start : start + _PAGE]})

    async def _read(self, end_times: Mapping[str, float]) -> None:
        if end_times:
            await self._flush()
            adapted = await self._adapt(list(end_times))
            self._waiting |= summarize(adapted, end_times, by_task=self._group_size > 1)

    def _deal_with(self, names: Collection[str]) -> None:
        state = self.state
        state.done |= {name: self._waiting.pop(name).end_time for name in names}
        ends = [*state.held.values(), *(item.end_time for item in self._waiting.values())]
        state.since = max(state.since, min([*ends, self._newest]) - _LATE_SECONDS)
        state.done = {name: end for name, end in state.done.items() if end >= state.since}


def _is_due(item: LiveRollout, now: float, patience: float) -> bool:
    """Whether to look again: after a fifth of the time that it has waited, and once when the patience has ended."""
    given_up_at = item.end_time + patience
    return now - item.looked_at >= 0.2 * (item.looked_at - item.end_time) or item.looked_at <= given_up_at < now


async def with_retries(call: Callable[[], Awaitable[T]]) -> T:
    """The result of ``call``, which is repeated while the store is away, for some minutes."""
    return await retried(call, _AWAY_SECONDS)


async def ended_since(store: LightningStore, since: float) -> AsyncIterator[dict[str, float]]:
    """Rollouts of live traffic that have succeeded since then with the times of their ends, page by page."""
    seen: set[str] = set()
    # From the newest on: what ends meanwhile moves others to later pages, where they are seen twice, but not missed.
    for offset in range(0, 1 << 60, _PAGE):
        page = await store.query_rollouts(
            status_in=["succeeded"], sort_by="end_time", sort_order="desc", limit=_PAGE, offset=offset
        )
        found = {
            item.rollout_id: item.end_time or 0.0
            for item in page
            if is_live(item) and (item.end_time or 0.0) >= since and item.rollout_id not in seen
        }
        seen |= found.keys()
        if found:
            yield found
        if len(page) < _PAGE or (page[-1].end_time or 0.0) < since:
            return


async def queued(store: LightningStore, most: int = 1_000) -> list[str]:
    """Rollouts of live traffic that wait for a runner, oldest first, up to ``most``."""
    found: list[str] = []
    for offset in range(0, 1 << 60, _PAGE):
        page = await store.query_rollouts(
            status_in=["queuing", "requeuing"], sort_by="start_time", limit=_PAGE, offset=offset
        )
        found += [item.rollout_id for item in page if is_live(item)]
        if len(page) < _PAGE or len(found) >= most:
            break
    return found[:most]


def is_live(rollout: Rollout) -> bool:
    """Whether live traffic has enqueued it: no flow or algorithm of ours, and not to judge by."""
    kind = (rollout.metadata or {}).get("kind")
    return rollout.mode not in ("val", "test") and kind not in (AGENT_KIND, SAMPLE_KIND)


def summarize(adapted: Adapted, end_times: Mapping[str, float], *, by_task: bool) -> dict[str, LiveRollout]:
    """What is kept of rollouts; ``by_task`` as they are compared with others of equal input."""
    now = time.time()
    found = {
        name: LiveRollout(end_times[name], now, reason) for reason, names in adapted.left_out.items() for name in names
    }
    samples: dict[str, list[TokenSample]] = {}
    for sample in adapted.samples:
        samples.setdefault(sample.rollout_id, []).append(sample)
    for name, own in samples.items():
        written_by = frozenset(model for sample in own for model in sample.model_ids or [None])
        task = content_id("task/1", own[0].task) if by_task else None
        found[name] = LiveRollout(end_times[name], now, None, written_by, task)
    return found


def select(
    rollouts: Mapping[str, LiveRollout],
    *,
    versions: Sequence[ContentId],
    max_staleness: int,
    group_size: int,
    patience: float,
    most: int,
    now: float,
) -> Selection:
    """Which rollouts to learn from, in order of their ends: the latest ``most``, in whole groups. Those that may still
    get a reward, or others to be compared with, are in neither part; ``patience`` seconds after their ends they are
    given up."""
    settled: dict[str, list[str]] = {}

    def give_up(reason: str, name: str, *, at_once: bool) -> None:
        if at_once or rollouts[name].end_time < now - patience:
            settled.setdefault(reason, []).append(name)

    def order(name: str) -> tuple[float, str]:
        return rollouts[name].end_time, name

    recent = set(versions[-1 - max_staleness :])
    by_task: dict[str, list[str]] = {}
    for name, item in rollouts.items():
        if item.reason is not None:
            give_up(item.reason, name, at_once=item.reason not in _MAY_CHANGE)
        elif not item.written_by <= recent:
            give_up("stale" if item.written_by <= set(versions) else "other weights", name, at_once=True)
        else:
            by_task.setdefault(item.task or name, []).append(name)
    groups: list[list[str]] = []
    for names in by_task.values():
        names.sort(key=order)
        whole = len(names) // group_size * group_size
        groups += [names[start : start + group_size] for start in range(0, whole, group_size)]
        for name in names[whole:]:
            give_up("incomplete group", name, at_once=False)
    groups.sort(key=lambda group: order(group[-1]))
    surplus = max(0, len(groups) - -(-most // group_size))
    if surplus:
        settled["surplus"] = [name for group in groups[:surplus] for name in group]
    return Selection(chosen=sorted((name for group in groups[surplus:] for name in group), key=order), settled=settled)

"""Log lines of stages and flows: where they go, and those on training, which people see who have no progress bar; and
the journal of what the stages of a flow run did, for its closing report.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from rollout_core.base.ids import ContentId
from rollout_core.evaluation.reports import SuiteReport
from rollout_core.inference.spending import RunSpending
from rollout_core.objects.records import Completions, EvalReport, Record, Scores, ShardCompletions

CHECKED = "Checked"
"""State of a stage that always checks and rarely has to act: an import of unchanged files, a promotion."""
CACHED = "Cached"
MOST_OF_A_LABEL = 80
_MOST_PERIODS = 1000
MOST_ROWS = 1000
"""Steps of an update under way whose figures are kept."""


def title_of(stage: str, label: str) -> str:
    """A call of a stage as people say it, such as ``evaluate before``; of a long label its beginning."""
    words = " ".join(label.split())
    return f"{stage} {words if len(words) <= MOST_OF_A_LABEL else words[: MOST_OF_A_LABEL - 3] + '...'}".strip()


@dataclass(frozen=True)
class StageEntry:
    """One call of a stage."""

    stage: str
    label: str
    state: str
    """``Cached``, ``Completed``, ``Checked`` or ``Failed``."""
    seconds: float
    inputs: tuple[ContentId, ...]
    outputs: tuple[ContentId, ...]
    result: Record | None = field(default=None, compare=False, repr=False)
    ended: float = field(default_factory=time.time, compare=False)
    """Seconds since the epoch."""
    key: ContentId | None = field(default=None, compare=False)
    """Of the call, where its result is cached."""
    named: frozenset[ContentId] = field(default=frozenset(), compare=False, repr=False)
    """All ids among its inputs."""

    @property
    def computed(self) -> bool:
        """False when the result came from the cache, or there was nothing to compute."""
        return self.state not in (CACHED, CHECKED)

    @property
    def failed(self) -> bool:
        """Whether it gave no result."""
        return self.computed and self.state != "Completed"

    @property
    def title(self) -> str:
        """As its task run is called."""
        return title_of(self.stage, self.label)

    def row(self) -> dict[str, str | float]:
        """For a table: state, seconds, first digits of the content ids in and out."""
        return {
            "stage": self.stage,
            "label": self.label,
            "state": self.state.lower(),
            "seconds": round(self.seconds, 3),
            "in": " ".join(content_id.short for content_id in self.inputs),
            "out": " ".join(content_id.short for content_id in self.outputs),
        }


@dataclass
class StageTotals:
    """What the calls of a stage came to."""

    calls: Counter[str] = field(default_factory=Counter)
    """By state."""
    _seconds: float = 0.0
    _periods: list[tuple[float, float]] = field(default_factory=list)

    def add(self, entry: StageEntry, ended: float) -> None:
        """Count a call that ended at ``ended`` of a monotonic clock, later than those before."""
        self.calls[entry.state] += 1
        if not entry.computed:
            return
        started = ended - entry.seconds
        while self._periods and self._periods[-1][1] >= started:
            started = min(started, self._periods.pop()[0])
        self._periods.append((started, ended))
        if len(self._periods) > _MOST_PERIODS:
            first, last = self._periods.pop(0)
            self._seconds += last - first

    @property
    def seconds(self) -> float:
        """How long at least one was computed: shards are computed at the same time."""
        return self._seconds + sum(last - first for first, last in self._periods)


@dataclass(frozen=True)
class Outcome:
    """What came of a flow run, for its summary."""

    facts: Mapping[str, str] = field(default_factory=dict)
    """What else there is to say, by what it is called."""
    held_out: Mapping[str, float] = field(default_factory=dict)
    """Mean held-out reward by moment, in order."""
    promoted: bool | None = None
    """None where nothing was to be promoted."""
    reason: str = ""
    """Why it was promoted, or not."""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """PNG by title."""


@dataclass
class Learning:
    """An update under way."""

    title: str
    """Of the call of its stage."""
    num_steps: int
    rows: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=MOST_ROWS))
    """Figures of its last steps."""


@dataclass
class Journal:
    """What the stages of a flow run did, and what came of it."""

    entries: list[StageEntry] = field(default_factory=list)
    """In order of finishing. Of a run without an end the oldest may be taken out; they stay in the totals."""
    totals: dict[str, StageTotals] = field(default_factory=dict)
    """By stage."""
    outcome: Outcome | None = None
    """Once there is one."""
    learning: Learning | None = None
    """While an update is made in this process."""
    at_work: dict[object, tuple[str, float]] = field(default_factory=dict)
    """Titles of the calls under way, in order, each with seconds since the epoch when it began."""
    missing: frozenset[str] = frozenset()
    """Ids of objects that earlier passes of the run's body found damaged or gone."""
    judged: list[ContentId] = field(default_factory=list)
    """What scorings filed of judges (`Scores.judged`), also cached ones."""
    judging: RunSpending | None = None
    """What judges took, once somebody asked (`judged_so_far`)."""
    completed: list[tuple[ContentId, ContentId]] = field(default_factory=list)
    """Models, and their completions, of cached stages."""
    asked: list[ContentId] = field(default_factory=list)
    """What cached evaluations filed of their questions (`SuiteReport.questions`)."""
    generating: RunSpending | None = None
    """What endpoints that generate took, once one is asked (`generated_so_far`)."""

    @property
    def has_judges(self) -> bool:
        """Whether judges were asked."""
        return bool(self.judged) or self.judging is not None

    def begin(self, title: str) -> object:
        """Note a call that begins; returns what `end` takes."""
        call = object()
        self.at_work[call] = title, time.time()
        return call

    def end(self, call: object) -> None:
        """It has ended, in whatever way."""
        self.at_work.pop(call, None)

    def add(self, entry: StageEntry) -> None:
        """Note one call, which has just ended."""
        self.entries.append(entry)
        if isinstance(entry.result, Scores | EvalReport) and entry.result.judged is not None:
            self.judged.append(entry.result.judged)
        if isinstance(entry.result, Completions | ShardCompletions) and entry.state == CACHED:
            self.completed.append((entry.result.model, entry.result.completions))
        if isinstance(entry.result, SuiteReport) and entry.state == CACHED:
            self.asked.append(entry.result.questions)
        self.totals.setdefault(entry.stage, StageTotals()).add(entry, time.monotonic())

    def makers_for(self, named: Collection[ContentId]) -> dict[str, str]:
        """Of these inputs of a call, those that calls of this run gave, with the keys of these calls.

        Where several made the same content, that counts whose other results are inputs as well, and then the last one.
        Of calls long ago nothing is said; lineage then goes by what it has on record.
        """
        found: dict[str, tuple[int, str]] = {}
        for entry in self.entries[-_LOOKED_BACK:]:
            taken = sum(output in named for output in entry.outputs)
            for output in entry.outputs:
                if entry.key is None or output not in named or output in entry.named:
                    continue
                if taken >= found.get(output, (0, ""))[0]:
                    found[output] = (taken, entry.key)
        return {output: key for output, (_, key) in found.items()}


_current: ContextVar[Journal | None] = ContextVar("rollout_journal", default=None)


@contextmanager
def keep_journal(*, missing: Iterable[str] = ()) -> Iterator[Journal]:
    """Collect what stages called inside the block do. ``missing``: as in `Journal`."""
    journal = Journal(missing=frozenset(missing))
    token = _current.set(journal)
    try:
        yield journal
    finally:
        _current.reset(token)


def current_journal() -> Journal | None:
    """The journal of the flow run, if one is kept."""
    return _current.get()


@contextmanager
def at_work(stage: str, label: str) -> Iterator[None]:
    """A call of a stage is under way inside the block."""
    journal = current_journal()
    call = None if journal is None else journal.begin(title_of(stage, label))
    try:
        yield
    finally:
        if journal is not None:
            journal.end(call)


_LOOKED_BACK = 1000
"""Entries among which the makers of a call's inputs are looked for, so that many shards slow nothing down."""
INTERVAL_SECONDS = 30.0
SPEED_SECONDS = 30.0
_LEAST_DONE, _ENOUGH_DONE = 0.02, 8
"""How much has to be done before it is said how long the rest takes: this share of all, or so much."""
_STEP_FIGURES = {
    "loss": "loss",
    "mean_token_accuracy": "token accuracy",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "value_loss": "value loss",
    "approx_kl": "KL to the sampling policy",
    "learning_rate": "learning rate",
}
_ITERATION_FIGURES = {
    "reward": "reward",
    "reward_std": "std",
    "objective/kl": "KL to the reference",
    "kl": "KL to the reference",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "cut off",
    "value_loss": "value loss",
    "loss": "loss",
}
_EVALUATION = "eval_"


def stage_logger() -> logging.Logger | logging.LoggerAdapter[Any]:
    """The run's logger, whose lines appear in the Prefect UI; a plain one outside a run."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("rollout")


class Pace:
    """How fast work goes, for how long it will take: from the first amount that was noted on, so that what was done
    before does not count."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)

    def note(self, done: int) -> None:
        """So much is done now."""
        self._last = time.monotonic(), done
        self._first = self._first or self._last

    def left(self, total: int) -> str:
        """Such as ``0:01:30 left``; empty where nothing is known yet, or nothing is left."""
        if self._first is None:
            return ""
        seconds, done = self._last[0] - self._first[0], self._last[1] - self._first[1]
        # One of many things that are worked on side by side says nothing of how fast the others come.
        if seconds <= 0 or done < min(_LEAST_DONE * total, _ENOUGH_DONE) or self._last[1] >= total:
            return ""
        return f"{timedelta(seconds=round((total - self._last[1]) * seconds / done))} left"


class Speed:
    """Recent speed: over the last half minute, from the first sample on."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, int, int]] = deque()

    def note(self, seconds: float, samples: int, tokens: int) -> None:
        """``samples`` and ``tokens`` were generated until ``seconds`` of a monotonic clock."""
        if samples == 0 and self._noted:
            self._noted.clear()
        self._noted.append((seconds, samples, tokens))
        while len(self._noted) > 2 and seconds - self._noted[1][0] > SPEED_SECONDS:
            self._noted.popleft()

    @property
    def figures(self) -> str:
        """`per_second` for a line."""
        samples, tokens = self.per_second
        return f"{samples:,.0f} samples/s, {tokens:,.0f} tokens/s"

    @property
    def per_second(self) -> tuple[float, float]:
        """Samples and tokens a second; zeros where nothing is known yet."""
        if len(self._noted) < 2:
            return 0.0, 0.0
        (start, samples, tokens), (now, more_samples, more_tokens) = self._noted[0], self._noted[-1]
        return (more_samples - samples) / (now - start), (more_tokens - tokens) / (now - start)


class StepLog:
    """A line for the first and the last step, for each evaluation, and else at most one in half a minute."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._next = 0.0
        self._pace = Pace()

    def note(self, row: Mapping[str, float], last_step: int) -> None:
        """Take the figures of a step; ``row["step"]`` counts up to ``last_step``."""
        step, now = int(row["step"]), time.monotonic()
        self._pace.note(step)
        evaluated = [name for name in row if name.startswith(_EVALUATION)]
        if now < self._next and not evaluated and step < last_step:
            return
        self._next = now + INTERVAL_SECONDS
        names = {**_STEP_FIGURES, **{name: name for name in evaluated}}
        figures = ", ".join(filter(None, (figures_text(row, names), self._pace.left(last_step))))
        stage_logger().info("%s: step %d of %d: %s", self._title, step, last_step, figures)


def step_figures(row: Mapping[str, float]) -> str:
    """Those of an optimizer step that people follow, for a line."""
    return figures_text(row, _STEP_FIGURES)


def log_iteration(title: str, summary: Mapping[str, float]) -> None:
    """One line on an iteration of PPO or GRPO, from the figures of its checkpoint."""
    stage_logger().info("%s: %s", title, figures_text(summary, _ITERATION_FIGURES))


def figures_text(row: Mapping[str, float], names: Mapping[str, str]) -> str:
    """Those of ``names`` that ``row`` has, in their order, each with the name that people read."""
    return ", ".join(f"{shown} {row[name]:.4g}" for name, shown in names.items() if name in row)

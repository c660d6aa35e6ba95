"""Log lines of stages and flows: where they go, and those on training, which people see who have no progress bar; and
the journal of what the stages of a flow run did, for its closing report.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from rollout_core.base.ids import ContentId

CHECKED = "Checked"
"""State of a stage that always checks and rarely has to act: an import of unchanged files, a promotion."""
CACHED = "Cached"
MOST_OF_A_LABEL = 80
_MOST_PERIODS = 1000


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
        """How long at least one was computed: shards are computed beside each other."""
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
class Journal:
    """What the stages of a flow run did, and what came of it."""

    entries: list[StageEntry] = field(default_factory=list)
    """In order of finishing. Of a run without an end the oldest may be taken out; they stay in the totals."""
    totals: dict[str, StageTotals] = field(default_factory=dict)
    """By stage."""
    outcome: Outcome | None = None
    """Once there is one."""

    def add(self, entry: StageEntry) -> None:
        """Note one call, which has just ended."""
        self.entries.append(entry)
        self.totals.setdefault(entry.stage, StageTotals()).add(entry, time.monotonic())


_current: ContextVar[Journal | None] = ContextVar("rollout_journal", default=None)


@contextmanager
def keep_journal() -> Iterator[Journal]:
    """Collect what stages called inside the block do."""
    journal = Journal()
    token = _current.set(journal)
    try:
        yield journal
    finally:
        _current.reset(token)


def current_journal() -> Journal | None:
    """The journal of the flow run, if one is kept."""
    return _current.get()


INTERVAL_SECONDS = 30.0
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


class StepLog:
    """A line for the first and the last step, for each evaluation, and else at most one in half a minute."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._next = 0.0

    def note(self, row: Mapping[str, float], last_step: int) -> None:
        """Take the figures of a step; ``row["step"]`` counts up to ``last_step``."""
        step, now = int(row["step"]), time.monotonic()
        evaluated = [name for name in row if name.startswith(_EVALUATION)]
        if now < self._next and not evaluated and step < last_step:
            return
        self._next = now + INTERVAL_SECONDS
        names = {**_STEP_FIGURES, **{name: name for name in evaluated}}
        stage_logger().info("%s: step %d of %d: %s", self._title, step, last_step, figures_text(row, names))


def log_iteration(title: str, summary: Mapping[str, float]) -> None:
    """One line on an iteration of PPO or GRPO, from the figures of its checkpoint."""
    stage_logger().info("%s: %s", title, figures_text(summary, _ITERATION_FIGURES))


def figures_text(row: Mapping[str, float], names: Mapping[str, str]) -> str:
    """Those of ``names`` that ``row`` has, in their order, each with the name that people read."""
    return ", ".join(f"{shown} {row[name]:.4g}" for name, shown in names.items() if name in row)

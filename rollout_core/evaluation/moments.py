"""Evaluations of a run that trains: at which moments, and how a suite's figure changes from one to another."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from rollout_core.base.errors import MissingObject, NotFound
from rollout_core.base.ids import ContentId
from rollout_core.config import TrainingSuite
from rollout_core.config.base import parse_config
from rollout_core.config.lm_eval import AnySuite, suite_class
from rollout_core.evaluation.bootstrap import PairedGain
from rollout_core.evaluation.lm_eval_tasks import lower_is_better
from rollout_core.evaluation.reports import CONFIDENCE, SuiteReport, compare_reports
from rollout_core.evaluation.suite_files import read_suite
from rollout_core.objects import ObjectStore
from rollout_core.objects.addresses import with_whole_ids

LABEL = "suite "
"""Begins the labels of the stages that evaluate a suite."""
_ITERATION = "after iteration "
START, LATEST = "before", "latest"
"""The moments at which a run evaluates the model that it starts from, and the one that is served."""


def suite_of(entry: TrainingSuite, base: Path, objects: ObjectStore | None) -> AnySuite:
    """The suite of an entry of `[[evaluation.suites]]`, whose relative path starts at ``base``, with whole content ids
    of models where the object store is known. Raises ConfigError with what is wrong with its file."""
    suite = entry.suite
    if isinstance(suite, str):
        table = read_suite(suite, base=base)
        suite = parse_config(table, suite_class(table), name=suite)
    return suite if objects is None else with_whole_ids(suite, base, lambda: objects)


def training_label(suite: str, moment: str) -> str:
    """Of the stages that evaluate a suite at a moment."""
    return f"{LABEL}{suite}, {moment}"


def after_iteration(number: int) -> str:
    """The moment after an iteration (from 1)."""
    return f"{_ITERATION}{number}"


def in_order(suites: Iterable[Iterable[str]]) -> list[str]:
    """The moments of several suites, of each in order, as one: those of one suite alone come where they belong."""
    found: list[str] = []
    for moments in suites:
        place = 0
        for moment in moments:
            if moment not in found:
                found.insert(place, moment)
            place = found.index(moment) + 1
    # Of iterations, which come one after another, suites may have different ones.
    iterations = [moment for moment in found if moment.startswith(_ITERATION)]
    numbered = iter(sorted(iterations, key=lambda moment: (len(moment), moment)))
    return [next(numbered) if moment.startswith(_ITERATION) else moment for moment in found]


def moment_of(label: str, suite: str) -> str | None:
    """The moment that `training_label` made a label of; None of other labels."""
    start = training_label(suite, "")
    return label.removeprefix(start) if label.startswith(start) else None


@dataclass(frozen=True)
class Evaluated:
    """What an iteration ended with, and a suite's figure of it."""

    iteration: int
    """From 1."""
    model: ContentId
    value: float


class SuiteWatch:
    """How a figure of a suite goes from iteration to iteration, and whether training ends by it: after ``patience``
    evaluations in a row without a new best one."""

    def __init__(self, metric: str | None, patience: int | None) -> None:
        self._metric, self._patience = metric, patience
        self._found: list[Evaluated] = []
        self._named, self._is_less_better = "", False

    def note(self, iteration: int, report: SuiteReport, falling: Collection[str] = ()) -> None:
        """Take the evaluation of what an iteration ended with; of metrics in ``falling`` less is better."""
        figure = report.figure(self._metric)
        self._named, self._is_less_better = f"{figure.name} on suite {report.suite}", figure.name in falling
        self._found.append(Evaluated(iteration, report.model, figure.value))

    @property
    def best(self) -> Evaluated | None:
        """The first of those with the highest figure, or the lowest where less is better."""
        sign = -1 if self._is_less_better else 1
        return max(self._found, key=lambda found: sign * found.value, default=None)

    @property
    def selected(self) -> str:
        """For people: what has the best figure."""
        assert self.best is not None, "asked once there is one"
        best = "lowest" if self._is_less_better else "highest"
        return f"iteration {self.best.iteration}, with the {best} {self._named} ({self.best.value:.4f})"

    @property
    def end(self) -> str | None:
        """Why training ends, for people; None where it does not."""
        if self.best is None or self._patience is None:
            return None
        since = len(self._found) - 1 - self._found.index(self.best)
        if since < self._patience:
            return None
        better = "lower" if self._is_less_better else "higher"
        return (
            f"{after_iteration(self._found[-1].iteration)}, as the last {since} evaluations brought no {better} "
            f"{self._named} than iteration {self.best.iteration} ({self.best.value:.4f})"
        )


@dataclass(frozen=True)
class Change:
    """What a metric of a suite came to in one model and in another, on the questions that have it in both."""

    suite: str
    metric: str
    gain: PairedGain
    confidence: float
    """Of the gain's interval."""
    is_less_better: bool = False
    """Of the metric."""

    @property
    def fall(self) -> float:
        """By how much the second model is worse; below 0 where it is better."""
        return self.gain.gain if self.is_less_better else -self.gain.gain

    @property
    def largest_fall(self) -> float:
        """The same at the worse end of the interval."""
        return self.gain.upper if self.is_less_better else -self.gain.lower

    def line(self, before: str) -> str:
        """For people; ``before`` says which model the first one is, such as ``latest``."""
        gain, difference = self.gain, "change (less is better)" if self.is_less_better else "gain"
        return (
            f"suite {self.suite}: {self.metric} {gain.mean_before:.4f} ({before}) -> {gain.mean_after:.4f}, "
            f"{difference} {gain.gain:.4f}, {self.confidence:.4g} interval {gain.lower:.4f} to {gain.upper:.4f} over "
            f"{gain.num_prompts} questions"
        )


def change_of(
    objects: ObjectStore,
    before: SuiteReport,
    after: SuiteReport,
    metric: str | None = None,
    *,
    confidence: float = CONFIDENCE,
) -> Change | None:
    """How a metric, by default the one that stands for all, differs between two reports of a suite, paired by question
    with a bootstrap interval of that ``confidence``; None where no question has it in both, or where it is no mean of
    what questions have.

    Raises ConfigError as `compare_reports`, and MissingObject: a run computes again what storage has lost.
    """
    name = metric or after.headline.name
    try:
        gain = compare_reports(objects, before, after, confidence=confidence).gains.get(name)
        falling = lower_is_better(objects, after)
    except NotFound as error:
        if isinstance(error.__cause__, MissingObject):
            raise error.__cause__ from None
        raise
    return None if gain is None else Change(after.suite, name, gain, confidence, name in falling)

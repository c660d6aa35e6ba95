"""Suites of a run that trains: which models are asked, when, and what that comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.suite_kinds import PreparedSuite, prepare_suite
from rollout_core.base.ids import ContentId
from rollout_core.config import BackendConfig, EvaluatedTraining, TrainConfig, TrainingSuite, VLLMBackend
from rollout_core.evaluation.lm_eval_tasks import lower_is_better
from rollout_core.evaluation.moments import SuiteWatch, after_iteration, suite_of, training_label
from rollout_core.evaluation.reports import SuiteReport
from tasks.runtime.connections import objects, working_folder
from tasks.runtime.dry_run import dry_run_remark, is_placeholder


@dataclass(frozen=True)
class _Suite:
    name: str
    entry: TrainingSuite
    prepared: PreparedSuite
    watch: SuiteWatch
    reports: dict[str, SuiteReport]
    """By moment, in order."""

    @classmethod
    def of(cls, entry: TrainingSuite) -> _Suite:
        suite = suite_of(entry, working_folder(), objects())
        prepared = prepare_suite(suite, training_label(suite.name, "questions"))
        return cls(suite.name, entry, prepared, SuiteWatch(entry.metric, entry.patience), {})

    def is_due(self, number: int, iterations: int) -> bool:
        """After iteration ``number`` (from 0). What the last one ends with is evaluated as the run's outcome, unless
        another iteration may be that."""
        if number + 1 == iterations:
            return self.entry.watches
        return self.entry.every is not None and (number + 1) % self.entry.every == 0


class RunSuites:
    """The suites by which a run evaluates its models, with the reports so far. Questions and scorers are read once, so
    that all models have the same."""

    def __init__(self, entries: Sequence[TrainingSuite], backend: BackendConfig) -> None:
        self._backend = backend
        self._suites = [_Suite.of(entry) for entry in entries]
        self._selecting = next((suite.watch for suite in self._suites if suite.entry.select == "best"), None)

    @property
    def reports(self) -> Mapping[str, Mapping[str, SuiteReport]]:
        """By name and moment, in order."""
        return {suite.name: suite.reports for suite in self._suites}

    def evaluate(self, model: ContentId, moment: str) -> None:
        """Have ``model`` answer all suites."""
        for suite in self._suites:
            self._evaluate(suite, model, moment)

    def after_iteration(self, number: int, iterations: int, model: ContentId) -> None:
        """Have ``model``, which iteration ``number`` (from 0) ended with, answer the suites that are due."""
        for suite in self._suites:
            if not suite.is_due(number, iterations):
                continue
            report = self._evaluate(suite, model, after_iteration(number + 1))
            if not is_placeholder(report.questions):
                suite.watch.note(number + 1, report, lower_is_better(objects(), report))
            elif suite.entry.watches:
                dry_run_remark(
                    f"which iteration suite {suite.name} ends or selects shows when it runs; all are counted"
                )

    @property
    def selected(self) -> ContentId | None:
        """The model that is the result so far, where a suite selects it."""
        best = None if self._selecting is None else self._selecting.best
        return None if best is None else best.model

    @property
    def end(self) -> str | None:
        """Why training ends now, for people; None where it does not."""
        return next((suite.watch.end for suite in self._suites if suite.watch.end is not None), None)

    @property
    def facts(self) -> dict[str, str]:
        """What they decided about training, for the run's summary."""
        selected = None if self._selecting is None or self.selected is None else self._selecting.selected
        return {name: text for name, text in (("ended", self.end), ("selected", selected)) if text is not None}

    def _evaluate(self, suite: _Suite, model: ContentId, moment: str) -> SuiteReport:
        label = training_label(suite.name, moment)
        suite.reports[moment] = suite.prepared.evaluate(model, self._backend, label)
        return suite.reports[moment]


def suites_of(config: TrainConfig[Any]) -> RunSuites:
    """Those of a run that trains one model; a reward model answers none."""
    if isinstance(config, EvaluatedTraining):
        return RunSuites(config.suites, config.engine)
    return RunSuites((), VLLMBackend())

"""Evaluations by suites that runs recorded: which models were evaluated by what, and what that came to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.evaluation.moments import START, moment_of
from rollout_core.evaluation.reports import SuiteReport
from rollout_core.runs.run_records import RunDetail, RunHead, RunRecords

LEAST_DIGITS = 4
"""Of a model's id or a run's, for a command."""


@dataclass(frozen=True)
class Evaluation:
    """A report of a suite that a run filed."""

    report: SuiteReport
    label: str
    """Of the call of its stage, as its samples have it."""

    @property
    def moment(self) -> str | None:
        """When a run that trains evaluated the model, such as ``after SFT``; None where a run did nothing else."""
        return moment_of(self.label, self.report.suite)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with the last evaluation of each suite it was evaluated by."""

    model: str
    """Its content id."""
    address: str | None
    """Where it came from, by the run that evaluated it last; of one that a run trained, the run's name and the
    moment."""
    evaluations: dict[str, tuple[RunHead, Evaluation]]
    """By the names of the suites, with the runs that filed them."""
    run: RunHead
    """The last one that evaluated it."""

    @property
    def reports(self) -> dict[str, SuiteReport]:
        """By the names of the suites."""
        return {name: evaluation.report for name, (_, evaluation) in self.evaluations.items()}


def evaluated_models(
    records: RunRecords, read: Callable[[RunRecords, RunHead], Sequence[Evaluation]] | None = None
) -> list[EvaluatedModel]:
    """Models that runs evaluated by suites, the one that was evaluated last first. ``read`` may keep what
    `read_evaluations` gives."""
    found: dict[str, EvaluatedModel] = {}
    for head in records.heads(lambda head: bool(head.suites) or head.flow == "evaluate-suites"):
        for evaluation in reversed((read or read_evaluations)(records, head)):
            model, moment = evaluation.report.model, evaluation.moment
            address = head.model if moment in (None, START) else f"{head.name}, {moment}"
            known = found.setdefault(model, EvaluatedModel(model, address, {}, head))
            known.evaluations.setdefault(evaluation.report.suite, (head, evaluation))
    return list(found.values())


def read_evaluations(records: RunRecords, head: RunHead) -> list[Evaluation]:
    """Those of a run; none of one whose record is of another version, or was removed meanwhile."""
    try:
        return evaluations_of(records.detail(head)[1])
    except NotFound:
        return []


def evaluations_of(detail: RunDetail) -> list[Evaluation]:
    """Evaluations by suites that a run filed, in order; of those under one label the last, as a run that computes again
    what storage lost files it again."""
    found: dict[tuple[str, str], Evaluation] = {}
    for call, result in detail.results("SuiteReport"):
        try:
            report = SuiteReport.model_validate(result)
        except ValidationError:  # of another version
            continue
        found[call.label, report.suite] = Evaluation(report, call.label)
    return list(found.values())


def find_evaluated(models: Sequence[EvaluatedModel], wanted: str) -> EvaluatedModel:
    """The model of that address, or whose id, or last run's id, begins with these digits. Raises NotFound, and
    ConfigError where several are meant."""
    named = [each for each in models if each.address == wanted or each.model == wanted]
    if named:
        return named[0]
    found = [each for each in models if len(wanted) >= LEAST_DIGITS and each.model.startswith(wanted)]
    found = found or [each for each in models if len(wanted) >= LEAST_DIGITS and each.run.id.startswith(wanted)]
    if not found:
        raise NotFound(f"no evaluation of {wanted!r} is recorded; `rollout eval list` lists the models that have one")
    if len(found) > 1:
        shown = ", ".join(each.model[:12] for each in found[:4])
        raise ConfigError(f"model {wanted!r}: expected digits that only one model begins with, got those of {shown}")
    return found[0]

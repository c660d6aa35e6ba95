"""Evaluations by suites that runs recorded: which models were evaluated by what, and what that came to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.evaluation.reports import SuiteReport
from rollout_core.runs.run_records import RunDetail, RunHead, RunRecords

LEAST_DIGITS = 4
"""Of a model's id or a run's, for a command."""


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with the last report of each suite it was evaluated by."""

    model: str
    """Its content id."""
    address: str | None
    """Where it came from, by the run that evaluated it last."""
    reports: dict[str, SuiteReport]
    """By the names of the suites."""
    run: RunHead
    """The last one that evaluated it."""


def evaluated_models(records: RunRecords) -> list[EvaluatedModel]:
    """Models that runs evaluated by suites, the one that was evaluated last first."""
    found: dict[str, EvaluatedModel] = {}
    for head in records.heads(lambda head: head.flow == "evaluate-suites"):
        try:
            _, detail = records.detail(head)
        except NotFound:  # of another version, or removed meanwhile
            continue
        for report in suite_reports(detail):
            known = found.setdefault(report.model, EvaluatedModel(report.model, head.model, {}, head))
            known.reports.setdefault(report.suite, report)
    return list(found.values())


def suite_reports(detail: RunDetail) -> Iterator[SuiteReport]:
    """Reports that a run filed, the last one first."""
    for _, result in reversed(list(detail.results("SuiteReport"))):
        try:
            yield SuiteReport.model_validate(result)
        except ValidationError:  # of another version
            continue


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

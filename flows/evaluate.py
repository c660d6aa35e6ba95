"""The flow that evaluates a model by suites: its answers to questions, their scores, and what these come to."""

from __future__ import annotations

from typing import Any, TypedDict

from prefect import flow

from flows.suite_kinds import prepare_suite
from rollout_core.base.ids import ContentId
from rollout_core.config import AnyBackend, EndpointModel, EvalConfig
from rollout_core.inference.endpoint_model import endpoint_id
from rollout_core.inference.engines import close_engine
from rollout_core.plans.learner_plan import plan_suites
from tasks.imports import import_model
from tasks.runtime.dry_run import end_of_stages
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal, Outcome
from tasks.runtime.run_record import record_refusal
from tasks.runtime.suite_report import in_words


class Evaluated(TypedDict):
    """What an evaluation returns, as JSON has it."""

    model: ContentId
    reports: list[dict[str, Any]]
    """Of each suite, see `rollout_core.evaluation.reports.SuiteReport`."""


@flow(name="evaluate-suites", flow_run_name="{config.run.name}", persist_result=False, on_failure=[record_refusal])
def evaluate_suites(config: EvalConfig) -> Evaluated:
    """Ask a model the questions of suites, score its answers and file what they come to."""
    return _evaluate(config)


@pipeline(plan_suites, closes=(close_engine,))
def _evaluate(config: EvalConfig, journal: Journal) -> Evaluated:
    model, backend = _answering(config)
    reports = [prepare_suite(suite, suite.name).evaluate(model, backend, suite.name) for suite in config.suites]
    end_of_stages()
    journal.outcome = Outcome(facts={report.suite: ", ".join(map(in_words, report.metrics)) for report in reports})
    return Evaluated(model=model, reports=[report.model_dump(mode="json") for report in reports])


def _answering(config: EvalConfig) -> tuple[ContentId, AnyBackend]:
    """The id of the model, and what answers for it."""
    if isinstance(config.model, EndpointModel):
        return endpoint_id(config.model), config.model
    return import_model(config.model).model, config.backend

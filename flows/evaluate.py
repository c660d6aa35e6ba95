"""The flow that evaluates a model by suites: its answers to questions, their scores, and what these come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from prefect import flow

from flows.evaluation import Judge, judge_of
from rollout_core.base.ids import ContentId
from rollout_core.config import AnyBackend, ChoiceScorer, EndpointModel, EvalConfig, FunctionRows, Suite
from rollout_core.config.evaluation import SuiteRows
from rollout_core.config.lm_eval import LmEvalSuite
from rollout_core.data.continuations import SCORING
from rollout_core.evaluation.reports import SuiteReport
from rollout_core.inference.endpoint_model import endpoint_id
from rollout_core.inference.engines import close_engine
from rollout_core.plans.learner_plan import plan_suites
from rollout_core.plans.plan import context_limit
from tasks.generate import batch_inference, enqueue_prompts
from tasks.imports import import_model, import_prompts, import_tasks
from tasks.runtime.dry_run import end_of_stages
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal, Outcome
from tasks.runtime.run_record import record_refusal
from tasks.runtime.suite_report import in_words
from tasks.score import score_rewards
from tasks.suites import (
    enqueue_choices,
    enqueue_continuations,
    enqueue_texts,
    import_lm_eval,
    import_rows,
    render_suite,
    report_choices,
    report_lm_eval,
    report_suite,
)


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
    reports = [
        evaluate_lm_eval(suite, model, backend)
        if isinstance(suite, LmEvalSuite)
        else evaluate_suite(prepare_suite(suite, suite.name), model, backend)
        for suite in config.suites
    ]
    end_of_stages()
    journal.outcome = Outcome(facts={report.suite: ", ".join(map(in_words, report.metrics)) for report in reports})
    return Evaluated(model=model, reports=[report.model_dump(mode="json") for report in reports])


def _answering(config: EvalConfig) -> tuple[ContentId, AnyBackend]:
    """The id of the model, and what answers for it."""
    if isinstance(config.model, EndpointModel):
        return endpoint_id(config.model), config.model
    return import_model(config.model).model, config.backend


@dataclass(frozen=True)
class PreparedSuite:
    """A suite whose questions and scorer are as they were when they were read."""

    suite: Suite
    """Its reward models have names by content."""
    prompts: ContentId
    judge: Judge | None
    """None where choices are compared."""


def prepare_suite(suite: Suite, label: str) -> PreparedSuite:
    """Read a suite's questions and scorer, once for all models that answer it."""
    prompts = _prompts(suite, label)
    if isinstance(suite.scorer, ChoiceScorer):
        return PreparedSuite(suite, prompts, None)
    judge = judge_of(suite.scorer)
    return PreparedSuite(suite.model_copy(update={"scorer": judge.reward}), prompts, judge)


def evaluate_suite(prepared: PreparedSuite, model: ContentId, backend: AnyBackend, label: str = "") -> SuiteReport:
    """What ``model`` answers to a suite, in cached stages. The engine stays for the next suite; whoever calls this ends
    it. Each answer is kept as it comes, also where the engine would not give it again to the last bit."""
    suite, prompts, judge, label = prepared.suite, prepared.prompts, prepared.judge, label or prepared.suite.name
    is_here = not isinstance(backend, EndpointModel)  # and not only at an endpoint
    limit = context_limit(backend) if is_here else None
    options = {"mode": "test", "deterministic": False, "failed": "stop" if suite.failed == "fail" else "leave_out"}
    if isinstance(suite.scorer, ChoiceScorer) or judge is None:
        assert isinstance(suite.scorer, ChoiceScorer), "others have a judge"
        asked = enqueue_choices(prompts, model, suite.scorer, max_model_len=limit, tokenised=is_here, label=label)
        completions = batch_inference(asked, SCORING, backend, **options, label=label)
        return report_choices(suite, prompts, completions, asked.samples, label=label)
    sampling, count = suite.sampling, suite.samples
    if is_here:
        about = {"samples_per_prompt": count, "max_model_len": limit, "mode": "test"}
        asked = enqueue_prompts(prompts, model, sampling, **about, label=label)
    else:
        asked = enqueue_texts(prompts, model, sampling, samples_per_prompt=count, label=label)
    completions = batch_inference(asked, sampling, backend, **options, label=label)
    scores = score_rewards(completions, judge.reward, judge.source, label=label)
    whole = asked.samples if completions.num_left_out else None
    return report_suite(suite, prompts, judge.source, completions, scores, asked=whole, label=label)


def evaluate_lm_eval(suite: LmEvalSuite, model: ContentId, backend: AnyBackend) -> SuiteReport:
    """What ``model`` answers to tasks of lm-evaluation-harness, as `evaluate_suite` does it."""
    label, completions, is_here = suite.name, [], not isinstance(backend, EndpointModel)
    limit = context_limit(backend) if is_here else None
    options = {"mode": "test", "deterministic": False, "label": label}
    requests = import_lm_eval(suite, label=label)
    for prompts, sampling, samples, scored in requests.asked:
        if scored:
            asked = enqueue_continuations(prompts, model, max_model_len=limit, tokenised=is_here, label=label)
        elif is_here:
            about = {"samples_per_prompt": samples, "max_model_len": limit, "mode": "test"}
            asked = enqueue_prompts(prompts, model, sampling, **about, label=label)
        else:
            asked = enqueue_texts(prompts, model, sampling, samples_per_prompt=samples, label=label)
        completions.append(batch_inference(asked, sampling, backend, **options))
    return report_lm_eval(suite, requests, tuple(completions), label=label)


def _prompts(suite: Suite, label: str) -> ContentId:
    if suite.prompt is None:
        if isinstance(suite.rows, FunctionRows):
            return import_rows(suite.rows, form="prompts", label=label).data
        return import_prompts(suite.rows, label=label).data
    few_shot = suite.prompt.few_shot
    rows = _tasks(suite.rows, label)
    examples = None if few_shot is None else _tasks(few_shot.rows, f"{label}, examples")
    return render_suite(rows, examples, suite.prompt, label=label).data


def _tasks(rows: SuiteRows, label: str) -> ContentId:
    if isinstance(rows, FunctionRows):
        return import_rows(rows, form="tasks", label=label).data
    return import_tasks(rows, label=label).data

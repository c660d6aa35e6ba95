"""The stages of suites: prompts are rendered from rows, and what the answers come to is filed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId
from rollout_core.config import AnyBackend, ChoiceScorer, FunctionRows, SamplingParams, Suite, SuitePrompt
from rollout_core.config.inspect_ai import InspectSuite
from rollout_core.config.lm_eval import LmEvalSuite
from rollout_core.data.continuations import Continued, scored_samples, scored_texts
from rollout_core.data.dataset_sources import import_dataset
from rollout_core.data.datasets import PromptRow, TaskRow, parse_rows, to_jsonl
from rollout_core.data.samples import Sample, file_samples, untokenised_samples
from rollout_core.environments.transcripts import file_episodes
from rollout_core.evaluation import choices, inspect_tasks, lm_eval_tasks, reports
from rollout_core.evaluation.inspect_tasks import InspectTasks
from rollout_core.evaluation.lm_eval_tasks import LmEvalRequests
from rollout_core.evaluation.prompts import render_prompts
from rollout_core.evaluation.reports import SuiteReport
from rollout_core.evaluation.suite_files import function_rows
from rollout_core.objects.origins import Source, record_import
from rollout_core.objects.records import (
    AgentRollouts,
    AgentTasks,
    Completions,
    Dataset,
    EnvironmentSource,
    PromptSet,
    Scores,
)
from tasks.runtime import artifacts, connections
from tasks.runtime.episodes import outcomes_of
from tasks.runtime.generation import account_of, enqueue, generate_on_demand, model_here
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, stage

NAMED_QUESTIONS = 5
"""In the log, of those without an answer."""


@stage(version=1, cached=False, imports=True, time="importing")
def import_rows(source: FunctionRows, *, form: Literal["prompts", "tasks"], label: str = "") -> Dataset:
    """File what a function of a suite's Python file makes: prompts, or rows of which prompts are made."""
    objects = current_stage().objects
    rows = function_rows(source, PromptRow if form == "prompts" else TaskRow, connections.working_folder())
    dataset = import_dataset(objects, rows)
    record_import(
        objects,
        dataset.data,
        Source(kind="data", address=source.address, size_bytes=objects.size(dataset.data), num_files=0),
    )
    return dataset


@stage(version=1)
def render_suite(rows: ContentId, examples: ContentId | None, prompt: SuitePrompt, *, label: str = "") -> Dataset:
    """Make a prompt of each row of a suite, with answered ``examples`` before it where it asks for them."""
    objects = current_stage().objects
    read = [
        [] if blob is None else parse_rows(objects.get_bytes(blob), f"{what} {blob.short}", TaskRow)
        for what, blob in (("rows", rows), ("examples", examples))
    ]
    rendered = render_prompts(prompt, *read)
    return Dataset(data=objects.put_bytes(to_jsonl(rendered)), num_rows=len(rendered))


@stage(version=1)
def enqueue_texts(
    prompts: ContentId, model: ContentId, sampling: SamplingParams, *, samples_per_prompt: int = 1, label: str = ""
) -> PromptSet:
    """Turn prompt rows into samples of a model at an endpoint, which has the tokenizer, and enqueue them."""
    objects = current_stage().objects
    rows = parse_rows(objects.get_bytes(prompts), f"prompts {prompts.short}", PromptRow)
    options = {"model": model, "params": sampling, "samples_per_prompt": samples_per_prompt}
    return _enqueued(untokenised_samples(rows, **options), model)


@stage(version=1)
def enqueue_choices(
    prompts: ContentId,
    model: ContentId,
    scorer: ChoiceScorer,
    *,
    max_model_len: int | None = None,
    tokenised: bool = True,
    label: str = "",
) -> PromptSet:
    """Make a sample of each choice of a suite's rows, to be scored behind the row's prompt, and enqueue them. Those of
    a model at an endpoint are not ``tokenised``."""
    objects = current_stage().objects
    rows = parse_rows(objects.get_bytes(prompts), f"prompts {prompts.short}", PromptRow)
    pairs = choices.continued(scorer, rows)
    return _enqueued_continuations(pairs, model, max_model_len, tokenised=tokenised)


@stage(version=1)
def enqueue_continuations(
    prompts: ContentId,
    model: ContentId,
    *,
    max_model_len: int | None = None,
    tokenised: bool = True,
    label: str = "",
) -> PromptSet:
    """Make a sample of each continuation that tasks of lm-evaluation-harness ask about, and enqueue them, as
    `enqueue_choices` does."""
    rows = parse_rows(current_stage().objects.get_bytes(prompts), f"prompts {prompts.short}", PromptRow)
    return _enqueued_continuations(lm_eval_tasks.continuations(rows), model, max_model_len, tokenised=tokenised)


def _enqueued_continuations(
    pairs: Sequence[Continued], model: ContentId, max_model_len: int | None, *, tokenised: bool
) -> PromptSet:
    if not tokenised:
        return _enqueued(scored_texts(pairs, model=model), model)
    return _enqueued(scored_samples(model_here(model).folder, pairs, model=model, max_model_len=max_model_len), model)


def _enqueued(samples: Sequence[Sample], model: ContentId) -> PromptSet:
    filed = file_samples(current_stage().objects, samples, model)
    enqueue(samples, source=filed.samples, mode="test")
    stage_logger().info("%d samples enqueued for model %s", len(samples), model.short)
    return filed


@stage(version=1, time="scoring")
def report_choices(
    suite: Suite, prompts: ContentId, completions: Completions, asked: ContentId, *, label: str = ""
) -> SuiteReport:
    """File the metrics of a suite whose choices were scored; ``asked`` are the samples of all of them."""
    report = choices.report_choices(current_stage().objects, suite, prompts, completions, asked)
    _show(report, label)
    return report


@stage(version=1, cached=False, imports=True, time="importing")
def import_lm_eval(suite: LmEvalSuite, *, label: str = "") -> LmEvalRequests:
    """File what tasks of lm-evaluation-harness ask."""
    objects, folder = current_stage().objects, connections.working_folder()
    asked = lm_eval_tasks.ask_tasks(suite, folder).filed(objects)
    stage_logger().info("tasks of lm_eval %s: %s", asked.version, ", ".join(suite.tasks))
    return asked


@stage(version=1, time="scoring")
def report_lm_eval(
    suite: LmEvalSuite, asked: LmEvalRequests, completions: tuple[Completions, ...], *, label: str = ""
) -> SuiteReport:
    """File what answers to tasks of lm-evaluation-harness come to, by the tasks' own metrics."""
    folder = connections.working_folder()
    report = lm_eval_tasks.report(current_stage().objects, suite, asked, completions, folder)
    _show(report, label)
    return report


@stage(version=1, cached=False, imports=True, time="importing")
def import_inspect(suite: InspectSuite, *, label: str = "") -> InspectTasks:
    """Find tasks of inspect_ai."""
    found = inspect_tasks.find_tasks(suite, connections.working_folder())
    stage_logger().info("tasks of inspect_ai %s: %s", found.version, ", ".join(found.tasks))
    return found


@stage(version=2, optional=("max_model_len",), concurrency="engine", time="generating")
def evaluate_inspect(
    suite: InspectSuite,
    tasks: InspectTasks,
    model: ContentId,
    backend: AnyBackend,
    *,
    max_model_len: int | None = None,
    label: str = "",
) -> SuiteReport:
    """Run tasks of inspect_ai, whose questions ``model`` answers through the store, and file what they come to."""
    folder = connections.working_folder()
    asked = {"model": model, "backend": backend, "limit": max_model_len, "account_of": account_of}
    num_questions = tasks.num_questions * (suite.epochs or 1)
    bar = {"at_least": num_questions, "counted": f"{num_questions:,} questions"}
    report = generate_on_demand(inspect_tasks.evaluate, suite, tasks, folder, **bar, **asked)
    _show(report, label)
    return report


@stage(version=1, optional=("asked",), time="scoring", place="scoring")
def report_suite(
    suite: Suite,
    prompts: ContentId,
    reward_source: ContentId,
    completions: Completions,
    scores: Scores,
    *,
    asked: ContentId | None = None,
    label: str = "",
) -> SuiteReport:
    """File the metrics of a model's scored answers to a suite, whose reward models have names by content. ``asked`` are
    the samples of all questions, where answers to some could not be had."""
    objects, warn = current_stage().objects, stage_logger().warning
    report = reports.report_suite(
        objects, suite, prompts, reward_source, completions, scores, lambda line: warn("%s", line), asked=asked
    )
    _show(report, label)
    return report


@stage(version=1, time="scoring")
def report_episodes(
    suite: Suite,
    rows: ContentId,
    source: EnvironmentSource,
    episodes: AgentTasks,
    played: AgentRollouts,
    *,
    label: str = "",
) -> SuiteReport:
    """File the metrics of episodes that a suite asked for, and what was said in them. Raises Fatal where one failed in
    every attempt, and the suite says that this ends the evaluation."""
    objects = current_stage().objects
    outcomes = outcomes_of(episodes, played, suite.samples)
    failed = sum(outcome.reward is None for outcome in outcomes)
    if failed and suite.failed == "fail":
        raise Fatal(f"{failed} of {len(outcomes)} episodes of suite {suite.name} failed in every attempt")
    completions, scores, asked = file_episodes(objects, played.model, outcomes)
    warn = stage_logger().warning
    report = reports.report_suite(
        objects, suite, rows, source.id, completions, scores, lambda line: warn("%s", line), asked=asked
    )
    _show(report, label)
    return report


def _show(report: SuiteReport, label: str) -> None:
    if report.num_failed:
        text = "%d answers of suite %s could not be had, to questions %s"
        stage_logger().warning(text, report.num_failed, report.suite, _named(report.failed))
    without = report.num_abstained + report.num_score_failed
    if report.unscored:
        text = "%d answers of suite %s have no score, to questions %s"
        stage_logger().warning(text, without, report.suite, _named(report.unscored))
        if report.num_score_failed:
            text = "%d of them have texts that are no numbers, which the tasks' own metrics count as 0"
            stage_logger().warning(text, report.num_score_failed)
    rows = [{**metric.model_dump(), "without_score": without, "failed": report.num_failed} for metric in report.metrics]
    for row in rows:
        stage_logger().info("%s of model %s: %s %.4f", report.suite, report.model.short, row["name"], row["value"])
    artifacts.table("suite", rows, f"Suite {label}".strip())


def _named(questions: Sequence[str]) -> str:
    more = f" and {len(questions) - NAMED_QUESTIONS} more" if len(questions) > NAMED_QUESTIONS else ""
    return ", ".join(questions[:NAMED_QUESTIONS]) + more

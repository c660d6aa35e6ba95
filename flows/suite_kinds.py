"""Suites of each kind: what is read of one once a run, and the stages in which a model answers it.

A kind has a class here with what `PreparedSuite` asks for, and a line in `prepare_suite`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from flows.evaluation import Judge, judge_of
from flows.playing import Environment, starts
from rollout_core.base.ids import ContentId
from rollout_core.config import (
    AnyBackend,
    ChoiceScorer,
    EndpointModel,
    FunctionRows,
    OpenAIBackend,
    SamplingParams,
    Suite,
)
from rollout_core.config.environments import EnvironmentConfig
from rollout_core.config.evaluation import SuiteRows
from rollout_core.config.inspect_ai import InspectSuite
from rollout_core.config.lm_eval import AnySuite, LmEvalSuite
from rollout_core.data.continuations import SCORING
from rollout_core.evaluation.inspect_tasks import InspectTasks
from rollout_core.evaluation.lm_eval_tasks import LmEvalRequests
from rollout_core.evaluation.reports import SuiteReport
from rollout_core.objects.records import EnvironmentSource, PromptSet
from rollout_core.plans.plan import context_limit
from tasks.environments import import_environment
from tasks.generate import batch_inference, enqueue_prompts
from tasks.imports import import_prompts, import_tasks
from tasks.score import score_rewards
from tasks.suites import (
    enqueue_choices,
    enqueue_continuations,
    enqueue_texts,
    evaluate_inspect,
    import_inspect,
    import_lm_eval,
    import_rows,
    render_suite,
    report_choices,
    report_episodes,
    report_lm_eval,
    report_suite,
)

_KEPT: dict[str, Any] = {"mode": "test", "deterministic": False}
"""How answers are had: each is kept as it comes, also where the engine would not give it again to the last bit."""


class PreparedSuite(Protocol):
    """A suite whose questions, and what scores their answers, were read once: all models that answer have the same."""

    def evaluate(self, model: ContentId, backend: AnyBackend, label: str) -> SuiteReport:
        """What ``model`` answers, in cached stages of this label. The engine stays for the next suite; whoever calls
        this ends it."""
        ...


def prepare_suite(suite: AnySuite, label: str) -> PreparedSuite:
    """Read a suite, in stages of this label."""
    if isinstance(suite, LmEvalSuite):
        return TasksOfLmEval(suite, import_lm_eval(suite, label=label))
    if isinstance(suite, InspectSuite):
        return TasksOfInspect(suite, import_inspect(suite, label=label))
    if suite.environment is not None:
        source = import_environment(suite.environment)
        return Episodes(suite, suite.environment, starts(suite.rows, source, suite.environment, label), source)
    prompts = _prompts(suite, label)
    if isinstance(suite.scorer, ChoiceScorer):
        return Choices(suite, suite.scorer, prompts)
    judge = judge_of(suite.scorer)
    return Questions(suite.model_copy(update={"scorer": judge.reward}), prompts, judge)


@dataclass(frozen=True)
class Questions:
    """Answers are drawn, and a reward scores them."""

    suite: Suite
    """Its reward models have names by content."""
    prompts: ContentId
    judge: Judge

    def evaluate(self, model: ContentId, backend: AnyBackend, label: str) -> SuiteReport:
        """As of `PreparedSuite`."""
        suite, judge = self.suite, self.judge
        asked = _enqueued(self.prompts, model, suite.sampling, suite.samples, backend, label)
        completions = batch_inference(asked, suite.sampling, backend, **_kept(suite), label=label)
        scores = score_rewards(completions, judge.reward, judge.source, label=label)
        whole = asked.samples if completions.num_left_out else None
        return report_suite(suite, self.prompts, judge.source, completions, scores, asked=whole, label=label)


@dataclass(frozen=True)
class Choices:
    """The likeliest choice is the answer; nothing is drawn."""

    suite: Suite
    scorer: ChoiceScorer
    """The suite's."""
    prompts: ContentId

    def evaluate(self, model: ContentId, backend: AnyBackend, label: str) -> SuiteReport:
        """As of `PreparedSuite`."""
        asked = enqueue_choices(self.prompts, model, self.scorer, **_context(backend), label=label)
        completions = batch_inference(asked, SCORING, backend, **_kept(self.suite), label=label)
        return report_choices(self.suite, self.prompts, completions, asked.samples, label=label)


@dataclass(frozen=True)
class Episodes:
    """Rows are starts of episodes, which an environment rewards."""

    suite: Suite
    settings: EnvironmentConfig
    """The suite's environment."""
    rows: ContentId
    source: EnvironmentSource

    def evaluate(self, model: ContentId, backend: AnyBackend, label: str) -> SuiteReport:
        """As of `PreparedSuite`."""
        assert not isinstance(backend, EndpointModel | OpenAIBackend), "the plan refuses it"
        suite, environment = self.suite, Environment(self.source, self.settings, backend, seed=0)
        options = {"mode": "test", "episodes_per_row": suite.samples, "label": label}
        episodes, played = environment.play(model, self.rows, suite.sampling, **options)
        return report_episodes(suite, self.rows, self.source, episodes, played, label=label)


@dataclass(frozen=True)
class TasksOfLmEval:
    """Requests of lm-evaluation-harness, whose own metrics score the answers."""

    suite: LmEvalSuite
    requests: LmEvalRequests

    def evaluate(self, model: ContentId, backend: AnyBackend, label: str) -> SuiteReport:
        """As of `PreparedSuite`."""
        completions = []
        for prompts, sampling, samples, scored in self.requests.asked:
            if scored:
                asked = enqueue_continuations(prompts, model, **_context(backend), label=label)
            else:
                asked = _enqueued(prompts, model, sampling, samples, backend, label)
            completions.append(batch_inference(asked, sampling, backend, **_KEPT, label=label))
        return report_lm_eval(self.suite, self.requests, tuple(completions), label=label)


@dataclass(frozen=True)
class TasksOfInspect:
    """Tasks of inspect_ai, which ask as they go."""

    suite: InspectSuite
    tasks: InspectTasks

    def evaluate(self, model: ContentId, backend: AnyBackend, label: str) -> SuiteReport:
        """As of `PreparedSuite`."""
        limit = context_limit(backend)
        return evaluate_inspect(self.suite, self.tasks, model, backend, max_model_len=limit, label=label)


def _enqueued(
    prompts: ContentId, model: ContentId, sampling: SamplingParams, samples: int, backend: AnyBackend, label: str
) -> PromptSet:
    if isinstance(backend, EndpointModel):
        return enqueue_texts(prompts, model, sampling, samples_per_prompt=samples, label=label)
    about = {"samples_per_prompt": samples, "max_model_len": context_limit(backend), "mode": "test"}
    return enqueue_prompts(prompts, model, sampling, **about, label=label)


def _context(backend: AnyBackend) -> dict[str, Any]:
    """Of what is scored: tokens of a model that is here, within its context; texts of one at an endpoint."""
    is_here = not isinstance(backend, EndpointModel)
    return {"max_model_len": context_limit(backend) if is_here else None, "tokenised": is_here}


def _kept(suite: Suite) -> dict[str, Any]:
    return {**_KEPT, "failed": "stop" if suite.failed == "fail" else "leave_out"}


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

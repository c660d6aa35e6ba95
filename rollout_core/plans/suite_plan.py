"""What is checked of a suite, and of what answers it, before any engine starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout_core.config import (
    AnyBackend,
    ChoiceScorer,
    EndpointModel,
    EnvironmentRows,
    EvalConfig,
    FunctionRows,
    OpenAIBackend,
    Suite,
)
from rollout_core.config.environments import EnvironmentConfig
from rollout_core.config.evaluation import SuiteRows
from rollout_core.config.inspect_ai import InspectSuite
from rollout_core.config.lm_eval import AnySuite, LmEvalSuite
from rollout_core.config.rewards import ModelReward, plain_rewards
from rollout_core.data.continuations import SCORING, Continued, encode_continuations
from rollout_core.data.datasets import PromptRow, RowT, TaskRow
from rollout_core.data.samples import refuse_long_prompts
from rollout_core.evaluation.choices import continued
from rollout_core.evaluation.inspect_tasks import find_tasks
from rollout_core.evaluation.lm_eval_tasks import Drawn, ask_tasks, continuations
from rollout_core.evaluation.prompts import render_prompts
from rollout_core.evaluation.suite_files import function_rows
from rollout_core.inference.anthropic_wire import conversation, tools_of
from rollout_core.inference.backend import cannot_score
from rollout_core.inference.endpoint_model import try_endpoint_model
from rollout_core.plans.plan import context_limit

if TYPE_CHECKING:
    from rollout_core.plans.learner_plan import LearnerPlan


@dataclass(frozen=True)
class Asked:
    """What a suite asks."""

    num_questions: int
    words: str
    """How much is asked, such as ``12 x 4``."""
    metrics: Sequence[str] | None
    """Names of the suite's metrics; None where only answers tell them."""
    counted: str = " questions"
    """What ``words`` counts, where they do not say so."""


def check_answering(plan: LearnerPlan, config: EvalConfig) -> AnyBackend:
    """Check that the model is there, or its endpoint answers. Returns what answers."""
    if isinstance(config.model, EndpointModel):
        endpoint = config.model
        plan.facts["model"] = endpoint.uri
        plan.check("model", lambda: try_endpoint_model(endpoint))
        return endpoint
    plan.known_model("model", config.model)
    plan.backend("backend", config.backend)
    return config.backend


def check_suite(plan: LearnerPlan, suite: AnySuite, backend: AnyBackend) -> Asked | None:
    """Check that the suite can be put to the plan's model: each row is rendered and tokenised, the scorer is loaded.
    None where it is not known what is asked."""
    what = f"suite {suite.name}"
    if isinstance(suite, LmEvalSuite):
        return _requests(plan, what, suite, backend)
    if isinstance(suite, InspectSuite):
        return _tasks(plan, what, suite, backend)
    if suite.environment is not None:
        return _episodes(plan, what, suite, suite.environment, backend)
    rows = _prompts(plan, suite, what)
    key = f"{what}: rows.{suite.rows.address_key}"
    if isinstance(backend, EndpointModel):
        _form(plan, key, rows or (), backend)
    if isinstance(suite.scorer, ChoiceScorer):
        return _choices(plan, what, key, suite, suite.scorer, rows, backend)
    plan.sampling(f"{what}: sampling", suite.sampling, backend)
    plan.reward(f"{what}: scorer", suite.scorer)
    if isinstance(backend, EndpointModel) and any(isinstance(one, ModelReward) for one in plain_rewards(suite.scorer)):
        plan.violations.append(
            f"{what}: scorer: a reward model scores token ids, which answers of an endpoint's own model do not have"
        )
    if not rows:
        return None
    plan.prompts(key, rows, context_limit(backend), suite.sampling)
    plan.answers(key, rows, suite.scorer)
    words = f"{len(rows)}" if suite.samples == 1 else f"{len(rows)} x {suite.samples}"
    return Asked(len(rows), words, suite.chosen_metrics)


def _episodes(
    plan: LearnerPlan, what: str, suite: Suite, environment: EnvironmentConfig, backend: AnyBackend
) -> Asked | None:
    """Rows are there, and the environment that begins episodes with them; the model is here, whose tokens they are."""
    if isinstance(backend, EndpointModel | OpenAIBackend):
        plan.violations.append(
            f"{what}: episodes are continued from token ids, which a model at an endpoint does not give; evaluate its "
            "files"
        )
        return None
    plan.sampling(f"{what}: sampling", suite.sampling, backend)
    plan.environment(f"{what}: environment", environment)
    if isinstance(suite.rows, EnvironmentRows):
        num_rows = plan.starts(f"{what}: rows", suite.rows, environment)
    else:
        num_rows = len(_rows(plan, f"{what}: rows", suite.rows, TaskRow) or ())
    if not num_rows:
        return None
    words = f"{num_rows} episodes" if suite.samples == 1 else f"{num_rows} x {suite.samples} episodes"
    return Asked(num_rows, words, suite.chosen_metrics, counted="")


def _form(plan: LearnerPlan, key: str, rows: Sequence[PromptRow], backend: EndpointModel) -> None:
    """The endpoint takes prompts of this form."""
    for number, row in enumerate(rows, start=1):
        if (problem := _problem_with_form(row, backend)) is not None:
            plan.violations.append(f"{key}: row {number} has {problem}")
            return


def _problem_with_form(row: PromptRow, backend: EndpointModel) -> str | None:
    if row.messages is None:
        return None
    if backend.api == "completions":
        return "a conversation, and api 'completions' takes texts; take api 'chat', or give the suite a prompt.text"
    if backend.api == "anthropic":
        try:
            conversation([message.plain() for message in row.messages])
        except ValueError as error:
            return f"a conversation that api 'anthropic' refuses: {error}; mend it, or leave the row out"
        try:
            tools_of(row.tools or ())
        except (LookupError, TypeError):
            return (
                "a tool that is not described in OpenAI's form; give it as {type = 'function', function = {name = ...}}"
            )
    return None


def _choices(
    plan: LearnerPlan,
    what: str,
    key: str,
    suite: Suite,
    scorer: ChoiceScorer,
    rows: Sequence[PromptRow] | None,
    backend: AnyBackend,
) -> Asked | None:
    if problem := cannot_score(backend):
        plan.violations.append(f"{what}: scorer: {problem}")
    if not rows:
        return None
    pairs = plan.check(f"{what}: scorer", lambda: continued(scorer, rows))
    if pairs is None:
        return None
    _continuations(plan, key, pairs, backend)
    return Asked(len(rows), f"{len(rows)}, {len(pairs)} choices", suite.chosen_metrics)


def _continuations(plan: LearnerPlan, key: str, pairs: Sequence[Continued], backend: AnyBackend) -> None:
    """They can be tokenised behind their prompts, and fit into the model's context."""
    if plan.model_facts is None:
        return
    limit = context_limit(backend) or plan.max_positions

    def fits() -> None:
        encoded = encode_continuations(plan.load_tokenizer(), pairs)
        if limit is not None:
            refuse_long_prompts([ids for ids, _ in encoded], SCORING.max_tokens, limit)

    plan.check(key, fits)
    plan.conversations(key, list({id(row): row for row, _ in pairs}.values()))


def _requests(plan: LearnerPlan, what: str, suite: LmEvalSuite, backend: AnyBackend) -> Asked | None:
    """Tasks of lm-evaluation-harness are loaded, and what they ask can be answered."""
    asked = plan.check(what, lambda: ask_tasks(suite, plan.base))
    if asked is None:
        return None
    for drawn in asked.drawings:
        _drawn(plan, what, drawn, backend)
    num_requests = sum(len(drawn.rows) * drawn.samples for drawn in asked.drawings)
    words = f"{num_requests} requests of lm_eval {asked.version}"
    return Asked(asked.num_questions, words, asked.metrics, counted="")


def _tasks(plan: LearnerPlan, what: str, suite: InspectSuite, backend: AnyBackend) -> Asked | None:
    """Tasks of inspect_ai are loaded, and their models answer chats."""
    if isinstance(backend, EndpointModel) and backend.api == "completions":
        plan.violations.append(f"{what}: conversations, and api 'completions' takes texts; take api 'chat'")
    for role, endpoint in suite.model_roles.items():
        if endpoint.api == "completions":
            plan.violations.append(f"{what}: model_roles.{role}: api 'completions' takes no conversations")
        plan.check(f"{what}: model_roles.{role}", lambda endpoint=endpoint: try_endpoint_model(endpoint))
    if plan.model_facts is not None:
        plan.conversations(what, [_HELLO])
        most, limit = suite.generate_config.get("max_tokens"), context_limit(backend) or plan.max_positions
        if isinstance(most, int) and limit is not None and most >= limit:
            plan.violations.append(
                f"{what}: generate_config.max_tokens {most} leaves no room in the context of {limit} tokens"
            )
    found = plan.check(what, lambda: find_tasks(suite, plan.base))
    if found is None:
        return None
    words = f"{found.num_questions} samples of inspect_ai {found.version}"
    return Asked(found.num_questions, words, None, counted="")


_HELLO = PromptRow.model_validate({"messages": [{"role": "user", "content": "Hello"}]})
"""A conversation that every chat template can render."""


def _drawn(plan: LearnerPlan, what: str, drawn: Drawn, backend: AnyBackend) -> None:
    if isinstance(backend, EndpointModel):
        _form(plan, f"{what}: prompts", drawn.rows, backend)
    if not drawn.scored:
        plan.sampling(f"{what}: generation_kwargs", drawn.sampling, backend)
        plan.prompts(f"{what}: prompts", drawn.rows, context_limit(backend), drawn.sampling)
    elif problem := cannot_score(backend):
        plan.violations.append(f"{what}: {problem}")
    else:
        _continuations(plan, f"{what}: prompts", continuations(drawn.rows), backend)


def _prompts(plan: LearnerPlan, suite: Suite, what: str) -> Sequence[PromptRow] | None:
    prompt = suite.prompt
    if prompt is None:
        return _rows(plan, f"{what}: rows", suite.rows, PromptRow)
    rows = _rows(plan, f"{what}: rows", suite.rows, TaskRow)
    examples: Sequence[TaskRow] | None = []
    if prompt.few_shot is not None:
        examples = _rows(plan, f"{what}: prompt.few_shot.rows", prompt.few_shot.rows, TaskRow)
    if rows is None or examples is None:
        return None
    return plan.check(f"{what}: prompt", lambda: render_prompts(prompt, rows, examples))


def _rows(plan: LearnerPlan, what: str, source: SuiteRows, model: type[RowT]) -> Sequence[RowT] | None:
    if isinstance(source, FunctionRows):
        return plan.check(f"{what}.{source.address_key}", lambda: function_rows(source, model, plan.base))
    stream = plan.stream(source, model)
    rows = plan.check(f"{what}.{source.address_key}", lambda: list(stream))
    plan.reading(what, stream.remarks())
    return rows

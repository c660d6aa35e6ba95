"""What is checked of an evaluation by suites before any engine starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_core.base.errors import Recoverable
from rollout_core.config import AnyBackend, ChoiceScorer, EndpointModel, EvalConfig, FunctionRows, Suite
from rollout_core.config.evaluation import SuiteRows
from rollout_core.config.lm_eval import LmEvalSuite
from rollout_core.config.rewards import ModelReward, plain_rewards
from rollout_core.data.continuations import SCORING, Continued, encode_continuations
from rollout_core.data.datasets import PromptRow, RowT, TaskRow
from rollout_core.data.samples import refuse_long_prompts
from rollout_core.evaluation.choices import continued
from rollout_core.evaluation.lm_eval_tasks import Drawn, ask_tasks, continuations
from rollout_core.evaluation.prompts import render_prompts
from rollout_core.evaluation.suite_files import function_rows
from rollout_core.inference.backend import cannot_score
from rollout_core.inference.endpoint_model import try_endpoint_model
from rollout_core.models.locating import Unchecked
from rollout_core.plans.cluster import check_placement
from rollout_core.plans.learner_plan import LearnerPlan
from rollout_core.plans.plan import context_limit
from rollout_core.store.reachable import Connections


def plan_suites(config: EvalConfig, base: Path, connections: Connections | None = None) -> dict[str, Any]:
    """Check an evaluation. Raises ConfigError naming all that is wrong: each row is rendered and tokenised, each scorer
    is loaded."""
    plan = LearnerPlan(base, connections)
    plan.places()
    plan.no_resume(config.run, "an evaluation resumes by itself when it is started again; leave it out")
    plan.place(config.placement)
    if config.placement is not None:
        check_placement(plan, config.placement, plan.placed)
    if isinstance(config.model, EndpointModel):
        backend: AnyBackend = config.model
        plan.facts["model"] = config.model.uri
        plan.check("model", lambda: _try_endpoint(backend))
    else:
        backend = config.backend
        plan.known_model("model", config.model)
        plan.backend("backend", backend)
    asked = {
        suite.name: _requests(plan, suite, backend)
        if isinstance(suite, LmEvalSuite)
        else _questions(plan, suite, backend)
        for suite in config.suites
    }
    plan.facts["questions"] = {name: number for name, number in asked.items() if number is not None}
    return plan.done()


def _try_endpoint(config: EndpointModel) -> None:
    try:
        try_endpoint_model(config)
    except Recoverable as error:
        raise Unchecked(str(error)) from error


def _questions(plan: LearnerPlan, suite: Suite, backend: AnyBackend) -> str | None:
    what = f"suite {suite.name}"
    rows = _prompts(plan, suite, what)
    key = f"{what}: rows.{suite.rows.address_key}"
    if isinstance(backend, EndpointModel):
        _form(plan, key, rows or (), backend)
    if isinstance(suite.scorer, ChoiceScorer):
        return _choices(plan, what, key, suite.scorer, rows, backend)
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
    return f"{len(rows)}" if suite.samples == 1 else f"{len(rows)} x {suite.samples}"


def _form(plan: LearnerPlan, key: str, rows: Sequence[PromptRow], backend: EndpointModel) -> None:
    """The endpoint takes prompts of this form."""
    for number, row in enumerate(rows, start=1):
        if row.messages is not None and backend.api == "completions":
            problem = (
                "a conversation, and api 'completions' takes texts; take api 'chat', or give the suite a prompt.text"
            )
        elif row.tools and backend.api == "anthropic":
            problem = "tools, which are not sent in the form of api 'anthropic'; leave them out"
        else:
            continue
        plan.violations.append(f"{key}: row {number} has {problem}")
        return


def _choices(
    plan: LearnerPlan,
    what: str,
    key: str,
    scorer: ChoiceScorer,
    rows: Sequence[PromptRow] | None,
    backend: AnyBackend,
) -> str | None:
    if problem := cannot_score(backend):
        plan.violations.append(f"{what}: scorer: {problem}")
    if not rows:
        return None
    pairs = plan.check(f"{what}: scorer", lambda: continued(scorer, rows))
    if pairs is None:
        return None
    _continuations(plan, key, pairs, backend)
    return f"{len(rows)}, {len(pairs)} choices"


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


def _requests(plan: LearnerPlan, suite: LmEvalSuite, backend: AnyBackend) -> str | None:
    """Tasks of lm-evaluation-harness are loaded, and what they ask can be answered."""
    what = f"suite {suite.name}"
    asked = plan.check(what, lambda: ask_tasks(suite, plan.base))
    if asked is None:
        return None
    for drawn in asked.drawings:
        _drawn(plan, what, drawn, backend)
    num_requests = sum(len(drawn.rows) * drawn.samples for drawn in asked.drawings)
    return f"{num_requests} requests of lm_eval {asked.version}"


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

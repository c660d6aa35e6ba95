"""What is checked of an evaluation by suites before any engine starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_core.config import ChoiceScorer, DatasetSource, EvalConfig, Suite
from rollout_core.data.continuations import SCORING, encode_continuations
from rollout_core.data.datasets import PromptRow, TaskRow
from rollout_core.data.samples import refuse_long_prompts
from rollout_core.evaluation.choices import continued
from rollout_core.evaluation.prompts import render_prompts
from rollout_core.inference.backend import cannot_score
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
    plan.known_model("model", config.model)
    plan.backend("backend", config.backend)
    asked = {suite.name: _questions(plan, suite, config) for suite in config.suites}
    plan.facts["questions"] = {name: number for name, number in asked.items() if number is not None}
    return plan.done()


def _questions(plan: LearnerPlan, suite: Suite, config: EvalConfig) -> str | None:
    what = f"suite {suite.name}"
    if isinstance(suite.scorer, ChoiceScorer):
        return _choices(plan, suite, suite.scorer, what, config)
    plan.sampling(f"{what}: sampling", suite.sampling, config.backend)
    rows = _prompts(plan, suite, what)
    key = f"{what}: rows.{suite.rows.address_key}"
    plan.reward(f"{what}: scorer", suite.scorer)
    if not rows:
        return None
    plan.prompts(key, rows, context_limit(config.backend), suite.sampling)
    plan.answers(key, rows, suite.scorer)
    return f"{len(rows)}" if suite.samples == 1 else f"{len(rows)} x {suite.samples}"


def _choices(plan: LearnerPlan, suite: Suite, scorer: ChoiceScorer, what: str, config: EvalConfig) -> str | None:
    problem = cannot_score(config.backend)
    if problem is not None:
        plan.violations.append(f"{what}: scorer: {problem}")
    rows = _prompts(plan, suite, what)
    if not rows:
        return None
    pairs = plan.check(f"{what}: scorer", lambda: continued(scorer, rows))
    if pairs is None:
        return None
    limit = context_limit(config.backend) or plan.max_positions

    def fits() -> None:
        encoded = encode_continuations(plan.load_tokenizer(), pairs)
        if limit is not None:
            refuse_long_prompts([ids for ids, _ in encoded], SCORING.max_tokens, limit)

    if plan.model_facts is not None:
        plan.check(f"{what}: rows.{suite.rows.address_key}", fits)
        plan.conversations(f"{what}: rows.{suite.rows.address_key}", rows)
    return f"{len(rows)}, {len(pairs)} choices"


def _prompts(plan: LearnerPlan, suite: Suite, what: str) -> Sequence[PromptRow] | None:
    if suite.prompt is None:
        return plan.prompt_rows(f"{what}: rows", suite.rows)
    few_shot = suite.prompt.few_shot
    rows = _tasks(plan, f"{what}: rows", suite.rows)
    examples = [] if few_shot is None else _tasks(plan, f"{what}: prompt.few_shot.rows", few_shot.rows)
    if rows is None or examples is None:
        return None
    prompt = suite.prompt
    return plan.check(f"{what}: prompt", lambda: render_prompts(prompt, rows, examples))


def _tasks(plan: LearnerPlan, what: str, source: DatasetSource) -> Sequence[TaskRow] | None:
    stream = plan.stream(source, TaskRow)
    rows = plan.check(f"{what}.{source.address_key}", lambda: list(stream))
    plan.reading(what, stream.remarks())
    return rows

"""Plan of a nightly run: all its parts held against each other before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout_core.config import NightlyConfig, PreferenceSettings
from rollout_core.plans.learner_plan import LearnerPlan, plan_preferences
from rollout_core.plans.plan import context_limit
from rollout_core.store.connections import Connections


def plan_nightly(
    config: NightlyConfig, base: Path, connections: Connections | None = None, *, keep: bool = False
) -> dict[str, Any]:
    """Check a nightly run; ``keep`` what was tokenised for it. Raises ConfigError naming all that is wrong."""
    plan = LearnerPlan(base, connections, keeps_tokens=keep)
    plan.places()
    plan.model("model", config.model)
    plan.backend("backend", config.backend)
    plan.sft("sft", config.sft)
    if config.rm is not None:
        _pairs(plan, "rm", config.rm)
    if config.dpo is not None:
        _pairs(plan, "dpo", config.dpo)
    held_out = plan.prompt_rows("evaluation.prompts", config.evaluation.prompts)
    held_out_key = f"evaluation.prompts.{config.evaluation.prompts.address_key}"
    plan.prompts(held_out_key, held_out, context_limit(config.backend), config.evaluation.sampling)
    plan.sampling("evaluation.sampling", config.evaluation.sampling, config.backend)
    plan.reward("reward", config.reward)
    on_policy = config.ppo or config.grpo
    if on_policy is not None:
        policy = "ppo" if config.ppo is not None else "grpo"
        rows = plan.on_policy(policy, on_policy, config.backend)
        if config.rm is None:
            plan.answers(f"{policy}.prompts.{on_policy.prompts.address_key}", rows, config.reward)
    plan.answers(held_out_key, held_out, config.reward)
    plan.facts["held-out prompts"] = len(held_out or ())
    plan.output_folder("report_dir", config.report_dir)
    return plan.done()


def _pairs(plan: LearnerPlan, what: str, settings: PreferenceSettings) -> None:
    from rollout_core.data.training_data import pair_form

    report = plan_preferences(plan, what, what, settings, pair_form(settings, need_prompts=what == "dpo"))
    if report is not None:
        plan.facts[f"{what} rows"] = report.num_rows

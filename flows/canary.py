"""The canary: what is served is evaluated again, and taken back where it does not do what it was promoted for."""

from __future__ import annotations

from functools import partial
from typing import Any, TypedDict

from prefect import flow

from flows.evaluation import evaluate_held_out, judge_of
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.config import NightlyConfig, apply_overrides, as_given, parse_config
from rollout_core.inference.engines import close_engine
from rollout_core.objects.records import EvalReport
from rollout_core.plans.learner_plan import plan_nightly
from rollout_core.promotion.evidence import same_prompts
from rollout_core.promotion.history import evidence_for
from rollout_core.rewards.kept import close_rewards
from tasks.imports import import_prompts
from tasks.promotion import latest_model, roll_back
from tasks.runtime import artifacts
from tasks.runtime.connections import objects
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal, Outcome, stage_logger
from tasks.runtime.run_record import record_refusal
from tasks.runtime.stage import refresh_name


class Verdict(TypedDict):
    """What a canary returns, as JSON has it."""

    model: ContentId | None
    """That was served when it began."""
    serves: ContentId | None
    """That is served now."""
    mean_reward: float | None
    """Of the fresh evaluation; None where there was nothing to hold it against."""
    promised: float | None
    """By the evidence it was promoted on."""
    reason: str


@flow(
    name="canary",
    flow_run_name="canary of {config.promotion.resource}",
    persist_result=False,
    on_failure=[record_refusal],
)
def canary(config: NightlyConfig, max_drop: float = 0.02, overrides: dict[str, Any] | None = None) -> Verdict:
    """Evaluate the served model again, by the configuration of the nightly run, and go back to the one before where
    its mean reward is more than ``max_drop`` below that of the evidence it was promoted on.

    Nothing of the evaluation comes from the cache or the store: all completions are generated again, from the same
    seeds, by an engine of this run. Where no model is served, or it was promoted without evidence of
    held-out prompts, nothing is done. ``overrides`` as of `nightly`.
    """
    if max_drop < 0:
        raise ConfigError(f"max_drop {max_drop:g}: expected 0 or more, by which the mean reward may fall")
    changed = apply_overrides(as_given(config), {**(overrides or {}), "run.refresh": True})
    return _canary(parse_config(changed, NightlyConfig, name="overrides"), max_drop)


@pipeline(partial(plan_nightly, keep=True), closes=(close_engine, close_rewards))
def _canary(config: NightlyConfig, journal: Journal, max_drop: float) -> Verdict:
    resource = config.promotion.resource
    model = latest_model(resource).model
    promised = None if model is None else _promised(resource, model)
    if model is None or promised is None:
        what = "no model is served" if model is None else f"{model.short} was promoted without held-out prompts"
        verdict = Verdict(
            model=model,
            serves=model,
            mean_reward=None,
            promised=None,
            reason=f"nothing to hold {resource!r} to: {what}",
        )
    else:
        verdict = _hold(config, max_drop, model, promised)
    stage_logger().info("%s", verdict["reason"])
    artifacts.table("canary", [dict(verdict)], f"Canary of {resource}")
    journal.outcome = Outcome(facts={"canary": verdict["reason"]})
    return verdict


def _promised(resource: str, model: ContentId) -> EvalReport | None:
    """The evaluation that the model was promoted on, where a history has one."""
    evidence = evidence_for(objects(), resource, model)
    if evidence is None:
        return None
    report = objects().get_json(evidence.comparisons[0].report)
    return EvalReport.model_validate(report) if "completions" in report else None  # an agent's has rollouts


def _hold(config: NightlyConfig, max_drop: float, model: ContentId, promised: EvalReport) -> Verdict:
    resource = config.promotion.resource
    held_out = import_prompts(config.evaluation.prompts, label="held out").data
    # This run's own, which it finds again when it is retried.
    drawing = f"canary, {refresh_name()}"
    known = config.evaluation.sampling, config.backend, held_out, judge_of(config.reward)
    now = evaluate_held_out(*known, model, "canary", drawing=drawing)
    prompts = "" if same_prompts(objects(), promised, now) else ", on other prompts than then"
    found = f"mean held-out reward {promised.mean_reward:.4f} when promoted -> {now.mean_reward:.4f} now{prompts}"
    fell = promised.mean_reward - now.mean_reward > max_drop
    serves: ContentId | None = model
    came_of_it = "it holds"
    if fell:
        back = roll_back(resource, None, reason=f"canary: {found}, may fall by {max_drop:g}", instead_of=model)
        serves = back.model
        came_of_it = back.reason if serves is None or back.previous is None else f"went back to {serves.short}"
    reason = f"{found}; {came_of_it}"
    return Verdict(
        model=model, serves=serves, mean_reward=now.mean_reward, promised=promised.mean_reward, reason=reason
    )

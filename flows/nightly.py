"""The nightly flow: fine-tune, PPO, GRPO or DPO, evaluate before and after, promote what got better, report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypedDict, cast

from prefect import flow

from flows.learning import learn_from_rows
from flows.nightly_steps import (
    algorithm_of,
    divergences,
    evaluate_held_out,
    guard_reports,
    judge_of,
    learn,
)
from rollout_core.base.ids import ContentId
from rollout_core.config import NightlyConfig, apply_overrides, as_given, parse_config
from rollout_core.inference.engines import close_engine
from rollout_core.objects.records import EvalReport
from rollout_core.plans.learner_plan import plan_nightly
from rollout_core.promotion.decision import precision_of
from rollout_core.rewards.kept import close_rewards
from tasks.approval import reason_of
from tasks.checkpoints import in_base_precision
from tasks.imports import import_model, import_prompts, import_sft
from tasks.promotion import latest_model, promote
from tasks.runtime.connections import objects, working_folder
from tasks.runtime.dry_run import end_of_stages
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal
from tasks.runtime.kept_states import keeping
from tasks.runtime.nightly_report import Report, compare_samples, outcome_of, write_report
from tasks.runtime.report import figure_of_steps
from tasks.runtime.run_record import record_refusal
from tasks.runtime.scheduled_runs import skipped_for_newer
from tasks.runtime.stage import retry


class NightlyResult(TypedDict):
    """What a nightly run returns, as JSON has it."""

    model: ContentId
    """That was trained, in the precision of the model that it began with."""
    train_state: ContentId
    held_out: dict[str, float]
    """Mean held-out reward by moment, in order."""
    rewards: Sequence[float]
    """Mean training reward of each iteration; none where it is not on the scale of the held-out one."""
    promoted: bool
    report: str
    """Folder of the report."""
    stages: list[dict[str, str | float]]
    """As `StageEntry.row`, in order of finishing."""


@flow(name="nightly", flow_run_name="{config.run.name}", persist_result=False, on_failure=[record_refusal])
def nightly(config: NightlyConfig, overrides: dict[str, Any] | None = None) -> NightlyResult:
    """Fine-tune, learn on by PPO, GRPO or DPO, evaluate held-out prompts before and after, promote, write a report.

    ``overrides`` maps dotted keys of the configuration to values, such as ``{"ppo.iterations": 3}``.
    A scheduled run ends at once, in the state Skipped, where a newer one of its schedule is due.
    """
    skipped = skipped_for_newer()
    if skipped is not None:
        return cast(NightlyResult, skipped)  # a state that a flow returns is the run's
    if overrides:
        changed = apply_overrides(as_given(config), overrides)
        config = parse_config(changed, NightlyConfig, name="overrides")
    return _nightly(config)


@pipeline(partial(plan_nightly, keep=True), closes=(close_engine, close_rewards))
@keeping
def _nightly(config: NightlyConfig, journal: Journal) -> NightlyResult:
    model = import_model(config.model).model
    rows = import_sft(config.sft.dataset).data
    held_out = import_prompts(config.evaluation.prompts, label="held out").data
    judge = judge_of(config.reward)

    def held_out_reward(of: ContentId, label: str) -> EvalReport:
        return evaluate_held_out(config, held_out, judge, of, label)

    before = held_out_reward(model, "before")
    tuned = learn_from_rows(config, "sft", config.sft, model, rows=rows, snapshot_label="after SFT")
    after_sft = held_out_reward(tuned.model, "after SFT")
    learned = learn(config, tuned.model, judge)
    final = in_base_precision(learned.checkpoint.model, model)
    after_learning = f"after {algorithm_of(config)}"
    after = held_out_reward(final, after_learning)
    seen = latest_model(config.promotion.resource)
    latest = seen.model
    # Most often cached: last night's run evaluated it on the same prompts.
    rival = held_out_reward(latest, "latest") if latest is not None and latest not in (model, final) else None
    guarded = guard_reports(config, judge, before, rival, after)
    apart = divergences(config, before, rival, after)
    promotion = promote(
        before,
        rival,
        after,
        config.promotion,
        guarded=guarded,
        divergences=apart,
        instead_of=seen.served,
        backend=config.backend,
    )
    end_of_stages()
    verdict = reason_of(promotion, seen.served, config.run.name, config.promotion, learned.progress.curve)

    moments = {"before": before, "after SFT": after_sft, after_learning: after}
    report = Report(
        name=config.run.name,
        held_out={moment: evaluation.mean_reward for moment, evaluation in moments.items()},
        held_out_temperature=config.evaluation.sampling.temperature,
        precision={
            moment: retry(lambda of=evaluation.model: precision_of(objects(), of, config.backend))
            for moment, evaluation in moments.items()
        },
        progress=learned.progress,
        sft_losses=figure_of_steps(objects(), tuned, "loss"),
        promotion=verdict,
        promoted=promotion.promoted,
        model=final,
        stages=journal.entries,
        samples=compare_samples(objects(), *moments.values()),
        evidence=() if promotion.evidence is None else promotion.evidence.lines,
    )
    folder = write_report(report, working_folder() / config.report_dir, objects())
    journal.outcome = outcome_of(report, folder)
    return NightlyResult(
        model=final,
        train_state=learned.checkpoint.train_state,
        held_out=dict(report.held_out),
        rewards=report.progress.curve.values if report.progress.temperature is not None else [],
        promoted=promotion.promoted,
        report=str(folder),
        stages=[entry.row() for entry in journal.entries],
    )

"""The nightly flow: fine-tune, PPO, GRPO or DPO, evaluate before and after, promote what got better, report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypedDict, cast

from prefect import flow

from flows.evaluation import HeldOutPrompts, Judge, divergences, guard_reports, judge_of
from flows.learning import learn_from_rows, policy_iterations
from flows.playing import Environment, HeldOutEpisodes, Playing
from flows.suites import RunSuites
from rollout_core.base.ids import ContentId
from rollout_core.config import NightlyConfig, apply_overrides, as_given, parse_config
from rollout_core.config.rewards import ModelReward
from rollout_core.data.first_iteration import FirstIteration
from rollout_core.evaluation.moments import LATEST, START
from rollout_core.inference.engines import close_engine
from rollout_core.objects.records import EvalReport
from rollout_core.plans.learner_plan import plan_nightly
from rollout_core.rewards.kept import close_rewards
from rollout_core.rewards.source_ids import source_id
from tasks.approval import reason_of
from tasks.checkpoints import in_base_precision
from tasks.imports import import_model, import_prompts, import_sft
from tasks.promotion import latest_model, promote
from tasks.runtime.connections import objects, working_folder
from tasks.runtime.dry_run import end_of_stages
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal
from tasks.runtime.kept_states import keeping
from tasks.runtime.nightly_report import Learned, Report, outcome_of, progress_of, write_report
from tasks.runtime.run_record import record_refusal
from tasks.runtime.scheduled_runs import skipped_for_newer
from tasks.runtime.suite_report import worse


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
    held_out = _held_out(config)
    suites = RunSuites(config.evaluation.suites, config.backend)

    def evaluated(of: ContentId, moment: str) -> EvalReport:
        report = held_out.evaluate(of, moment)
        suites.evaluate(of, moment)
        return report

    before = evaluated(model, START)
    tuned = learn_from_rows(config, config.sft, model, rows=rows, snapshot_label="after SFT")
    after_sft = evaluated(tuned.model, "after SFT")
    learned = _learn(config, tuned.model, held_out, suites)
    final = in_base_precision(learned.outcome.model, model)
    after_learning = f"after {learned.algorithm}"
    after = evaluated(final, after_learning)
    seen = latest_model(config.promotion.resource)
    # Most often cached: last night's run evaluated it on the same prompts.
    rival = None if seen.model in (None, model, final) else evaluated(seen.model, LATEST)
    promotion = promote(
        before,
        rival,
        after,
        config.promotion,
        guarded=guard_reports(config, held_out.judge, before, rival, after, suites.reports, after_learning),
        divergences=divergences(config, before, rival, after),
        instead_of=seen.served,
        backend=config.backend,
    )
    end_of_stages()
    progress = progress_of(objects(), tuned, learned)
    reason = reason_of(promotion, seen.served, config.run.name, config.promotion, progress.curve)
    report = Report(
        name=config.run.name,
        evaluations={START: before, "after SFT": after_sft, after_learning: after},
        temperature=config.evaluation.sampling.temperature,
        backend=config.backend,
        progress=progress,
        promotion=promotion.model_copy(update={"reason": reason}),
        stages=journal.entries,
        suites=suites.reports,
        decided=suites.facts,
        fell=worse(objects(), suites.reports, START if rival is None else LATEST, after_learning),
    )
    folder = write_report(report, working_folder() / config.report_dir, objects())
    journal.outcome = outcome_of(report, folder)
    return NightlyResult(
        model=final,
        train_state=learned.outcome.train_state,
        held_out=report.held_out,
        rewards=progress.curve.values if progress.temperature is not None else [],
        promoted=promotion.promoted,
        report=str(folder),
        stages=[entry.row() for entry in journal.entries],
    )


def _held_out(config: NightlyConfig) -> HeldOutPrompts | HeldOutEpisodes:
    """What models are evaluated by, read once a run."""
    source, sampling, backend = config.evaluation.prompts, config.evaluation.sampling, config.backend
    if config.environment is None:
        prompts = import_prompts(source, label="held out").data
        return HeldOutPrompts(sampling, backend, prompts, judge_of(config.reward))
    environment = Environment.of(config.environment, backend, config.seed)
    return HeldOutEpisodes(environment, sampling, environment.rows(source, "held out"))


def _learn(
    config: NightlyConfig, start: ContentId, held_out: HeldOutPrompts | HeldOutEpisodes, suites: RunSuites
) -> Learned:
    """DPO; or PPO or GRPO, rewarded by an environment, as held-out completions are, or by a reward model that is
    trained first."""
    if config.dpo is not None:
        return Learned("DPO", [learn_from_rows(config, config.dpo, start, start, snapshot_label="after DPO")])
    settings = config.ppo or config.grpo
    assert settings is not None, "validated"
    rater, judge, playing = None, None, None
    if isinstance(held_out, HeldOutEpisodes):
        prompts = held_out.environment.rows(settings.prompts, "training")
        playing = Playing.of(held_out.environment, settings, prompts)
    else:
        judge = held_out.judge
        if config.rm is not None:
            rater = learn_from_rows(config, config.rm, start, snapshot_label="reward model")
            reward = ModelReward(model=rater.model)
            judge = Judge(reward, source_id(reward))
        prompts = import_prompts(settings.prompts, label="training").data
    first = FirstIteration(start)
    iterations = policy_iterations(config, settings, judge, prompts, first, suites, reference=start, playing=playing)
    return Learned(
        "GRPO" if config.ppo is None else "PPO",
        iterations.checkpoints,
        iterations.rewards,
        temperature=settings.sampling.temperature,
        reward_model=rater,
        selected=iterations.outcome,
    )

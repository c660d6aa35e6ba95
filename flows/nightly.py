"""The nightly flow: fine-tune, PPO, GRPO or DPO, evaluate before and after, promote what did not get worse, report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from prefect import flow

from flows.curves import Curve, curves_of_iterations, figure_of_steps
from flows.flow_run import recompute_missing
from flows.report import Progress, Report, SampleComparison, write_report
from flows.train import policy_iterations
from rollout_core.base.ids import ContentId
from rollout_core.config import NightlyConfig, apply_overrides, parse_config
from rollout_core.config.rewards import ModelReward, RewardSpec
from rollout_core.data.samples import decode_completions_blob, decode_samples
from rollout_core.inference.engines import close_engine
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Checkpoint, EvalReport
from rollout_core.objects.short_ids import with_whole_ids
from rollout_core.plans.nightly_plan import plan_nightly
from rollout_core.plans.plan import context_limit
from rollout_core.rewards.source_ids import source_id
from tasks import artifacts, connections
from tasks.connections import current_connections, working_folder
from tasks.imports import import_held_out, import_model, import_pairs, import_prompts, import_reward, import_sft
from tasks.journal import Journal
from tasks.learn import dpo_update, rm_update, sft_update
from tasks.promotion import latest_model, promote, snapshot
from tasks.prompts import enqueue_prompts
from tasks.rewards import close_rewards
from tasks.score import evaluate

SHOWN_SAMPLES = 8


@flow(name="nightly", flow_run_name="{config.run.name}", persist_result=False)
def nightly(config: NightlyConfig, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Fine-tune, learn on by PPO, GRPO or DPO, evaluate held-out prompts before and after, promote, write a report.

    ``overrides`` maps dotted keys of the configuration to values, such as ``{"ppo.iterations": 3}``.
    """
    if overrides:
        changed = apply_overrides(config.model_dump(mode="json"), overrides)
        config = parse_config(changed, NightlyConfig, name="overrides")
    config = with_whole_ids(config, working_folder(), connections.objects)
    plan_nightly(config, working_folder(), current_connections(), keep=True)
    try:
        return recompute_missing(lambda journal: _nightly(config, journal), config)
    finally:
        close_engine()
        close_rewards()


@dataclass(frozen=True)
class _Learned:
    """What came of the part after SFT."""

    checkpoint: Checkpoint
    progress: Progress


def _nightly(config: NightlyConfig, journal: Journal) -> dict[str, Any]:
    after_policy = f"after {_algorithm(config)}"
    model = import_model(config.model).model
    rows = import_sft(config.sft.dataset)
    held_out = import_prompts(config.evaluation.prompts)
    reward = import_reward(config.reward)
    reward_source = source_id(reward, base=working_folder())

    def held_out_reward(of: Any, label: str) -> EvalReport:
        prompt_set = enqueue_prompts(
            held_out.data,
            of,
            config.evaluation.sampling,
            max_model_len=context_limit(config.backend),
            mode="test",
            label=label,
        )
        return evaluate(prompt_set, config.evaluation.sampling, config.backend, reward, reward_source, label=label)

    before = held_out_reward(model, "before")

    tuned = sft_update(
        model,
        rows.data,
        config.sft,
        seed=config.seed,
        num_threads=config.num_threads,
        held_out=import_held_out(config.sft.evaluation, import_sft),
        label="nightly",
    )
    snapshot(tuned, f"{config.run.name}/sft", label="after SFT")
    after_sft = held_out_reward(tuned.model, "after SFT")

    learned = (
        _from_pairs(config, tuned.model)
        if config.dpo is not None
        else _on_policy(config, tuned.model, reward, reward_source)
    )
    final = learned.checkpoint
    after = held_out_reward(final.model, after_policy)
    latest = latest_model(config.promotion.resource).model
    # Most often cached: last night's run evaluated it on the same prompts.
    rival = held_out_reward(latest, "latest") if latest not in (None, model, final.model) else None
    promotion = promote(before, rival, after, config.promotion)

    objects = connections.objects()
    report = Report(
        name=config.run.name,
        held_out={
            "before": before.mean_reward,
            "after SFT": after_sft.mean_reward,
            after_policy: after.mean_reward,
        },
        held_out_temperature=config.evaluation.sampling.temperature,
        progress=learned.progress,
        sft_losses=figure_of_steps(objects, tuned, "loss"),
        promotion=promotion.reason,
        promoted=promotion.promoted,
        model=final.model,
        stages=journal.entries,
        samples=_compare(objects, before, after_sft, after),
    )
    folder = write_report(report, working_folder() / config.report_dir)
    curve = learned.progress.curve
    artifacts.curve(
        "reward", curve.values, title=f"{config.run.name}: {curve.what}", x_label=curve.x_label, y_label=curve.what
    )
    artifacts.table(
        "stages",
        [entry.row() for entry in journal.entries],
        f"Stages of this run; the report is in {folder}",
    )
    return {
        "model": final.model,
        "train_state": final.train_state,
        "held_out": report.held_out,
        "rewards": curve.values if learned.progress.temperature is not None else [],
        "promoted": promotion.promoted,
        "report": str(folder),
        "stages": [entry.row() for entry in journal.entries],
    }


def _algorithm(config: NightlyConfig) -> str:
    """Of the part after SFT, as people write it."""
    return next(name.upper() for name in ("ppo", "grpo", "dpo") if getattr(config, name) is not None)


def _on_policy(config: NightlyConfig, start: ContentId, reward: RewardSpec, reward_source: ContentId) -> _Learned:
    """PPO or GRPO iterations, rewarded by ``reward`` or by a reward model that is trained first."""
    settings = config.ppo or config.grpo
    assert settings is not None, "validated"
    objects = connections.objects()
    of_judge: list[Curve] = []
    if config.rm is not None:
        pairs = import_pairs(config.rm.dataset)
        judge = rm_update(
            start,
            pairs.data,
            config.rm,
            seed=config.seed,
            num_threads=config.num_threads,
            held_out=import_held_out(config.rm.evaluation, import_pairs),
        )
        snapshot(judge, f"{config.run.name}/rm", label="reward model")
        reward = ModelReward(model=judge.model)
        reward_source = source_id(reward)
        accuracies = figure_of_steps(objects, judge, "rewards/accuracies")
        of_judge.append(Curve("accuracy of the reward model", accuracies, "RM step"))
    prompts = import_prompts(settings.prompts)
    iterations = policy_iterations(
        start,
        start,
        prompts.data,
        settings,
        config.backend,
        reward,
        reward_source,
        seed=config.seed,
        num_threads=config.num_threads,
        run_name=config.run.name,
    )
    rewards = [iteration.scores.mean for iteration in iterations]
    is_reward = config.rm is None
    what = "mean training reward" if is_reward else "mean score of the reward model"
    x_label = f"{_algorithm(config)} iteration"
    checkpoints = [iteration.checkpoint for iteration in iterations]
    progress = Progress(
        Curve(what, rewards, x_label),
        temperature=settings.sampling.temperature if is_reward else None,
        others=[*of_judge, *curves_of_iterations(objects, checkpoints, x_label)],
    )
    return _Learned(checkpoints[-1], progress)


def _from_pairs(config: NightlyConfig, start: ContentId) -> _Learned:
    """DPO."""
    assert config.dpo is not None, "validated"
    pairs = import_pairs(config.dpo.dataset)
    checkpoint = dpo_update(
        start,
        start,
        pairs.data,
        config.dpo,
        seed=config.seed,
        num_threads=config.num_threads,
        held_out=import_held_out(config.dpo.evaluation, import_pairs),
        label="nightly",
    )
    snapshot(checkpoint, f"{config.run.name}/dpo", label="after DPO")
    margins, accuracies, losses = (
        Curve(what, figure_of_steps(connections.objects(), checkpoint, name), "DPO step")
        for what, name in (
            ("margin of chosen over rejected", "rewards/margins"),
            ("accuracy of the implicit reward", "rewards/accuracies"),
            ("DPO loss", "loss"),
        )
    )
    return _Learned(checkpoint, Progress(margins, others=(accuracies, losses)))


def _compare(objects: ObjectStore, *reports: EvalReport) -> list[SampleComparison]:
    """A few held-out prompts with what each model made of them, those first whose reward changed."""
    samples = decode_samples(objects.get_bytes(reports[0].samples))
    texts = [[row.text for row in decode_completions_blob(objects.get_bytes(r.completions))] for r in reports]
    scores: list[list[float]] = [json.loads(objects.get_bytes(report.scores)) for report in reports]
    order = sorted(range(len(samples)), key=lambda row: scores[0][row] - scores[-1][row])
    half = SHOWN_SAMPLES // 2
    chosen = dict.fromkeys([*order[:half], *range(min(half, len(samples)))])
    return [
        SampleComparison(
            prompt=samples[row].prompt if isinstance(samples[row].prompt, str) else json.dumps(samples[row].prompt),
            completions=tuple(text[row] for text in texts),
            rewards=tuple(score[row] for score in scores),
        )
        for row in chosen
    ]

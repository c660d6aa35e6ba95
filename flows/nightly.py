"""The nightly flow: fine-tune, PPO or GRPO, evaluate before and after, promote what did not get worse, report."""

from __future__ import annotations

import json
from typing import Any

from prefect import flow

from flows.healing import run_body
from flows.report import Report, SampleComparison, write_report
from flows.train import policy_iterations
from rollout_core.config import NightlyConfig, apply_overrides, parse_config
from rollout_core.inference.engines import close_engine
from rollout_core.inference.samples import decode_completions_blob, decode_samples
from rollout_core.objects import ObjectStore
from rollout_core.plan import context_limit, plan_nightly
from rollout_core.records import Checkpoint, EvalReport
from rollout_core.rewards import source_id
from tasks import artifacts, places
from tasks.journal import Journal
from tasks.keep import (
    import_held_out,
    import_model,
    import_prompts,
    import_reward,
    import_sft,
    latest_model,
    promote,
    snapshot,
)
from tasks.learn import sft_update
from tasks.places import connections, working_folder
from tasks.prompts import enqueue_prompts
from tasks.score import evaluate

SHOWN_SAMPLES = 8


@flow(name="nightly", flow_run_name="{config.run.name}", persist_result=False)
def nightly(config: NightlyConfig, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Fine-tune, run PPO or GRPO iterations, evaluate held-out prompts before and after, promote, write a report.

    ``overrides`` maps dotted keys of the configuration to values, such as ``{"ppo.iterations": 3}``.
    """
    if overrides:
        changed = apply_overrides(config.model_dump(mode="json"), overrides)
        config = parse_config(changed, NightlyConfig, name="overrides")
    plan_nightly(config, working_folder(), connections())
    try:
        return run_body(lambda journal: _nightly(config, journal), config.run)
    finally:
        close_engine()


def _nightly(config: NightlyConfig, journal: Journal) -> dict[str, Any]:
    name = "PPO" if config.ppo is not None else "GRPO"
    after_policy = f"after {name}"
    model = import_model(config.model).model
    rows = import_sft(config.sft.dataset)
    prompts = import_prompts(config.policy.prompts)
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

    iterations = policy_iterations(
        tuned.model,
        tuned.model,
        prompts.data,
        config.policy,
        config.backend,
        reward,
        seed=config.seed,
        num_threads=config.num_threads,
        run_name=config.run.name,
    )
    final = iterations[-1].checkpoint
    after = held_out_reward(final.model, after_policy)
    latest = latest_model(config.promotion.resource).model
    # Most often cached: last night's run evaluated it on the same prompts.
    rival = held_out_reward(latest, "latest") if latest not in (None, model, final.model) else None
    promotion = promote(before, rival, after, config.promotion)

    rewards = [iteration.scores.mean for iteration in iterations]
    objects = places.objects()
    report = Report(
        name=config.run.name,
        held_out={
            "before": before.mean_reward,
            "after SFT": after_sft.mean_reward,
            after_policy: after.mean_reward,
        },
        rewards=rewards,
        sft_losses=_losses(objects, tuned),
        promotion=promotion.reason,
        promoted=promotion.promoted,
        model=final.model,
        stages=journal.entries,
        samples=_compare(objects, before, after_sft, after),
    )
    folder = write_report(report, working_folder() / config.report_dir)
    artifacts.curve(
        "reward",
        rewards,
        title=f"{config.run.name}: training reward",
        x_label=f"{name} iteration",
        y_label="mean reward",
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
        "rewards": rewards,
        "promoted": promotion.promoted,
        "report": str(folder),
        "stages": [entry.row() for entry in journal.entries],
    }


def _losses(objects: ObjectStore, checkpoint: Checkpoint) -> list[float]:
    return [json.loads(line)["loss"] for line in objects.get_bytes(checkpoint.metrics).splitlines()]


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

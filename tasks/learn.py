"""The stages that train: supervised fine-tuning, learning from preferences, and one PPO iteration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect.runtime import flow_run

from rollout_core.algorithms.context import UpdateContext
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.stopping import is_stopping
from rollout_core.config import (
    DPOSettings,
    GRPOSettings,
    IPOSettings,
    KTOSettings,
    OnPolicySettings,
    PPOSettings,
    RewardModelSettings,
    SFTSettings,
    identity,
)
from rollout_core.data.data_report import DataReport
from rollout_core.launch import run_update
from rollout_core.launch.job import UpdateName
from rollout_core.objects.records import Checkpoint, Scores
from tasks import artifacts, connections
from tasks.logs import StepLog, stage_logger
from tasks.stage import StageRun, current_stage, stage


@stage(version=3, concurrency="learner", optional=("held_out", "start_from"))
def sft_update(
    model: ContentId,
    dataset: ContentId,
    settings: SFTSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    held_out: ContentId | None = None,
    start_from: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """Fine-tune a model on prompt/completion or chat rows; resumes from its last snapshot."""
    run = current_stage()
    with _update_context(run, seed, num_threads, "SFT", start_from, base_model=model) as context:
        checkpoint, report = _update(
            "sft",
            context,
            on_data=lambda report: _show_data("sft", report),
            model=model,
            dataset=dataset,
            settings=settings,
            held_out=held_out,
        )
    checkpoint = _with_data_report(run, checkpoint, report)
    losses = [row["loss"] for row in _metrics(run, checkpoint)]
    artifacts.curve("sft-loss", losses, title=f"SFT loss {label}".strip(), x_label="step", y_label="loss")
    _show(
        checkpoint,
        {"model": model, "dataset": dataset, "held out": held_out, "start": start_from},
        f"SFT checkpoint {label}".strip(),
    )
    return checkpoint


@stage(version=2, concurrency="learner", optional=("held_out", "start_from"))
def rm_update(
    model: ContentId,
    dataset: ContentId,
    settings: RewardModelSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    held_out: ContentId | None = None,
    start_from: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """Train a reward model on pairs; resumes from its last snapshot."""
    inputs = {"model": model, "dataset": dataset}
    return _learn_preferences("rm", inputs, settings, seed, num_threads, held_out, start_from, label)


@stage(version=2, concurrency="learner", optional=("held_out", "start_from"))
def dpo_update(
    model: ContentId,
    reference: ContentId,
    dataset: ContentId,
    settings: DPOSettings | IPOSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    held_out: ContentId | None = None,
    start_from: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """DPO or IPO of a model on pairs; resumes from its last snapshot."""
    inputs = {"model": model, "reference": reference, "dataset": dataset}
    return _learn_preferences("dpo", inputs, settings, seed, num_threads, held_out, start_from, label)


@stage(version=2, concurrency="learner", optional=("held_out", "start_from"))
def kto_update(
    model: ContentId,
    reference: ContentId,
    dataset: ContentId,
    settings: KTOSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    held_out: ContentId | None = None,
    start_from: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """KTO of a model on labelled answers; resumes from its last snapshot."""
    inputs = {"model": model, "reference": reference, "dataset": dataset}
    return _learn_preferences("kto", inputs, settings, seed, num_threads, held_out, start_from, label)


def _show_data(kind: str, report: DataReport) -> None:
    """Before training starts: a table in the UI, a line in the log."""
    figures = report.figures()
    rows = [{"figure": name, "value": value} for name, value in figures.items()]
    artifacts.table(f"{kind}-data", rows, "What became of the training rows")
    stage_logger().info("data: %s", ", ".join(f"{name} {value}" for name, value in figures.items()))


def _with_data_report(run: StageRun, checkpoint: Checkpoint, report: DataReport) -> Checkpoint:
    return checkpoint.model_copy(update={"data_report": run.objects.put_json(report.document())})


def _learn_preferences(
    name: UpdateName,
    inputs: Mapping[str, ContentId],
    settings: RewardModelSettings | DPOSettings | IPOSettings | KTOSettings,
    seed: int,
    num_threads: int | None,
    held_out: ContentId | None,
    start_from: ContentId | None,
    label: str,
) -> Checkpoint:
    run = current_stage()
    kind = name if isinstance(settings, RewardModelSettings) else settings.kind
    with _update_context(run, seed, num_threads, kind.upper(), start_from, base_model=inputs["model"]) as context:
        checkpoint, report = _update(
            name,
            context,
            on_data=lambda report: _show_data(kind, report),
            settings=settings,
            held_out=held_out,
            **inputs,
        )
    checkpoint = _with_data_report(run, checkpoint, report)
    metrics = _metrics(run, checkpoint)
    for figure, short in (("loss", "loss"), ("rewards/margins", "margins")):
        title = f"{kind.upper()} {short} {label}".strip()
        values = [row[figure] for row in metrics]
        artifacts.curve(f"{kind}-{short}", values, title=title, x_label="step", y_label=figure)
    made_from = {**inputs, "held out": held_out, "start": start_from}
    _show(checkpoint, made_from, f"{kind.upper()} checkpoint {label}".strip())
    return checkpoint


@stage(version=3, concurrency="learner")
def ppo_update(
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    scores: Scores,
    samples: ContentId,
    settings: PPOSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    label: str = "",
) -> Checkpoint:
    """One PPO iteration over scored completions of ``model``; resumes from its last snapshot."""
    inputs = {"model": model, "train_state": train_state, "reference": reference, "samples": samples}
    return _learn_on_policy("ppo", inputs, scores, settings, seed, num_threads, label)


@stage(version=2, concurrency="learner")
def grpo_update(
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    scores: Scores,
    samples: ContentId,
    settings: GRPOSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    label: str = "",
) -> Checkpoint:
    """One GRPO iteration over scored groups of completions of ``model``; resumes from its last snapshot."""
    inputs = {"model": model, "train_state": train_state, "reference": reference, "samples": samples}
    return _learn_on_policy("grpo", inputs, scores, settings, seed, num_threads, label)


def _learn_on_policy(
    name: UpdateName,
    inputs: Mapping[str, ContentId | None],
    scores: Scores,
    settings: OnPolicySettings,
    seed: int,
    num_threads: int | None,
    label: str,
) -> Checkpoint:
    run = current_stage()
    # The same in all iterations of a run, which draw one curve together.
    series = content_id("series/1", [flow_run.name, run.name, inputs["reference"], identity(settings)])
    title = f"{name.upper()} {label}".strip()
    reference = inputs["reference"]
    assert reference is not None, "on-policy updates have one"
    with _update_context(run, seed, num_threads, title, series=series, base_model=reference) as context:
        checkpoint = _update(name, context, scores=scores, settings=settings, **inputs)
    rows = [{"figure": figure, "value": value} for figure, value in checkpoint.summary.items()]
    artifacts.table(name, rows, title)
    made_from = {key.replace("_", " "): value for key, value in inputs.items() if key != "samples"}
    _show(checkpoint, {**made_from, "scores": scores.scores}, f"{name.upper()} checkpoint {label}".strip())
    return checkpoint


def _update(name: UpdateName, context: UpdateContext, **inputs: Any) -> Any:
    """What the update returns; lines of processes of its own go to the run's log."""
    return run_update(name, context, on_line=stage_logger().info, **inputs)


@contextmanager
def _update_context(
    run: StageRun,
    seed: int,
    num_threads: int | None,
    title: str,
    start_from: ContentId | None = None,
    series: ContentId | None = None,
    *,
    base_model: ContentId,
) -> Iterator[UpdateContext]:
    last_step = 0

    def on_start(first: int, last: int) -> None:
        nonlocal last_step
        last_step = last
        if first:
            stage_logger().info("%s resumes at step %d of %d", title, first, last)

    lines = StepLog(title)

    def on_step(row: dict[str, float]) -> None:
        bar.show(int(row["step"]), last_step)
        lines.note(row, last_step)

    with artifacts.ProgressBar(f"{run.name.replace('_', '-')}-progress", title) as bar:
        yield UpdateContext(
            objects=run.objects,
            cache=connections.cache_folder(),
            key=run.key,
            run_id=run.run_id,
            seed=seed,
            run_name=flow_run.name or "",
            start_from=start_from,
            tracking=connections.tracking_folder(),
            series=series,
            base_model=base_model,
            num_threads=num_threads,
            is_stopping=is_stopping,
            on_step=on_step,
            on_start=on_start,
        )


def _metrics(run: StageRun, checkpoint: Checkpoint) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.objects.get_bytes(checkpoint.metrics).splitlines()]


def _show(checkpoint: Checkpoint, made_from: Mapping[str, ContentId | None], title: str) -> None:
    artifacts.origin("checkpoint", title, {"model": checkpoint.model, "train state": checkpoint.train_state}, made_from)
    summary = checkpoint.summary
    stage_logger().info(
        "%s: step %d, loss %.4f, model %s", title, checkpoint.step, summary.get("loss", 0.0), checkpoint.model.short
    )

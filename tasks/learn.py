"""The stages that train: supervised fine-tuning, learning from preferences, and one PPO iteration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect.runtime import flow_run

from rollout_core.algorithms.data_report import DataReport
from rollout_core.algorithms.workshop import Workshop
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
from rollout_core.ids import ContentId, content_id
from rollout_core.launch import run_update
from rollout_core.launch.job import UpdateName
from rollout_core.records import Checkpoint, Scores
from tasks import artifacts, places
from tasks.stage import StageRun, current_stage, stage, stage_logger


@stage(version=2, concurrency="learner", optional=("held_out", "start_from"))
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
    with _workshop(run, seed, num_threads, "SFT", start_from) as workshop:
        checkpoint, report = _update(
            "sft",
            workshop,
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


@stage(version=1, concurrency="learner", optional=("held_out", "start_from"))
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
    run = current_stage()
    with _workshop(run, seed, num_threads, "reward model", start_from) as workshop:
        checkpoint, report = _update(
            "rm",
            workshop,
            on_data=lambda report: _show_data("rm", report),
            model=model,
            dataset=dataset,
            settings=settings,
            held_out=held_out,
        )
    checkpoint = _with_data_report(run, checkpoint, report)
    made_from = {"model": model, "dataset": dataset, "held out": held_out, "start": start_from}
    _show_preferences(run, "rm", checkpoint, made_from, label)
    return checkpoint


@stage(version=1, concurrency="learner", optional=("held_out", "start_from"))
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
    run = current_stage()
    with _workshop(run, seed, num_threads, settings.kind.upper(), start_from) as workshop:
        checkpoint, report = _update(
            "dpo",
            workshop,
            on_data=lambda report: _show_data(settings.kind, report),
            model=model,
            reference=reference,
            dataset=dataset,
            settings=settings,
            held_out=held_out,
        )
    made_from = {"model": model, "reference": reference, "dataset": dataset, "held out": held_out, "start": start_from}
    checkpoint = _with_data_report(run, checkpoint, report)
    _show_preferences(run, settings.kind, checkpoint, made_from, label)
    return checkpoint


@stage(version=1, concurrency="learner", optional=("held_out", "start_from"))
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
    """KTO of a model on judged answers; resumes from its last snapshot."""
    run = current_stage()
    with _workshop(run, seed, num_threads, "KTO", start_from) as workshop:
        checkpoint, report = _update(
            "kto",
            workshop,
            on_data=lambda report: _show_data(settings.kind, report),
            model=model,
            reference=reference,
            dataset=dataset,
            settings=settings,
            held_out=held_out,
        )
    made_from = {"model": model, "reference": reference, "dataset": dataset, "held out": held_out, "start": start_from}
    checkpoint = _with_data_report(run, checkpoint, report)
    _show_preferences(run, settings.kind, checkpoint, made_from, label)
    return checkpoint


def _show_data(kind: str, report: DataReport) -> None:
    """Before training starts: a table in the UI, a line in the log."""
    figures = report.figures()
    rows = [{"figure": name, "value": value} for name, value in figures.items()]
    artifacts.table(f"{kind}-data", rows, "What became of the training rows")
    stage_logger().info("data: %s", ", ".join(f"{name} {value}" for name, value in figures.items()))


def _with_data_report(run: StageRun, checkpoint: Checkpoint, report: DataReport) -> Checkpoint:
    return checkpoint.model_copy(update={"data_report": run.objects.put_json(report.document())})


def _show_preferences(
    run: StageRun,
    kind: str,
    checkpoint: Checkpoint,
    made_from: Mapping[str, ContentId | None],
    label: str,
) -> None:
    metrics = _metrics(run, checkpoint)
    for figure, name in (("loss", "loss"), ("rewards/margins", "margins")):
        title = f"{kind.upper()} {name} {label}".strip()
        artifacts.curve(f"{kind}-{name}", [row[figure] for row in metrics], title=title, x_label="step", y_label=figure)
    _show(checkpoint, made_from, f"{kind.upper()} checkpoint {label}".strip())


@stage(version=2, concurrency="learner")
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
    run = current_stage()
    series = _series(run, reference, settings)
    with _workshop(run, seed, num_threads, f"PPO {label}".strip(), series=series) as workshop:
        checkpoint = _update(
            "ppo",
            workshop,
            model=model,
            train_state=train_state,
            reference=reference,
            scores=scores,
            samples=samples,
            settings=settings,
        )
    _show_iteration("PPO", checkpoint, model, train_state, reference, scores, label)
    return checkpoint


@stage(version=1, concurrency="learner")
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
    run = current_stage()
    series = _series(run, reference, settings)
    with _workshop(run, seed, num_threads, f"GRPO {label}".strip(), series=series) as workshop:
        checkpoint = _update(
            "grpo",
            workshop,
            model=model,
            train_state=train_state,
            reference=reference,
            scores=scores,
            samples=samples,
            settings=settings,
        )
    _show_iteration("GRPO", checkpoint, model, train_state, reference, scores, label)
    return checkpoint


def _show_iteration(
    name: str,
    checkpoint: Checkpoint,
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    scores: Scores,
    label: str,
) -> None:
    rows = [{"figure": figure, "value": value} for figure, value in checkpoint.summary.items()]
    artifacts.table(name.lower(), rows, f"{name} {label}".strip())
    _show(
        checkpoint,
        {"model": model, "train state": train_state, "reference": reference, "scores": scores.scores},
        f"{name} checkpoint {label}".strip(),
    )


def _series(run: StageRun, reference: ContentId, settings: OnPolicySettings) -> ContentId:
    """Identity of the curve that the iterations of a run draw together."""
    return content_id("series/1", [flow_run.name, run.name, reference, identity(settings)])


def _update(name: UpdateName, workshop: Workshop, **inputs: Any) -> Any:
    """What the update returns; lines of processes of its own go to the run's log."""
    return run_update(name, workshop, on_line=stage_logger().info, **inputs)


@contextmanager
def _workshop(
    run: StageRun,
    seed: int,
    num_threads: int | None,
    title: str,
    start_from: ContentId | None = None,
    series: ContentId | None = None,
) -> Iterator[Workshop]:
    last_step = 0

    def on_start(first: int, last: int) -> None:
        nonlocal last_step
        last_step = last
        if first:
            stage_logger().info("%s resumes at step %d of %d", title, first, last)

    def on_step(row: dict[str, float]) -> None:
        bar.show(int(row["step"]), last_step)

    with artifacts.ProgressBar(f"{run.name.replace('_', '-')}-progress", title) as bar:
        yield Workshop(
            objects=run.objects,
            cache=places.cache_folder(),
            key=run.key,
            run_id=run.run_id,
            seed=seed,
            run_name=flow_run.name or "",
            start_from=start_from,
            tracking=places.tracking_folder(),
            series=series,
            num_threads=num_threads,
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

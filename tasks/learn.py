"""The stages that train: supervised fine-tuning, learning from preferences, one PPO or GRPO iteration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefect.runtime import flow_run

from rollout_core.algorithms.context import UpdateContext
from rollout_core.base.determinism import is_portable_here, release_gpu_memory
from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.stopping import is_stopping
from rollout_core.config import (
    AnyGroupSettings,
    AnyPairSettings,
    IPOSettings,
    KTOSettings,
    LearnerSettings,
    OnPolicySettings,
    PPOSettings,
    RewardModelSettings,
    SFTSettings,
    identity,
)
from rollout_core.config.learning import UpdateName
from rollout_core.data.tokenized import DataReport
from rollout_core.inference.engines import sleep_engine
from rollout_core.launch import run_update
from rollout_core.models.chat_templates import written_in_words
from rollout_core.objects.records import Checkpoint, Scores
from rollout_core.objects.snapshots import progress_ref
from tasks.runtime import artifacts, connections, events
from tasks.runtime.dry_run import current_dry_run, dry_run_remark
from tasks.runtime.iterations import current_states
from tasks.runtime.journal import StepLog, stage_logger, step_figures
from tasks.runtime.stage import Stage, StageRun, current_stage, stage


@dataclass(frozen=True)
class UpdateJob:
    """What a stage was asked to train."""

    update: UpdateName
    settings: LearnerSettings
    inputs: Mapping[str, Any]
    """The update's other arguments: content ids and scores by name."""
    seed: int
    num_threads: int | None
    label: str
    """Ends the titles that people see."""
    start_from: ContentId | None = None

    @property
    def kind(self) -> str:
        """The algorithm by its usual name."""
        return self.settings.family

    @property
    def made_from(self) -> dict[str, ContentId | None]:
        """What the checkpoint comes from, for people to read."""
        return {name.replace("_", " "): value for name, value in self.inputs.items() if not isinstance(value, Scores)}


@stage(
    version=4, concurrency="learner", optional=("held_out", "start_from", "teacher"), time="learning", place="learning"
)
def sft_update(
    model: ContentId,
    dataset: ContentId,
    settings: SFTSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    held_out: ContentId | None = None,
    start_from: ContentId | None = None,
    teacher: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """Fine-tune a model on prompt/completion or chat rows; resumes from its last snapshot."""
    inputs = {"model": model, "dataset": dataset, "held_out": held_out, "teacher": teacher}
    return _learn_from_rows(UpdateJob("sft", settings, inputs, seed, num_threads, label, start_from))


@stage(version=4, concurrency="learner", optional=("held_out", "start_from"), time="learning", place="learning")
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
    inputs = {"model": model, "dataset": dataset, "held_out": held_out}
    return _learn_from_rows(UpdateJob("rm", settings, inputs, seed, num_threads, label, start_from))


@stage(version=3, concurrency="learner", optional=("held_out", "start_from"), time="learning", place="learning")
def dpo_update(
    model: ContentId,
    reference: ContentId,
    dataset: ContentId,
    settings: AnyPairSettings | IPOSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    held_out: ContentId | None = None,
    start_from: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """DPO or IPO of a model on pairs; resumes from its last snapshot."""
    inputs = {"model": model, "reference": reference, "dataset": dataset, "held_out": held_out}
    return _learn_from_rows(UpdateJob("preference", settings, inputs, seed, num_threads, label, start_from))


@stage(version=3, concurrency="learner", optional=("held_out", "start_from"), time="learning", place="learning")
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
    inputs = {"model": model, "reference": reference, "dataset": dataset, "held_out": held_out}
    return _learn_from_rows(UpdateJob("preference", settings, inputs, seed, num_threads, label, start_from))


def _learn_from_rows(job: UpdateJob) -> Checkpoint:
    run, name = current_stage(), job.kind.upper()
    with _update_context(run, job, name, base_model=job.inputs["model"]) as context:
        checkpoint, report = _update(job, context, on_data=partial(_show_data, job))
    checkpoint = checkpoint.model_copy(update={"data_report": run.objects.put_json(report.document())})
    metrics = [json.loads(line) for line in run.objects.get_bytes(checkpoint.metrics).splitlines()]
    for figure, short in (("loss", "loss"), ("rewards/margins", "margins")):
        if values := [row[figure] for row in metrics if figure in row]:
            title = f"{name} {short} {job.label}".strip()
            artifacts.curve(f"{job.kind}-{short}", values, title=title, x_label="step", y_label=figure)
    _show(checkpoint, {**job.made_from, "start": job.start_from}, f"{name} checkpoint {job.label}".strip())
    return checkpoint


def _show_data(job: UpdateJob, report: DataReport) -> None:
    """Before training starts: a table in the UI, a line in the log."""
    kind, figures = job.kind, report.figures()
    template = written_in_words(job.inputs["model"], current_stage().objects)
    figures |= {} if template is None else {"chat template": template}
    rows = [{"figure": name, "value": value} for name, value in figures.items()]
    artifacts.table(f"{kind}-data", rows, "Training rows by outcome")
    stage_logger().info("data: %s", ", ".join(f"{name} {value}" for name, value in figures.items()))


@stage(version=5, concurrency="learner", optional=("replayed",), time="learning", place="learning")
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
    replayed: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """One PPO iteration over scored completions of ``model``; resumes from its last snapshot."""
    inputs = {"model": model, "train_state": train_state, "reference": reference, "scores": scores, "samples": samples}
    inputs["replayed"] = replayed
    return _learn_on_policy(UpdateJob("ppo", settings, inputs, seed, num_threads, label))


@stage(version=5, concurrency="learner", optional=("teacher", "replayed"), time="learning", place="learning")
def grpo_update(
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    scores: Scores,
    samples: ContentId,
    settings: AnyGroupSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    teacher: ContentId | None = None,
    replayed: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """One GRPO iteration over scored groups of completions of ``model``; resumes from its last snapshot."""
    inputs = {"model": model, "train_state": train_state, "reference": reference, "scores": scores, "samples": samples}
    inputs |= {"teacher": teacher, "replayed": replayed}
    return _learn_on_policy(UpdateJob("grpo", settings, inputs, seed, num_threads, label))


UPDATES: Mapping[str, Stage[..., Checkpoint]] = {
    "sft": sft_update,
    "rm": rm_update,
    "dpo": dpo_update,
    "ipo": dpo_update,
    "kto": kto_update,
    "ppo": ppo_update,
    "grpo": grpo_update,
}
"""The stages that train, by the ``family`` of their settings."""


def check_guards(settings: OnPolicySettings, checkpoint: Checkpoint, label: str) -> None:
    """Raises Fatal where an update that was cached is past a bound that it was not made under; a plan says so."""
    try:
        settings.guards.check_done(checkpoint.summary, label.capitalize())
    except Fatal as error:
        if current_dry_run() is None:
            raise
        dry_run_remark(f"the run ends here: {error}")


def _learn_on_policy(job: UpdateJob) -> Checkpoint:
    run, reference = current_stage(), job.inputs["reference"]
    # The same in all iterations of a run, which draw one curve together.
    series = content_id("series/1", [flow_run.name, run.name, reference, identity(job.settings)])
    title = f"{job.update.upper()} {job.label}".strip()
    with _update_context(run, job, title, base_model=reference, series=series) as context:
        checkpoint = _update(job, context)
    try:
        _check_named(title, checkpoint)
    except Fatal:
        run.objects.delete_ref(progress_ref(run.key))  # the next try, elsewhere, resumes from nothing that is wrong
        raise
    rows = [{"figure": figure, "value": value} for figure, value in checkpoint.summary.items()]
    artifacts.table(job.update, rows, title)
    made_from = {name: value for name, value in job.made_from.items() if name not in ("samples", "replayed")}
    scores = job.inputs["scores"].scores
    _show(checkpoint, {**made_from, "scores": scores}, f"{job.update.upper()} checkpoint {job.label}".strip())
    return checkpoint


def _check_named(title: str, checkpoint: Checkpoint) -> None:
    """Raises Fatal where the outcome was named before, is another now, and arithmetic should not tell."""
    here = current_states()
    if here is None or here.expected is None or here.expected.cache_identity() == checkpoint.cache_identity():
        return
    found = f"{title}: computed again, the training state is {checkpoint.train_state.short}, and was named as "
    found += here.expected.train_state.short
    if is_portable_here():
        raise Fatal(
            f"{found}. With portable numerics both should be the same: look for a machine that computes wrongly, or "
            "start over by run.refresh = true"
        )
    stage_logger().warning("%s: other arithmetic, such as another CPU or GPU. What follows is computed from it", found)


def _update(job: UpdateJob, context: UpdateContext, **options: Any) -> Any:
    """What the update returns; the output of processes of its own goes to the run's log. An engine that can leaves the
    GPU to it."""
    sleep_engine()
    try:
        return run_update(
            job.update, context, on_line=stage_logger().info, settings=job.settings, **job.inputs, **options
        )
    finally:
        release_gpu_memory()


@contextmanager
def _update_context(
    run: StageRun, job: UpdateJob, title: str, *, base_model: ContentId, series: ContentId | None = None
) -> Iterator[UpdateContext]:
    last_step = 0

    def on_start(first: int, last: int) -> None:
        nonlocal last_step
        last_step = last
        emitted.start(first, last)
        if first:
            stage_logger().info("%s resumes at step %d of %d", title, first, last)

    here = current_states()
    lines, emitted = StepLog(title), events.Training(run.name, job.kind, job.label)

    def on_step(row: dict[str, float]) -> None:
        bar.show(int(row["step"]), last_step, step_figures(row))
        lines.note(row, last_step)
        emitted.step(row)

    with artifacts.ProgressBar(f"{run.name.replace('_', '-')}-progress", title, is_logged=True) as bar:
        yield UpdateContext(
            objects=run.objects,
            cache=connections.cache_folder(),
            key=run.key,
            run_id=run.run_id,
            seed=job.seed,
            run_name=flow_run.name or "",
            start_from=job.start_from,
            tracking=connections.tracking_folder(),
            series=series,
            base_model=base_model,
            num_threads=job.num_threads,
            held=None if here is None else here.held,
            stores_state=here is None or here.stores,
            is_stopping=is_stopping,
            check=run.check,
            on_step=on_step,
            on_start=on_start,
        )
    emitted.end()


def _show(checkpoint: Checkpoint, made_from: Mapping[str, ContentId | None], title: str) -> None:
    artifacts.origin("checkpoint", title, {"model": checkpoint.model, "train state": checkpoint.train_state}, made_from)
    summary = checkpoint.summary
    stage_logger().info(
        "%s: step %d, loss %.4f, model %s", title, checkpoint.step, summary.get("loss", 0.0), checkpoint.model.short
    )

"""How a stage trains: by an update of the library, whose progress goes to the UI, the log and events. Its outcome is
checked and shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prefect.runtime import flow_run

from rollout_core.algorithms.context import UpdateContext
from rollout_core.base.determinism import release_gpu_memory
from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.processes import in_environment
from rollout_core.base.stopping import is_stopping
from rollout_core.config import LearnerSettings, identity
from rollout_core.config.learning import UpdateName
from rollout_core.data.tokenized import DataReport
from rollout_core.inference.engines import sleep_engine
from rollout_core.launch import run_update
from rollout_core.models.chat_templates import written_in_words
from rollout_core.objects.records import Checkpoint, Scores
from rollout_core.objects.snapshots import progress_ref
from rollout_core.runs.figures import metric_rows
from tasks.runtime import artifacts, connections, events
from tasks.runtime.iterations import check_outcome, current_states
from tasks.runtime.journal import StepLog, stage_logger, step_figures
from tasks.runtime.stage import current_stage

CURVES = {"loss": "loss", "rewards/margins": "margins"}
"""Of updates from rows, figures with their short names."""


@dataclass(frozen=True)
class UpdateJob:
    """What the running stage was asked to train."""

    update: UpdateName
    settings: LearnerSettings
    inputs: Mapping[str, Any]
    """The update's other arguments: content ids and scores by name."""
    seed: int
    num_threads: int | None
    label: str
    """Ends the titles that people see."""
    start_from: ContentId | None = None

    def learn_from_rows(self) -> Checkpoint:
        """Train on a data set."""
        objects, kind = current_stage().objects, self.settings.family
        name, base_model = kind.upper(), self.inputs["model"]
        with self._context(name, base_model) as context:
            checkpoint, report = self._update(context, on_data=self._show_data)
        checkpoint = checkpoint.model_copy(update={"data_report": objects.put_json(report.document())})
        metrics = metric_rows(objects, checkpoint.metrics)
        for figure, short in CURVES.items():
            if values := [row[figure] for row in metrics if figure in row]:
                title = f"{name} {short} {self.label}".strip()
                artifacts.curve(f"{kind}-{short}", values, title=title, x_label="step", y_label=figure)
        self._show(checkpoint, name, start=self.start_from)
        return checkpoint

    def learn_on_policy(self) -> Checkpoint:
        """One iteration on scored completions."""
        run, reference, name = current_stage(), self.inputs["reference"], self.update.upper()
        # The same in all iterations of a run, which draw one curve together.
        series = content_id("series/1", [flow_run.name, run.name, reference, identity(self.settings)])
        title = f"{name} {self.label}".strip()
        with self._context(title, reference, series) as context:
            checkpoint = self._update(context)
        try:
            check_outcome(title, checkpoint)
        except Fatal:
            run.objects.delete_ref(progress_ref(run.key))  # the next try, elsewhere, resumes from nothing that is wrong
            raise
        artifacts.figures(self.update, checkpoint.summary, title)
        self._show(checkpoint, name, samples=None, replayed=None, scores=self.inputs["scores"].scores)
        return checkpoint

    def _update(self, context: UpdateContext, **options: Any) -> Any:
        """What the update returns; the output of processes of its own goes to the run's log. An engine that can leaves
        the GPU to it."""
        sleep_engine()
        on_line = stage_logger().info
        try:
            return run_update(self.update, context, on_line=on_line, settings=self.settings, **self.inputs, **options)
        finally:
            release_gpu_memory()

    @contextmanager
    def _context(self, title: str, base_model: ContentId, series: ContentId | None = None) -> Iterator[UpdateContext]:
        run, here, last_step = current_stage(), current_states(), 0
        lines, emitted = StepLog(title), events.Training(run.name, self.settings.family, self.label)

        def on_start(first: int, last: int) -> None:
            nonlocal last_step
            last_step = last
            emitted.start(first, last)
            if first:
                stage_logger().info("%s resumes at step %d of %d", title, first, last)

        def on_step(row: dict[str, float]) -> None:
            bar.show(int(row["step"]), last_step, step_figures(row))
            lines.note(row, last_step)
            emitted.step(row)

        tracker = connections.tracker() if self.settings.trackers else None
        with (
            artifacts.ProgressBar(f"{run.name.replace('_', '-')}-progress", title, is_logged=True) as bar,
            in_environment({} if tracker is None else tracker.environment()),
        ):
            yield UpdateContext(
                objects=run.objects,
                cache=connections.cache_folder(),
                key=run.key,
                run_id=run.run_id,
                seed=self.seed,
                run_name=flow_run.name or "",
                start_from=self.start_from,
                tracking=None if tracker is None else tracker.place(),
                series=series,
                base_model=base_model,
                num_threads=self.num_threads,
                held=None if here is None else here.held,
                stores_state=here is None or here.stores,
                is_stopping=is_stopping,
                check=run.check,
                on_step=on_step,
                on_start=on_start,
            )
        emitted.end()

    def _show_data(self, report: DataReport) -> None:
        """Before training starts: a table in the UI, a line in the log."""
        figures, template = report.figures(), written_in_words(self.inputs["model"], current_stage().objects)
        figures |= {} if template is None else {"chat template": template}
        artifacts.figures(f"{self.settings.family}-data", figures, "Training rows by outcome")
        stage_logger().info("data: %s", ", ".join(f"{name} {value}" for name, value in figures.items()))

    def _show(self, checkpoint: Checkpoint, name: str, **made_from: ContentId | None) -> None:
        """What came of it and what it was made from: the inputs, with ``made_from`` in place of those of its names."""
        title = f"{name} checkpoint {self.label}".strip()
        ids = {name: value for name, value in self.inputs.items() if not isinstance(value, Scores)} | made_from
        origins = {name.replace("_", " "): value for name, value in ids.items()}
        made = {"model": checkpoint.model, "train state": checkpoint.train_state}
        artifacts.origin("checkpoint", title, made, origins)
        done = checkpoint.step, checkpoint.summary.get("loss", 0.0), checkpoint.model.short
        stage_logger().info("%s: step %d, loss %.4f, model %s", title, *done)

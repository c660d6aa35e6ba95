"""One update from its start to its filed checkpoint, with evaluation on held-out rows; and its figures to trackers
(TensorBoard, Weights & Biases, MLflow) by accelerate's own classes, and to those of plugins.

Evaluation is the learner's own loss and figures, without gradient and without a trace: dropout is off, the
generators of random numbers stay where they were, and rows come in their own order, so a run with evaluation trains
exactly as one without.

Each step is logged once and in order, also by a run that was killed: what a tracker has already is not logged again,
and what it lacks is logged from the rows of the restored state. A tracker never stops training: one that fails is
dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, MLflowTracker, TensorBoardTracker, WandBTracker

from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.layers import checkpoint_layers
from rollout_core.algorithms.loop import Algorithm, LoopHooks, StepFigures, train
from rollout_core.algorithms.parallel import any_rank, is_first, split_across_ranks
from rollout_core.algorithms.plugin_tracker import Delivery
from rollout_core.algorithms.resumption import BEST, Origin, Resumption
from rollout_core.algorithms.state import TrainState
from rollout_core.algorithms.supervised import DatasetAlgorithm
from rollout_core.base.errors import ConfigError, Fatal, Stopped
from rollout_core.base.ids import ContentId
from rollout_core.config import DatasetSettings, HeldOutRows, LearnerSettings, Settings, TrackerName
from rollout_core.config.learning import PluginTracker
from rollout_core.objects.records import Checkpoint
from rollout_core.plugins.discovery import find_plugin

log = logging.getLogger(__name__)

BatchT = TypeVar("BatchT")
PREFIX = "eval_"


def train_to_end(
    algorithm: Algorithm[Any],
    state: TrainState,
    settings: LearnerSettings,
    accelerator: Accelerator,
    context: UpdateContext,
    tokenizer_from: Path,
    *,
    total_steps: int | None = None,
    max_minutes: float | None = None,
    evaluation: Evaluation[Any] | None = None,
    figures: Callable[[], Mapping[str, float]] = dict,
) -> Checkpoint:
    """Train ``state`` by ``algorithm``, from the last snapshot of this update if there is one, and file the outcome.

    ``state`` is that at the update's start, which may be at a later step than 0. ``total_steps`` as in `train`,
    ``max_minutes`` in a budget; ``figures`` of the whole update, which its first step may add to, go into each of its
    rows. Raises Stopped, with the state of the step kept, when the context is stopping.
    """
    first_step = state.step
    if settings.gradient_checkpointing:
        checkpoint_layers(state.model, *state.modules.values())
    max_seconds = None if max_minutes is None else 60.0 * max_minutes
    series = _series(algorithm.name, settings, context)
    with (
        Resumption(context, algorithm.name, settings, tokenizer_from) as resumption,
        Tracking(settings.trackers if is_first() else (), series) as tracking,
    ):
        _restore(state, resumption, algorithm, evaluation)
        tracking.catch_up({**row, **figures()} for row in state.metrics)
        context.on_start(state.step - first_step, algorithm.num_steps - first_step)

        def on_step(row: dict[str, float]) -> None:
            if isinstance(algorithm, DatasetAlgorithm):
                algorithm.note_end(state)
            if evaluation is not None and evaluation.selects(state):
                resumption.save_best(state)
            if state.step < algorithm.num_steps:
                resumption.after_step(state)
            tracking.log({**row, **figures()})
            context.on_step({**row, "step": row["step"] - first_step})
            if state.step < algorithm.num_steps and any_rank(context.is_stopping(), accelerator.device):
                resumption.save_now(state)
                raise Stopped(
                    f"the {algorithm.name} update was asked to stop and did at step {state.step} of "
                    f"{algorithm.num_steps}, which is kept: run again to continue from there"
                )

        hooks = LoopHooks(
            evaluate=evaluation.after_step if evaluation is not None else lambda state, is_last: {},
            is_over=evaluation.is_over if evaluation is not None else lambda state: False,
            on_step=on_step,
            on_snapshot=resumption.save,
            on_failure=resumption.save_now,
            keep_batch=context.objects.put_json,
        )
        train(algorithm, state, settings, accelerator, total_steps=total_steps, max_seconds=max_seconds, hooks=hooks)
        for row in state.metrics:
            row.update(figures())
        return resumption.finish(state)


def _restore(
    state: TrainState, resumption: Resumption, algorithm: Algorithm[Any], evaluation: Evaluation[Any] | None
) -> None:
    """Bring ``state`` to where the update is, or is to start. Raises ConfigError where that is behind its end."""
    origin = resumption.restore(state)
    if isinstance(algorithm, DatasetAlgorithm):
        algorithm.continue_from(state)
    if origin is Origin.GIVEN and state.step >= algorithm.num_steps:
        raise ConfigError(
            f"the snapshot to start from is of step {state.step}, and the budget ends at step "
            f"{algorithm.num_steps}; raise algorithm.budget"
        )
    if evaluation is None or not evaluation.compares(state):
        state.extras.pop(BEST, None)


def _series(algorithm: str, settings: LearnerSettings, context: UpdateContext) -> Series:
    return Series(
        folder=context.tracking or context.cache.parent / "tracking",
        run_name=f"{context.run_name}-{algorithm}" if context.run_name else algorithm,
        id=context.series or context.key,
        update=context.key,
        base_model=context.base_model,
        settings=settings,
    )


class Evaluation(Generic[BatchT]):
    """An algorithm over held-out rows, and when to run it."""

    def __init__(
        self,
        algorithm: DatasetAlgorithm[BatchT],
        accelerator: Accelerator,
        settings: HeldOutRows,
        rows: ContentId,
    ) -> None:
        """rows: content id of the held-out rows."""
        self._algorithm = algorithm
        self._accelerator = accelerator
        self.settings = settings
        self._rows = rows

    def after_step(self, state: TrainState, is_last: bool) -> dict[str, float]:
        """Figures for the row of the step that was just done; none where no evaluation is due.

        Where evaluations are compared, ``state.extras`` say which was the best. Raises Fatal where the loss is not
        finite.
        """
        every = self.settings.every_steps
        if not is_last and (every is None or state.step % every):
            return {}
        figures = self.run(state)
        if self.settings.select == "best" or self.settings.patience is not None:
            figures |= self._compared(state, figures[f"{PREFIX}loss"])
        return figures

    def _compared(self, state: TrainState, loss: float) -> dict[str, float]:
        best = state.extras.get(BEST)
        if best is None or loss < best["loss"]:
            best = {"step": state.step, "loss": loss, "rows": self._rows, "since": 0}
        else:
            best = {**best, "since": best["since"] + 1}
        state.extras[BEST] = best
        return {f"{PREFIX}best_loss": best["loss"], f"{PREFIX}best_step": best["step"]}

    def compares(self, state: TrainState) -> bool:
        """Whether what the state says of the best evaluation is of these rows, and wanted."""
        wanted = self.settings.select == "best" or self.settings.patience is not None
        return wanted and state.extras.get(BEST, {}).get("rows") == self._rows

    def selects(self, state: TrainState) -> bool:
        """Whether the step that was just done is the best one so far, and that is to be the result."""
        return self.settings.select == "best" and state.extras.get(BEST, {}).get("step") == state.step

    def is_over(self, state: TrainState) -> bool:
        """Whether there was no better evaluation for as long as ``patience`` says."""
        patience = self.settings.patience
        return patience is not None and state.extras.get(BEST, {}).get("since", 0) >= patience

    @torch.no_grad()
    def run(self, state: TrainState) -> dict[str, float]:
        """``eval_loss`` over all rows, the loss of a step that had them all, and the other figures by their names.

        Several processes share the rows. Collective.
        """
        batches = self._algorithm.cut(range(self._algorithm.num_items))
        was_training = state.model.training
        state.model.eval()
        figures = StepFigures()
        with state.averaged(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            for batch, counts in split_across_ranks(batches):
                with self._accelerator.autocast():
                    figures.add(self._algorithm.loss(batch, batches), counts=counts)
        state.model.train(was_training)
        row = {f"{PREFIX}{name}": value for name, value in figures.row().items()}
        if not all(map(math.isfinite, row.values())):
            raise Fatal(
                f"{self._algorithm.name} step {state.step}: figures of the held-out rows are not finite: {row}; "
                "look at the rows of evaluation.dataset"
            )
        return row


def evaluation_of(
    held_out: DatasetAlgorithm[BatchT] | None,
    rows: ContentId | None,
    settings: DatasetSettings,
    accelerator: Accelerator,
) -> Evaluation[BatchT] | None:
    """What ``settings`` say of an algorithm over the held-out items of ``rows``; None where there is none."""
    if held_out is None or rows is None or settings.evaluation is None:
        return None
    return Evaluation(held_out, accelerator, settings.evaluation, rows)


SETTINGS_LENGTH = 80
"""Characters of the settings in a name, which is also that of a folder."""
_OF_NO_INTEREST = {
    "kind",
    "base_model",
    "dataset",
    "prompts",
    "reward",
    "trackers",
    "snapshots",
    "evaluation",
    "parallel",
}
"""Settings that say what is read, watched or kept, not how it is learned."""
_MLFLOW_TAG = "rollout.series"


@dataclass(frozen=True)
class Series:
    """What is drawn as one curve: an update, or all iterations of a run."""

    folder: Path
    """Where trackers keep files."""
    run_name: str
    id: ContentId
    update: ContentId
    """The part of it that is trained now."""
    base_model: ContentId | None = None
    """What the run began with."""
    settings: Settings | None = None

    @property
    def title(self) -> str:
        """Name for people, by which curves of one page are distinguished: the run, its model, the settings that are not
        the default ones as far as there is room, and the beginning of the id."""
        model = f"model {self.base_model[:8]}" if self.base_model else ""
        differing = " ".join(_differing(self.settings)) if self.settings is not None else ""
        if len(differing) > SETTINGS_LENGTH:
            differing = differing[: differing.rfind(" ", 0, SETTINGS_LENGTH) + 1] + "..."
        return ", ".join(filter(None, [self.run_name, model, differing, self.id[:8]]))


class Tracking:
    """Open trackers. Use it as a context manager."""

    def __init__(self, trackers: Sequence[TrackerName | PluginTracker], series: Series) -> None:
        self._series = series
        self._trackers = trackers
        self._open: dict[str, tuple[GeneralTracker | Delivery, int]] = {}
        """Each with the last step it had when it was opened."""

    def __enter__(self) -> Tracking:
        for number, tracker in enumerate(self._trackers, start=1):
            # The same plugin may be there twice, with two configurations.
            name = f"plugin {tracker.address} ({number})" if isinstance(tracker, PluginTracker) else tracker
            self._tolerate(name, lambda name=name, tracker=tracker: self._open.update({name: self._opened(tracker)}))
        return self

    def _opened(self, tracker: TrackerName | PluginTracker) -> tuple[GeneralTracker | Delivery, int]:
        if not isinstance(tracker, PluginTracker):
            return _OPEN[tracker](self._series)
        code = find_plugin(tracker.name, Path(), tracker.path, kind="tracker")
        series = self._series
        # It is asked for its last step by whoever delivers, so that opening it holds up nothing.
        return Delivery(tracker, code, str(series.id), title=series.title, run=series.run_name), 0

    def __exit__(self, *exc_info: object) -> None:
        for name, (tracker, _) in self._open.items():
            self._tolerate(name, tracker.finish)

    def catch_up(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Log the rows of a restored state that are not logged yet."""
        for row in rows:
            self.log(row)

    def log(self, row: Mapping[str, float]) -> None:
        """Log the row of a step."""
        step = int(row["step"])
        figures = {name: value for name, value in row.items() if name != "step"}
        for name, (tracker, known) in list(self._open.items()):
            if step > known and not self._tolerate(name, lambda to=tracker: to.log(figures, step=step)):
                del self._open[name]

    def _tolerate(self, name: str, call: Callable[[], Any]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, a curve is not worth a run
            log.warning("%s is dropped: %s: %s", name, type(error).__name__, error)
            return False
        return True


def _open_tensorboard(series: Series) -> tuple[GeneralTracker, int]:
    """One file an update, rewritten from the state's rows by each process that takes the update up."""
    suffix = f".{series.update[:16]}"
    folder = series.folder / "tensorboard"
    for left_over in (folder / series.title).glob(f"events.out.tfevents.*{suffix}"):
        left_over.unlink()
    tracker = TensorBoardTracker(series.title, folder, filename_suffix=suffix)
    tracker.start()
    return tracker, 0


def _open_wandb(series: Series) -> tuple[GeneralTracker, int]:
    series.folder.mkdir(parents=True, exist_ok=True)
    tracker = WandBTracker(
        series.run_name, id=series.id[:32], name=series.title, resume="allow", dir=str(series.folder)
    )
    tracker.start()
    return tracker, tracker.run.step - 1


def _open_mlflow(series: Series) -> tuple[GeneralTracker, int]:
    import mlflow  # pyright: ignore[reportMissingImports]

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(series.run_name)
    tag = f"tags.`{_MLFLOW_TAG}` = '{series.id}'"
    found = client.search_runs([experiment.experiment_id], tag) if experiment is not None else []
    run_id = found[0].info.run_id if found else None
    known = max((point.step for point in client.get_metric_history(run_id, "loss")), default=0) if run_id else 0
    tracker = MLflowTracker(series.run_name, run_id=run_id, run_name=series.title, tags={_MLFLOW_TAG: series.id})
    tracker.start()
    return tracker, known


def _differing(settings: Settings) -> Iterator[str]:
    """``key=value`` of each plain setting that is not its default, tables after the plain keys."""
    changed = settings.model_dump(mode="json", exclude_defaults=True, exclude=_OF_NO_INTEREST)
    tables = {key: value for key, value in changed.items() if isinstance(value, dict)}
    yield from (_assignment(key, value) for key, value in changed.items() if key not in tables)
    for table in tables.values():
        yield from (_assignment(key, value) for key, value in table.items() if not isinstance(value, dict))


def _assignment(key: str, value: Any) -> str:
    # It becomes part of a folder's name.
    return f"{key}={value}".replace("/", "_").replace(" ", "")


_OPEN: dict[TrackerName, Callable[[Series], tuple[GeneralTracker, int]]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
}

"""Figures of training to trackers: TensorBoard, Weights & Biases, MLflow, by accelerate's own classes.

Each step is logged once and in order, also by a run that was killed: what a tracker has already is not logged again,
and what it lacks is logged from the rows of the restored state. A tracker never stops training: one that fails is
dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, MLflowTracker, TensorBoardTracker, WandBTracker

from rollout_core.base.ids import ContentId
from rollout_core.config import Settings, TrackerName

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
log = logging.getLogger(__name__)
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

    def __init__(self, names: Sequence[TrackerName], series: Series) -> None:
        self._series = series
        self._names = names
        self._open: dict[TrackerName, tuple[GeneralTracker, int]] = {}
        """Each with the last step it had when it was opened."""

    def __enter__(self) -> Tracking:
        for name in self._names:
            self._tolerate(name, lambda name=name: self._open.update({name: _OPEN[name](self._series)}))
        return self

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
    """``key=value`` of each plain setting that is not its default, tables after the keys beside them."""
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

"""Where an update works, and how it can be interrupted at any moment and go on."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rollout_core.algorithms.state import METRICS_FILE, MODEL_FOLDER, TrainState, load_state, save_state
from rollout_core.config import LearnerSettings
from rollout_core.errors import CorruptObject, NotFound
from rollout_core.ids import ContentId
from rollout_core.objects import ObjectStore
from rollout_core.records import Checkpoint
from rollout_core.snapshots import SnapshotStore

log = logging.getLogger(__name__)

FINISHED = "finished"
"""Label of an update's last snapshot, unless people give it a better one."""
SECONDS = "training_seconds"
"""Key of a snapshot's record; the snapshot itself does not depend on the clock."""


@dataclass(frozen=True)
class Workshop:
    """Where an update works and under which key it can be resumed."""

    objects: ObjectStore
    cache: Path
    """Local folder for fetched models."""
    key: ContentId
    """Identity of this update: equal inputs, equal key."""
    run_id: str
    seed: int
    num_threads: int | None = None
    on_step: Callable[[dict[str, float]], None] = field(default=lambda row: None)
    on_start: Callable[[int, int], None] = field(default=lambda first_step, last_step: None)
    """Called with the step training starts at and the one it ends at."""

    def model(self, content_id: ContentId) -> Path:
        """Local folder of a model."""
        return self.objects.local_tree(content_id, self.cache)


class Resumption:
    """The snapshots of one update in progress."""

    def __init__(self, workshop: Workshop, algorithm: str, settings: LearnerSettings, tokenizer_from: Path) -> None:
        self._workshop = workshop
        self._algorithm = algorithm
        self._settings = settings
        self._tokenizer_from = tokenizer_from
        self._snapshots = SnapshotStore(workshop.objects)
        self._ref = f"progress/{workshop.key}"

    def restore(self, state: TrainState) -> None:
        """Bring ``state`` to the last snapshot of this update, if there is one that can be read."""
        snapshot_id = self._workshop.objects.get_ref(self._ref)
        if snapshot_id is None:
            return
        with tempfile.TemporaryDirectory(prefix="rollout-restore-") as scratch:
            folder = Path(scratch) / "state"
            try:
                snapshot = self._snapshots.restore(snapshot_id, folder)
            except (CorruptObject, NotFound) as error:
                log.warning("%s update starts over: its last snapshot cannot be read (%s)", self._algorithm, error)
                return
            load_state(state, folder)
            state.seconds = snapshot.meta.get(SECONDS, 0.0)
        log.info("%s update resumes at step %d from snapshot %s", self._algorithm, state.step, snapshot_id.short)

    def save(self, state: TrainState) -> None:
        """Make the current step resumable; when this returns, a kill loses nothing before it."""
        with _SavedState(state, self._tokenizer_from) as folder:
            snapshot = self._snapshots.save(
                folder,
                run_id=self._workshop.run_id,
                step=state.step,
                algorithm=self._algorithm,
                meta={SECONDS: round(state.seconds, 3)},
            )
        self._workshop.objects.set_ref(self._ref, snapshot.id)
        self._snapshots.prune(self._workshop.run_id, keep_last=self._settings.snapshots.keep_last)

    def finish(self, state: TrainState) -> Checkpoint:
        """File the outcome: the model by itself, and the state training can go on from."""
        objects = self._workshop.objects
        with _SavedState(state, self._tokenizer_from) as folder:
            model = objects.put_tree(folder / MODEL_FOLDER)
            metrics = objects.put_file(folder / METRICS_FILE)
            # Labelled, or a later update of the same run would prune what its own training goes on from.
            snapshot = self._snapshots.save(
                folder,
                run_id=self._workshop.run_id,
                step=state.step,
                algorithm=self._algorithm,
                label=FINISHED,
                meta={SECONDS: round(state.seconds, 3)},
            )
        # Until the caller has filed this outcome, a retry finds the finished state here and need not train again.
        objects.set_ref(self._ref, snapshot.id)
        last = state.metrics[-1] if state.metrics else {}
        return Checkpoint(
            model=model,
            train_state=snapshot.id,
            metrics=metrics,
            algorithm=self._algorithm,
            step=state.step,
            summary={name: value for name, value in last.items() if name != "step"},
        )


class _SavedState:
    """A temporary folder holding a saved state."""

    def __init__(self, state: TrainState, tokenizer_from: Path) -> None:
        self._state = state
        self._tokenizer_from = tokenizer_from

    def __enter__(self) -> Path:
        self._scratch = tempfile.mkdtemp(prefix="rollout-state-")
        folder = Path(self._scratch) / "state"
        save_state(self._state, folder, tokenizer_from=self._tokenizer_from)
        return folder

    def __exit__(self, *exc_info: object) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

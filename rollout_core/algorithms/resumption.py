"""The snapshots of one update, written beside training, and how the update resumes from the last of them.

A step waits only while the state is copied in memory; a thread then writes the copy, files it and moves the update's
ref to it, which is the last thing it does: killed at any moment, the update resumes from the snapshot before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.parallel import all_ranks_equal, broadcast_from_rank0, broadcast_text_from_rank0, is_first
from rollout_core.algorithms.state import (
    METRICS_FILE,
    MODEL_FOLDER,
    StateCopy,
    TrainState,
    copy_state,
    device_of,
    load_state,
    write_state,
)
from rollout_core.base.errors import ConfigError, CorruptObject, NotFound, Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.base.numerics import arithmetic, differing, is_portable_here
from rollout_core.base.scratch import scratch_folder
from rollout_core.config import LearnerSettings
from rollout_core.objects.records import Checkpoint
from rollout_core.objects.snapshots import PROGRESS_REFS, RUN_NAME, Snapshot, SnapshotStore

log = logging.getLogger(__name__)

FINISHED = "finished"
"""Label of an update's last snapshot, unless people give it a better one."""
SECONDS = "training_seconds"
"""Key of a snapshot's record; the snapshot itself does not depend on the clock."""
ARITHMETIC = "arithmetic"
"""The same: what decided over last bits, of each part of the update that was computed in another way, in order."""


class Origin(Enum):
    """Which snapshot an update resumes from."""

    NONE = "none"
    OWN = "its own last one"
    GIVEN = "the one given to start from"


class Resumption:
    """The snapshots of one update in progress. As a context manager it waits at the end for what is being written.

    Of several processes all read them, and the first one writes them. What concerns a state is collective.
    """

    def __init__(self, context: UpdateContext, algorithm: str, settings: LearnerSettings, tokenizer_from: Path) -> None:
        self._context = context
        self._algorithm = algorithm
        self._settings = settings
        self._tokenizer_from = tokenizer_from
        self._snapshots = SnapshotStore(context.objects)
        self._ref = f"{PROGRESS_REFS}/{context.key}"
        self._arithmetic = [arithmetic()]
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._writing: Future[None] | None = None
        self._is_due = False

    def __enter__(self) -> Resumption:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._writer.shutdown(wait=True)

    def restore(self, state: TrainState) -> Origin:
        """Bring ``state`` to the last snapshot of this update, else to the one it is to start from, if there is one.

        Of its own one that cannot be read counts as none. Raises ConfigError where the other is not of this model, or
        where its own was made by other arithmetic and this is to be portable; Recoverable where only some of several
        processes could read their own.
        """
        found = self._restore_own(state)
        if not all_ranks_equal(float(found), device_of(state)):
            raise Recoverable(
                f"{self._algorithm}: only some of the processes could read the last snapshot, this one "
                f"{'among them' if found else 'not'}. The next try finds a damaged one set aside"
            )
        if found:
            return Origin.OWN
        if self._context.start_from is None:
            return Origin.NONE
        self._restore_from(self._context.start_from, state)
        return Origin.GIVEN

    def _restore_own(self, state: TrainState) -> bool:
        snapshot_id = self._context.objects.cached_ref(self._ref)
        if snapshot_id is None:
            return False
        try:
            self._restore_from(snapshot_id, state, same_arithmetic=is_portable_here())
        except (CorruptObject, NotFound) as error:
            log.warning("%s update starts over: its last snapshot cannot be read (%s)", self._algorithm, error)
            return False
        return True

    def _arithmetic_with(self, snapshot_id: ContentId, *, same: bool) -> list[dict[str, Any]]:
        """That of the parts so far and this process's. A difference is logged, or refused if ``same``."""
        before = self._snapshots.get(snapshot_id).meta.get(ARITHMETIC, [])
        here = arithmetic()
        differences = differing(before[-1], here) if before else ""
        if differences and same:
            raise ConfigError(
                f"the {self._algorithm} update was started with {differences}. Continuing would give other bytes than "
                'an uninterrupted run, and numerics = "portable" promises the same. Run it with what it was started '
                "with, or from its start by run.refresh = true, or train on as another result by run.resume = "
                f'"{snapshot_id.short}"'
            )
        if differences:
            log.warning(
                "%s update continues with other arithmetic: started with %s. The result is sound, but its last bits "
                "differ from those of an uninterrupted run on either machine; its snapshots name both",
                self._algorithm,
                differences,
            )
        return [*before, here] if differences else before or [here]

    def _restore_from(self, snapshot_id: ContentId, state: TrainState, *, same_arithmetic: bool = False) -> None:
        computed = self._arithmetic_with(snapshot_id, same=same_arithmetic)
        with scratch_folder("restore") as scratch:
            folder = scratch / "state"
            snapshot = self._snapshots.restore(snapshot_id, folder)
            load_state(state, folder)
            state.seconds = snapshot.meta.get(SECONDS, 0.0)
        self._arithmetic = computed
        log.info("%s update resumes at step %d from snapshot %s", self._algorithm, state.step, snapshot_id.short)

    def save(self, state: TrainState) -> None:
        """Have the current step made resumable, or the next one that finds no other snapshot being written."""
        self._is_due = True
        self.after_step(state)

    def after_step(self, state: TrainState) -> None:
        """Start what is due, if nothing else is being written. Raises what went wrong with an earlier snapshot."""
        if self._writing is not None and self._writing.done():
            self._wait()
        # The first process writes, so it knows whether a copy would have to wait; all take part in making one.
        if self._is_due and broadcast_from_rank0(self._writing is None, device_of(state)):
            self._is_due = False
            copied = copy_state(state)
            if is_first():
                self._writing = self._writer.submit(self._write, copied)

    def save_now(self, state: TrainState) -> None:
        """Make the current step resumable; when this returns, a kill loses nothing before it."""
        self._wait()
        copied = copy_state(state)
        if is_first():
            self._write(copied)
        # Nobody fails before it is there: who started the processes would end the first one, too.
        broadcast_from_rank0(state.step, device_of(state))

    def finish(self, state: TrainState) -> Checkpoint:
        """File the outcome: the model by itself, and the state training can resume from."""
        self._wait()
        copied = copy_state(state)
        filed = self._filed(state, copied).model_dump_json() if is_first() else ""
        return Checkpoint.model_validate_json(broadcast_text_from_rank0(filed, device_of(state)))

    def _filed(self, state: TrainState, copied: StateCopy) -> Checkpoint:
        objects = self._context.objects
        with self._written(copied) as folder:
            model = objects.put_tree(folder / MODEL_FOLDER)
            metrics = objects.put_file(folder / METRICS_FILE)
            # Labelled, or a later update of the same run would prune what its own training resumes from.
            snapshot = self._file(copied, folder, label=FINISHED)
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

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, copied: StateCopy) -> None:
        with self._written(copied) as folder:
            snapshot = self._file(copied, folder)
        self._context.objects.set_ref(self._ref, snapshot.id)
        policy = self._settings.snapshots
        in_use = {snapshot_id for _, snapshot_id in self._context.objects.list_refs(PROGRESS_REFS)}
        self._snapshots.prune(
            self._context.run_id, keep_last=policy.keep_last, keep_every=policy.keep_every, keep=in_use
        )

    def _file(self, copied: StateCopy, folder: Path, *, label: str | None = None) -> Snapshot:
        return self._snapshots.save(
            folder,
            run_id=self._context.run_id,
            step=copied.step,
            algorithm=self._algorithm,
            label=label,
            meta={
                SECONDS: round(copied.seconds, 3),
                RUN_NAME: self._context.run_name,
                ARITHMETIC: self._arithmetic,
            },
        )

    @contextmanager
    def _written(self, copied: StateCopy) -> Iterator[Path]:
        """A temporary folder holding a state."""
        with scratch_folder("state") as scratch:
            write_state(copied, scratch / "state", tokenizer_from=self._tokenizer_from)
            yield scratch / "state"

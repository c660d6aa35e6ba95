"""The snapshots of one update, written while training continues, and how the update resumes from the last of them.

A step waits only while the state is copied in memory; a thread then writes the copy, files it and moves the update's
ref to it, which is the last thing it does: killed at any moment, the update resumes from the snapshot before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from enum import Enum
from pathlib import Path
from typing import Any

from rollout_core.algorithms.context import UpdateContext, seen
from rollout_core.algorithms.parallel import all_ranks_equal, broadcast_from_rank0, broadcast_text_from_rank0, is_first
from rollout_core.algorithms.state import (
    METRICS_FILE,
    StateCopy,
    TrainState,
    copy_state,
    device_of,
    load_state,
    write_state,
)
from rollout_core.base.determinism import arithmetic, differing, is_portable_here
from rollout_core.base.errors import ConfigError, CorruptObject, NotFound, Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.base.locks import scratch_folder
from rollout_core.config import LearnerSettings
from rollout_core.objects.local_trees import keep_local_tree
from rollout_core.objects.records import Checkpoint
from rollout_core.objects.retention.pruning import free
from rollout_core.objects.retention.unstored import hold_model, put_model, put_stored_model
from rollout_core.objects.snapshots import FINISHED, MODEL_FOLDER, PROGRESS_REFS, RUN_NAME, Snapshot, SnapshotStore
from rollout_core.objects.trees import TreeManifest, files_of

log = logging.getLogger(__name__)

BEST = "best"
"""Key of a state's extras: step and loss of the best evaluation on held-out rows so far, the content id of these rows,
evaluations since, and the snapshot of that step where one is kept."""
SECONDS = "training_seconds"
"""Key of a snapshot's record; the snapshot itself does not depend on the clock."""
ARITHMETIC = "arithmetic"
"""The same: what decided over last bits, of each part of the update that was computed in another way, in order."""


def _best_of(folder: Path, snapshot_id: ContentId) -> ContentId | None:
    """Snapshot of the best evaluation that the state in ``folder``, which is ``snapshot_id``, knows of."""
    document = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    best = document["extras"].get(BEST)
    if best is None:
        return None
    return snapshot_id if best["step"] == document["step"] else best.get("snapshot")


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
        self._ref = context.progress_ref
        self._arithmetic = [arithmetic()]
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._writing: Future[None] | None = None
        self._deleter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="free")
        """Looks at the whole storage, so nobody waits for it; what it leaves the run deletes, or housekeeping."""
        self._freeing: Future[None] | None = None
        self._dropped: set[ContentId] = set()
        """Manifests of snapshots that were given up and are yet to be freed."""
        self._is_due = False
        evaluation = getattr(settings, "evaluation", None)
        self._keeps_best = evaluation is not None and evaluation.select == "best"
        self._best: ContentId | None = None
        """Snapshot of the best evaluation; known to the first of several processes."""
        self._best_ref = f"{self._ref}-best"
        self._resumed: ContentId | None = None
        """Of this update's own snapshots the one that it was taken up from, which a killed run may have saved."""

    def __enter__(self) -> Resumption:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._writer.shutdown(wait=True)
        self._deleter.shutdown(wait=False, cancel_futures=True)

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
            self._restore_from(snapshot_id, state, same_arithmetic=is_portable_here(), with_best=True)
            self._resumed = snapshot_id
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
                "with, or from its start by run.refresh = true, or, as another result, go on from it by run.resume = "
                f'"{snapshot_id.short}" of `rollout train`'
            )
        if differences:
            log.warning(
                "%s update continues with other arithmetic: started with %s. The result is sound, but its last bits "
                "differ from those of an uninterrupted run on either machine; its snapshots name both",
                self._algorithm,
                differences,
            )
        return [*before, here] if differences else before or [here]

    def _restore_from(
        self, snapshot_id: ContentId, state: TrainState, *, same_arithmetic: bool = False, with_best: bool = False
    ) -> None:
        """``with_best``: raises NotFound where that of the best evaluation is gone, which is else forgotten."""
        computed = self._arithmetic_with(snapshot_id, same=same_arithmetic)
        with scratch_folder("restore") as scratch:
            folder = scratch / "state"
            snapshot = self._snapshots.restore(snapshot_id, folder)
            best = _best_of(folder, snapshot_id) if self._keeps_best else None
            is_gone = best is not None and not self._snapshots.is_present(best)
            if is_gone and with_best:
                raise NotFound(f"snapshot {best}, that of its best evaluation, is gone")
            load_state(state, folder)
            state.seconds = snapshot.meta.get(SECONDS, 0.0)
        if is_gone:
            log.warning("%s: snapshot %s, that of the best evaluation until then, is gone", self._algorithm, best)
            del state.extras[BEST]
        elif best is not None and is_first():
            self._keep_best(best)
        self._arithmetic = computed
        log.info("%s update resumes at step %d from snapshot %s", self._algorithm, state.step, snapshot_id.short)

    def save(self, state: TrainState) -> None:
        """Have the current step made resumable, or the next one that finds no other snapshot being written.

        Not where the state at the end is not stored either."""
        if not self._context.stores_state:
            return
        if self._keeps_best and state.extras.get(BEST, {}).get("step") == state.step:
            return  # `save_best` has
        self._is_due = True
        self.after_step(state)

    def save_best(self, state: TrainState) -> None:
        """Have the current step, that of the best evaluation so far, made resumable and kept until there is a better
        one. Waits for a snapshot that is being written."""
        self._wait()
        self._is_due = False
        copied = self._copy(state)
        if is_first():
            self._writing = self._writer.submit(copy_context().run, self._write, copied, is_best=True)

    def _keep_best(self, snapshot_id: ContentId) -> None:
        # Named like progress, so that neither this update nor another nor housekeeping drops it.
        self._best = snapshot_id
        self._context.objects.set_ref(self._best_ref, snapshot_id)

    def _copy(self, state: TrainState, *, copy: bool = True) -> StateCopy:
        """A copy that names the snapshot of the best evaluation, unless that is to be of this very copy. Without
        ``copy`` for who writes it before training continues. Collective."""
        best = state.extras.get(BEST)
        if best is not None and self._keeps_best:
            named = {} if best["step"] == state.step else {"snapshot": self._best}
            state.extras[BEST] = {**best, **named}
        return copy_state(state, copy=copy)

    def after_step(self, state: TrainState) -> None:
        """Start what is due, if nothing else is being written. Raises what went wrong with an earlier snapshot."""
        if self._writing is not None and self._writing.done():
            self._wait()
        # The first process writes, so it knows whether a copy would have to wait; all take part in making one.
        if self._is_due and broadcast_from_rank0(self._writing is None, device_of(state)):
            self._is_due = False
            copied = self._copy(state)
            if is_first():
                self._writing = self._writer.submit(copy_context().run, self._write, copied)

    def save_now(self, state: TrainState) -> None:
        """Make the current step resumable; when this returns, a kill loses nothing before it."""
        self._wait()
        copied = self._copy(state, copy=False)
        if is_first():
            self._write(copied)
        # Nobody fails before it is there: who started the processes would end the first one, too.
        broadcast_from_rank0(state.step, device_of(state))

    def finish(self, state: TrainState) -> Checkpoint:
        """File the outcome: the model by itself, and the state training can resume from; those of the best evaluation
        where that is to be the result."""
        self._wait()
        copied = self._copy(state, copy=False)
        filed = self._filed(state, copied).model_dump_json() if is_first() else ""
        return Checkpoint.model_validate_json(broadcast_text_from_rank0(filed, device_of(state)))

    def _filed(self, state: TrainState, copied: StateCopy) -> Checkpoint:
        objects = self._context.objects
        with self._written(copied) as folder:
            metrics = objects.put_file(folder / METRICS_FILE)
            last, model = (self._store if self._context.stores_state else self._hold)(copied, folder)
        chosen, step, more = last, state.step, {}
        best = state.extras.get(BEST)
        if self._keeps_best and best is not None and best["step"] != state.step:
            chosen, step, more = ContentId(best["snapshot"]), best["step"], {"last_step": float(state.step)}
            model = self._snapshots.subtree(chosen, MODEL_FOLDER)
            if self._snapshots.get(chosen).label is None:
                self._snapshots.set_label(chosen, FINISHED)
            log.info("%s: step %d of %d has the lowest held-out loss", self._algorithm, step, state.step)
        if self._context.stores_state:
            # Until the caller has filed this outcome, a retry finds the finished state here and need not train again.
            objects.set_ref(self._ref, last)
        objects.delete_ref(self._best_ref)
        if self._context.stores_state:
            self._drop_older()  # how many are left does not depend on how fast the last steps were; the run frees them
        figures = next((row for row in reversed(state.metrics) if row["step"] == step), {})
        return Checkpoint(
            model=model,
            train_state=chosen,
            metrics=metrics,
            algorithm=self._algorithm,
            step=step,
            summary={name: value for name, value in figures.items() if name != "step"} | more,
        )

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, copied: StateCopy, *, is_best: bool = False) -> None:
        with self._written(copied) as folder:
            snapshot = self._file(copied, folder, given=files_of(folder))
        self._context.check()
        self._context.objects.set_ref(self._ref, snapshot.id)
        if is_best:  # until here an update that is taken up needs the one before
            self._keep_best(snapshot.id)
        self._dropped |= self._drop_older()
        if self._dropped and (self._freeing is None or self._freeing.done()):
            self._freeing = self._deleter.submit(copy_context().run, self._free, self._dropped)
            self._dropped = set()

    def _free(self, dropped: set[ContentId]) -> None:
        try:
            free(self._context.objects, among=dropped)
        except Exception as error:  # noqa: BLE001 - whatever storage raises: the run and housekeeping delete it, too
            log.info("snapshots that were given up are not deleted yet: %s", error)

    def _drop_older(self) -> set[ContentId]:
        """Give up the snapshots that the settings do not keep; their manifests."""
        policy = self._settings.snapshots
        in_use = {snapshot_id for _, snapshot_id in self._context.objects.list_refs(PROGRESS_REFS)}
        kept = {"keep_last": policy.keep_last, "keep_every": policy.keep_every, "keep": in_use}
        dropped = self._snapshots.prune(self._context.run_id, **kept, dry_run=True)
        if self._resumed is not None and self._resumed not in in_use:
            dropped += [found for found in self._snapshots.named_by(self._resumed) if found.label is None]
        for snapshot in {snapshot.ref: snapshot for snapshot in dropped}.values():
            self._snapshots.drop_name(snapshot, run_id=None)
        return {snapshot.files for snapshot in dropped}

    def _store(self, copied: StateCopy, folder: Path) -> tuple[ContentId, ContentId]:
        """The state and its model, stored."""
        before = seen(folder)
        # Files of the model go to the cache, which is not the store's alone. Small ones are copied in any case.
        large = (path for path, mark in before if mark.size > self._context.objects.files.whole_write_bytes)
        given = {path for path in large if not path.startswith(f"{MODEL_FOLDER}/")}
        # Labelled, or a later update of the same run would prune what its own training resumes from.
        snapshot = self._file(copied, folder, label=FINISHED, given=given)
        manifest = self._context.objects.manifest(snapshot.files).below(MODEL_FOLDER)
        model = put_stored_model(self._context.objects, manifest)
        self._keep_here(model, manifest, folder / MODEL_FOLDER)
        now, was = seen(folder), dict(before)
        # A file that was given has the time when it was.
        is_same = all(was[path][:2] == mark[:2] and (was[path] == mark or path in given) for path, mark in now)
        if self._context.held is not None and is_same:
            self._context.held.lend(folder, snapshot.id, now, **self._about(copied, FINISHED))
        return snapshot.id, model

    def _hold(self, copied: StateCopy, folder: Path) -> tuple[ContentId, ContentId]:
        """The state, held, and its model, which is stored unless it is to go with the states."""
        context, about = self._context, self._about(copied, FINISHED)
        assert context.held is not None, "there is where to hold it"
        state_id, manifest, checks = context.held.hold(folder, context.objects, **about)
        model, written = manifest.below(MODEL_FOLDER), context.held.place(state_id) / MODEL_FOLDER
        if not self._settings.stores_all_models:
            made_by = {name: about[name] for name in ("run_id", "step", "algorithm")}
            return state_id, hold_model(context.objects, model, written, context.cache, **made_by)
        return state_id, self._keep_here(put_model(context.objects, model, written, checks), model, written)

    def _keep_here(self, model: ContentId, manifest: TreeManifest, written: Path) -> ContentId:
        keep_local_tree(model, manifest, written, self._context.cache)  # the engine of this machine need not fetch it
        return model

    def _file(
        self, copied: StateCopy, folder: Path, *, label: str | None = None, given: Collection[str] = ()
    ) -> Snapshot:
        return self._snapshots.save(folder, **self._about(copied, label), given=given)

    def _about(self, copied: StateCopy, label: str | None) -> dict[str, Any]:
        return {
            "run_id": self._context.run_id,
            "step": copied.step,
            "algorithm": self._algorithm,
            "label": label,
            "meta": {
                SECONDS: round(copied.seconds, 3),
                RUN_NAME: self._context.run_name,
                ARITHMETIC: self._arithmetic,
            },
        }

    @contextmanager
    def _written(self, copied: StateCopy) -> Iterator[Path]:
        """A temporary folder holding a state. That which the update began with has been read, and makes room."""
        if self._context.held is not None:
            self._context.held.drop_stored()
        with scratch_folder("state") as scratch:
            write_state(copied, scratch / "state", tokenizer_from=self._tokenizer_from)
            yield scratch / "state"

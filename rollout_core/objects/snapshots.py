"""Snapshots: folders of state under a content id, saved durably and verified when restored.

A snapshot's id is the blake3 of the deterministic tar of its folder (see `tar`), so equal state has an equal id on
every machine. What is stored is each file as a blob of its own plus a small record, so that a tensor file shared by
many snapshots is stored once; `SnapshotStore.export` streams the very tar whose hash is the id.

The record of snapshot S saved by run R is the blob that ref ``snapshots/<S>/<R>`` names. It says both itself, so that a
ref to another's record is noticed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, get_args

from blake3 import blake3
from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from rollout_core.base.errors import ConfigError, CorruptObject, CorruptRef, MissingObject, NotFound
from rollout_core.base.ids import ContentId, canonical_json
from rollout_core.objects import ObjectStore
from rollout_core.objects.addresses import complete_snapshot_id, copy_object
from rollout_core.objects.files import EXPIRED_REFS, GIVEN_UP_REFS, PRUNED_REFS, SNAPSHOT_REFS, hash_chunks, parsed
from rollout_core.objects.lineage import lineage_of
from rollout_core.objects.retention.garbage import GcReport, collect_garbage
from rollout_core.objects.trees import appearing_folder, file_mark, files_of, identify, read_file, tar_stream

log = logging.getLogger(__name__)

_REPAIR = "`rollout storage verify --repair` says what is lost, and restores what can be"
PROGRESS_REFS = "progress"
"""Each names the last snapshot of an unfinished stage, by an id that is no blob's."""
MODEL_FOLDER = "model"
"""Of a training state: its weights, a whole model by themselves."""
_RUN_ID = re.compile("[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")
SnapshotKind = Literal["train_state", "buffer", "process", "episodic_memory"]


class Snapshot(BaseModel):
    """The record of one snapshot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: ContentId
    """blake3 of the deterministic tar of the folder."""
    kind: SnapshotKind
    run_id: str
    step: int
    label: str | None = None
    """A name people gave it; labelled snapshots are spared by `SnapshotStore.prune`."""
    created_at: AwareDatetime
    algorithm: str
    files: ContentId
    """Manifest of the folder."""
    size_bytes: int
    """Sum of the sizes of its files."""
    meta: dict[str, Any] = {}
    """Whatever the saver wants to remember, as JSON."""

    @property
    def ref(self) -> str:
        """The ref that names this record."""
        return _ref(self.id, self.run_id)

    @property
    def runs(self) -> set[str]:
        """Names of the runs that trained it, or found it trained."""
        found = [str(self.meta.get(RUN_NAME, "")), *(label.partition("/")[0] for label in self.stage_labels)]
        return {name for name in found if name}

    @property
    def stage_labels(self) -> list[str]:
        """Labels that runs gave it, those that found it trained as well."""
        found = self.meta.get(STAGE_LABELS)
        return [label for label in found if isinstance(label, str)] if isinstance(found, list) else []

    @property
    def is_kept_by_label(self) -> bool:
        """Whether somebody labelled it. The labels of pipelines are ``finished``, and RUN/ALGORITHM or
        RUN/ALGORITHM-ITERATION."""
        if self.label in (None, FINISHED, *self.stage_labels):
            return False
        run = re.escape(str(self.meta.get(RUN_NAME, "")))
        return re.fullmatch(rf"{run}/[a-z]+(-\d+)?", self.label) is None


class PrunedSnapshot(BaseModel):
    """What stays of a snapshot that was given up, or never stored. It names no blob, or it would keep it."""

    model_config = ConfigDict(frozen=True)

    kind: SnapshotKind
    run_id: str
    step: int
    algorithm: str
    created_at: AwareDatetime
    let_go_at: AwareDatetime
    was_stored: bool = True
    """False of a state that its run named and did not store, see `algorithms.context`."""
    run: str | None = None
    """The flow run that gave it up; None: housekeeping."""


FINISHED = "finished"
"""Label of an update's last snapshot, unless people give it a better one."""


class SnapshotComparison(BaseModel):
    """In what two snapshots differ."""

    model_config = ConfigDict(frozen=True)

    record: dict[str, tuple[Any, Any]]
    """What their records say otherwise."""
    same: tuple[str, ...]
    """Files of the same name and bytes."""
    changed: tuple[str, ...]
    """Files of the same name with other bytes."""
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    same_bytes: int
    """Stored once for both."""
    first_bytes: int
    second_bytes: int


class SnapshotStore:
    """Saves, finds, restores and drops snapshots in an object store."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def save(
        self,
        folder: Path,
        *,
        kind: SnapshotKind = "train_state",
        run_id: str,
        step: int,
        algorithm: str,
        label: str | None = None,
        meta: dict[str, Any] | None = None,
        given: Collection[str] = (),
    ) -> Snapshot:
        """Save ``folder``; durable when this returns. The same bytes have the same id. ``given`` are files of it to
        which nobody writes any more, which may so be spared a copy (`ObjectStore.put_files`).

        Saving the same bytes again in the same run replaces the record, except that a label stays unless a new one is
        given, and so do those of runs. Raises ConfigError for what a tree cannot hold, Conflict when the folder changes
        meanwhile.
        """
        _check_kind(kind)
        canonical_json(meta)  # pydantic would quietly turn NaN into null
        paths = files_of(folder)
        marks = {path: file_mark(paths[path]) for path in given}
        snapshot_id, manifest, checks = identify(paths)
        ref = _ref(snapshot_id, run_id)
        before = self._record(ref)
        if label in (None, FINISHED) and before is not None and before.label is not None:
            label = before.label
        by_runs = {STAGE_LABELS: before.stage_labels} if before is not None and before.stage_labels else {}
        snapshot = Snapshot(
            id=snapshot_id,
            kind=kind,
            run_id=run_id,
            step=step,
            label=label,
            created_at=datetime.now(UTC),
            algorithm=algorithm,
            files=self._objects.put_files(manifest, paths, checks, marks),
            size_bytes=manifest.size_bytes,
            meta={**(meta or {}), **by_runs},
        )
        self._objects.set_ref(ref, self._objects.put_json(snapshot))
        return snapshot

    def restore(self, snapshot_id: ContentId, folder: Path) -> Snapshot:
        """Write the snapshot's files to ``folder``, which appears whole and verified, or not at all.

        ``folder`` must not exist, or be empty. Raises NotFound, MissingObject, CorruptObject, or Conflict. A snapshot
        that was pruned is MissingObject, and from then on does not count as one, so that its stage runs again.
        """
        snapshot = self._needed(snapshot_id)
        with appearing_folder(folder) as temporary:
            with self._missed(snapshot_id):
                manifest = self._objects.manifest(snapshot.files)
                self._objects.get_files(manifest, temporary)
            sizes = [(file.path, file.size) for file in manifest.files]
            found = hash_chunks(tar_stream(sizes, lambda path: read_file(temporary / path)))
            if found != snapshot.id:
                raise _wrong_tar(snapshot, found)
        return snapshot

    def _needed(self, snapshot_id: ContentId) -> Snapshot:
        try:
            return self.get(snapshot_id)
        except NotFound as error:
            if self.find_pruned(snapshot_id) is None:
                raise
            self.forget(snapshot_id)
            raise MissingObject(snapshot_id, f"{error}; the stage that made it has to run again") from error

    def present(self, snapshot_id: ContentId) -> Snapshot:
        """The record of a snapshot whose files are all there with the right sizes; they are not read, as a restore
        verifies them. Raises as `restore` where one is not."""
        snapshot = self._needed(snapshot_id)
        with self._missed(snapshot_id):
            self._objects.check_present(snapshot.files)
        return snapshot

    @contextmanager
    def _missed(self, snapshot_id: ContentId) -> Iterator[None]:
        """Where a file of a snapshot is gone within the block, it does not count as pruned either, so that its stage
        runs again."""
        try:
            yield
        except MissingObject:
            self.forget(snapshot_id)
            raise

    def export(self, snapshot_id: ContentId) -> Iterator[bytes]:
        """Chunks of the tar whose blake3 is the snapshot's id; CorruptObject instead of the last one if it is not."""
        snapshot = self.get(snapshot_id)
        files = {file.path: file for file in self._objects.manifest(snapshot.files).files}
        sizes = [(path, file.size) for path, file in files.items()]
        hasher = blake3()
        held = b""
        for chunk in tar_stream(sizes, lambda path: self._objects.stream(files[path].content_id)):
            if held:
                yield held
            hasher.update(chunk)
            held = chunk
        if hasher.hexdigest() != snapshot.id:
            raise _wrong_tar(snapshot, hasher.hexdigest())
        yield held

    def get(self, snapshot_id: ContentId) -> Snapshot:
        """The record; of several runs that saved the same bytes, the newest. Raises NotFound."""
        below = f"{SNAPSHOT_REFS}/{ContentId(snapshot_id)}"
        found = _newest_first(self._records(below))
        if found:
            return found[0]
        if self._objects.ref_names(below):
            raise NotFound(f"snapshot {snapshot_id} cannot be read: its record is damaged or gone. {_REPAIR}")
        gone = self.find_pruned(snapshot_id)
        if gone is not None and not gone.was_stored:
            raise NotFound(
                f"snapshot {snapshot_id} (step {gone.step} of {gone.algorithm}, run {gone.run_id}) was not stored "
                "(state_every); `rollout snapshot list` has those around it"
            )
        if gone is not None:
            by = "housekeeping" if gone.run is None else "its run, which has a later one (run.keep_states)"
            raise NotFound(
                f"snapshot {snapshot_id} (step {gone.step} of {gone.algorithm}, run {gone.run_id}) was pruned by "
                f"{by} on {gone.let_go_at:%Y-%m-%d}; `rollout reproduce` makes it again, `rollout snapshot list` has "
                "those that are stored"
            )
        raise NotFound(f"snapshot not found: {snapshot_id}")

    def copy(self, snapshot_id: ContentId, target: ObjectStore) -> None:
        """Put a snapshot, as its newest record has it, into another object store. Raises NotFound, MissingObject."""
        snapshot = self.get(snapshot_id)
        copy_object(self._objects, target, snapshot.files)
        target.set_ref(snapshot.ref, target.put_json(snapshot))

    def compare(self, first: ContentId, second: ContentId) -> SnapshotComparison:
        """In what two snapshots differ, by their records and manifests. Raises NotFound, MissingObject."""
        records = self.get(first), self.get(second)
        one, two = ({file.path: file for file in self._objects.manifest(item.files).files} for item in records)
        said, other = (item.model_dump(mode="json", exclude={"id", "files"}) for item in records)
        both = sorted(one.keys() & two.keys())
        same = [path for path in both if one[path].content_id == two[path].content_id]
        return SnapshotComparison(
            record={name: (said[name], other[name]) for name in said if said[name] != other[name]},
            same=tuple(same),
            changed=tuple(path for path in both if path not in same),
            only_first=tuple(sorted(one.keys() - two.keys())),
            only_second=tuple(sorted(two.keys() - one.keys())),
            same_bytes=sum(one[path].size for path in same),
            first_bytes=records[0].size_bytes,
            second_bytes=records[1].size_bytes,
        )

    def subtree(self, snapshot_id: ContentId, folder: str) -> ContentId:
        """The tree that ``folder`` of the snapshot is by itself; its files are not copied. Raises NotFound."""
        manifest = self._objects.manifest(self.get(snapshot_id).files).below(folder)
        if not manifest.files:
            raise NotFound(f"snapshot {snapshot_id} has no folder {folder!r}")
        return self._objects.put_json(manifest)

    def list(
        self,
        *,
        run_id: str | None = None,
        kind: SnapshotKind | None = None,
        label_contains: str | None = None,
        limit: int | None = None,
    ) -> list[Snapshot]:
        """Snapshots that match all that is given, newest first. Unlabelled ones match no ``label_contains``.

        One whose record cannot be read is left out, and named in a warning.

        Raises ConfigError for an unknown kind.
        """
        if kind is not None:
            _check_kind(kind)
        found = [
            snapshot
            for snapshot in self._records(SNAPSHOT_REFS, run_id)
            if kind in (None, snapshot.kind)
            and (label_contains is None or (snapshot.label is not None and label_contains in snapshot.label))
        ]
        return _newest_first(found)[:limit]

    def set_label(self, snapshot_id: ContentId, label: str | None, *, by_stage: bool = False) -> Snapshot:
        """Give the snapshot a label, or take it away. Raises NotFound.

        A label keeps the snapshot from housekeeping, see `Snapshot.is_kept_by_label`. One ``by_stage``, RUN/ALGORITHM
        or RUN/ALGORITHM-ITERATION, does not replace a label that does; the record has it in any case.
        """
        snapshot = self.get(snapshot_id)
        labels = [known for known in snapshot.stage_labels if known != label]
        is_a_persons = snapshot.is_kept_by_label
        if by_stage and label is not None and not (is_a_persons and label == snapshot.label):
            labels.append(label)
        if by_stage and is_a_persons:
            label = snapshot.label
        meta = {name: value for name, value in snapshot.meta.items() if name != STAGE_LABELS}
        meta |= {STAGE_LABELS: labels} if labels else {}
        snapshot = snapshot.model_copy(update={"label": label, "meta": meta})
        self._objects.set_ref(snapshot.ref, self._objects.put_json(snapshot))
        return snapshot

    def is_present(self, snapshot_id: ContentId) -> bool:
        """Whether the record and all files are there with the right sizes. The files are not read."""
        try:
            return self._objects.tree_is_present(self.get(snapshot_id).files)
        except NotFound:
            return False

    def counts(self, snapshot_id: ContentId) -> bool:
        """Whether a result that names the snapshot is whole: it is present, or was pruned."""
        return self.is_present(snapshot_id) or self.find_pruned(snapshot_id) is not None

    def find_pruned(self, snapshot_id: ContentId) -> PrunedSnapshot | None:
        """What is known of a snapshot that was pruned, by housekeeping or by its run; None of any other."""
        noted = self._objects.cached_bytes(f"{PRUNED_REFS}/{ContentId(snapshot_id)}")
        kind = None if noted is None else parsed(noted).get("kind")  # there are notes of models, too
        return PrunedSnapshot.model_validate_json(noted) if noted and kind in get_args(SnapshotKind) else None

    def expire(self, snapshot: Snapshot) -> None:
        """Have one run's snapshot be pruned. Results that name it stay cached; who needs its state has it
        computed again.

        Its bytes stay until `gc`, what only it has until the runs now under way have ended. Killed, it is done again.
        """
        known = snapshot.model_dump(include=set(PrunedSnapshot.model_fields))
        self._note(snapshot.id, PrunedSnapshot(let_go_at=datetime.now(UTC), **known))
        expire_ref(self._objects, snapshot.ref)

    def drop_name(self, snapshot: Snapshot, run_id: str | None) -> None:
        """Take away one run's name of a snapshot that nobody needs any more, and leave word that its files may go
        (`retention.pruning`). Of a state that results name, ``run_id`` says who gave it up; they stay cached."""
        if run_id is not None:
            known = snapshot.model_dump(include=set(PrunedSnapshot.model_fields))
            self._note(snapshot.id, PrunedSnapshot(let_go_at=datetime.now(UTC), run=run_id, **known))
        # First, so that whoever is killed in between leaves nothing that is deleted by nobody.
        word = f"{GIVEN_UP_REFS}/{snapshot.files}"
        self._objects.set_ref(word, snapshot.files)
        self._objects.delete_ref(snapshot.ref)
        if self._objects.ref_names(f"{SNAPSHOT_REFS}/{snapshot.id}"):
            self._objects.delete_ref(word)

    def named_by(self, snapshot_id: ContentId) -> list[Snapshot]:
        """The records of all runs that have it, the newest first."""
        return _newest_first(self._records(f"{SNAPSHOT_REFS}/{ContentId(snapshot_id)}"))

    def fork(self, snapshot_id: ContentId, run: str) -> Snapshot:
        """Have another run name a snapshot as its own, so that it begins there, and housekeeping of the one that saved
        it takes nothing away. Nothing is copied. Raises NotFound, MissingObject, ConfigError where the run has it."""
        snapshot = self.present(snapshot_id)
        runs = {name for record in self.named_by(snapshot_id) for name in (record.run_id, *record.runs)}
        if run in runs:
            raise ConfigError(f"run {run!r} has snapshot {snapshot_id.short} already; fork it into another")
        meta = {name: value for name, value in snapshot.meta.items() if name != STAGE_LABELS}
        meta |= {RUN_NAME: run, FORKED_FROM: snapshot.run_id}
        label = snapshot.label if snapshot.is_kept_by_label else FINISHED
        own = {"run_id": run, "label": label, "meta": meta, "created_at": datetime.now(UTC)}
        forked = snapshot.model_copy(update=own)
        self.put_record(forked)
        self._objects.wait_for_sweep(forked.files)
        self.present(snapshot_id)  # until it was named, somebody may have given it up
        return forked

    def put_record(self, snapshot: Snapshot) -> None:
        """Have a run name a snapshot that another has saved."""
        self._objects.set_ref(snapshot.ref, self._objects.put_json(snapshot))

    def name_only(self, snapshot_id: ContentId, *, run_id: str, step: int, algorithm: str) -> None:
        """Have results count that name a training state which is not stored; nothing changes where it is."""
        if not self.is_present(snapshot_id):
            now, about = datetime.now(UTC), {"run_id": run_id, "step": step, "algorithm": algorithm}
            gone = PrunedSnapshot(kind="train_state", created_at=now, let_go_at=now, was_stored=False, **about)
            self._note(snapshot_id, gone)

    def _note(self, snapshot_id: ContentId, gone: PrunedSnapshot) -> None:
        self._objects.set_ref(f"{PRUNED_REFS}/{snapshot_id}", self._objects.put_bytes(gone.model_dump_json().encode()))

    def forget(self, snapshot_id: ContentId) -> None:
        """Have results that name a snapshot which is not stored count no longer. Idempotent."""
        self._objects.delete_ref(f"{PRUNED_REFS}/{ContentId(snapshot_id)}")

    def delete(self, snapshot_id: ContentId) -> None:
        """Drop the records of the snapshot, of every run. Its bytes stay until `gc`. Idempotent."""
        for ref in self._objects.ref_names(f"{SNAPSHOT_REFS}/{ContentId(snapshot_id)}"):
            self._objects.delete_ref(ref)

    def prune(
        self,
        run_id: str,
        *,
        keep_last: int = 3,
        keep_labelled: bool = True,
        max_age: timedelta | None = None,
        keep_every: int | None = None,
        keep: Collection[ContentId] = (),
        dry_run: bool = False,
    ) -> list[Snapshot]:
        """Drop old records of one run and return them, newest first. Their bytes stay until `gc`.

        Kept is what is among the newest ``keep_last`` of its kind (labelled or not), or labelled, or younger than
        ``max_age``, or of a step that ``keep_every`` divides, or among ``keep``. So ``max_age`` only protects; without
        it age does not count. A ``dry_run`` drops nothing.
        """
        now = datetime.now(UTC)
        found = self.list(run_id=run_id)
        newest = {snapshot.ref for kind in get_args(SnapshotKind) for snapshot in _of_kind(found, kind)[:keep_last]}
        dropped = [
            snapshot
            for snapshot in found
            if snapshot.ref not in newest
            and not (keep_labelled and snapshot.label is not None)
            and not (max_age is not None and now - snapshot.created_at < max_age)
            and not (keep_every is not None and snapshot.step % keep_every == 0)
            and snapshot.id not in keep
        ]
        for snapshot in () if dry_run else dropped:
            self._objects.delete_ref(snapshot.ref)
        return dropped

    def gc(
        self,
        *,
        extra_roots: Iterable[ContentId] = (),
        min_age: timedelta = timedelta(days=1),
        dry_run: bool = False,
    ) -> GcReport:
        """Delete blobs that nothing live reaches; see `retention.garbage.collect_garbage`."""
        return collect_garbage(self._objects, extra_roots=extra_roots, min_age=min_age, dry_run=dry_run)

    def _records(self, prefix: str, run_id: str | None = None) -> list[Snapshot]:
        names = [
            name for name in self._objects.ref_names(prefix) if run_id is None or name.rpartition("/")[2] == run_id
        ]
        return [record for record in self._objects.in_parallel(self._record, names) if record is not None]

    def _record(self, ref: str) -> Snapshot | None:
        """None when there is none, or none that can be read: one lost record must not hide the others."""
        try:
            content_id = self._objects.get_ref(ref)
            if content_id is None:
                return None
            snapshot = Snapshot.model_validate_json(self._objects.get_bytes(content_id))
        except (MissingObject, CorruptObject, CorruptRef) as error:
            log.warning("a snapshot is left out: %s", error)
        except ValidationError:
            log.warning("a snapshot is left out: what ref %s names is no record of one. %s", ref, _REPAIR)
        else:
            if ref == snapshot.ref:
                return snapshot
            log.warning("a snapshot is left out: ref %s names the record of %s. %s", ref, snapshot.ref, _REPAIR)
        return None


def progress_ref(key: ContentId) -> str:
    """Ref of the last snapshot of an unfinished stage."""
    return f"{PROGRESS_REFS}/{key}"


def expire_ref(objects: ObjectStore, name: str) -> None:
    """Take ``name`` away, but keep what it stands for as long as a run is under way that may have read it."""
    named = objects.cached_ref(name)
    if named is not None:
        objects.set_ref(f"{EXPIRED_REFS}/{name}", named)
    objects.delete_ref(name)


def _check_kind(kind: str) -> None:
    if kind not in get_args(SnapshotKind):
        raise ConfigError(f"unknown kind of snapshot: {kind!r}; expected one of {', '.join(get_args(SnapshotKind))}")


def _wrong_tar(snapshot: Snapshot, found: str) -> CorruptObject:
    return CorruptObject(
        snapshot.id,
        f"files of snapshot {snapshot.id} have the tar hash {found}; its record is wrong: delete the snapshot",
    )


def _of_kind(snapshots: Iterable[Snapshot], kind: SnapshotKind) -> list[Snapshot]:
    return [snapshot for snapshot in snapshots if snapshot.kind == kind]


def _newest_first(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    return sorted(snapshots, key=lambda snapshot: (snapshot.created_at, snapshot.step), reverse=True)


def _ref(snapshot_id: ContentId, run_id: str) -> str:
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigError(f"run id {run_id!r} cannot name a snapshot; expected letters, digits, '.', '_' and '-'")
    return f"{SNAPSHOT_REFS}/{snapshot_id}/{run_id}"


LATEST = "latest"
RUN_NAME = "run"
"""Key of a snapshot's meta: the name of the run that saved it."""
FORKED_FROM = "forked_from"
"""The same: the run that saved what this one has by `SnapshotStore.fork`."""
STAGE_LABELS = "stage_labels"
"""The same: `Snapshot.stage_labels`."""


def find_start(
    objects: ObjectStore, wanted: str, *, algorithm: str, run_name: str, steps_per_iteration: int | None = 1
) -> Snapshot:
    """The snapshot that ``wanted`` names: ``latest``, or its id or the first digits of it.

    Iterations are continued from their ends only, whose steps ``steps_per_iteration`` divides; None: they have as many
    as come, and their ends are what updates have on record that they left. Raises ConfigError for a snapshot of another
    algorithm or within an iteration, NotFound where there is none.
    """
    snapshots, steps = SnapshotStore(objects), steps_per_iteration

    def ends_iteration(snapshot: Snapshot) -> bool:
        return lineage_of(objects, snapshot.id) is not None if steps is None else snapshot.step % steps == 0

    if wanted == LATEST:
        for snapshot in snapshots.list(kind="train_state"):
            if snapshot.algorithm == algorithm and run_name in snapshot.runs and ends_iteration(snapshot):
                return snapshot
        raise NotFound(
            f"no {algorithm} snapshot of a run named {run_name!r}; give the id of one, or leave out the resume"
        )
    snapshot = snapshots.get(complete_snapshot_id(objects, wanted))
    if (snapshot.kind, snapshot.algorithm) != ("train_state", algorithm):
        raise ConfigError(
            f"snapshot {snapshot.id.short} is a {snapshot.kind} of {snapshot.algorithm}; this run trains {algorithm}"
        )
    if not ends_iteration(snapshot):
        of = ", or no update is on record that left it" if steps is None else f" of {steps} steps"
        raise ConfigError(
            f"snapshot {snapshot.id.short} is of step {snapshot.step}, within an iteration{of}; choose one from the "
            "end of an iteration"
        )
    return snapshot

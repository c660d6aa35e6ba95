"""What a run gives up as soon as it has something later: training states, and the models between its first and its
last. Their bytes are deleted at once, not when housekeeping comes by.

A state is named by the run that saved it, and by each that found it trained while another might still give it up
(`stand_on`). A run takes away its own name only. Of a model that was given up, results keep the id, a note says that
its weights are not stored, and they stay all the same where somebody made the model the latest or chose it, or where a
state has them that somebody names.

Giving up is names; deleting is `free`, which looks at every name that there is, as garbage collection does, and deletes
what none of them reaches. Each thing that was given up leaves word below ``given-up/`` before its name goes, so a run
that is killed in between leaves it to the next one. Files that somebody put again meanwhile, and has yet to name, are
younger than the manifest with which they were stored; these are left to housekeeping.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Literal

from rollout_core.base.errors import ConfigError, CorruptObject, NotFound
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.objects.files import GIVEN_UP_REFS, RESULT_REFS, SNAPSHOT_REFS, FileStat
from rollout_core.objects.object_store import ObjectStore, blob_key
from rollout_core.objects.retention.garbage import KEEPING_REFS, WEIGHTS, Marking, Scope
from rollout_core.objects.retention.sweeps import announced
from rollout_core.objects.retention.unstored import note_pruned
from rollout_core.objects.snapshots import FINISHED, PROGRESS_REFS, RUN_NAME, Snapshot, SnapshotStore

log = logging.getLogger(__name__)


Fate = Literal["stays", "may go", "over"]
"""Of a run's name of a state: its run has ended well, or is none that gives anything up; is under way, or may be tried
again; was killed, and continues as another."""


def stand_on(
    objects: ObjectStore, state: ContentId, run_id: str, run_name: str, fate: Callable[[Snapshot], Fate]
) -> bool:
    """Have a run name a state that no other's name keeps for it, so that nobody's giving it up deletes it. False where
    it is not there. Names of runs that are over are taken over."""
    snapshots = SnapshotStore(objects)
    records = snapshots.named_by(state)
    if not records:
        return False
    fates = {record.ref: fate(record) for record in records if record.run_id != run_id}
    if len(fates) == len(records) and "stays" not in fates.values():
        newest = records[0]
        meta = {**newest.meta, RUN_NAME: run_name}
        label = newest.label if newest.is_kept_by_label else FINISHED
        own = {"run_id": run_id, "label": label, "meta": meta, "created_at": datetime.now(UTC)}
        snapshots.put_record(newest.model_copy(update=own))
        objects.wait_for_sweep(newest.files)
    if not snapshots.is_present(state):
        return False
    for record in records:
        if fates.get(record.ref) == "over" and not record.is_kept_by_label:
            objects.delete_ref(record.ref)
    return True


def prune_state(objects: ObjectStore, state: ContentId, run_id: str) -> None:
    """Take away a run's name of a state, unless somebody labelled it or an unfinished update resumes from it."""
    snapshots = SnapshotStore(objects)
    for record in snapshots.named_by(state):
        if record.run_id == run_id and not record.is_kept_by_label and not _is_resumed_from(objects, state):
            snapshots.drop_name(record, run_id)


def _is_resumed_from(objects: ObjectStore, state: ContentId) -> bool:
    """Whether an unfinished update does. What a finished one left where it was killed at its very end is removed."""
    found = False
    for name, named in objects.list_refs(PROGRESS_REFS):
        key = name.partition("/")[2]
        if named == state and is_content_id(key) and objects.cached_ref(f"{RESULT_REFS}/{key}") is not None:
            objects.delete_ref(name)
        else:
            found = found or named == state
    return found


def prune_model(objects: ObjectStore, model: ContentId, *, run_id: str, step: int, algorithm: str) -> None:
    """Have results that name a model count without its weights, which `free` deletes unless something keeps them."""
    if objects.tree_is_present(model):
        note_pruned(objects, model, run_id=run_id, step=step, algorithm=algorithm)
        objects.set_ref(f"{GIVEN_UP_REFS}/{model}", model)


def free(
    objects: ObjectStore, *, among: Collection[ContentId] | None = None, extra_roots: Collection[ContentId] = ()
) -> int:
    """Delete the files of what was given up, but for those that anything names, or somebody puts at this moment.

    ``among``: manifests; default: all that were given up, also by runs that were killed since. ``extra_roots``: ids
    that are named elsewhere, such as in a database. Returns the bytes freed. Nothing is deleted
    while a ref or a record is damaged, since it may have named anything.
    """
    words = {ContentId(name.rpartition("/")[2]): name for name in objects.ref_names(GIVEN_UP_REFS)}
    words = {tree: name for tree, name in words.items() if among is None or tree in among}
    chosen, states = _chosen(objects), set(objects.ref_names(SNAPSHOT_REFS))
    found: dict[ContentId, FileStat] = {}
    for tree in words:
        found |= _files(objects, tree)
    if not found:
        return _forget(objects, words.values())
    with announced(objects.files, found.keys()):
        marking = Marking(objects, dict(objects.blobs()), 0.0, Scope(extra_roots, weights_of_inputs=False))
        marking.reach_refs()
        if marking.complaints() or _chosen(objects) != chosen:
            return 0
        # Marking takes a while in a large store, and does not follow what was put meanwhile.
        reached = marking.reached | _named_since(objects, states)
        gone = [blob for blob, stat in found.items() if blob not in reached and _is_as_before(objects, blob, stat)]
        for blob in gone:
            objects.delete(blob)
        _forget(objects, words.values())
    return sum(found[blob].size for blob in gone)


def _files(objects: ObjectStore, tree: ContentId) -> dict[ContentId, FileStat]:
    """Tensors of a manifest, which are nearly all of its bytes, that nobody has put again since it was itself."""
    try:
        files = objects.manifest(tree).files
    except (NotFound, CorruptObject, ConfigError):
        return {}
    put = objects.files.stat(blob_key(tree))
    large = [file.content_id for file in files if file.path.endswith(WEIGHTS)]
    stats = dict(zip(large, objects.in_parallel(lambda blob: objects.files.stat(blob_key(blob)), large), strict=True))
    return {blob: stat for blob, stat in stats.items() if stat and put and stat.modified <= put.modified}


def _named_since(objects: ObjectStore, before: Collection[str]) -> set[ContentId]:
    """Files of the states that are named now, and were not ``before``."""
    found: set[ContentId] = set()
    for name in set(objects.ref_names(SNAPSHOT_REFS)).difference(before):
        for record in SnapshotStore(objects).named_by(ContentId(name.split("/")[1])):
            found |= {file.content_id for file in objects.manifest(record.files).files}
    return found


def _is_as_before(objects: ObjectStore, blob: ContentId, before: FileStat) -> bool:
    now = objects.files.stat(blob_key(blob))
    return now is not None and now.modified == before.modified


def _chosen(objects: ObjectStore) -> list[str]:
    return [name for folder in KEEPING_REFS for name in objects.ref_names(folder.rstrip("/"))]


def _forget(objects: ObjectStore, words: Collection[str]) -> int:
    for word in words:
        objects.delete_ref(word)
    return 0

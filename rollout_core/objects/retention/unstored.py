"""Models that results name and object storage does not have, as their run did not store their weights.

Such a model has its id all the same, the hash of its files, and its manifest and small files are stored. Its weights
are in the cache of the machine that computed them, from where an engine loads them. A note below ``let-go/`` says so:
results that name the model count as whole. Where a run needs the weights and they are gone, the update that left them
is computed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from rollout_core.base.errors import ConfigError, MissingObject, NotFound
from rollout_core.base.ids import ContentId
from rollout_core.objects.addresses import complete_folder_id, is_folder
from rollout_core.objects.files import CHOSEN_REFS, PRUNED_REFS
from rollout_core.objects.local_trees import keep_local_tree
from rollout_core.objects.object_store import ObjectStore
from rollout_core.objects.records import Record
from rollout_core.objects.retention.garbage import UNSTORED_MODEL, WEIGHTS
from rollout_core.objects.snapshots import SnapshotStore
from rollout_core.objects.trees import NO_CHECKS, Checks, TreeManifest


class UnstoredModel(BaseModel):
    """What is noted of one."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["unstored model/1"] = UNSTORED_MODEL
    run_id: str
    step: int
    algorithm: str
    was_stored: bool = False
    """True of one that its run stored, and gave up once there was a later one."""

    @property
    def reason(self) -> str:
        """Why it is not stored, for people."""
        return "was given up for a later one (run.keep_states)" if self.was_stored else "was not stored (store_models)"


def put_model(objects: ObjectStore, manifest: TreeManifest, written: Path, checks: Checks = NO_CHECKS) -> ContentId:
    """Store the model in the folder ``written``, all of it (`ObjectStore.put_files`). Returns its id."""
    model = objects.put_files(manifest, {file.path: written / file.path for file in manifest.files}, checks)
    objects.delete_ref(_ref(model))
    return model


def put_stored_model(objects: ObjectStore, manifest: TreeManifest) -> ContentId:
    """Store the model whose files were stored just now, as those of its training state. Returns its id."""
    model = objects.put_json(manifest)
    objects.delete_ref(_ref(model))
    return model


def hold_model(
    objects: ObjectStore,
    manifest: TreeManifest,
    written: Path,
    cache: Path,
    *,
    run_id: str,
    step: int,
    algorithm: str,
) -> ContentId:
    """Have the model in the folder ``written`` in the cache, and store what it has except its weights; where the cache
    does not take it, or it is stored already, store it whole. Returns its id."""
    model = objects.put_json(manifest)
    keep_local_tree(model, manifest, written, cache)
    # An update may leave the weights as they were, and so the model that it began with, which is stored.
    if not (cache / model).is_dir() or objects.tree_is_present(model):
        return put_model(objects, manifest, written)
    small = [written / file.path for file in manifest.files if not file.path.endswith(WEIGHTS)]
    objects.in_parallel(objects.put_file, small)
    note = UnstoredModel(run_id=run_id, step=step, algorithm=algorithm)
    objects.set_ref(_ref(model), objects.put_bytes(note.model_dump_json().encode()))
    return model


def note_pruned(objects: ObjectStore, model: ContentId, *, run_id: str, step: int, algorithm: str) -> None:
    """Have results count that name a stored model whose weights are about to be deleted."""
    note = UnstoredModel(run_id=run_id, step=step, algorithm=algorithm, was_stored=True)
    objects.set_ref(_ref(model), objects.put_bytes(note.model_dump_json().encode()))


def keep_model(objects: ObjectStore, model: ContentId) -> bool:
    """Have a model stay that somebody names as the start of a run, though the run that made it may give it up at this
    moment. False where not all of it is stored."""
    name = f"{CHOSEN_REFS}/{model}"
    if objects.cached_ref(name) != model:  # a damaged one is written again
        objects.set_ref(name, model)
    objects.wait_for_sweep(model)
    return objects.tree_is_present(model)


def local_model(objects: ObjectStore, model: ContentId, cache: Path) -> Path:
    """A folder with the model's files, as `ObjectStore.local_tree` gives it. Raises as that.

    One that is not stored and no longer in the cache is MissingObject, by its own id.
    """
    try:
        return objects.local_tree(model, cache)
    except MissingObject as error:
        noted = unstored_model(objects, model)
        if noted is None:
            raise
        raise MissingObject(
            model,
            f"model {model.short} (step {noted.step} of {noted.algorithm}) {noted.reason}, and is not "
            f"in the cache {cache}; the update that left it has to run again",
        ) from error


def unstored_model(objects: ObjectStore, model: ContentId) -> UnstoredModel | None:
    """What is noted of a model that its run did not store; None of any other."""
    noted = objects.cached_bytes(_ref(model))
    # Housekeeping's own notes of models are of another kind.
    return (
        UnstoredModel.model_validate_json(noted) if noted and json.loads(noted).get("kind") == UNSTORED_MODEL else None
    )


def check_stored(model: ContentId, objects: ObjectStore) -> None:
    """Raise ConfigError where the object store does not have all of this model."""
    if not objects.tree_is_present(model):
        raise ConfigError(why_not_stored(objects, model) or f"model {model} is not in the object store {objects.url}")


def why_not_stored(objects: ObjectStore, model: ContentId) -> str | None:
    """For people, of a model that its run did not store; None of any other."""
    noted = unstored_model(objects, model)
    if noted is None:
        return None
    return (
        f"model {model} (step {noted.step} of {noted.algorithm}, run {noted.run_id}) {noted.reason}; "
        "make it again by `rollout reproduce`, or take one that is stored: `rollout snapshot list` has the training "
        "states, whose iterations end with stored models"
    )


def is_whole(record: Record, objects: ObjectStore, *, to_load: bool = False) -> bool:
    """Whether object storage still holds everything ``record`` names (sizes are compared, content is not read): but for
    what is known not to be stored, unless it is ``to_load`` at once."""
    snapshots = SnapshotStore(objects)
    checks: dict[str, Callable[[ContentId], bool]] = {
        "blob": objects.exists,
        "tree": lambda tree: (
            objects.tree_is_present(tree) or (not to_load and unstored_model(objects, tree) is not None)
        ),
        "snapshot": snapshots.is_present if to_load else snapshots.counts,
    }
    return all(checks[kind](reference) for kind, reference in record.references())


def _ref(model: ContentId) -> str:
    return f"{PRUNED_REFS}/{ContentId(model)}"


def find_model(objects: ObjectStore, digits: str) -> ContentId:
    """The model of that id, or of which those are the first digits.

    Raises ConfigError or NotFound where the object store has none that is whole.
    """
    model = complete_folder_id(objects, digits)
    if not objects.exists(model):
        raise NotFound(f"no model {model} is in the object store {objects.url}")
    if not is_folder(objects, model):
        raise ConfigError(f"{model} is no model but a file; give the id of a model's folder, as `rollout lineage` does")
    names = {file.path for file in objects.manifest(model).files}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise ConfigError(f"{model} is no model: its folder needs config.json and *.safetensors")
    if not objects.tree_is_present(model):
        raise NotFound(
            why_not_stored(objects, model)
            or f"files of the model {model} are missing in the object store {objects.url}; make it again"
        )
    return model

"""Stages that finish what training made: a state is labelled, and a model gets the precision of its base."""

from __future__ import annotations

from rollout_core.base.ids import ContentId
from rollout_core.models.precision import in_precision_of, stored_dtype
from rollout_core.objects.records import Checkpoint, Model, SnapshotRecord
from rollout_core.objects.snapshots import SnapshotStore
from tasks.runtime import connections
from tasks.runtime.dry_run import is_placeholder
from tasks.runtime.journal import stage_logger
from tasks.runtime.kept_states import current_keeping
from tasks.runtime.stage import current_stage, retry, stage


@stage(version=1)
def snapshot(checkpoint: Checkpoint, snapshot_label: str, *, label: str = "") -> SnapshotRecord:
    """Label a checkpoint's training state for people. That it is there is looked at; its files were verified when they
    were written, and are when they are restored, so they are not read."""
    snapshots = SnapshotStore(current_stage().objects)
    found = snapshots.present(checkpoint.train_state)
    snapshots.set_label(checkpoint.train_state, snapshot_label, by_stage=True)
    stage_logger().info("snapshot %s labelled %r", found.id.short, snapshot_label)
    return SnapshotRecord(
        snapshot=found.id,
        model=checkpoint.model,
        label=snapshot_label,
        step=checkpoint.step,
        size_bytes=found.size_bytes,
    )


def file_state(checkpoint: Checkpoint, name: str, *, label: str = "") -> None:
    """Have the states before a checkpoint's go, if that is stored, and label it ``name`` for people."""
    if (kept := current_keeping()) is not None:
        kept.later(checkpoint)
    label_state(checkpoint, name, label=label)


def label_state(checkpoint: Checkpoint, name: str, *, label: str = "") -> None:
    """Label a checkpoint's state for people, unless it is not stored. One that was given up since has its label."""
    snapshots, state = SnapshotStore(connections.objects()), checkpoint.train_state
    is_there = retry(lambda: snapshots.find_pruned(state) is None or snapshots.is_present(state))
    labelled = {"checkpoint": checkpoint, "snapshot_label": name, "label": label}
    if is_there or retry(lambda: snapshot.find(labelled)) is not None:
        snapshot(checkpoint, name, label=label)


@stage(version=2)
def round_weights(model: ContentId, base: ContentId) -> Model:
    """A trained model with its weights in the dtype of ``base``, which its training began with."""
    rounded = in_precision_of(model, base, current_stage().objects, connections.cache_folder())
    stage_logger().info("model %s with the dtype of its base is %s", model.short, rounded.short)
    return Model(model=rounded)


def in_base_precision(model: ContentId, base: ContentId) -> ContentId:
    """The form of ``model`` that leaves the run which trained it, and so is evaluated for promotion: what
    `round_weights` makes of it, unless the dtype of ``base`` is float32, as in training, or unknown."""
    if is_placeholder(base):  # to be downloaded or converted: of most models that dtype is another
        return round_weights(model, base).model
    dtype = retry(lambda: stored_dtype(connections.objects(), base))
    return model if dtype in (None, "float32") else round_weights(model, base).model

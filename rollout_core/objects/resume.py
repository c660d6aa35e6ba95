"""Which snapshot a run starts from when it is told to: ``latest`` of its name, or one by the first digits of its id."""

from __future__ import annotations

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.objects import ObjectStore
from rollout_core.objects.short_ids import complete_snapshot_id
from rollout_core.objects.snapshots import Snapshot, SnapshotStore

LATEST = "latest"
RUN_NAME = "run"
"""Key of a snapshot's meta: what people call the run that saved it."""


def find_start(
    objects: ObjectStore, wanted: str, *, algorithm: str, run_name: str, steps_per_iteration: int = 1
) -> Snapshot:
    """The snapshot that ``wanted`` names: ``latest``, or its id or the first digits of it.

    Iterations are gone on with at their ends only, whose steps ``steps_per_iteration`` divides. Raises ConfigError for
    a snapshot of another algorithm or within an iteration, NotFound where there is none.
    """
    snapshots = SnapshotStore(objects)
    if wanted == LATEST:
        for snapshot in snapshots.list(kind="train_state"):
            own = snapshot.algorithm == algorithm and snapshot.meta.get(RUN_NAME) == run_name
            if own and snapshot.step % steps_per_iteration == 0:
                return snapshot
        raise NotFound(
            f"no {algorithm} snapshot of a run named {run_name!r}; give the id of one, or leave out the resume"
        )
    snapshot = snapshots.get(complete_snapshot_id(objects, wanted))
    if (snapshot.kind, snapshot.algorithm) != ("train_state", algorithm):
        raise ConfigError(
            f"snapshot {snapshot.id.short} is a {snapshot.kind} of {snapshot.algorithm}; this run trains {algorithm}"
        )
    if snapshot.step % steps_per_iteration:
        raise ConfigError(
            f"snapshot {snapshot.id.short} is of step {snapshot.step}, within an iteration of {steps_per_iteration} "
            "steps; choose one from the end of an iteration"
        )
    return snapshot

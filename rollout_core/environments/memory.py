"""What an environment remembers between episodes: a value as JSON, which all episodes of an iteration begin with.

Episodes run next to each other, so none sees what another leaves in the same iteration. Each may leave a note, which is
stored with its spans; what `merge_memory` makes of the memory before and of the notes, in the order of the episodes, is
the memory of the next iteration. So it follows from what the episodes are, not from which ended first or was played
twice, and it is a snapshot of kind ``episodic_memory``, whose id the next episodes depend on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, CorruptObject
from rollout_core.base.ids import ContentId
from rollout_core.base.locks import scratch_folder
from rollout_core.config.environments import EnvironmentConfig
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.hosts import NO_MEMORY, merged_memory
from rollout_core.objects import ObjectStore, Snapshot, SnapshotStore
from rollout_core.objects.addresses import complete_snapshot_id
from rollout_core.objects.snapshots import FINISHED

KIND = "episodic_memory"
MEMORY_FILE = "memory.json"


def find_memory(objects: ObjectStore, wanted: str) -> ContentId:
    """The memory of that snapshot id, or of its first digits. Raises NotFound, ConfigError for a snapshot of another
    kind."""
    snapshot = SnapshotStore(objects).get(complete_snapshot_id(objects, wanted))
    if snapshot.kind != KIND:
        raise ConfigError(
            f"environment.start_memory: snapshot {snapshot.id.short} is a {snapshot.kind}; expected an {KIND}, as "
            f"`rollout snapshot list --kind {KIND}` shows them"
        )
    return snapshot.id


def read_memory(objects: ObjectStore, memory: ContentId | None) -> str:
    """The text of a memory; of None that of an environment which remembers nothing yet. Raises as
    `SnapshotStore.restore`."""
    if memory is None:
        return NO_MEMORY
    with scratch_folder("memory") as scratch:
        SnapshotStore(objects).restore(memory, scratch / "memory")
        file = scratch / "memory" / MEMORY_FILE
        if not file.is_file():
            raise CorruptObject(memory, f"snapshot {memory} has no {MEMORY_FILE}: it is no environment's memory")
        return file.read_text(encoding="utf-8")


def merge_notes(
    objects: ObjectStore,
    code: EnvironmentCode,
    settings: EnvironmentConfig,
    memory: ContentId | None,
    notes: list[Any],
    **about: Any,
) -> Snapshot:
    """Save what the environment makes of its memory and of notes. ``about``: what the snapshot says of its run, as
    `SnapshotStore.save` takes it. Raises ConfigError where the environment cannot make anything of them."""
    text = merged_memory(code, settings, read_memory(objects, memory), notes)
    with scratch_folder("memory") as scratch:
        folder = Path(scratch) / "memory"
        folder.mkdir()
        (folder / MEMORY_FILE).write_text(text, encoding="utf-8")
        # With this label an update of the same run does not prune it.
        return SnapshotStore(objects).save(folder, kind=KIND, label=FINISHED, **about)

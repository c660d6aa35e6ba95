"""Where an update reads and writes, what identifies it, and who hears of its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rollout_core.base.ids import ContentId
from rollout_core.objects import ObjectStore


@dataclass(frozen=True)
class UpdateContext:
    """Where an update reads and writes, and under which key it can be resumed."""

    objects: ObjectStore
    cache: Path
    """Local folder for fetched models."""
    key: ContentId
    """Identity of this update: equal inputs, equal key."""
    run_id: str
    seed: int
    run_name: str = ""
    """What people call the run; `rollout_core.objects.snapshots` finds its snapshots by it."""
    start_from: ContentId | None = None
    """Snapshot to start from where the update has none of its own."""
    tracking: Path | None = None
    """Folder of trackers; default: beside the cache."""
    series: ContentId | None = None
    """Identity of the curve that trackers draw; default: the update's own."""
    base_model: ContentId | None = None
    """What the run began with; trackers name it."""
    num_threads: int | None = None
    is_stopping: Callable[[], bool] = field(default=lambda: False)
    """Asked after each step. Once it says True, here or in another process, the update keeps its state and ends."""
    check: Callable[[], None] = field(default=lambda: None)
    """Called directly before progress is noted under the key. Raises Stopped where that is another's to write now."""
    on_step: Callable[[dict[str, float]], None] = field(default=lambda row: None)
    on_start: Callable[[int, int], None] = field(default=lambda first_step, last_step: None)
    """Called with the step training starts at and the one it ends at."""

    def model(self, content_id: ContentId) -> Path:
        """Local folder of a model."""
        return self.objects.local_tree(content_id, self.cache)

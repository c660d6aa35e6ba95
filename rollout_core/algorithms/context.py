"""Where an update reads and writes, what identifies it, and who hears of its progress; and training states that are
held on this machine: instead of being stored, or in addition to that until the next update has read them.

What a state's id names is the same either way, so results and whatever follows from them do not tell which it was. The
object store has a note that it knows of the state and does not have it; who needs it when its holder is gone has it
computed again.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, canonical_json
from rollout_core.base.locks import scratch_folder
from rollout_core.config import LearnerSettings
from rollout_core.objects import ObjectStore
from rollout_core.objects.retention.unstored import local_model, put_stored_model
from rollout_core.objects.snapshots import MODEL_FOLDER, Snapshot, SnapshotStore, progress_ref
from rollout_core.objects.trees import FileMark, Identified, file_mark, files_of, identify

log = logging.getLogger(__name__)

STATE, ABOUT = "state", "about.json"
STORED = "stored"
"""Name of an empty file next to a held state that the object store has, too."""
OwnLossFunction = Callable[..., Any]
"""Of tensors; gives the loss of each token, pair or answer."""
Seen = tuple[tuple[str, FileMark], ...]
"""Files of a folder as they are."""
_known_whole: set[tuple[ContentId, Seen]] = set()
"""States whose files this process has read and found to be what their ids stand for, as the files were then."""


def seen(folder: Path) -> Seen:
    """What tells without reading a folder's files whether somebody wrote to them."""
    return tuple((path, file_mark(real)) for path, real in files_of(folder).items())


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
    """Folder of trackers; default: next to the cache."""
    series: ContentId | None = None
    """Identity of the curve that trackers draw; default: the update's own."""
    base_model: ContentId | None = None
    """What the run began with; trackers name it."""
    num_threads: int | None = None
    held: HeldStates | None = None
    """Where training states are that are not stored, and the last one in any case."""
    stores_state: bool = True
    """False: the state at the end is held there, and there are none on the way but where the update is stopped."""
    own_loss: OwnLossFunction | None = None
    """The loss of the user's own that the settings name, of the tensors in the order of their ``loss_arguments``."""
    is_stopping: Callable[[], bool] = field(default=lambda: False)
    """Asked after each step. Once it says True, here or in another process, the update keeps its state and ends."""
    check: Callable[[], None] = field(default=lambda: None)
    """Called directly before progress is noted under the key. Raises Stopped where that is another's to write now."""
    on_step: Callable[[dict[str, float]], None] = field(default=lambda row: None)
    on_start: Callable[[int, int], None] = field(default=lambda first_step, last_step: None)
    """Called with the step training starts at and the one it ends at."""

    @contextmanager
    def state(self, state_id: ContentId) -> Iterator[Path]:
        """A folder with a training state, held or stored. Raises as `SnapshotStore.restore`."""
        held = None if self.held is None else self.held.find(state_id)
        if held is not None:
            yield held
            return
        with scratch_folder("restore") as scratch:
            SnapshotStore(self.objects).restore(state_id, scratch / "state")
            yield scratch / "state"

    def loss_of(self, settings: LearnerSettings) -> OwnLossFunction | None:
        """``own_loss``. Raises ConfigError where the settings name one and it was not loaded."""
        if settings.own_loss is not None and self.own_loss is None:
            raise ConfigError(f"loss {settings.own_loss.path} is not loaded; train by rollout_core.launch.run_update")
        return self.own_loss

    @property
    def progress_ref(self) -> str:
        """Ref of the last snapshot of this update while it is unfinished."""
        return progress_ref(self.key)

    def has_progress(self) -> bool:
        """Whether there is such a snapshot, readable or not."""
        return self.objects.cached_ref(self.progress_ref) is not None

    def model(self, content_id: ContentId) -> Path:
        """Local folder of a model."""
        return local_model(self.objects, content_id, self.cache)


class HeldStates:
    """Those below one folder, which ends with the process that made it; other processes of the machine may use it.

    This process may also keep what has the tensors of one of them in memory. A state's files stay what it is: who
        takes its tensors from memory has everything else from these.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._learner: tuple[ContentId, Hashable, Any] | None = None

    def keep_learner(self, state_id: ContentId, made_for: Hashable, learner: Any) -> None:
        """Keep what has come to this state, for `take_learner`."""
        self._learner = (state_id, made_for, learner)

    def take_learner(self, state_id: ContentId | None, made_for: Hashable) -> Any | None:
        """What was kept, if it was made for the same and the state is held; it is the caller's then. Whatever was kept
        is kept no longer."""
        kept, self._learner = self._learner, None
        if kept is None or state_id is None or kept[:2] != (state_id, made_for) or not self.has(state_id):
            return None
        return kept[2]

    def drop_learner(self) -> None:
        """Keep it no longer: what follows may need the memory."""
        self._learner = None

    def hold(self, written: Path, objects: ObjectStore, **about: Any) -> Identified:
        """Take over a state that was ``written`` on the same file system, and note in ``objects`` that it has none.

        ``about`` is what `SnapshotStore.save` needs to know of it, should it be stored after all. Returns its id
        and what its folder holds, which is at `place` now.
        """
        before = seen(written)
        found = identify(files_of(written))
        self._take(written, found.id, before, **about)
        SnapshotStore(objects).name_only(found.id, **{name: about[name] for name in ("run_id", "step", "algorithm")})
        return found

    def lend(self, written: Path, state_id: ContentId, as_seen: Seen, **about: Any) -> None:
        """Take over a state that was stored from ``written``, which was so `seen` then: who needs it next is spared
        fetching it. Large files may be the very ones of the object store, so nobody writes to them."""
        self._take(written, state_id, as_seen, **about)
        (self.folder / state_id / STORED).touch()

    def _take(self, written: Path, state_id: ContentId, as_seen: Seen, **about: Any) -> None:
        folder = self.folder / state_id
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / ABOUT).write_bytes(canonical_json(about))
        written.rename(self.place(state_id))
        _known_whole.add((state_id, as_seen))

    def place(self, state_id: ContentId) -> Path:
        """Its folder, where it is held."""
        return self.folder / state_id / STATE

    def has(self, state_id: ContentId) -> bool:
        """Whether it is held; its files are not read."""
        return self.place(state_id).is_dir()

    def find(self, state_id: ContentId) -> Path | None:
        """Its folder, if it is held and has the bytes that its id stands for. They are read once a process, and again
        after a change."""
        if not self.has(state_id):
            return None
        state = self.place(state_id)
        now = seen(state)
        if (state_id, now) in _known_whole:
            return state
        found = identify(files_of(state)).id
        if found != state_id:
            log.warning("the training state held as %s has the hash %s; it is not used", state_id.short, found.short)
            return None
        _known_whole.add((state_id, now))
        return state

    def drop_stored(self) -> None:
        """Remove those that the object store has, to make room for the next one."""
        for mark in self.folder.glob(f"*/{STORED}"):
            shutil.rmtree(mark.parent, ignore_errors=True)

    def keep_only(self, state_ids: Collection[ContentId]) -> None:
        """Remove all others."""
        for place in self.folder.iterdir():
            if place.name not in state_ids:
                shutil.rmtree(place, ignore_errors=True)

    def store(self, state_id: ContentId, objects: ObjectStore) -> Snapshot | None:
        """Put it into ``objects`` after all, and its model; None where it is not held whole."""
        state = self.find(state_id)
        if state is None:
            return None
        about = json.loads((self.folder / state_id / ABOUT).read_bytes())
        snapshot = SnapshotStore(objects).save(state, **about)
        put_stored_model(objects, objects.manifest(snapshot.files).below(MODEL_FOLDER))
        return snapshot

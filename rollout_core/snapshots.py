"""Train-state snapshots: deterministic tars by content, verified when restored.

A snapshot's id is the blake3 of the deterministic tar of its folder: entries sorted by path, no times, owners or names,
fixed modes, no compression. What is stored is each file as a blob of its own, so tensors that snapshots share are stored
once; `export` streams the very tar the id was computed from.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import orjson
from blake3 import blake3
from pydantic import BaseModel, ConfigDict

from rollout_core.errors import ConfigError, CorruptObject, MissingObject, NotFound
from rollout_core.ids import ContentId
from rollout_core.lineage import content_ids_in
from rollout_core.objects import ObjectStore, TreeManifest

SnapshotKind = Literal["train_state", "buffer", "process", "episodic_memory"]
INDEX = "snapshots"
_JSON_LIMIT_BYTES = 64 << 20
_BLOCK = tarfile.BLOCKSIZE


class Snapshot(BaseModel):
    """One saved state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: ContentId
    """blake3 of the deterministic tar."""
    kind: SnapshotKind
    run_id: str
    step: int
    label: str | None
    created_at: datetime
    algorithm: str
    files: ContentId
    """Manifest of the saved folder."""
    size_bytes: int
    meta: dict[str, Any]
    """The producing algorithm's own JSON."""


@dataclass(frozen=True)
class GcReport:
    """What a garbage collection did."""

    kept: int
    deleted: int
    freed_bytes: int


class SnapshotStore:
    """Snapshots over an object store; its index are refs ``snapshots/<id>/<run id>``."""

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
    ) -> Snapshot:
        """Store ``folder``; when this returns, the snapshot survives anything short of losing the storage.

        Equal folders give equal ids, whatever their times and owners.
        """
        files = self._objects.put_tree(folder)
        manifest = self._objects.manifest(files)
        hasher = blake3()
        for chunk in _tar(manifest, lambda path, _: _file_chunks(folder / path)):
            hasher.update(chunk)
        snapshot = Snapshot(
            id=ContentId(hasher.hexdigest()),
            kind=kind,
            run_id=run_id,
            step=step,
            label=label,
            created_at=datetime.now(UTC),
            algorithm=algorithm,
            files=files,
            size_bytes=sum(file.size for file in manifest.files),
            meta=meta or {},
        )
        self._index(snapshot)
        return snapshot

    def restore(self, snapshot_id: ContentId, folder: Path) -> Snapshot:
        """Write a snapshot's files to the new folder ``folder``, every file and the tar verified.

        Raises NotFound, MissingObject or CorruptObject; the folder is then not there.
        """
        snapshot = self.get(snapshot_id)
        manifest = self._objects.manifest(snapshot.files)
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            whole = scratch / "state"
            self._objects.get_tree(snapshot.files, whole)
            hasher = blake3()
            for chunk in _tar(manifest, lambda path, _: _file_chunks(whole / path)):
                hasher.update(chunk)
            if hasher.hexdigest() != snapshot_id:
                raise CorruptObject(snapshot_id, f"snapshot {snapshot_id} does not match its id; save it again")
            whole.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return snapshot

    def export(self, snapshot_id: ContentId) -> Iterator[bytes]:
        """The deterministic tar whose blake3 is the snapshot's id."""
        manifest = self._objects.manifest(self.get(snapshot_id).files)
        yield from _tar(manifest, lambda _, content_id: self._objects.stream(content_id))

    def get(self, snapshot_id: ContentId) -> Snapshot:
        """The newest record of a snapshot. Raises NotFound."""
        records = [self._read(record) for _, record in self._objects.list_refs(f"{INDEX}/{ContentId(snapshot_id)}")]
        if not records:
            raise NotFound(f"snapshot not found: {snapshot_id}")
        return max(records, key=lambda snapshot: snapshot.created_at)

    def list(
        self,
        *,
        run_id: str | None = None,
        kind: str | None = None,
        label_contains: str | None = None,
        limit: int | None = None,
    ) -> list[Snapshot]:
        """Snapshots that match all given filters, newest first; ``limit`` counts after sorting."""
        found = [
            snapshot
            for snapshot in self._all(run_id)
            if (kind is None or snapshot.kind == kind)
            and (label_contains is None or (snapshot.label is not None and label_contains in snapshot.label))
        ]
        return found[:limit]

    def set_label(self, snapshot_id: ContentId, label: str | None) -> Snapshot:
        """Give the newest record of a snapshot a label, which keeps it from being pruned."""
        snapshot = self.get(snapshot_id)
        if snapshot.label != label:
            snapshot = snapshot.model_copy(update={"label": label})
            self._index(snapshot)
        return snapshot

    def is_present(self, snapshot_id: ContentId) -> bool:
        """Whether record and files are there with the right sizes."""
        try:
            return self._objects.tree_is_present(self.get(snapshot_id).files)
        except (NotFound, CorruptObject):
            return False

    def delete(self, snapshot: Snapshot) -> None:
        """Forget a run's record of a snapshot. Its blobs go with the next `gc`."""
        self._objects.delete_ref(_index_name(snapshot))

    def prune(
        self,
        run_id: str,
        *,
        keep_last: int = 3,
        keep_labelled: bool = True,
        max_age: timedelta | None = None,
    ) -> list[Snapshot]:
        """Forget a run's older snapshots and return them.

        Kept are the ``keep_last`` newest (labelled ones count), with ``keep_labelled`` all labelled ones, and with
        ``max_age`` all younger ones.
        """
        now = datetime.now(UTC)
        pruned = [
            snapshot
            for position, snapshot in enumerate(self._all(run_id))
            if position >= keep_last
            and not (keep_labelled and snapshot.label is not None)
            and not (max_age is not None and now - snapshot.created_at < max_age)
        ]
        for snapshot in pruned:
            self.delete(snapshot)
        return pruned

    def gc(
        self, *, extra_roots: Iterable[ContentId] = (), min_age: timedelta = timedelta(days=1), dry_run: bool = False
    ) -> GcReport:
        """Delete blobs that nothing leads to: no ref, no JSON that a ref leads to, and no extra root.

        Blobs younger than ``min_age`` stay: a running stage may have written them and not yet filed its record.
        """
        cutoff = time.time() - min_age.total_seconds()
        live = self._reachable([*extra_roots, *(target for _, target in self._objects.list_refs(""))])
        kept = deleted = freed = 0
        for blob, written_at in list(self._objects.list_blobs()):
            if blob in live or written_at >= cutoff:
                kept += 1
                continue
            deleted += 1
            freed += self._objects.size(blob)
            if not dry_run:
                self._objects.delete(blob)
        if not dry_run:
            self._objects.sweep_scratch(cutoff)
        return GcReport(kept, deleted, freed)

    def _reachable(self, roots: Iterable[ContentId]) -> set[ContentId]:
        live: set[ContentId] = set()
        waiting = list(roots)
        while waiting:
            content_id = waiting.pop()
            if content_id in live or not self._objects.exists(content_id):
                continue
            live.add(content_id)
            waiting += self._named_in(content_id)
        return live

    def _named_in(self, blob: ContentId) -> list[ContentId]:
        if self._objects.size(blob) > _JSON_LIMIT_BYTES:
            return []
        try:
            data = self._objects.get_bytes(blob)
        except (CorruptObject, MissingObject):
            return []
        if not data.startswith((b"{", b"[")):
            return []
        try:
            return list(content_ids_in(_parsed(orjson.loads(data))))
        except orjson.JSONDecodeError:
            return []  # JSON lines and other text: rows of data, which name no objects of their own

    def _all(self, run_id: str | None) -> list[Snapshot]:
        snapshots = []
        for name, record in self._objects.list_refs(INDEX):
            if run_id is None or name.rpartition("/")[2] == run_id:
                snapshots.append(self._read(record))
        return sorted(snapshots, key=lambda snapshot: snapshot.created_at, reverse=True)

    def _read(self, record: ContentId) -> Snapshot:
        return Snapshot.model_validate_json(self._objects.get_bytes(record))

    def _index(self, snapshot: Snapshot) -> None:
        record = self._objects.put_bytes(snapshot.model_dump_json().encode())
        self._objects.set_ref(_index_name(snapshot), record)


def _index_name(snapshot: Snapshot) -> str:
    return f"{INDEX}/{snapshot.id}/{snapshot.run_id}"


def _parsed(value: Any) -> Any:
    """Prefect's result records hold their result as JSON text within JSON."""
    if isinstance(value, dict) and isinstance(value.get("result"), str) and value["result"].startswith(("{", "[")):
        return {**value, "result": orjson.loads(value["result"])}
    return value


def _tar(manifest: TreeManifest, content: Any) -> Iterator[bytes]:
    """Bytes of the tar of a manifest's files; ``content(path, content id)`` gives a file's chunks."""
    total = 0
    for file in manifest.files:
        header = tarfile.TarInfo(file.path)
        header.size = file.size
        header.mode = 0o644
        encoded = header.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        yield encoded
        written = 0
        for chunk in content(file.path, file.content_id):
            written += len(chunk)
            yield chunk
        if written != file.size:
            raise ConfigError(f"file {file.path} changed while it was saved: {written} bytes, expected {file.size}")
        padding = -written % _BLOCK
        yield bytes(padding)
        total += len(encoded) + written + padding
    end = 2 * _BLOCK
    yield bytes(end + -(total + end) % tarfile.RECORDSIZE)


def _file_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk

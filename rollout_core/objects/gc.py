"""Garbage collection: delete the blobs that nothing live reaches."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import chain

from pydantic import BaseModel, ConfigDict

from rollout_core.ids import ContentId
from rollout_core.objects.files import FileStat
from rollout_core.objects.store import ObjectStore, blob_key

LINEAGE_REFS = "lineage/"
FINISHED_REFS = "finished/"
"""Below it, under the id of a blob, stands what is noted of it; the note lives as long as the blob."""
NOTE_REFS = ("model-facts/", "prompt-shards/", "output-files/", "runs/", "work/", "fan-out/")
"""Below them stands what spares work or tells of a run; a note lives until nobody has set it for a while."""
KEEP_NOTES = timedelta(days=30)
_NAMED_ID = re.compile(rb'"([0-9a-f]{64})[\\"]')
_NAMED_ID_BYTES = 66


class GcReport(BaseModel):
    """What a collection did, or would do."""

    model_config = ConfigDict(frozen=True)

    live_blobs: int
    """Reached from a root."""
    young_blobs: int
    """Not reached, but young or named by something young."""
    deleted_blobs: int
    deleted_bytes: int
    """Of the deleted blobs and leftovers."""
    deleted_leftovers: int
    """Temporary files of killed writers, and corrupt blobs that had been set aside."""
    deleted_notes: int
    """Refs that nobody used for long, or that told of a blob that is gone."""
    dry_run: bool


def collect_garbage(
    objects: ObjectStore,
    *,
    extra_roots: Iterable[ContentId] = (),
    min_age: timedelta,
    keep_notes: timedelta = KEEP_NOTES,
    dry_run: bool = False,
) -> GcReport:
    """Delete every blob older than ``min_age`` that no ref and none of ``extra_roots`` reaches.

    A reached blob of JSON or JSON lines reaches every blob whose id is a string in it (also in JSON within a string),
    so results, records and manifests keep what they name. The lineage of what is live is live, with the inputs it
    names; the lineage of anything else keeps its record, not its data. Ids kept elsewhere, such as in a database, must
    be given as ``extra_roots``.

    Notes keep what they name, such as the shards of an input or the model of a run, until nobody has set them for
    ``keep_notes``; then they are deleted. Those below `FINISHED_REFS` live as long as the blob they are about.

    Safe beside running writers as long as each names what it puts by a ref within ``min_age`` less six hours: a put
    makes a blob young again, even when the bytes were there, and what is young spares what it names. An age of zero is
    for when nothing runs.
    """
    spared_since = time.time() - min_age.total_seconds()
    blobs = dict(objects.blobs())
    unused_since = time.time() - max(keep_notes, min_age).total_seconds()
    marking = _Marking(objects, blobs, unused_since)
    marking.reach(extra_roots)
    marking.reach_refs()
    live_blobs = len(marking.reached)
    marking.reach(content_id for content_id, stat in blobs.items() if stat.modified >= spared_since)
    marking.reach_refs()  # once more: what running writers have named since
    unreached = [blob_key(content_id) for content_id in blobs if content_id not in marking.reached]
    leftovers = [key for folder in ("tmp", "corrupt") for key, _ in objects.files.list(folder)]

    def sweep(key: str, since: float = spared_since) -> int | None:
        """Bytes freed, or None when the file is spared; its age is asked for again, since a put may have renewed it."""
        stat = objects.files.stat(key)
        if stat is None or stat.modified >= since:
            return None
        if not dry_run:
            objects.files.delete(key)
        return stat.size

    swept = [size for size in objects.in_parallel(sweep, unreached) if size is not None]
    cleared = [size for size in objects.in_parallel(sweep, leftovers) if size is not None]
    orphans = [sweep(key) for key in marking.orphaned_notes()]
    unused = [sweep(key, unused_since) for key in marking.unused_notes]
    return GcReport(
        live_blobs=live_blobs,
        young_blobs=len(blobs) - live_blobs - len(swept),
        deleted_blobs=len(swept),
        deleted_bytes=sum(swept) + sum(cleared),
        deleted_leftovers=len(cleared),
        deleted_notes=sum(size is not None for size in orphans + unused),
        dry_run=dry_run,
    )


class _Marking:
    """The set of reached blobs, grown from roots."""

    def __init__(self, objects: ObjectStore, blobs: Mapping[ContentId, FileStat], unused_since: float) -> None:
        self.reached: set[ContentId] = set()
        self.unused_notes = {
            key
            for folder in NOTE_REFS
            for key, stat in objects.files.list(f"refs/{folder.rstrip('/')}")
            if stat.modified < unused_since
        }
        """Keys of the refs below `NOTE_REFS` that nobody has set since."""
        self._objects = objects
        self._blobs = blobs
        self._about: dict[ContentId, set[ContentId]] = {}
        """What is followed from a blob though the blob does not name it: its lineage, and what is noted of it."""
        self._seen: set[ContentId] = set()

    def reach_refs(self) -> None:
        """Reach what every ref names but unused notes; what is about a blob is followed only from what is live, though
        records of lineage are kept."""
        roots = set()
        for name, named in self._objects.list_refs(""):
            about = next((folder for folder in (LINEAGE_REFS, FINISHED_REFS) if name.startswith(folder)), None)
            if about is None:
                roots |= set() if f"refs/{name}" in self.unused_notes else {named}
                continue
            blob = ContentId(name[len(about) :])
            self._about.setdefault(blob, set()).add(named)
            if about == LINEAGE_REFS:
                self.reached |= {named} & self._blobs.keys()
            if blob in self._seen:
                roots.add(named)
        self.reach(roots)

    def orphaned_notes(self) -> list[str]:
        """Keys of the refs below `FINISHED_REFS` about blobs that were not reached."""
        names = self._objects.ref_names(FINISHED_REFS.rstrip("/"))
        return [f"refs/{name}" for name in names if name[len(FINISHED_REFS) :] not in self.reached]

    def reach(self, roots: Iterable[ContentId]) -> None:
        """Reach ``roots`` and, level by level, all that they name."""
        level = set(roots)
        while level:
            self._seen |= level
            found = level & self._blobs.keys()
            self.reached |= found
            named = set(chain.from_iterable(self._objects.in_parallel(self._names_in, found)))
            named.update(*(self._about[content_id] for content_id in level if content_id in self._about))
            level = {name for name in named if name in self._blobs or name in self._about} - self._seen

    def _names_in(self, content_id: ContentId) -> set[ContentId]:
        key = blob_key(content_id)
        try:
            # Read without verifying: setting corrupt blobs aside is the business of those who need them.
            if not self._blobs[content_id].size or self._objects.files.read_start(key)[:1] not in b'{["':
                return set()
            return set(named_ids(self._objects.files.read_chunks(key)))
        except FileNotFoundError:
            return set()


def named_ids(chunks: Iterable[bytes]) -> Iterator[ContentId]:
    """Content ids that are whole strings in a stream of JSON, or of JSON within its strings. May repeat."""
    window = b""
    for chunk in chunks:
        window = window[1 - _NAMED_ID_BYTES :] + chunk
        for match in _NAMED_ID.finditer(window):
            yield ContentId(match[1].decode())

"""Garbage collection: delete the blobs that nothing live reaches."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain

from blake3 import blake3
from pydantic import BaseModel, ConfigDict

from rollout_core.base.errors import CorruptRef
from rollout_core.base.ids import ContentId, canonical_json, is_content_id, named_ids
from rollout_core.objects.files import (
    CHOSEN_REFS,
    GIVEN_UP_REFS,
    IMPORT_REFS,
    LINEAGE_FOLDERS,
    PROMOTION_REFS,
    PRUNED_REFS,
    RECORD_BYTES,
    SELF_NAMED_REFS,
    SNAPSHOT_REFS,
    FileStat,
    hashed,
    parsed,
)
from rollout_core.objects.object_store import ObjectStore, blob_key
from rollout_core.objects.retention.run_leases import live_leases, unused_before
from rollout_core.objects.retention.sweeps import announced
from rollout_core.objects.trees import TREE_BEGINS

log = logging.getLogger(__name__)

_RECORD_FOLDERS = tuple(f"{folder}/" for folder in SELF_NAMED_REFS)
FINISHED_REFS = "finished/"
"""Below it, under the id of a blob, stands what is noted of it; the note lives as long as the blob."""
UPDATE_REFS = "agent-updates/"
"""Below it, under the key of an update of an agent's policy, stands its outcome."""
CANDIDATE_REFS = "candidates/"
"""Below it, under its id, stands a model that a person is to decide about."""
KEEPING_REFS = (f"{PROMOTION_REFS}/", CANDIDATE_REFS, f"{CHOSEN_REFS}/")
"""What they name keeps its weights, also where the run that made it has given it up."""
NOTE_REFS = (
    CANDIDATE_REFS,
    f"{CHOSEN_REFS}/",
    "model-facts/",
    "prompt-lengths/",
    "pictures/",
    "prompt-shards/",
    "output-files/",
    "runs/",
    "work/",
    "fan-out/",
    "templated-models/",
    UPDATE_REFS,
)
"""Refs below them only save work or describe a run; such a note expires when it has not been set for a while."""
KEEP_NOTES = timedelta(days=30)
ABOUT_REFS = (*LINEAGE_FOLDERS, FINISHED_REFS, f"{PRUNED_REFS}/", f"{IMPORT_REFS}/")
"""Below them, under an id, stands what is known of a blob, a snapshot or code."""
UNSTORED_MODEL = "unstored model/1"
"""Kind of a note below `PRUNED_REFS`, see `unstored`."""
WEIGHTS = ".safetensors"
"""How the names of a model's files end that are left out where it is not stored."""
_END_BYTES = 64
"""So many trailing bytes of weights do not look like text by accident."""
_NO_TEXT = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")


class GcReport(BaseModel):
    """What a collection did, or would do."""

    model_config = ConfigDict(frozen=True)

    live_blobs: int
    """Reached from a root."""
    young_blobs: int
    """Not reached, but young or named by something young; and all that were not reached where something is
    ``unreadable``."""
    deleted_blobs: int
    deleted_bytes: int
    """Of the deleted blobs and leftovers."""
    deleted_leftovers: int
    """Temporary files and unfinished uploads of killed writers, and corrupt blobs that had been set aside."""
    deleted_notes: int
    """Refs that nobody used for long, or that described a blob that is gone."""
    unreadable: tuple[str, ...] = ()
    """Damaged refs and records. They may have named any blob, so none is deleted while there is one."""
    dry_run: bool


@dataclass(frozen=True)
class Scope:
    """What a collection takes for live in addition to all refs, and what not."""

    extra_roots: Collection[ContentId] = ()
    """Named elsewhere, such as in a database."""
    absent: frozenset[str] = frozenset()
    """Refs that count as gone, as in a preview of what comes after their removal."""
    closed: frozenset[str] = frozenset()
    """Refs whose record stays, but not what it names."""
    weights_of_inputs: bool = True
    """Whether models that are named by lineage alone stay, though they can be made again from their inputs."""


def collect_garbage(
    objects: ObjectStore,
    *,
    extra_roots: Iterable[ContentId] = (),
    min_age: timedelta,
    keep_notes: timedelta = KEEP_NOTES,
    dry_run: bool = False,
    scope: Scope | None = None,
) -> GcReport:
    """Delete every blob older than ``min_age`` that no ref and none of ``extra_roots`` reaches. ``scope`` says more.

    A reached blob of JSON or JSON lines reaches every blob whose id is a string in it (also in JSON within a string),
    so results, records and manifests keep what they name. The lineage of what is live is live, with the inputs it
    names; the lineage of anything else keeps its record for ``keep_notes``, not its data. Of several records that made
    equal content those are followed whose other outputs are live as well. Ids kept elsewhere, such as in a database,
    must be given as ``extra_roots``.

    Notes keep what they name, such as the shards of an input or the model of a run, until nobody has set them for
    ``keep_notes``; then they are deleted. Those below `FINISHED_REFS` live as long as the blob they are about.

    Large binary files, such as weights, are not read: files above `RECORD_BYTES` that no result, snapshot or lineage is
    named by, and of which neither the start nor the end looks like JSON.

    While a ref or a reached record is damaged, what it named is unknown, so no blob and no note of a blob is deleted.
    The report and a warning name it. ``rollout storage verify --repair`` restores it or moves it aside.

    Safe while writers run, as long as each names what it puts by a ref within ``min_age`` less six hours, or holds
    a `lease`: a put makes a blob young again, even when the bytes were there, and what is young spares what it names.
    An age of zero is for when nothing runs. A collection that is killed has deleted what it would have deleted first.
    """
    scope, leases = scope or Scope(extra_roots=frozenset(extra_roots)), live_leases(objects, clear=not dry_run)
    spared_since = unused_before(leases, time.time() - min_age.total_seconds())
    blobs = dict(objects.blobs())
    unused_since = unused_before(leases, time.time() - max(keep_notes, min_age).total_seconds())
    marking = Marking(objects, blobs, unused_since, scope)
    marking.reach_refs()
    live_blobs = len(marking.reached)
    marking.reach(content_id for content_id, stat in blobs.items() if stat.modified >= spared_since)
    marking.reach_refs()  # once more: what running writers have named since
    unreadable = marking.complaints()
    unreached = [] if unreadable else sorted(blobs.keys() - marking.reached)
    leftovers = [key for folder in ("tmp", "corrupt") for key, _ in objects.files.list(folder)]
    sweep = partial(_sweep, objects, dry_run=dry_run)
    free = partial(sweep, unchanged_since=spared_since)
    # Before the blobs: a note without its blob is worth nothing, and who is killed here leaves the notes to the next.
    orphans = [] if unreadable else [free(key) for key in marking.orphaned_notes()]
    unused = [sweep(key, unchanged_since=unused_since) for key in marking.unused_notes(unreadable=bool(unreadable))]
    with nullcontext() if dry_run else announced(objects.files, unreached):
        freed = objects.in_parallel(free, map(blob_key, unreached))
    cleared = objects.in_parallel(free, leftovers)
    num_swept = _count(freed)
    return GcReport(
        live_blobs=live_blobs,
        young_blobs=len(blobs) - live_blobs - num_swept,
        deleted_blobs=num_swept,
        deleted_bytes=sum(size or 0 for size in freed + cleared),
        deleted_leftovers=_count(cleared) + objects.files.drop_uploads(spared_since, dry_run=dry_run),
        deleted_notes=_count(orphans + unused),
        unreadable=tuple(unreadable),
        dry_run=dry_run,
    )


def _count(sizes: Sequence[int | None]) -> int:
    return sum(size is not None for size in sizes)


def _sweep(objects: ObjectStore, key: str, *, unchanged_since: float, dry_run: bool) -> int | None:
    """Bytes freed, or None when the file is spared; its age is asked for again, since a put may have renewed it."""
    stat = objects.files.stat(key)
    if stat is None or stat.modified >= unchanged_since:
        return None
    if not dry_run:
        objects.files.delete(key)
    return stat.size


class Marking:
    """The set of reached blobs, grown from roots."""

    def __init__(
        self, objects: ObjectStore, blobs: Mapping[ContentId, FileStat], unused_since: float, scope: Scope
    ) -> None:
        self.reached: set[ContentId] = set()
        self.unreadable: set[str] = set()
        """Damaged refs and reached records, which may have named anything."""
        self._unused_since = unused_since
        self._unused = {
            key
            for folder in NOTE_REFS
            for key, stat in objects.files.list(f"refs/{folder.rstrip('/')}")
            if stat.modified < unused_since
        }
        self._records: set[ContentId] = set()
        """What the refs of results, snapshots and lineage name."""
        self._objects = objects
        self._blobs = blobs
        self._scope = scope
        self._about: dict[ContentId, set[ContentId]] = {}
        """What is noted of a blob or snapshot, by its id."""
        self._lineage: dict[ContentId, set[ContentId]] = {}
        """Records of how it was made, by its id; several where calls of stages made the same."""
        self._lineage_refs: dict[str, ContentId] = {}
        self._keys: dict[ContentId, str] = {}
        """Of these records the keys of their calls."""
        self._all_keys: set[str] = set()
        self._keys_named: set[str] = set()
        """Of these keys the ones that what was reached names, such as what took a result."""
        self._outputs: dict[ContentId, set[ContentId]] = {}
        """Of records of lineage, as far as they were asked for."""
        self._seen: set[ContentId] = set()
        self._pruned: set[ContentId] = set()
        """Models that their run gave up, whose weights only those need that name the model itself."""
        self._chosen: set[ContentId] = set()
        """Models that are named so."""
        self._left_out: dict[ContentId, set[ContentId]] = {}
        """Weights of models that were given up, which nothing else has named."""
        self._traced: set[ContentId] = set()
        """Seen as the input of something that is live, see `Scope.weights_of_inputs`."""

    def reach_refs(self) -> None:
        """Reach what every ref names but unused notes; what is about a blob is followed only from what is live, though
        records of lineage are kept for a while."""
        roots = set(self._scope.extra_roots)
        self._chosen |= roots
        gone = self._scope.absent
        names = [
            name
            for name in self._objects.ref_names("")
            if f"refs/{name}" not in self._unused and name not in gone and not name.startswith(f"{GIVEN_UP_REFS}/")
        ]
        for name, named in zip(names, self._objects.in_parallel(self._named_by, names), strict=True):
            if named is None:
                continue
            if name in self._scope.closed:
                self.reached |= {named} & self._blobs.keys()
                continue
            if name.startswith(KEEPING_REFS) and named in self._blobs:
                self._chosen |= {named} | self._names_in(named)
            about = next((folder for folder in ABOUT_REFS if name.startswith(folder)), None)
            if about is None or not is_content_id(_subject(name, about)):
                roots.add(named)
                continue
            blob = ContentId(_subject(name, about))
            is_lineage = about in LINEAGE_FOLDERS
            (self._lineage if is_lineage else self._about).setdefault(blob, set()).add(named)
            if is_lineage:
                self._lineage_refs[name] = named
                self._keys[named] = name.split("/")[-1] if name.count("/") == 2 else ""
                self._all_keys.add(self._keys[named])
            if about == f"{PRUNED_REFS}/" and blob in self._blobs and self._is_pruned(named):
                self._pruned.add(blob)
            if about != FINISHED_REFS:
                self.reached |= {named} & self._blobs.keys()
            if blob in self._seen and not is_lineage:
                roots.add(named)
        if self._scope.weights_of_inputs:
            roots |= self._only_records(self._seen)
        self.reach(roots)
        self.reach(set().union(*(self._left_out.pop(model, ()) for model in self._chosen)))
        if not self._scope.weights_of_inputs:
            seen = self._seen | self._traced
            self._trace(self._only_records(seen) | self._records_of_several(seen))

    def _named_by(self, name: str) -> ContentId | None:
        try:
            named = self._objects.get_ref(name)
        except CorruptRef:
            self.unreadable.add(f"ref {name}, which is damaged")
            return None
        if named is not None and name.startswith(_RECORD_FOLDERS):
            self._records.add(named)
        if named is None or named in self._blobs or not name.startswith(f"{SNAPSHOT_REFS}/"):
            return named
        if not self._objects.exists(named):
            self.unreadable.add(f"the record of ref {name}, which is gone")
        return named

    def complaints(self) -> list[str]:
        """What is ``unreadable``, with a warning where there is any."""
        if self.unreadable:
            log.warning(
                "no blob is deleted, since it may be what is named by %s", "; by ".join(sorted(self.unreadable))
            )
        return sorted(self.unreadable)

    def orphaned_notes(self) -> list[str]:
        """Keys of the refs below `ABOUT_REFS`, but for lineage, about what was not reached."""
        known = self.reached | self._seen | self._traced
        folders = [folder for folder in ABOUT_REFS if folder not in LINEAGE_FOLDERS]
        return [key for folder in folders for key, blob in self._notes(folder) if blob not in known]

    def unused_notes(self, *, unreadable: bool) -> list[str]:
        """Keys of the refs below `NOTE_REFS` that nobody has set for long, and, unless something is ``unreadable``, of
        the lineage of what is gone, and records of what else made content that is live."""
        followed = self._seen | self._traced
        known = self.reached | followed
        lineage: list[str] = []
        for folder in () if unreadable else LINEAGE_FOLDERS:
            for key, blob in self._notes(folder):
                record = self._lineage_refs.get(key.removeprefix("refs/"))
                is_one_of_several = record is not None and len(self._lineage[ContentId(blob)]) > 1
                if blob not in known or (is_one_of_several and record not in followed):
                    lineage.append(key)
        return [*sorted(self._unused), *lineage]

    def _notes(self, folder: str) -> Iterator[tuple[str, str]]:
        for name in self._objects.ref_names(folder.rstrip("/")):
            if name not in self._scope.absent:
                yield f"refs/{name}", _subject(name, folder)

    def reach(self, roots: Iterable[ContentId]) -> None:
        """Reach ``roots`` and, level by level, all that they name."""
        level = set(roots)
        follows_lineage = self._scope.weights_of_inputs
        while level:
            self._seen |= level
            level = self._named_in(level, level, follows_lineage) - self._seen
            if not level and follows_lineage:
                level = self._records_of_several(self._seen)

    def _named_in(self, level: set[ContentId], followed: set[ContentId], follows_lineage: bool) -> set[ContentId]:
        """Keep ``level``; what those of it that are ``followed`` name, what is noted of it, and how it was made."""
        self.reached |= level & self._blobs.keys()
        found = followed & self._blobs.keys()
        named = set(chain.from_iterable(self.names_in_each(found)))
        self._keys_named |= named & self._all_keys
        named.update(*(self._about[seen] for seen in level if seen in self._about))
        if follows_lineage:
            named |= self._only_records(level)
        return {name for name in named if name in self._blobs or name in self._about or name in self._lineage}

    def names_in_each(self, found: Iterable[ContentId]) -> list[set[ContentId]]:
        """The ids that each of these blobs names."""
        return self._objects.in_parallel(self._names_in, found)

    def _only_records(self, seen: Iterable[ContentId]) -> set[ContentId]:
        """The records of lineage of what was made once."""
        known = (self._lineage.get(content_id, set()) for content_id in seen)
        return set().union(*(records for records in known if len(records) == 1))

    def _records_of_several(self, seen: set[ContentId]) -> set[ContentId]:
        """Once all else was reached: of what was made several times, such as rewards that are all 0, the records that
        something else names as its maker; or else those of which all outputs were seen, or the most. Without those that
        are among ``seen``."""
        several = {one: records for one in seen & self._lineage.keys() if len(records := self._lineage[one]) > 1}
        unread = set().union(*several.values()) - self._outputs.keys()
        self._outputs |= zip(unread, self._objects.in_parallel(self._outputs_of, unread), strict=True)
        sure: set[ContentId] = set()
        likely: set[ContentId] = set()
        for records in several.values():
            named = {record for record in records if self._keys[record] in self._keys_named}
            missing = {record: len(self._outputs[record] - seen) for record in records}
            fewest = min(missing.values())
            whole = {record for record in records if not missing[record]}
            sure |= named | whole
            if not named and not whole:
                likely |= {record for record in records if missing[record] == fewest}
        return (sure - seen) or (likely - seen)

    def _outputs_of(self, record: ContentId) -> set[ContentId]:
        try:
            document = parsed(self._objects.files.read(blob_key(record)))
        except FileNotFoundError:
            document = None
        outputs = document.get("outputs", ()) if isinstance(document, dict) else ()
        return {ContentId(one) for one in outputs if is_content_id(one)}

    def _trace(self, records: set[ContentId]) -> None:
        """Reach what records of lineage name, and the lineage of that, but not the weights of models that were made by
        stages from inputs that are named as well."""
        level = records - self._seen - self._traced
        while level:
            self._traced |= level
            trees = [content_id for content_id in level & self._blobs.keys() if self._is_made_tree(content_id)]
            level = self._named_in(level, level - set(trees), True) - self._seen - self._traced
            level = level or self._records_of_several(self._seen | self._traced)

    def _is_made_tree(self, content_id: ContentId) -> bool:
        key, made = blob_key(content_id), self._lineage.get(content_id, ())
        try:
            is_tree = self._objects.files.read_part(key, 0, len(TREE_BEGINS)) == TREE_BEGINS if made else False
        except FileNotFoundError:
            return False
        return is_tree and any(self._has_inputs(record) for record in made)

    def _has_inputs(self, record: ContentId) -> bool:
        try:
            document = parsed(self._objects.files.read(blob_key(record)))
        except FileNotFoundError:
            return False
        inputs = document.get("inputs") if isinstance(document, dict) else None
        return next(named_ids([canonical_json(inputs)]), None) is not None

    def _names_in(self, content_id: ContentId) -> set[ContentId]:
        key, size = blob_key(content_id), self._blobs[content_id].size
        hasher = blake3()
        try:
            is_json = size > 0 and begins_like_json(self._objects.files.read_part(key, 0, 1))
            if not is_json and self._is_binary(content_id):
                return set()
            names = set(named_ids(hashed(self._objects.files.read_chunks(key), hasher))) if size else set()
        except FileNotFoundError:
            return set()
        # Setting damaged blobs aside is the business of those who need them.
        if hasher.hexdigest() != content_id:
            self.unreadable.add(f"blob {content_id}, which is damaged")
        if content_id in self._pruned and content_id not in self._chosen and is_json:
            return self._without_weights(content_id, names)
        return names if is_json else set()

    def _is_pruned(self, note: ContentId) -> bool:
        """Whether a note below `PRUNED_REFS` is of a model that its run gave up, see `unstored`."""
        try:
            document = parsed(self._objects.files.read(blob_key(note)))
        except FileNotFoundError:
            return False
        return isinstance(document, dict) and document.get("kind") == UNSTORED_MODEL

    def _without_weights(self, model: ContentId, names: set[ContentId]) -> set[ContentId]:
        """What is reached of a model that its run gave up: all but the weights."""
        files = parsed(self._objects.files.read(blob_key(model)))["files"]
        weights = {ContentId(file["content_id"]) for file in files if file["path"].endswith(WEIGHTS)}
        self._left_out[model] = weights & names
        return names - weights

    def _is_binary(self, content_id: ContentId) -> bool:
        """Whether a blob that does not begin like JSON is surely none. A record may have lost its first bytes."""
        key, size = blob_key(content_id), self._blobs[content_id].size
        if size <= RECORD_BYTES or content_id in self._records:
            return False
        return not _ends_like_json(self._objects.files.read_part(key, size - _END_BYTES, _END_BYTES))


def _subject(name: str, folder: str) -> str:
    """What a ref below ``folder`` is about, if it is about something."""
    return name[len(folder) :].partition("/")[0]


def begins_like_json(start: bytes) -> bool:
    """Whether a blob with these first bytes may be JSON, or JSON lines."""
    return start[:1] in (b"{", b"[", b'"')


def _ends_like_json(end: bytes) -> bool:
    return end.rstrip()[-1:] in (b"}", b"]", b'"') and _NO_TEXT.search(end) is None

"""Whether a store holds what it says: every blob read and compared with its id, every ref and record followed; and what
can be done about damage that was found.

Checking changes nothing. Blobs are read as streams, several at once; in memory are the ids of blobs and the names of
refs, and where there is damage, also which blob names which. Safe while flows run: what appears meanwhile is
looked for before it counts as missing, and what goes meanwhile is nobody's damage.

Repair restores refs to records that name themselves from these. What else is damaged is moved to ``corrupt/``, where
garbage collection leaves it for a while, and with it the refs that need it: what is a cache is then made again by the
next run that needs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Literal, TypeVar

from blake3 import blake3

from rollout_core.base.errors import CorruptObject, CorruptRef, MissingObject, Recoverable
from rollout_core.base.ids import ContentId, is_content_id, named_ids
from rollout_core.objects import ObjectStore
from rollout_core.objects.files import (
    CHOSEN_REFS,
    GIVEN_UP_REFS,
    LINEAGE_FOLDERS,
    PRUNED_REFS,
    RECORD_BYTES,
    RESULT_REFS,
    SELF_NAMED_REFS,
    SNAPSHOT_REFS,
    hashed,
    own_refs,
    parsed,
)
from rollout_core.objects.object_store import blob_key
from rollout_core.objects.retention.garbage import begins_like_json
from rollout_core.objects.snapshots import PROGRESS_REFS
from rollout_core.objects.trees import TREE_BEGINS

_BATCH = 256
_T = TypeVar("_T")


@dataclass(frozen=True)
class Damage:
    """Something that is not as it was stored."""

    kind: Literal["damaged blob", "missing blob", "damaged ref", "misplaced ref", "dangling ref"]
    name: str
    """Id of the blob, or name of the ref."""
    place: str
    holders: tuple[str, ...] = ()
    """Refs that need a blob; of a ref, itself."""


@dataclass
class Verification:
    """What was read, and what of it is damaged."""

    num_blobs: int = 0
    num_bytes: int = 0
    num_refs: int = 0
    damage: list[Damage] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """Refs that an earlier version wrote, without a check."""
    stages: dict[str, str] = field(default_factory=dict)
    """Refs of results to the stage that made each."""


def verify_store(
    objects: ObjectStore, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Verification:
    """Read and compare all that is in a store. ``on_progress`` gets the bytes read so far, and those of all blobs."""
    return _Check(objects, on_progress).run()


class _Check:
    def __init__(self, objects: ObjectStore, on_progress: Callable[[int, int], None]) -> None:
        self._objects = objects
        self._on_progress = on_progress
        self._found = Verification()
        self._blobs = {content_id: stat.size for content_id, stat in objects.blobs()}
        self._names = {name for name in objects.ref_names("") if not name.startswith(f"{GIVEN_UP_REFS}/")}
        self._snapshots = {name.split("/")[1] for name in self._names if name.startswith(f"{SNAPSHOT_REFS}/")}
        self._let_go = {name.split("/")[1] for name in self._names if name.startswith(f"{PRUNED_REFS}/")}
        """Snapshots and models that were given up or never stored, which nobody misses."""
        self._damaged: set[str] = set()
        self._missing: set[str] = set()
        self._refs: dict[str, list[str]] = defaultdict(list)
        """What each id is named by."""
        self._outputs: dict[str, set[str]] = {}
        """Refs of results to what these stand on, as far as lineage records it."""

    def run(self) -> Verification:
        self._read_blobs()
        for names in _batches(sorted(self._names)):
            self._objects.in_parallel(self._check_ref, names)
        self._found.num_refs = len(self._names)
        self._tell_of_blobs()
        self._found.damage.sort(key=lambda damage: (damage.kind, damage.name))
        return self._found

    # Blobs

    def _read_blobs(self) -> None:
        total = sum(self._blobs.values())
        for batch in _batches(self._blobs):
            self._objects.in_parallel(self._check_blob, batch)
            self._found.num_blobs += len(batch)
            self._found.num_bytes += sum(self._blobs[content_id] for content_id in batch)
            self._on_progress(self._found.num_bytes, total)

    def _check_blob(self, content_id: ContentId) -> None:
        hasher = blake3()
        try:
            chunks = hashed(self._objects.files.read_chunks(blob_key(content_id)), hasher)
            first = next(chunks, b"")
            files = set(named_ids(chain([first], chunks))) if first.startswith(TREE_BEGINS) else set()
            for _ in chunks:
                """Only to be hashed."""
        except FileNotFoundError:
            return  # deleted in the meantime
        if hasher.hexdigest() != content_id:
            self._damaged.add(content_id)
            return
        if content_id not in self._let_go:
            self._missing.update(file for file in files if not self._is_there(file))

    def _is_there(self, content_id: str) -> bool:
        return content_id in self._blobs or self._objects.exists(ContentId(content_id))

    # Refs

    def _check_ref(self, name: str) -> None:
        try:
            content = self._objects.read_ref(name)
        except CorruptRef:
            self._add("damaged ref", name)
            return
        if content is None:
            return
        if not content.is_checked:
            self._found.unchecked.append(name)
        named = content.named
        self._refs[named].append(name)
        folder = name.partition("/")[0]
        if folder == PROGRESS_REFS:
            if named not in self._snapshots and not self._objects.ref_names(f"{SNAPSHOT_REFS}/{named}"):
                self._add("dangling ref", name)
        elif not self._is_there(named):
            self._add("dangling ref", name)
        elif folder in SELF_NAMED_REFS and named not in self._damaged and not self._follow(name, named):
            self._add("misplaced ref", name)

    def _follow(self, name: str, named: ContentId) -> bool:
        """Look for what a record stands on; False where it is not the record of ``name``."""
        try:
            document = parsed(self._objects.files.read(blob_key(named)))
        except FileNotFoundError:
            return True
        if name not in own_refs(document):
            return False
        if name.startswith(f"{SNAPSHOT_REFS}/") and not self._is_there(document["files"]):
            self._missing.add(document["files"])
        if name.startswith(LINEAGE_FOLDERS):
            result = f"{RESULT_REFS}/{document['key']}"
            self._outputs[result] = set(document["outputs"])
            self._found.stages[result] = document["stage"]
            output = name.split("/")[1]
            is_kept = output in self._snapshots or output in self._let_go or self._is_there(output)
            if result in self._names and not is_kept:
                self._missing.add(output)
        return True

    def _add(self, kind: Literal["damaged ref", "misplaced ref", "dangling ref"], name: str) -> None:
        self._found.damage.append(Damage(kind, name, self._objects.files.where(f"refs/{name}"), (name,)))

    # Who needs what is damaged

    def _tell_of_blobs(self) -> None:
        wanted = self._damaged | self._missing
        parents = self._parents(wanted) if wanted else {}
        for name in wanted:
            holders = tuple(sorted(self._holders(name, parents)))
            place = self._objects.files.where(blob_key(ContentId(name)))
            if name in self._damaged:
                self._found.damage.append(Damage("damaged blob", name, place, holders))
            elif holders:  # what nobody needs may be gone
                self._found.damage.append(Damage("missing blob", name, place, holders))

    def _parents(self, wanted: set[str]) -> dict[str, set[str]]:
        """Blobs that name each blob and snapshot."""
        known = self._blobs.keys() | wanted | self._snapshots
        parents: dict[str, set[str]] = defaultdict(set)
        for batch in _batches(self._blobs):
            for blob, named in zip(batch, self._objects.in_parallel(self._named_in, batch), strict=True):
                for child in named & known - {blob}:
                    parents[child].add(blob)
        return parents

    def _named_in(self, content_id: ContentId) -> set[ContentId]:
        key = blob_key(content_id)
        try:
            if not self._blobs[content_id] or not begins_like_json(self._objects.files.read_part(key, 0, 1)):
                return set()
            return set(named_ids(self._objects.files.read_chunks(key)))
        except FileNotFoundError:
            return set()

    def _holders(self, name: str, parents: dict[str, set[str]]) -> set[str]:
        """Refs that are of no use without this blob, or snapshot."""
        holders: set[str] = set()
        seen, waiting = {name}, [name]
        while waiting:
            child = waiting.pop()
            refs = {ref for ref in self._refs.get(child, ()) if not ref.startswith(LINEAGE_FOLDERS)}
            holders |= refs
            above = {ref.split("/")[1] for ref in refs if ref.startswith(f"{SNAPSHOT_REFS}/")}
            above |= {parent for parent in parents.get(child, ()) if self._stands_on(parent, child)}
            waiting += above - seen
            seen |= above
        return holders

    def _stands_on(self, parent: str, child: str) -> bool:
        """Not so where a record of lineage names what once was an input, or a result what it was made of; nor of a
        model that was given up."""
        if parent in self._let_go:
            return False
        refs = self._refs.get(parent, ())
        results = [ref for ref in refs if ref.startswith(f"{RESULT_REFS}/")]
        if any(ref.startswith(LINEAGE_FOLDERS) for ref in refs):
            return False
        return not results or any(child in self._outputs.get(ref, {child}) for ref in results)


def _batches(items: Iterable[_T]) -> Iterator[Sequence[_T]]:
    rest = iter(items)
    while batch := list(islice(rest, _BATCH)):
        yield batch


CACHES = (
    "results",
    "progress",
    "model-facts",
    "prompt-lengths",
    "pictures",
    "merged-models",
    "gguf-models",
    "templated-models",
    "prompt-shards",
    "tokenized",
    "reference-logprobs",
    "output-files",
    "finished",
    "runs",
    "work",
    "fan-out",
    "agent-updates",
    "imports",
    CHOSEN_REFS,
    PRUNED_REFS,
)
"""Folders of refs to what a run makes again when it finds nothing there."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one damage."""

    text: str
    is_lost: bool = False
    """Whether something is gone that no run makes again by itself."""


def repair_store(objects: ObjectStore, found: Verification) -> Iterator[tuple[Damage, Outcome]]:
    """Mend one damage after the other. Each is looked at again first, since a running flow may have mended it."""
    wanted = {damage.name for damage in found.damage if damage.kind in ("damaged ref", "misplaced ref")}
    records = _newest_records(objects, wanted) if wanted else {}
    for damage in found.damage:
        if damage.name in wanted:
            yield damage, _mend_ref(objects, damage, records.get(damage.name))
        elif damage.kind == "dangling ref":
            yield damage, _without(objects, damage.holders, "moved aside")
        else:
            yield damage, _mend_blob(objects, damage)


def add_checks(objects: ObjectStore, names: Iterable[str]) -> int:
    """Write those of these refs anew that still have no check; returns how many."""
    num_written = 0
    for name in names:
        try:
            content = objects.read_ref(name)
        except CorruptRef:
            continue
        if content is not None and not content.is_checked:
            objects.set_ref(name, content.named)
            num_written += 1
    return num_written


def _newest_records(objects: ObjectStore, wanted: set[str]) -> dict[str, ContentId]:
    """For each of these refs the record that was stored last of those that say they belong there."""
    newest: dict[str, tuple[float, ContentId]] = {}
    for content_id, stat in objects.blobs():
        if not 0 < stat.size <= RECORD_BYTES:
            continue
        try:
            if objects.files.read_part(blob_key(content_id), 0, 1) != b"{":
                continue
            names = own_refs(parsed(objects.get_bytes(content_id))) & wanted
        except (FileNotFoundError, MissingObject, CorruptObject):
            continue
        for name in names:
            newest[name] = max(newest.get(name, (0.0, content_id)), (stat.modified, content_id))
    return {name: content_id for name, (_, content_id) in newest.items()}


def _mend_ref(objects: ObjectStore, damage: Damage, record: ContentId | None) -> Outcome:
    name = damage.name
    try:
        if damage.kind == "damaged ref" and objects.get_ref(name) is not None:
            return Outcome("whole by now")
    except CorruptRef:
        pass
    folder, _, rest = name.partition("/")
    if folder == "spans" and is_content_id(rest) and objects.exists(ContentId(rest)):
        record = ContentId(rest)
    if record is not None:
        objects.set_ref(name, record)
        return Outcome(f"restored: it names {record} again")
    return _without(objects, (name,), "moved aside")


def _mend_blob(objects: ObjectStore, damage: Damage) -> Outcome:
    content_id = ContentId(damage.name)
    try:
        for _ in objects.stream(content_id):
            pass
        return Outcome("whole by now")
    except CorruptObject:
        return _without(objects, damage.holders, "moved aside")
    except MissingObject:
        return _without(objects, damage.holders, "gone")
    except Recoverable as error:
        return Outcome(f"left as it is: {error}", is_lost=True)


def _without(objects: ObjectStore, holders: tuple[str, ...], done: str) -> Outcome:
    """Forget the refs that need what is damaged."""
    for name in holders:
        objects.set_ref_aside(name)
    again = (*(f"{folder}/" for folder in CACHES), *LINEAGE_FOLDERS)
    lost = [name for name in holders if not name.startswith(again)]
    if lost:
        return Outcome(f"{done}; lost with it: {', '.join(lost)}", is_lost=True)
    return Outcome(f"{done}; made again by the next run that needs it")

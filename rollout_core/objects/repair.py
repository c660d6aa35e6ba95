"""What can be done about damage that `verify_store` found.

Refs to records that name themselves are restored from these. What else is damaged is moved to ``corrupt/``, where
garbage collection leaves it for a while, and with it the refs that need it: what is a cache is then made again by the
next run that needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollout_core.base.errors import CorruptObject, CorruptRef, MissingObject, Recoverable
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.objects import ObjectStore
from rollout_core.objects.self_named import RECORD_BYTES, own_refs, parsed
from rollout_core.objects.store import blob_key
from rollout_core.objects.verification import Damage, Verification

CACHES = (
    "results",
    "progress",
    "model-facts",
    "merged-models",
    "prompt-shards",
    "tokenized",
    "reference-logprobs",
    "output-files",
    "finished",
    "runs",
    "work",
    "fan-out",
)
"""Folders of refs to what a run makes again when it finds nothing there."""


@dataclass(frozen=True)
class Outcome:
    """What became of one damage."""

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
    """Write those of these refs anew that still have no check; tells how many."""
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
    lost = [name for name in holders if not name.startswith(tuple(f"{folder}/" for folder in (*CACHES, "lineage")))]
    if lost:
        return Outcome(f"{done}; lost with it: {', '.join(lost)}", is_lost=True)
    return Outcome(f"{done}; made again by the next run that needs it")

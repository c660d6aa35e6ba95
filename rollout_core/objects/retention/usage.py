"""What uses how much of an object store: by what it is for, alone or together with others, and what nothing needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from pydantic import BaseModel, ConfigDict

from rollout_core.base.ids import ContentId
from rollout_core.objects import ObjectStore, SnapshotStore
from rollout_core.objects.files import (
    LINEAGE_FOLDERS,
    LINEAGE_REFS,
    MAKER_REFS,
    PROMOTION_REFS,
    RESULT_REFS,
    SNAPSHOT_REFS,
    FileStat,
    parsed,
)
from rollout_core.objects.object_store import blob_key
from rollout_core.objects.retention.garbage import Marking, Scope
from rollout_core.objects.snapshots import RUN_NAME


class Use(BaseModel):
    """One purpose."""

    model_config = ConfigDict(frozen=True)

    what: str
    names: int
    """Refs that stand for it."""
    total_bytes: int
    """Of all blobs that it needs."""
    own_bytes: int
    """Of those that nothing else needs: what deleting it would free."""


class Usage(BaseModel):
    """What a store holds."""

    model_config = ConfigDict(frozen=True)

    url: str
    blobs: int
    total_bytes: int
    uses: tuple[Use, ...]
    """The largest first. Blobs that several need count in the total of each."""
    shared_bytes: int
    """Needed by more than one of them."""
    unneeded_blobs: int
    unneeded_bytes: int
    """Needed by none of them: what housekeeping deletes once it is old enough."""
    leftover_bytes: int
    """Temporary files and what was set aside as damaged."""


DATABASE = "named by the database"
INPUTS = "what all this was made from"


def measure(objects: ObjectStore, *, named_elsewhere: Collection[ContentId] = ()) -> Usage:
    """Look at every ref and at every record that it leads to; weights are not read. Nothing is changed."""
    blobs = dict(objects.blobs())
    scope = Scope(extra_roots=named_elsewhere, weights_of_inputs=False)
    marking = Marking(objects, blobs, unused_since=0.0, scope=scope)
    names_in: dict[ContentId, set[ContentId]] = {}
    users: dict[ContentId, set[str]] = defaultdict(set)
    groups = _groups(objects)
    groups[DATABASE] = {content_id: content_id for content_id in named_elsewhere}
    for what, roots in groups.items():
        # A record of lineage names its inputs, which it does not keep by itself.
        is_lineage = what in (MAKER_REFS, LINEAGE_REFS)
        named = set(roots.values()) & blobs.keys()
        for content_id in named if is_lineage else _closure(marking, named, blobs, names_in):
            users[content_id].add(what)
    marking.reach_refs()
    for content_id in marking.reached - users.keys():
        users[content_id].add(INPUTS)
    totals: dict[str, int] = defaultdict(int)
    own: dict[str, int] = defaultdict(int)
    for content_id, needing in users.items():
        for what in needing:
            totals[what] += blobs[content_id].size
        if len(needing) == 1:
            own[next(iter(needing))] += blobs[content_id].size
    uses = [
        Use(what=what, names=len(groups.get(what, ())), total_bytes=totals[what], own_bytes=own[what])
        for what in totals
    ]
    unneeded = blobs.keys() - users.keys()
    leftovers = [stat.size for folder in ("tmp", "corrupt") for _, stat in objects.files.list(folder)]
    return Usage(
        url=objects.url,
        blobs=len(blobs),
        total_bytes=sum(stat.size for stat in blobs.values()),
        uses=tuple(sorted(uses, key=lambda use: (-use.own_bytes, -use.total_bytes, use.what))),
        shared_bytes=sum(blobs[content_id].size for content_id, needing in users.items() if len(needing) > 1),
        unneeded_blobs=len(unneeded),
        unneeded_bytes=sum(blobs[content_id].size for content_id in unneeded),
        leftover_bytes=sum(leftovers),
    )


def _groups(objects: ObjectStore) -> dict[str, dict[str, ContentId]]:
    """Refs with what they stand for, by purpose."""
    found: dict[str, dict[str, ContentId]] = defaultdict(dict)
    refs = dict(objects.list_refs(""))
    stages = dict(_stages(objects, refs))
    states = SnapshotStore(objects).list()
    runs = {state.ref: f"training states of {state.meta.get(RUN_NAME, 'a run')}" for state in states}
    for name, named in refs.items():
        folder, _, rest = name.partition("/")
        what = {
            RESULT_REFS: f"results of {stages.get(name, 'stages')}",
            SNAPSHOT_REFS: runs.get(name, "training states"),
            PROMOTION_REFS: f"promoted as {rest.partition('/')[0].removeprefix('of-')}",
        }.get(folder, folder)
        found[what][name] = named
    return found


def _stages(objects: ObjectStore, refs: Mapping[str, ContentId]) -> Iterator[tuple[str, str]]:
    """Refs of results and the stages that made them, by the records of lineage."""
    records = {named for name, named in refs.items() if name.startswith(LINEAGE_FOLDERS)}

    def read(record: ContentId) -> tuple[str, str] | None:
        try:
            document = parsed(objects.files.read(blob_key(record)))
        except FileNotFoundError:
            return None
        match document:
            case {"stage": str(stage), "key": str(key)}:
                return f"{RESULT_REFS}/{key}", stage
        return None

    yield from filter(None, objects.in_parallel(read, records))


def _closure(
    marking: Marking,
    roots: set[ContentId],
    blobs: Mapping[ContentId, FileStat],
    names_in: dict[ContentId, set[ContentId]],
) -> set[ContentId]:
    """Blobs that roots lead to; ``names_in`` remembers what each names."""
    seen: set[ContentId] = set()
    level = roots
    while level:
        seen |= level
        unread = [content_id for content_id in level if content_id not in names_in]
        names_in.update(zip(unread, marking.names_in_each(unread), strict=True))
        level = {name for content_id in level for name in names_in[content_id] if name in blobs} - seen
    return seen

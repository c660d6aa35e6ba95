"""The model that the store's latest resources serve under a name, and the history of it: who changed it, when, why.

An entry of the history is a blob in the object store, named by a ref of its own below ``promotions/of-RESOURCE/``. It
is written before the resources are: killed in between, nothing is lost, the entry stands in the history though it is
not in force, and who tries again finds it and continues from there. Two who promote at once write two entries. Entries
keep alive, through garbage collection, the weights that one can go back to, and the evaluations that were the evidence.
"""

from __future__ import annotations

import asyncio
import fcntl
import getpass
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError
from ulid import ULID

from rollout_core.base.errors import ConfigError, Conflict, CorruptObject, CorruptRef, NotFound
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.base.locks import try_exclusive
from rollout_core.base.settings import locations
from rollout_core.objects import ObjectStore
from rollout_core.objects.addresses import complete_id
from rollout_core.objects.files import PROMOTION_REFS
from rollout_core.objects.records import Record
from rollout_core.promotion.evidence import Evidence
from rollout_core.store import LLM, LightningStore, Resource

log = logging.getLogger(__name__)

_OF = "of-"
"""Before the name of a resource, which may begin with a dot, as no part of a ref may."""
LOOKED_AT = 500
"""So many of the last entries are looked through for a rollback; online learning may write thousands."""
_LOOK_AGAIN_SECONDS = 0.05


class Entry(BaseModel):
    """One change of the latest model of a resource."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: Literal["promote", "rollback"]
    resource: str
    model: ContentId
    previous: ContentId | None
    """What was served until then; None: nothing, or a model that is somebody else's."""
    by: str
    """Flow run, or user and command."""
    at: AwareDatetime
    reason: str
    evidence: Evidence | None = None


class Latest(Record):
    """The model that the store's latest resources serve under a name."""

    model: ContentId | None
    """None also where its weights are gone, so that nothing can be compared with it."""
    served: ContentId | None


@dataclass(frozen=True)
class Change:
    """A change of the latest model that is to be made."""

    action: Literal["promote", "rollback"]
    resource: str
    model: ContentId
    by: str
    reason: str
    evidence: Evidence | None = None


def this_user(command: str) -> str:
    """Who runs a command, for the history."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{command}"


# The history


def resources_with_history(objects: ObjectStore) -> list[str]:
    """Names of the resources that have one."""
    names = (name.split("/")[1].removeprefix(_OF) for name in objects.ref_names(PROMOTION_REFS))
    return list(dict.fromkeys(names))


def history_of(objects: ObjectStore, resource: str, *, last: int = 0) -> list[Entry]:
    """All entries, or the ``last`` ones, the oldest first. One that cannot be read is left out, with a warning."""
    return [entry for _, entry in entries_by_ref(objects, resource, last=last)]


def entries_by_ref(objects: ObjectStore, resource: str, *, last: int = 0) -> list[tuple[str, Entry]]:
    """`history_of` with the ref of each entry."""

    def read(name: str) -> tuple[str, Entry] | None:
        try:
            named = objects.get_ref(name)
            return None if named is None else (name, Entry.model_validate_json(objects.get_bytes(named)))
        except (NotFound, CorruptRef, CorruptObject, ValidationError) as error:
            log.warning("ref %s is no entry of the history that can be read (%s); it is left out", name, error)
            return None

    found = objects.in_parallel(read, objects.ref_names(_folder(resource))[-last:])
    return [entry for entry in found if entry is not None]


def histories(objects: ObjectStore) -> list[list[tuple[str, ContentId]]]:
    """Refs of the entries of each resource's history, the oldest first, with the model that each made the latest: what
    housekeeping keeps the newest of."""
    return [
        [(ref, entry.model) for ref, entry in entries_by_ref(objects, resource)]
        for resource in resources_with_history(objects)
    ]


def withdrawn(entries: Sequence[Entry], model: ContentId) -> Entry | None:
    """The rollback from this model, where nobody has made it the latest since."""
    about = [entry for entry in entries if model in (entry.model, entry.previous)]
    last = next((entry for entry in reversed(about) if entry.model == model or entry.action == "rollback"), None)
    return last if last is not None and last.action == "rollback" and last.previous == model else None


def evidence_for(objects: ObjectStore, resource: str, model: ContentId) -> Evidence | None:
    """What a model was promoted by last; None without evidence."""
    entries = history_of(objects, resource, last=LOOKED_AT)
    promoted = [entry for entry in entries if (entry.action, entry.model) == ("promote", model)]
    return promoted[-1].evidence if promoted else None


def _write(objects: ObjectStore, entry: Entry) -> None:
    name = ULID.from_datetime(entry.at)
    objects.set_ref(f"{_folder(entry.resource)}/{name}", objects.put_json(entry))


def _folder(resource: str) -> str:
    return f"{PROMOTION_REFS}/{_OF}{resource}"


def _now(entries: Sequence[Entry]) -> datetime:
    """A time after all entries, also where a clock went back: the order of the history is that of its times."""
    now = datetime.now(UTC)
    return max([now, *(entry.at + timedelta(milliseconds=1) for entry in entries[-1:])])


# The latest model


async def served_model(store: LightningStore, objects: ObjectStore, resource: str) -> ContentId | None:
    """What the latest resources serve under this name; None: nothing, or a model that is no content id.

    A database that knows no resource of this name, such as a new one with an old object store, does not unmake what
    was promoted: then it is what the history made the latest last.
    """
    latest = await store.get_latest_resources()
    known = latest.resources if latest else {}
    if resource in known:
        return _model_of(known[resource])
    entry = await asyncio.to_thread(_last, objects, resource)
    return None if entry is None else entry.model


async def find_latest(
    store: LightningStore, objects: ObjectStore, resource: str, *, warn: Callable[[str], None]
) -> Latest:
    """The latest model and whether it can be evaluated, after `adopt_history`. ``warn`` gets a line where that made a
    model the latest, and where weights are gone."""
    entry = await adopt_history(store, objects, resource)
    if entry is not None:
        warn(
            f"the database knows no {resource!r}; by the history in object storage {entry.model.short} became the "
            f"latest at {entry.at:%Y-%m-%d %H:%M} UTC, and is so here as well"
        )
    served = await served_model(store, objects, resource)
    found = _with_weights(objects, served)
    if found.model != served:
        warn(f"the latest {resource!r}, {served}, is not in the object store any more; not compared")
    return found


def latest_by_history(objects: ObjectStore, resource: str) -> Latest:
    """`find_latest` without a database."""
    entries = history_of(objects, resource, last=1)
    return _with_weights(objects, entries[-1].model if entries else None)


def _with_weights(objects: ObjectStore, served: ContentId | None) -> Latest:
    is_there = served is not None and objects.tree_is_present(served)
    return Latest(model=served if is_there else None, served=served)


async def adopt_history(store: LightningStore, objects: ObjectStore, resource: str) -> Entry | None:
    """Add to the latest resources what the history made the latest last, where they have nothing of this name. The
    entry it stands in; None where nothing was to be added."""
    async with _alone(objects):
        return await _adopt(store, objects, resource)


async def _adopt(store: LightningStore, objects: ObjectStore, resource: str) -> Entry | None:
    latest = await store.get_latest_resources()
    known = latest.resources if latest else {}
    entry = _last(objects, resource) if resource not in known else None
    if entry is not None:
        await store.add_resources({**known, resource: _served_as(entry.model)})
    return entry


def _last(objects: ObjectStore, resource: str) -> Entry | None:
    """The last entry; raises ConfigError where that cannot be read, as the one before may have been gone back from."""
    names = objects.ref_names(_folder(resource))
    found = entries_by_ref(objects, resource, last=1)
    if names and not found:
        raise ConfigError(
            f"the last entry of the history of {resource!r}, ref {names[-1]} in {objects.url}, cannot be read, and the "
            "database does not know what is served; say it: rollout promote ID"
        )
    return found[-1][1] if found else None


def _served_as(model: ContentId) -> LLM:
    return LLM(endpoint="", model=model, sampling_parameters={})


def _model_of(named: Resource | None) -> ContentId | None:
    # Somebody else's resource of that name may serve a model that is no content id.
    return ContentId(named.model) if isinstance(named, LLM) and is_content_id(named.model) else None


Served = ContentId | None | Literal["whatever"]
"""What has to be served for a change to be made; None: nothing of ours."""


class LatestChanged(Conflict):
    """Another model is served than the one that was looked at; nothing was changed."""

    def __init__(self, resource: str, looked_at: ContentId | None, now: ContentId | None) -> None:
        was, by_now = (model.short if model is not None else "none" for model in (looked_at, now))
        super().__init__(f"the latest {resource!r} has changed since it was compared ({was} -> {by_now})")
        self.now = now


async def change_latest(
    store: LightningStore, objects: ObjectStore, change: Change, *, instead_of: Served = "whatever"
) -> Entry | None:
    """Make a model the latest, and note it in the history before. None where it is the latest already.

    Tried again after it was killed or the store was away, it resumes with the entry that it wrote. Raises LatestChanged
    where something else than ``instead_of`` is served.
    """
    async with _alone(objects):
        served = await _served_or_adopted(store, objects, change.resource)
        if instead_of != "whatever" and served not in (instead_of, change.model):
            raise LatestChanged(change.resource, instead_of, served)
        return await _change(store, objects, change, history_of(objects, change.resource, last=1), served)


async def _served_or_adopted(store: LightningStore, objects: ObjectStore, resource: str) -> ContentId | None:
    with suppress(ConfigError):  # what cannot be read is replaced by what is promoted now
        await _adopt(store, objects, resource)
    latest = await store.get_latest_resources()
    return _model_of((latest.resources if latest else {}).get(resource))


async def _change(
    store: LightningStore,
    objects: ObjectStore,
    change: Change,
    entries: Sequence[Entry],
    previous: ContentId | None,
) -> Entry | None:
    """See `change_latest`; ``previous`` is served, and ``entries`` hold the last one of the history."""
    latest = await store.get_latest_resources()
    known = latest.resources if latest else {}
    wanted = _served_as(change.model)
    if known.get(change.resource) == wanted:
        return None
    entry = _unfinished(entries, change, previous)
    if entry is None:
        entry = Entry(**vars(change), previous=previous, at=_now(entries))
        _write(objects, entry)
    await store.add_resources({**known, change.resource: wanted})
    return entry


def _unfinished(entries: Sequence[Entry], change: Change, previous: ContentId | None) -> Entry | None:
    """The last entry, where it is this change, which was noted and not made."""
    if not entries:
        return None
    last = entries[-1]
    is_same = all(getattr(last, name) == value for name, value in vars(change).items())
    return last if is_same and last.previous == previous else None


async def roll_back(
    store: LightningStore,
    objects: ObjectStore,
    resource: str,
    *,
    to: str | None,
    by: str,
    reason: str = "",
    instead_of: Served = "whatever",
    once: bool = False,
) -> Entry:
    """Serve again what was latest before, or the model ``to`` of the history (its id, or the first digits). ``once``:
    where ``by`` has gone back last and that is in force, nothing more is done.

    Raises NotFound where there is nothing to go back to or its weights are gone, ConfigError for ``to`` that is no id,
    LatestChanged where something else than ``instead_of`` is served.
    """
    async with _alone(objects):
        entries = history_of(objects, resource)
        served = await _served_or_adopted(store, objects, resource)
        last = entries[-1] if entries else None
        if once and last is not None and (last.action, last.by, last.model) == ("rollback", by, served):
            return last
        if instead_of not in ("whatever", served):
            raise LatestChanged(resource, instead_of, served)
        target = model_to_go_back_to(entries, resource, served) if to is None else _named(entries, resource, to)
        if target == served:
            raise ConfigError(f"{resource!r} serves {target.short} already; give another model of its history")
        if not objects.tree_is_present(target):
            raise NotFound(
                f"the weights of {target} are not in the object store {objects.url} any more, so {resource!r} cannot "
                f"go back to it; `rollout promotions {resource}` lists others, which --to takes"
            )
        left = "nothing" if served is None else served.short
        change = Change("rollback", resource, target, by, reason or f"back from {left} to {target.short}")
        entry = await _change(store, objects, change, entries, served)
    assert entry is not None, "another model is served"
    return entry


def model_to_go_back_to(entries: Sequence[Entry], resource: str, served: ContentId | None) -> ContentId:
    """The model that was latest before the one that is served. Going back twice goes back by two.

    Raises NotFound where there is none.
    """
    standing: list[ContentId] = []  # of those that were latest, the ones that were not gone back from
    for entry in entries:
        if entry.action == "promote":
            # What another entry put on top and did not come into force is no longer there.
            _settle(standing, entry.previous)
            if standing[-1:] != [entry.model]:  # one that was served already is no other to go back from
                standing.append(entry.model)
        else:
            _settle(standing, entry.model)
    _settle(standing, served)
    if served is None or len(standing) < 2:
        what = "serves no model of ours" if served is None else f"serves {served.short}, and no model before it"
        raise NotFound(
            f"nothing to go back to: {resource!r} {what}; `rollout promotions` lists the history, and `rollout promote "
            "ID` makes any model the latest"
        )
    return standing[-2]


def _settle(standing: list[ContentId], served: ContentId | None) -> None:
    """Make ``served`` the last of those that stand."""
    if served is None:
        return
    if served in standing:
        del standing[len(standing) - standing[::-1].index(served) :]
    else:
        standing.append(served)


def _named(entries: Sequence[Entry], resource: str, digits: str) -> ContentId:
    known = {model for entry in entries for model in (entry.model, entry.previous) if model is not None}
    what = f"model in the history of {resource!r}"
    found = complete_id(digits, known, what)
    if found not in known:
        raise NotFound(f"{found} is no {what}; `rollout promote {found.short}` makes any model the latest")
    return found


@asynccontextmanager
async def _alone(objects: ObjectStore) -> AsyncIterator[None]:
    """Held while the latest resources are read and written: another process of this machine that changes another of
    them meanwhile would undo this change. On other machines the later one counts; the history has both."""
    is_local = objects.url.startswith("file://")
    folder = Path(objects.url.removeprefix("file://")) if is_local else locations().cache
    path = folder / "locks" / "promotions.lock"
    # Not waited for in the kernel: who holds it may need this event loop to go on.
    while (descriptor := try_exclusive(path)) is None:
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)
    try:
        yield
    finally:
        # Closing would not do: a process that was forked meanwhile shares the open file.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

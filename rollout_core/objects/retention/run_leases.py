"""Runs that are under way, as garbage collection knows them: what they have used or put since they began stays.

A run holds a lease: two refs below ``leases/<ulid>/``, whose files the storage dates. ``began`` is set once, ``alive``
again and again by a thread. A lease that was not renewed for a day has ended, and so has one of a process that is known
to be dead. What a run takes from a cache it renews, see `renew_ref`, so that it counts as used since the run began.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ulid import ULID

from rollout_core.base.errors import CorruptObject, CorruptRef, NotFound, RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.base.processes import ProcessName
from rollout_core.objects.files import SNAPSHOT_REFS, TOUCH_AFTER_SECONDS, ref_key
from rollout_core.objects.object_store import ObjectStore

log = logging.getLogger(__name__)

LEASE_REFS = "leases"
RENEW_SECONDS = 600.0
DEAD_AFTER_SECONDS = 86400.0
"""Long enough for a machine that was asleep or cut off for a night."""
LONGEST_SECONDS = 30 * 86400.0
"""A run that lasts longer, such as a service, holds what it has used or made in the last so many seconds."""
_MARGIN_SECONDS = TOUCH_AFTER_SECONDS + 60.0
"""A run may use what was renewed so long before it began, without renewing it again."""


@dataclass(frozen=True)
class Lease:
    """A run that is under way."""

    name: str
    holder: str
    """What people call the run."""
    began: float
    """When it began, by the storage's clock, in seconds since the epoch; see `LONGEST_SECONDS`."""


@contextmanager
def lease(objects: ObjectStore, holder: str) -> Iterator[None]:
    """Hold a lease within the block. Raises what the storage raises where it cannot be written."""
    name = f"{LEASE_REFS}/{ULID()}"
    document = objects.put_json({"holder": holder, "process": str(ProcessName.of_this_process())})
    objects.set_ref(f"{name}/began", document)
    objects.set_ref(f"{name}/alive", document)
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(objects, name, document, ended), name="lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join(timeout=10.0)
        _drop(objects, name)


def _renew(objects: ObjectStore, name: str, document: ContentId, ended: threading.Event) -> None:
    while not ended.wait(RENEW_SECONDS):
        try:
            objects.set_ref(f"{name}/alive", document)
        except RolloutError as error:
            log.warning("the lease of this run was not renewed (%s); it is tried again", error)


def _drop(objects: ObjectStore, name: str) -> None:
    try:
        objects.delete_ref(f"{name}/began")
        objects.delete_ref(f"{name}/alive")
    except RolloutError as error:
        log.warning("a lease is left to end by itself: %s", error)


def live_leases(objects: ObjectStore, *, clear: bool) -> list[Lease]:
    """Runs under way, the oldest first. ``clear`` removes the leases of those that have ended."""
    dated = {key.removeprefix("refs/"): stat.modified for key, stat in objects.files.list(f"refs/{LEASE_REFS}")}
    found = []
    for name in sorted({ref.rpartition("/")[0] for ref in dated}):
        began = dated.get(f"{name}/began")
        last = max(when for ref, when in dated.items() if ref.startswith(f"{name}/"))
        holder, process = _document(objects, name)
        if last < time.time() - DEAD_AFTER_SECONDS or (process is not None and process.has_ended()):
            if clear:
                _drop(objects, name)
        elif began is not None:
            found.append(Lease(name, holder, max(began, time.time() - LONGEST_SECONDS)))
    return sorted(found, key=lambda item: item.began)


def _document(objects: ObjectStore, name: str) -> tuple[str, ProcessName | None]:
    try:
        named = objects.get_ref(f"{name}/alive") or objects.get_ref(f"{name}/began")
        document = {} if named is None else objects.get_json(named)
    except (NotFound, CorruptObject, CorruptRef):
        document = {}
    return str(document.get("holder", name)), ProcessName.parse(str(document.get("process", "")))


def unused_before(leases: list[Lease], moment: float) -> float:
    """``moment``, or where a run began before it, that time: what was used since then stays."""
    return min([moment, *(item.began - _MARGIN_SECONDS for item in leases)])


def renew_ref(objects: ObjectStore, name: str) -> None:
    """Have ``name`` count as used now. Refs that were set or renewed a short while ago are left alone."""
    stat = objects.files.stat(ref_key(name))
    if stat is None or time.time() - stat.modified < TOUCH_AFTER_SECONDS:
        return
    named = objects.get_ref(name)
    if named is not None:
        objects.set_ref(name, named)


def renew_snapshot(objects: ObjectStore, snapshot_id: ContentId) -> None:
    """`renew_ref` of a snapshot's records."""
    for name in objects.ref_names(f"{SNAPSHOT_REFS}/{snapshot_id}"):
        renew_ref(objects, name)

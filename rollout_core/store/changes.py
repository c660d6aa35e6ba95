"""What has changed in a store, for those who watch it: changes of rollouts, of attempts, of the queue and of resources,
in the order in which they were committed.

A store keeps what each of its transactions has changed as a group of `Entry` for a while, and gives every group a
place. The position of a change is its group's place and its own number in the group, so whoever names the last change
that it has seen gets all that came after it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.loops import Bell

ChangeKind = Literal["rollout", "attempt", "queue", "resources"]
KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)
KEPT_GROUPS = 20_000
"""Groups of changes that a store keeps at least. Who asks for what came before them gets NotFound."""
GROUP_ENTRIES = 200
"""Most entries of a group; more are several groups."""
PAGE_CHANGES = 1_000
"""About how many changes one call gives."""
_JOINED, _LEFT = 1, -1

Entry = Sequence[Any]
"""A change as it is kept, a list for JSON: a rollout's id, status and whether it joined (1) or left (-1) the queue; an
attempt's rollout, id and status (None: it was taken back); an id of resources. Its first item is the kind's letter."""


class Change(BaseModel):
    """Something that was committed."""

    id: str
    """Its position, from which another watch continues (``after``)."""
    kind: ChangeKind
    time: float
    """When, in seconds since the epoch."""
    rollout_id: str | None = None
    attempt_id: str | None = None
    resources_id: str | None = None
    status: str | None = None
    """The new one of the rollout or attempt (none: the attempt was taken back); of the queue ``joined`` or ``left``."""


class ChangePage(BaseModel):
    """Changes in their order."""

    items: list[Change]
    position: str
    """From which the next page continues, also where nothing was found."""


class Place(NamedTuple):
    """Where a change stands among all; the first two name its group."""

    transaction: int
    group: int
    number: int
    microseconds: int
    """The time of its group: a store that began anew, or was put back from an earlier copy, has another one there."""

    @classmethod
    def of(cls, text: str) -> Place:
        """That of a position. Raises ConfigError for a text that is none."""
        parts = text.split(".") if isinstance(text, str) else []
        if len(parts) != 4 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
            raise ConfigError(f"position {text!r:.80} is none; give the id of a change, or the position of a page")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return ".".join(map(str, self))


class Group(NamedTuple):
    """What a transaction has changed, or a part of that."""

    transaction: int
    group: int
    time: float
    entries: Sequence[Entry]

    @property
    def end(self) -> Place:
        """The place of its last change."""
        return self._place(2 * len(self.entries))

    def has(self, place: Place) -> bool:
        """Whether a place is in this group."""
        return place == self._place(place.number)

    def _place(self, number: int) -> Place:
        return Place(self.transaction, self.group, number, round(self.time * 1e6))

    def changes(self, after: Place) -> Iterator[Change]:
        """Those of its changes that come after a place."""
        seen = after.number if after[:2] == self[:2] else 0
        for index, entry in enumerate(self.entries):
            for number, change in enumerate(_changes_of(entry), start=2 * index + 1):
                if number > seen:
                    yield Change(id=str(self._place(number)), time=self.time, **change)


def _changes_of(entry: Entry) -> Iterator[dict[str, Any]]:
    kind, *rest = entry
    if kind == "r":
        rollout_id, status, moved = rest
        yield {"kind": "rollout", "rollout_id": rollout_id, "status": status}
        if moved:
            status = "joined" if moved == _JOINED else "left"
            yield {"kind": "queue", "rollout_id": rollout_id, "status": status}
    elif kind == "a":
        yield {"kind": "attempt", **dict(zip(("rollout_id", "attempt_id", "status"), rest, strict=True))}
    else:
        yield {"kind": "resources", "resources_id": rest[0]}


def rollout_entry(rollout_id: str, status: str, waited: bool, waits: bool) -> Entry:
    """A rollout's change, by whether it was in the queue before and is in it now."""
    return ["r", rollout_id, status, waits - waited]


def attempt_entry(rollout_id: str, attempt_id: str, status: str | None) -> Entry:
    """An attempt's change."""
    return ["a", rollout_id, attempt_id, status]


def resources_entry(resources_id: str) -> Entry:
    """A snapshot's addition or update."""
    return ["s", resources_id]


def grouped(entries: Sequence[Entry]) -> Sequence[Sequence[Entry]]:
    """Entries of a transaction, as they are kept."""
    if 0 < len(entries) <= GROUP_ENTRIES:  # as nearly always
        return (entries,)
    return [entries[start : start + GROUP_ENTRIES] for start in range(0, len(entries), GROUP_ENTRIES)]


def page_of(groups: Iterable[Group], after: Place, kinds: Sequence[ChangeKind] | None, limit: int) -> ChangePage:
    """Changes of these kinds (None: of all) after a place, ``limit`` or a few more."""
    items: list[Change] = []
    position = str(after)
    for group in groups:
        if len(items) >= limit:
            break
        items += [change for change in group.changes(after) if kinds is None or change.kind in kinds]
        position = str(max(group.end, after))
    return ChangePage(items=items, position=position)


def check_kinds(kinds: Sequence[ChangeKind] | None) -> None:
    """Raise ConfigError for a kind that there is not."""
    unknown = [kind for kind in kinds or () if kind not in KINDS]
    if isinstance(kinds, str) or unknown:
        raise ConfigError(f"kinds is {kinds!r}; expected some of {', '.join(KINDS)}")


def gone(after: Place) -> NotFound:
    """For who asks for changes that are not kept any more."""
    return NotFound(
        f"the change {after} is not kept any more, or is of another store, so some that came after it may be lost; "
        "list what is there (rollouts, resources), and watch from now"
    )


class Watch:
    """A call that waits for changes after a place."""

    def __init__(self, after: Place, look: Callable[[Place], Awaitable[ChangePage]]) -> None:
        self._look = look
        self._page = ChangePage(items=[], position=str(after))

    async def wait(self, news: Bell, timeout: float, first_poll: float, longest_poll: float) -> ChangePage:
        """The first page that has changes, or an empty one after ``timeout`` seconds; see `Bell.wait`."""
        deadline = time.monotonic() + timeout
        while not await self._has_found():
            left = deadline - time.monotonic()
            # It rings for changes of other kinds too.
            if left <= 0 or not await news.wait(self._has_found, left, first_poll, longest_poll):
                break
        return self._page

    async def _has_found(self) -> bool:
        """Whether there are some; also of those kinds that are not asked for, it never looks at one twice."""
        while not self._page.items:
            before = self._page.position
            self._page = await self._look(Place.of(before))
            if self._page.position == before:
                break
        return bool(self._page.items)


class ChangeLog:
    """Changes of a store in memory. They are added by one caller at a time, and read by any."""

    def __init__(self) -> None:
        self._groups: dict[int, tuple[float, Sequence[Entry]]] = {0: (0.0, ())}
        """By number, when and what."""
        self._last = 0

    def add(self, entries: Sequence[Entry], now: float) -> None:
        """What a transaction has changed."""
        for part in grouped(entries):
            number = self._last + 1
            self._groups[number] = (now, part)
            self._last = number
            self._groups.pop(number - KEPT_GROUPS, None)

    def now(self) -> Place:
        """The place of the last change."""
        last = self._last
        return Group(0, last, *self._groups[last]).end

    def page(self, after: Place, kinds: Sequence[ChangeKind] | None, limit: int) -> ChangePage:
        """See `page_of`. Raises NotFound where some of them are not kept any more."""
        last = self._last
        kept = self._groups.get(after.group)
        if kept is None or not Group(0, after.group, *kept).has(after):
            raise gone(after)
        return page_of(self._kept(after, last), after, kinds, limit)

    def _kept(self, after: Place, last: int) -> Iterator[Group]:
        for number in range(after.group, last + 1):
            found = self._groups.get(number)
            if found is None:  # a writer was quicker
                raise gone(after)
            yield Group(0, number, *found)

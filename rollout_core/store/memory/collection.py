"""Storage that a LightningStore can stand on: collections of records, a queue and counters, changed atomically.

``CollectionBasedLightningStore`` needs nothing else, so a new backend is an implementation of these four interfaces.
Items are values: one that has been handed over, or given out, is never changed in place, only replaced by ``update``.

A filter maps field names to conditions, such as ``{"status": {"within": ["queuing"]}}``. ``_aggregate`` (``"and"`` or
``"or"``) joins them all, but for those in a mapping of the same form, or a list of such, under ``_must``, which always
hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, NotRequired, Self, TypeVar

from pydantic import BaseModel
from typing_extensions import TypedDict

from rollout_core.store.queries import AttemptsQuery, ResourcesQuery, RolloutsQuery, WorkersQuery
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.types import Attempt, FilterLogic, PaginatedResult, Rollout, SortOrder, Worker

Record = TypeVar("Record", bound=BaseModel)
Element = TypeVar("Element")
Key = TypeVar("Key")
Value = TypeVar("Value")
Result = TypeVar("Result")


class FilterField(TypedDict, total=False):
    """Conditions on one field."""

    exact: Any
    within: Sequence[Any]
    """Any of these; none of them, no item."""
    contains: Any
    """A part of the text, case and all; of a field that is a list, one of its items."""


FilterOptions = Mapping[str, Any]
"""``FilterField`` by field name, and the keys ``_aggregate`` and ``_must``."""


class SortOptions(TypedDict):
    """The order of a query. Missing times come last, other missing values count as ``""`` or 0."""

    name: str
    order: SortOrder
    then: NotRequired[Sequence[str]]
    """Fields that break ties, always ascending; after them, the order of insertion."""


class Collection(ABC, Generic[Record]):
    """Records of one model, each with its own values of the primary keys."""

    @abstractmethod
    def item_type(self) -> type[Record]:
        """The model of the items."""

    @abstractmethod
    def primary_keys(self) -> Sequence[str]:
        """The fields that identify an item."""

    @abstractmethod
    async def size(self) -> int:
        """How many items there are."""

    @abstractmethod
    async def query(
        self, filter: FilterOptions | None = None, sort: SortOptions | None = None, limit: int = -1, offset: int = 0
    ) -> PaginatedResult[Record]:
        """Items that match, in the order of insertion unless ``sort`` is given.

        Raises ConfigError for a field that cannot be sorted by, and for a filter, limit or offset that means nothing.
        """

    @abstractmethod
    async def get(self, filter: FilterOptions | None = None, sort: SortOptions | None = None) -> Record | None:
        """The first item of ``query``, or None."""

    async def items_of(self, keys: Iterable[Any]) -> Sequence[Record]:
        """The items whose first primary key is one of these, in any order."""
        return (await self.query({self.primary_keys()[0]: {"within": list(keys)}})).items

    @abstractmethod
    async def insert(self, items: Sequence[Record]) -> None:
        """Add items. Raises Conflict (a ValueError), and adds none, if one has the keys of another."""

    @abstractmethod
    async def update(self, items: Sequence[Record]) -> None:
        """Replace items. Raises NotFound (a ValueError), and replaces none, if one does not exist."""

    @abstractmethod
    async def upsert(self, items: Sequence[Record]) -> None:
        """Replace the items that exist and add the others."""

    @abstractmethod
    async def delete(self, items: Sequence[Record]) -> None:
        """Remove items. Raises NotFound (a ValueError), and removes none, if one does not exist."""


class Queue(ABC, Generic[Element]):
    """First in, first out."""

    @abstractmethod
    def item_type(self) -> type[Element]:
        """The type of the items."""

    @abstractmethod
    async def size(self) -> int:
        """How many items wait."""

    @abstractmethod
    async def has(self, item: Element) -> bool:
        """Whether the item waits."""

    @abstractmethod
    async def enqueue(self, items: Sequence[Element]) -> Sequence[Element]:
        """Append items at the end, and return them."""

    @abstractmethod
    async def dequeue(self, limit: int = 1) -> Sequence[Element]:
        """Take up to ``limit`` items from the front."""

    @abstractmethod
    async def peek(self, limit: int = 1) -> Sequence[Element]:
        """Up to ``limit`` items of the front, which stay."""

    async def put_back(self, items: Sequence[Element]) -> None:
        """Put items in front of all others, in this order."""
        others = await self.dequeue(await self.size())
        await self.enqueue([*items, *others])

    @abstractmethod
    async def remove(self, items: Sequence[Element]) -> None:
        """Take these items out, wherever they wait; those that do not wait are ignored."""


class KeyValue(ABC, Generic[Key, Value]):
    """A dictionary."""

    @abstractmethod
    async def size(self) -> int:
        """How many keys there are."""

    @abstractmethod
    async def has(self, key: Key) -> bool:
        """Whether there is a value for ``key``."""

    @abstractmethod
    async def get(self, key: Key, default: Value | None = None) -> Value | None:
        """The value for ``key``, or ``default``."""

    @abstractmethod
    async def set(self, key: Key, value: Value) -> None:
        """Set the value for ``key``."""

    @abstractmethod
    async def pop(self, key: Key, default: Value | None = None) -> Value | None:
        """Take the value for ``key`` out, or return ``default``."""


class LightningCollections(ABC):
    """Everything a LightningStore keeps."""

    @property
    @abstractmethod
    def rollouts(self) -> Collection[Rollout]:
        """Rollouts, by ``rollout_id``; without their attempts."""

    @property
    @abstractmethod
    def attempts(self) -> Collection[Attempt]:
        """Attempts, by ``rollout_id`` and ``attempt_id``."""

    @property
    @abstractmethod
    def spans(self) -> Collection[Span]:
        """Spans, by ``rollout_id``, ``attempt_id`` and ``span_id``."""

    @property
    @abstractmethod
    def resources(self) -> Collection[ResourcesUpdate]:
        """Snapshots of resources, by ``resources_id``."""

    @property
    @abstractmethod
    def workers(self) -> Collection[Worker]:
        """Workers, by ``worker_id``."""

    @property
    @abstractmethod
    def rollout_queue(self) -> Queue[str]:
        """Ids of the rollouts that wait to be claimed."""

    @property
    @abstractmethod
    def span_sequence_ids(self) -> KeyValue[str, int]:
        """For each rollout the last sequence id that was given to a span."""

    @abstractmethod
    def atomic(self, *args: Any, **kwargs: Any) -> AbstractAsyncContextManager[Self]:
        """A block whose changes happen together, seen by others all or not at all. Not to be nested."""

    async def execute(self, callback: Callable[[Self], Awaitable[Result]]) -> Result:
        """Call ``callback`` with these collections within one atomic block."""
        async with self.atomic() as collections:
            return await callback(collections)


def filter_of(logic: FilterLogic, **fields: dict[str, Any]) -> dict[str, Any]:
    """A filter of the conditions that are not None."""
    given = {
        name: {operator: operand for operator, operand in field.items() if operand is not None}
        for name, field in fields.items()
    }
    return {"_aggregate": logic, **{name: field for name, field in given.items() if field}}


def sort_of(query: RolloutsQuery | AttemptsQuery | ResourcesQuery | WorkersQuery) -> SortOptions | None:
    """The order that a query asks for, if any."""
    return None if query.sort_by is None else {"name": query.sort_by, "order": query.sort_order}


def span_sort(sort_by: str | None, sort_order: SortOrder) -> SortOptions | None:
    """Spans that share a sequence id are ordered by their times."""
    if sort_by is None:
        return None
    sort: SortOptions = {"name": sort_by, "order": sort_order}
    if sort_by == "sequence_id":
        sort["then"] = ("start_time", "end_time")
    return sort

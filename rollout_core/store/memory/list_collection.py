"""A collection in memory: nested dicts by primary key, kept in order of insertion, and sorted indices."""

from __future__ import annotations

from collections.abc import Callable, Collection as Values, Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import chain, islice
from operator import attrgetter
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from sortedcontainers import SortedDict

from rollout_core.base.errors import ConfigError, Conflict, NotFound
from rollout_core.store.checks import LARGEST_NUMBER, check_page
from rollout_core.store.memory.collection import Collection, FilterOptions, SortOptions
from rollout_core.store.queries import check_logic, check_order, sortable_fields
from rollout_core.store.types import PaginatedResult

Record = TypeVar("Record", bound=BaseModel)


class Condition(NamedTuple):
    """One condition on one field."""

    field: str
    operator: Literal["exact", "within", "contains"]
    operand: Any

    @property
    def keys(self) -> Values[Any] | None:
        """The values of the field that match, if they can be looked up; else None."""
        if self.operator == "exact":
            return (self.operand,) if isinstance(self.operand, Hashable) else None
        return self.operand if isinstance(self.operand, frozenset) else None

    def holds(self, item: Any) -> bool:
        """Whether the item meets the condition."""
        value = getattr(item, self.field)
        if self.operator == "exact":
            return value == self.operand
        if self.operator == "within":
            return value in self.operand
        if isinstance(value, str):
            return isinstance(self.operand, str) and self.operand in value
        return isinstance(value, list | tuple | set | frozenset) and self.operand in value


def conditions_of(fields: Any) -> list[Condition]:
    """The conditions of a filter's fields. Raises ConfigError for one that means nothing."""
    if not isinstance(fields, Mapping):
        raise ConfigError(f"got the filter {fields!r:.200}; expected a dict of conditions by field")
    conditions: list[Condition] = []
    for name, field in fields.items():
        if not isinstance(field, Mapping):
            raise ConfigError(f"{name} is filtered by {field!r:.200}; expected a dict such as {{'exact': ...}}")
        for operator, operand in field.items():
            if operator == "contains" and not isinstance(operand, str | int | float):
                raise ConfigError(f"{name} is to contain {operand!r:.200}; expected a text")
            if operator not in ("exact", "within", "contains"):
                raise ConfigError(f"{name} is filtered by {operator!r}; expected 'exact', 'within' or 'contains'")
            conditions.append(Condition(name, operator, _values(operand, name) if operator == "within" else operand))
    return conditions


def _values(operand: Any, name: str) -> Values[Any]:
    """The operand of ``within``, as a set if its values can be looked up."""
    if isinstance(operand, str) or not isinstance(operand, Iterable):
        raise ConfigError(f"{name} is to be within {operand!r}; expected a list of values")
    values = list(operand)
    try:
        return frozenset(values)
    except TypeError:
        return values


_number = attrgetter("number")


class _Entry:
    """An item, its place in the order of insertion, and the values that the indices know it by."""

    __slots__ = ("indexed", "item", "number")

    def __init__(self, number: int, item: Any, indexed: tuple[Any, ...]) -> None:
        self.number = number
        self.item = item
        self.indexed = indexed


class _Found(NamedTuple):
    """Entries in order of insertion, and how many there are if that is known without counting."""

    entries: Iterable[_Entry]
    count: int | None


class ListBasedCollection(Collection[Record]):
    """Items in nested dicts, one level for each primary key, so that an item and a prefix of keys are found at once.

    ``indexed`` names further fields that have few different values, or are sorted by: filters on one of them alone and
    sorting by it read only what they return. A condition on anything else is checked item by item.
    """

    def __init__(
        self, items: Iterable[Record], item_type: type[Record], primary_keys: Sequence[str], indexed: Sequence[str] = ()
    ) -> None:
        if not primary_keys:
            raise ConfigError(f"a collection of {item_type.__name__} needs at least one primary key")
        self._item_type = item_type
        self._primary_keys = tuple(primary_keys)
        self._missing = sortable_fields(item_type)
        self._index_fields = tuple(indexed)
        # For each field: value -> number of the entry -> entry, sorted by both.
        self._indices = {field: SortedDict() for field in indexed}
        self._root: dict[Any, Any] = {}
        self._size = 0
        self._next_number = 0
        for item in items:
            self._insert(item, self._keys(item))

    def item_type(self) -> type[Record]:
        return self._item_type

    def primary_keys(self) -> Sequence[str]:
        return self._primary_keys

    async def size(self) -> int:
        return self._size

    # Changes

    async def insert(self, items: Sequence[Record]) -> None:
        new: dict[tuple[Any, ...], Record] = {}
        for item in items:
            self._check_type(item)
            keys = self._keys(item)
            if keys in new or self._find(keys) is not None:
                raise Conflict(f"{self._name(keys)} exists already; update it, or use other keys")
            new[keys] = item
        for keys, item in new.items():
            self._insert(item, keys)

    async def update(self, items: Sequence[Record]) -> None:
        for entry, item in zip(self._entries(items), items, strict=True):
            self._replace(entry, item)

    async def upsert(self, items: Sequence[Record]) -> None:
        for item in items:
            self._check_type(item)
        for item in items:
            keys = self._keys(item)
            entry = self._find(keys)
            if entry is None:
                self._insert(item, keys)
            else:
                self._replace(entry, item)

    async def delete(self, items: Sequence[Record]) -> None:
        for entry in {entry.number: entry for entry in self._entries(items)}.values():
            self._unindex(entry)
            path = [self._root]
            *outer, last = self._keys(entry.item)
            for key in outer:
                path.append(path[-1][key])
            del path[-1][last]
            for node, key in zip(reversed(path[:-1]), reversed(outer), strict=True):
                if not node[key]:
                    del node[key]
            self._size -= 1

    def drop(self, first_key: Any) -> None:
        """Forget all items whose first primary key has this value."""
        node = self._root.pop(first_key, None)
        if node is not None:
            for entry in _leaves([node], len(self._primary_keys) - 1):
                self._unindex(entry)
                self._size -= 1

    def _keys(self, item: Any) -> tuple[Any, ...]:
        return tuple([getattr(item, key) for key in self._primary_keys])

    def _find(self, keys: Iterable[Any]) -> _Entry | None:
        node: Any = self._root
        for key in keys:
            node = node.get(key)
            if node is None:
                return None
        return node

    def _entries(self, items: Sequence[Record]) -> list[_Entry]:
        entries: list[_Entry] = []
        for item in items:
            self._check_type(item)
            entry = self._find(self._keys(item))
            if entry is None:
                raise NotFound(f"{self._name(self._keys(item))} does not exist")
            entries.append(entry)
        return entries

    def _check_type(self, item: Any) -> None:
        if not isinstance(item, self._item_type):
            raise ConfigError(f"item is a {type(item).__name__}; this is a collection of {self._item_type.__name__}")

    def _name(self, keys: tuple[Any, ...]) -> str:
        return f"{self._item_type.__name__} with {dict(zip(self._primary_keys, keys, strict=True))}"

    def _insert(self, item: Record, keys: tuple[Any, ...]) -> None:
        entry = _Entry(self._next_number, item, tuple([getattr(item, field) for field in self._index_fields]))
        *outer, last = keys
        node = self._root
        for key in outer:
            child = node.get(key)
            if child is None:
                child = node[key] = {}
            node = child
        node[last] = entry
        for field, value in zip(self._index_fields, entry.indexed, strict=True):
            self._index(field, value, entry)
        self._next_number += 1
        self._size += 1

    def _replace(self, entry: _Entry, item: Record) -> None:
        entry.item = item
        indexed = tuple([getattr(item, field) for field in self._index_fields])
        if indexed != entry.indexed:
            for field, old, new in zip(self._index_fields, entry.indexed, indexed, strict=True):
                if old != new:
                    self._index_out(field, old, entry)
                    self._index(field, new, entry)
            entry.indexed = indexed

    def _index(self, field: str, value: Any, entry: _Entry) -> None:
        index = self._indices[field]
        bucket = index.get(value)
        if bucket is None:
            bucket = index[value] = SortedDict()
        bucket[entry.number] = entry

    def _index_out(self, field: str, value: Any, entry: _Entry) -> None:
        bucket = self._indices[field][value]
        del bucket[entry.number]
        if not bucket:
            del self._indices[field][value]

    def _unindex(self, entry: _Entry) -> None:
        for field, value in zip(self._index_fields, entry.indexed, strict=True):
            self._index_out(field, value, entry)

    # Queries

    async def get(self, filter: FilterOptions | None = None, sort: SortOptions | None = None) -> Record | None:
        page, _ = self._page(filter, sort, 1, 0)
        return page[0] if page else None

    async def items_of(self, keys: Iterable[Any]) -> Sequence[Record]:
        # Nearly every call of a store looks something up by its id: a query would take ten times as long.
        nodes = [node for key in dict.fromkeys(keys) if (node := self._root.get(key)) is not None]
        return [entry.item for entry in _leaves(nodes, len(self._primary_keys) - 1)]

    async def query(
        self, filter: FilterOptions | None = None, sort: SortOptions | None = None, limit: int = -1, offset: int = 0
    ) -> PaginatedResult[Record]:
        check_page(limit, offset)
        items, total = self._page(filter, sort, limit, offset)
        return PaginatedResult(items=items, limit=limit, offset=offset, total=total)

    def _page(
        self, filter: FilterOptions | None, sort: SortOptions | None, limit: int, offset: int
    ) -> tuple[list[Record], int]:
        if sort is not None:
            check_order(self._item_type, sort.get("order"), sort.get("name") or "", *sort.get("then", ()))
        filter = filter or {}
        if not isinstance(filter, Mapping):
            raise ConfigError(f"got the filter {filter!r:.200}; expected a dict of conditions by field")
        check_logic(filter.get("_aggregate", "and"))
        if sort is not None and sort["name"] in self._indices and not filter.keys() - {"_aggregate"}:
            found = _Found(self._walk_index(sort), self._size)
        else:
            found = self._match(filter)
            if sort is not None:
                entries = self._sorted(list(found.entries), sort)
                found = _Found(entries, len(entries))
        entries, total = found
        if total is None:
            entries = list(entries)
            total = len(entries)
        end = None if limit == -1 else min(offset + limit, LARGEST_NUMBER)
        return [entry.item for entry in islice(entries, offset, end)], total

    def _match(self, filter: FilterOptions) -> _Found:
        """The entries that match, by the best way there is to them."""
        joined = conditions_of({name: field for name, field in filter.items() if name not in ("_aggregate", "_must")})
        must = filter.get("_must") or ()
        parts = [must] if isinstance(must, Mapping) or not isinstance(must, Sequence) else must
        needed = [condition for part in parts for condition in conditions_of(part)]
        if filter.get("_aggregate", "and") == "and" or len(joined) == 1:
            needed, joined = [*needed, *joined], []
        for condition in (*needed, *joined):
            if condition.field not in self._item_type.model_fields:
                raise ConfigError(f"cannot filter by {condition.field!r}; {self._item_type.__name__} has no such field")
            if condition.operator == "contains" and not isinstance(condition.operand, str):
                kind = self._item_type.model_fields[condition.field].annotation
                if not _is_of_items(kind):
                    raise ConfigError(f"{condition.field} is to contain {condition.operand!r:.200}; expected a text")
        found = self._by_prefix(needed) or self._by_index(needed) or _Found(self._all(), self._size)
        if not needed and not joined:
            return found
        holds = [condition.holds for condition in needed]
        either = [condition.holds for condition in joined]
        return _Found(_checked(found.entries, holds, either), None)

    def _by_prefix(self, needed: list[Condition]) -> _Found | None:
        """The entries below the primary keys that are asked for; their conditions are taken off ``needed``."""
        nodes: list[Any] = [self._root]
        depth = 0
        for key in self._primary_keys:
            condition = next((one for one in needed if one.field == key and one.keys is not None), None)
            if condition is None:
                break
            keys = condition.keys or ()
            nodes = [child for node in nodes for child in map(node.get, keys) if child is not None]
            needed.remove(condition)
            depth += 1
        if depth == 0:
            return None
        levels = len(self._primary_keys) - depth
        entries = list(_leaves(nodes, levels))
        if len(nodes) > 1 or levels > 1:
            entries.sort(key=_number)
        return _Found(entries, len(entries))

    def _by_index(self, needed: list[Condition]) -> _Found | None:
        """The entries of the buckets that are asked for; the condition is taken off ``needed``."""
        for condition in needed:
            if condition.field in self._indices and condition.keys is not None:
                index = self._indices[condition.field]
                buckets = [index[key] for key in condition.keys if key in index]
                needed.remove(condition)
                entries = (
                    buckets[0].values()
                    if len(buckets) == 1
                    else merge(*(bucket.values() for bucket in buckets), key=_number)
                )
                return _Found(entries, sum(map(len, buckets)))
        return None

    def _all(self) -> Iterable[_Entry]:
        entries = _leaves([self._root], len(self._primary_keys))
        return entries if len(self._primary_keys) == 1 else sorted(entries, key=_number)

    def _walk_index(self, sort: SortOptions) -> Iterator[_Entry]:
        index = self._indices[sort["name"]]
        for value in reversed(index) if sort["order"] == "desc" else index:
            yield from index[value].values()

    def _sorted(self, entries: list[_Entry], sort: SortOptions) -> list[_Entry]:
        key = self._sort_key(sort["name"])
        then = sort.get("then", ())
        if then and len(set(map(key, entries))) < len(entries):
            ties = [self._sort_key(name) for name in then]
            entries.sort(key=lambda entry: tuple([tie(entry) for tie in ties]))
        entries.sort(key=key, reverse=sort["order"] == "desc")  # stable, also in reverse
        return entries

    def _sort_key(self, name: str) -> Callable[[_Entry], Any]:
        value_of, missing = attrgetter(f"item.{name}"), self._missing[name]
        if missing is None:
            return value_of

        def key(entry: _Entry) -> Any:
            value = value_of(entry)
            return missing if value is None else value

        return key


def _is_of_items(annotation: Any) -> bool:
    """Whether values of this type may be lists or sets."""
    kinds = [annotation, get_origin(annotation)]
    if any(isinstance(kind, type) and issubclass(kind, list | tuple | set | frozenset) for kind in kinds):
        return True
    return get_origin(annotation) in (Union, UnionType) and any(map(_is_of_items, get_args(annotation)))


def _checked(
    entries: Iterable[_Entry], holds: Sequence[Callable[[Any], bool]], either: Sequence[Callable[[Any], bool]]
) -> Iterator[_Entry]:
    for entry in entries:
        item = entry.item
        if all(hold(item) for hold in holds) and (not either or any(hold(item) for hold in either)):
            yield entry


def _leaves(nodes: Iterable[Any], levels: int) -> Iterator[_Entry]:
    """The entries ``levels`` below these nodes."""
    for _ in range(levels):
        nodes = chain.from_iterable([node.values() for node in nodes])
    return iter(nodes)

"""What the ``query_*`` methods of a store ask for, checked once for all stores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.store.checks import check_id_list, check_ids, check_page, check_statuses, check_texts
from rollout_core.store.codec import encode_stored
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.stored_spans import page_json, stored_json
from rollout_core.store.types import (
    Attempt,
    BrowsedPage,
    FilterLogic,
    PaginatedResult,
    Rollout,
    RolloutStatus,
    SortOrder,
    Worker,
    WorkerStatus,
)


class RolloutsQuery(NamedTuple):
    """See ``LightningStore.query_rollouts``."""

    status_in: Sequence[RolloutStatus] | None = None
    rollout_id_in: Sequence[str] | None = None
    rollout_id_contains: str | None = None
    filter_logic: FilterLogic = "and"
    sort_by: str | None = None
    sort_order: SortOrder = "asc"
    limit: int = -1
    offset: int = 0

    def checked(self) -> Self:
        """This query. Raises ConfigError if it means nothing."""
        check_texts(self.rollout_id_contains)
        check_statuses(self.status_in, RolloutStatus)
        if self.rollout_id_in is not None:
            check_id_list(self.rollout_id_in)
        _check(self, Rollout, self.filter_logic)
        return self


class RolloutsBrowse(NamedTuple):
    """See ``LightningStore.browse_rollouts``."""

    before: str | None = None
    status_in: Sequence[RolloutStatus] | None = None
    text: str | None = None
    limit: int = 100
    within: int = 10_000

    def checked(self) -> Self:
        """This query. Raises ConfigError if it means nothing."""
        check_ids(self.before)
        check_texts(self.text)
        check_statuses(self.status_in, RolloutStatus)
        for name, number in (("limit", self.limit), ("within", self.within)):
            check_page(number, 0)
            if number < 1:
                raise ConfigError(f"{name} is {number}; expected 1 or more")
        return self


class AttemptsQuery(NamedTuple):
    """See ``LightningStore.query_attempts``."""

    rollout_id: str
    sort_by: str | None = "sequence_id"
    sort_order: SortOrder = "asc"
    limit: int = -1
    offset: int = 0

    def checked(self) -> Self:
        """This query. Raises ConfigError if it means nothing."""
        check_ids(self.rollout_id)
        _check(self, Attempt)
        return self


class SpansQuery(NamedTuple):
    """See ``LightningStore.query_spans``."""

    rollout_id: str
    attempt_id: str | Literal["latest"] | None = None
    trace_id: str | None = None
    trace_id_contains: str | None = None
    span_id: str | None = None
    span_id_contains: str | None = None
    parent_id: str | None = None
    parent_id_contains: str | None = None
    name: str | None = None
    name_contains: str | None = None
    filter_logic: FilterLogic = "and"
    limit: int = -1
    offset: int = 0
    sort_by: str | None = "sequence_id"
    sort_order: SortOrder = "asc"

    def checked(self) -> Self:
        """This query. Raises ConfigError if it means nothing."""
        check_ids(self.rollout_id, self.attempt_id, self.span_id)
        check_texts(*self.exact.values(), *self.parts.values())
        _check(self, Span, self.filter_logic)
        return self

    @property
    def exact(self) -> dict[str, str | None]:
        """By field, the value to be equal to."""
        return {"trace_id": self.trace_id, "span_id": self.span_id, "parent_id": self.parent_id, "name": self.name}

    @property
    def parts(self) -> dict[str, str | None]:
        """By field, the text to be contained."""
        return {
            "trace_id": self.trace_id_contains,
            "span_id": self.span_id_contains,
            "parent_id": self.parent_id_contains,
            "name": self.name_contains,
        }


class ResourcesQuery(NamedTuple):
    """See ``LightningStore.query_resources``."""

    resources_id: str | None = None
    resources_id_contains: str | None = None
    sort_by: str | None = None
    sort_order: SortOrder = "asc"
    limit: int = -1
    offset: int = 0

    def checked(self) -> Self:
        """This query. Raises ConfigError if it means nothing."""
        check_ids(self.resources_id)
        check_texts(self.resources_id_contains)
        _check(self, ResourcesUpdate)
        return self


class WorkersQuery(NamedTuple):
    """See ``LightningStore.query_workers``."""

    status_in: Sequence[WorkerStatus] | None = None
    worker_id_contains: str | None = None
    filter_logic: FilterLogic = "and"
    sort_by: str | None = None
    sort_order: SortOrder = "asc"
    limit: int = -1
    offset: int = 0

    def checked(self) -> Self:
        """This query. Raises ConfigError if it means nothing."""
        check_statuses(self.status_in, WorkerStatus)
        check_texts(self.worker_id_contains)
        _check(self, Worker, self.filter_logic)
        return self


QueryT = TypeVar("QueryT", RolloutsQuery, RolloutsBrowse, AttemptsQuery, SpansQuery, ResourcesQuery, WorkersQuery)
Query = RolloutsQuery | AttemptsQuery | SpansQuery | ResourcesQuery | WorkersQuery
"""One whose answer is a page."""


def _asked(kind: type[QueryT], given: Mapping[str, Any]) -> QueryT:
    """The query of a call with these arguments, which have the names of its fields. Raises ConfigError if it means
    nothing."""
    return kind(*[given[name] for name in kind._fields]).checked()


class Queries:
    """The queries of a LightningStore.

    A filter that is None does not filter, an empty list matches nothing. ``limit`` -1 is no limit; 0 gives no items but
    the total. Without ``sort_by`` the order is that of insertion. Missing values sort lowest, missing times last. An
    unknown field or a meaningless limit raises ConfigError.

    A store answers ``find_*``, whose query is checked, or overrides ``query_*`` itself.
    """

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[RolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
    ) -> PaginatedResult[Rollout]:
        """Rollouts that match; an AttemptedRollout exactly if an attempt exists.

        ``status`` and ``rollout_ids`` are older names of ``status_in`` and ``rollout_id_in``, which win if both are
        given.
        """
        status_in = status if status_in is None else status_in
        rollout_id_in = rollout_ids if rollout_id_in is None else rollout_id_in
        return await self.find_rollouts(_asked(RolloutsQuery, locals()))

    async def find_rollouts(self, query: RolloutsQuery) -> PaginatedResult[Rollout]:
        """What ``query_rollouts`` asks for."""
        raise self._lacks("query_rollouts")

    async def browse_rollouts(
        self,
        *,
        before: str | None = None,
        status_in: Sequence[RolloutStatus] | None = None,
        text: str | None = None,
        limit: int = 100,
        within: int = 10_000,
    ) -> BrowsedPage[Rollout]:
        """Rollouts with their latest attempts, those stored last first, for people who look through millions of them.

        Nothing is counted and nothing skipped: a page starts after the rollout ``before``, wherever that is. ``text``
        is a part of the id, or of the input as JSON, case and all. A page ends with ``limit`` rollouts, or earlier,
        where it may have looked at ``within`` of them; ``next`` is what the next page is to have as ``before``.

        Raises NotFound where ``before`` is no rollout of this store.
        """
        return await self.find_browsed(_asked(RolloutsBrowse, locals()))

    async def find_browsed(self, query: RolloutsBrowse) -> BrowsedPage[Rollout]:
        """What ``browse_rollouts`` asks for. A store that is not large may go through all it has, as this does."""
        found = list(reversed((await self.query_rollouts()).items))
        if query.before is not None:
            place = next((n for n, each in enumerate(found) if each.rollout_id == query.before), None)
            if place is None:
                raise NotFound(f"there is no rollout {query.before!r} to go on after")
            found = found[place + 1 :]
        items: list[Rollout] = []
        for looked, each in enumerate(found[: query.within], start=1):
            if _is_browsed(each, query):
                items.append(each)
            if len(items) == query.limit:
                return BrowsedPage(items=items, next=each.rollout_id if looked < len(found) else None)
        return BrowsedPage(items=items, next=found[query.within - 1].rollout_id if query.within < len(found) else None)

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        """One rollout, with its latest attempt if it has one; None if it is unknown."""
        found = await self.query_rollouts(rollout_id_in=[rollout_id])
        return found[0] if found else None

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """Attempts of a rollout, oldest first; none if it is unknown."""
        return await self.find_attempts(_asked(AttemptsQuery, locals()))

    async def find_attempts(self, query: AttemptsQuery) -> PaginatedResult[Attempt]:
        """What ``query_attempts`` asks for."""
        raise self._lacks("query_attempts")

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """The attempt with the highest ``sequence_id``; None if there is none."""
        found = await self.query_attempts(rollout_id, sort_by="sequence_id", sort_order="desc", limit=1)
        return found[0] if found else None

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"] | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
    ) -> PaginatedResult[Span]:
        """Spans of a rollout, of one attempt or of all; none if the rollout is unknown.

        ``filter_logic`` joins the filters, never the rollout and attempt. Spans that share a ``sequence_id`` are
        ordered by start and end time. A store that evicts spans raises RuntimeError for a rollout whose spans are gone.
        """
        return await self.find_spans(_asked(SpansQuery, locals()))

    async def find_spans(self, query: SpansQuery) -> PaginatedResult[Span]:
        """What ``query_spans`` asks for."""
        raise self._lacks("query_spans")

    async def query_spans_json(self, rollout_id: str, attempt_id: str | None = None, **query: Any) -> bytes:
        """The page of ``query_spans`` as JSON, for a server that only passes it on.

        A store that keeps spans as JSON has it much quicker than by making them models.
        """
        page = await self.query_spans(rollout_id, attempt_id, **query)
        return page_json(page, map(stored_json, page.items))

    async def query_many_spans(self, rollout_ids: Sequence[str], *, name: str | None = None) -> Sequence[Span]:
        """Spans of the latest attempt of each of these rollouts: by rollout as asked for, then by ``sequence_id``.

        Unknown rollouts and those without attempts yield none. One query, also for thousands of rollouts.
        """
        check_id_list(rollout_ids)
        pages = [await self.query_spans(rollout_id, "latest", name=name) for rollout_id in dict.fromkeys(rollout_ids)]
        return [span for page in pages for span in page]

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """Snapshots that match."""
        return await self.find_resources(_asked(ResourcesQuery, locals()))

    async def find_resources(self, query: ResourcesQuery) -> PaginatedResult[ResourcesUpdate]:
        """What ``query_resources`` asks for."""
        raise self._lacks("query_resources")

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """One snapshot; None if it is unknown."""
        found = await self.query_resources(resources_id=resources_id)
        return found[0] if found else None

    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        """Workers that match."""
        return await self.find_workers(_asked(WorkersQuery, locals()))

    async def find_workers(self, query: WorkersQuery) -> PaginatedResult[Worker]:
        """What ``query_workers`` asks for."""
        raise self._lacks("query_workers")

    def _lacks(self, *names: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not define {' or '.join(names)}")


def _is_browsed(rollout: Rollout, query: RolloutsBrowse) -> bool:
    if query.status_in is not None and rollout.status not in query.status_in:
        return False
    if query.text is None:
        return True
    return query.text in rollout.rollout_id or query.text in encode_stored(rollout.input).decode()


def _check(
    query: Query,
    model: type[BaseModel],
    logic: FilterLogic = "and",
) -> None:
    check_logic(logic)
    check_order(model, query.sort_order, query.sort_by)
    check_page(query.limit, query.offset)


def check_logic(logic: Any) -> None:
    """Raise ConfigError for what does not join conditions."""
    if logic not in ("and", "or"):
        raise ConfigError(f"filter_logic is {logic!r}; expected 'and' or 'or'")


def check_order(model: type[BaseModel], order: Any, *fields: Any) -> None:
    """Raise ConfigError for an unknown order, and for a field that cannot be sorted by; None is no field."""
    if order not in ("asc", "desc"):
        raise ConfigError(f"sort_order is {order!r}; expected 'asc' or 'desc'")
    for name in fields:
        if name is not None and name not in sortable_fields(model):
            raise ConfigError(f"cannot sort by {name!r}; expected one of {', '.join(sortable_fields(model))}")


@cache
def sortable_fields(model: type[BaseModel]) -> Mapping[str, Any]:
    """Fields that hold one plain value, and what counts where it is missing; None if it never is."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kinds = _plain_kinds(field.annotation)
        if kinds:
            missing = math.inf if name.endswith("_time") else "" if str in kinds else 0
            fields[name] = missing if NoneType in kinds else None
    return fields


def _plain_kinds(annotation: Any) -> set[type]:
    """The types of a field's values; empty if one is not a plain value."""
    if get_origin(annotation) in (Union, UnionType):
        parts = [_plain_kinds(part) for part in get_args(annotation)]
        return set().union(*parts) if all(parts) else set()
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    return {annotation} if annotation in (str, int, float, bool, NoneType) else set()

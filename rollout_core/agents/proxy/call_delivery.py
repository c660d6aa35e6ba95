"""The way of recorded calls to the store: numbered when they begin, stored when they end, in batches of all rollouts.

A call's number is asked for while the upstream works on the answer, and its span handed over before the answer's last
byte is. So when an agent has returned, everything it asked of a model is here or in the store, in its order, and one
``flush`` is all that is needed to be sure of the latter. A store that is away is asked again for as long as it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import orjson

from rollout_core.agents.delivery import AWAY, retried
from rollout_core.base.errors import Recoverable, in_words
from rollout_core.store import LLM, AttemptedRollout, LightningStore, NamedResources, ProxyLLM, Span

logger = logging.getLogger(__name__)

BATCH = 256
"""Most calls of one request to the store."""
BATCH_BYTES = 16 << 20
"""Spans of one request to the store stay below this together, unless one alone is larger."""
MAX_BACKLOG_BYTES = 512 << 20
"""Of calls that wait for the store; no more are let in then."""
FLUSH = "/flush"
"""Behind an attempt's path, where to wait until its calls are stored."""
FLUSH_SECONDS = 30.0
"""Longest time that a request waits for that."""
UNDER_WAY_SECONDS = 5.0
"""Of it, for calls that are still under way when the attempt ends."""
ABSENT_SECONDS = 10.0
"""A proxy that does not answer a flush may be on its way back for so long."""
_LOOK_SECONDS = 2.0
_MOST_REFUSED = 10_000
"""Attempts whose refused calls are remembered."""


@dataclass(eq=False)
class Ticket:
    """The place of one call among its rollout's spans."""

    store: LightningStore
    rollout_id: str
    attempt_id: str
    number: int | None = None
    """Its sequence id, once the store has given it."""
    span: Span | None = None
    """What is to be stored, once the call has ended, but for its number."""
    num_bytes: int = 0
    has_ended: bool = False
    is_settled: bool = False
    """Stored, or refused for good."""


class CallDelivery:
    """Calls of any number of attempts, on their way to their stores. To be used on one event loop."""

    def __init__(self) -> None:
        self._made_at = time.monotonic()
        self.backlog_bytes = 0
        self._new: list[Ticket] = []
        """Without numbers."""
        self._ready: list[Ticket] = []
        """With number and span."""
        self._open: dict[Ticket, None] = {}
        """All that are not settled."""
        self._num_refused: OrderedDict[tuple[str, str], int] = OrderedDict()
        """By rollout and attempt, of the latest attempts that have any."""
        self._num_ended = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._to_number = asyncio.Event()
        self._to_store = asyncio.Event()
        self._settled: list[asyncio.Future[None]] = []

    @property
    def is_full(self) -> bool:
        """Whether so much waits for the store that nothing more should be recorded."""
        return self.backlog_bytes > MAX_BACKLOG_BYTES

    @property
    def seconds(self) -> float:
        """How long calls have been kept here. What was recorded before, by a proxy that was killed, may be lost."""
        return time.monotonic() - self._made_at

    @property
    def num_waiting(self) -> int:
        """Calls that have ended and are not stored."""
        return self._num_ended

    def start(self) -> None:
        """Begin to deliver, on the running loop. What an earlier run has left is delivered as well."""
        self._to_number, self._to_store = asyncio.Event(), asyncio.Event()
        self._to_number.set()
        self._to_store.set()
        self._tasks = [asyncio.create_task(self._number_all()), asyncio.create_task(self._store_all())]

    def begin(self, store: LightningStore, rollout_id: str, attempt_id: str) -> Ticket:
        """A call begins: its number is asked for now."""
        ticket = Ticket(store, rollout_id, attempt_id)
        self._open[ticket] = None
        self._new.append(ticket)
        self._to_number.set()
        return ticket

    def end(self, ticket: Ticket, span: Span, num_bytes: int) -> None:
        """A call has ended, and this is its span, of about so many bytes. Only the first time counts."""
        if ticket.has_ended:
            return
        ticket.has_ended = True
        if ticket.is_settled:  # its rollout is unknown
            return
        ticket.span, ticket.num_bytes = span, num_bytes
        self.backlog_bytes += num_bytes
        self._num_ended += 1
        if ticket.number is not None:
            self._ready.append(ticket)
            self._to_store.set()

    async def flush(
        self, rollout_id: str | None = None, attempt_id: str | None = None, *, under_way: bool = True
    ) -> None:
        """Wait until calls are stored, or refused by the store: those of a rollout, or of an attempt of it, also the
        ones ``under_way``; without either, all that have ended."""
        waited = {
            ticket
            for ticket in self._open
            if rollout_id in (None, ticket.rollout_id)
            and attempt_id in (None, ticket.attempt_id)
            and (ticket.has_ended or (under_way and rollout_id is not None))
        }
        while waited := {ticket for ticket in waited if not ticket.is_settled}:
            change = asyncio.get_running_loop().create_future()
            self._settled.append(change)
            await change

    def num_under_way(self, rollout_id: str, attempt_id: str) -> int:
        """Calls of an attempt that have begun and not ended."""
        asked = (rollout_id, attempt_id)
        return sum((one.rollout_id, one.attempt_id) == asked and not one.has_ended for one in self._open)

    def num_refused(self, rollout_id: str, attempt_id: str) -> int:
        """Calls of an attempt that the store has refused for good."""
        return self._num_refused.get((rollout_id, attempt_id), 0)

    async def stop(self, patience_seconds: float) -> None:
        """Deliver what has ended, and end. Raises Recoverable if the store does not take it in time; it is kept, and
        delivered after the next ``start``."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_seconds):
                    await self.flush()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks = []
        if self._num_ended:
            raise Recoverable(
                f"{self._num_ended} calls are recorded but not stored, as the store is away for more than "
                f"{patience_seconds:g} s; start the proxy again once it is back, or their spans are lost"
            )

    async def _number_all(self) -> None:
        while True:
            await self._to_number.wait()
            self._to_number.clear()
            while self._new:
                batch = _first(self._new)
                await self._number(batch)
                del self._new[: len(batch)]

    async def _number(self, batch: Sequence[Ticket]) -> None:
        pairs = [(ticket.rollout_id, ticket.attempt_id) for ticket in batch]
        try:
            numbers = await retried(lambda: batch[0].store.get_many_span_sequence_ids(pairs), math.inf)
        except Exception as error:  # noqa: BLE001 - any store's; its refusal must not end the delivery of others
            if len(batch) > 1:
                for ticket in batch:
                    await self._number([ticket])
            else:
                self._refuse(batch[0], error)
            return
        for ticket, number in zip(batch, numbers, strict=True):
            ticket.number = number
            if ticket.span is not None:
                self._ready.append(ticket)
        self._to_store.set()

    async def _store_all(self) -> None:
        while True:
            await self._to_store.wait()
            self._to_store.clear()
            while self._ready:
                batch = _first(self._ready)
                await self._store(batch)
                del self._ready[: len(batch)]

    async def _store(self, batch: Sequence[Ticket]) -> None:
        spans: list[Span] = []
        for ticket in batch:
            assert ticket.span is not None and ticket.number is not None, "only such are ready"
            ticket.span.sequence_id = ticket.number
            spans.append(ticket.span)
        try:
            await retried(lambda: batch[0].store.add_many_spans(spans), math.inf)
        except Exception as error:  # noqa: BLE001 - as above
            if len(batch) > 1:
                for ticket in batch:
                    await self._store([ticket])
            else:
                self._refuse(batch[0], error)
            return
        for ticket in batch:
            self._settle(ticket)

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        # The kind alone where the error may show what the span holds, such as a prompt.
        reason = in_words(error) if ticket.span is None else type(error).__name__
        logger.error(
            "A call of rollout %s, attempt %s, is not recorded: the store refuses it (%s)",
            ticket.rollout_id,
            ticket.attempt_id,
            reason,
        )
        ids = ticket.rollout_id, ticket.attempt_id
        self._num_refused[ids] = self._num_refused.pop(ids, 0) + 1
        while len(self._num_refused) > _MOST_REFUSED:
            self._num_refused.popitem(last=False)
        self._settle(ticket)

    def _settle(self, ticket: Ticket) -> None:
        if ticket.is_settled:
            return
        ticket.is_settled = True
        del self._open[ticket]
        if ticket.span is not None:
            self._num_ended -= 1
            self.backlog_bytes -= ticket.num_bytes
            ticket.span = None
        changes, self._settled = self._settled, []
        for change in changes:
            if not change.done():
                change.set_result(None)


def _first(tickets: Sequence[Ticket]) -> list[Ticket]:
    """As many of the first ones as go to one store in one request."""
    batch: list[Ticket] = []
    num_bytes = 0
    for ticket in tickets[:BATCH]:
        num_bytes += ticket.num_bytes
        if batch and (ticket.store is not tickets[0].store or num_bytes > BATCH_BYTES):
            break
        batch.append(ticket)
    return batch


_seen: set[str] = set()
"""Endpoints of proxies that have answered this process."""


async def look_for_proxies(resources: NamedResources) -> None:
    """Note which proxies are there before an attempt begins. ``flush_proxies`` expects those to be there at its end."""
    for resource in resources.values():
        if isinstance(resource, ProxyLLM) and (url := resource.get_base_url()) not in _seen:
            with contextlib.suppress(*AWAY):
                await _request("GET", f"{url}/health", resource, _LOOK_SECONDS)
                _seen.add(url)


async def flush_proxies(
    resources: NamedResources, rollout: AttemptedRollout, seconds: float, *, has_failed: bool = False
) -> None:
    """Wait until what an attempt asked of the models among its resources is stored, by the proxies that they are at.

    Raises Recoverable where calls may be lost: the store refused some, a proxy cannot store them now, is no longer
    there, or began to keep calls after the attempt began, which was ``seconds`` ago. (Both sides measure how long that
    is, as clocks differ.) A proxy that never was there is only logged: it cannot have been asked, and agents that did
    ask have failed by it. For an attempt that ``has_failed`` no proxy is waited for that is away.
    """
    began = time.monotonic() - seconds
    patience = 0.0 if has_failed else ABSENT_SECONDS
    for resource in resources.values():
        if isinstance(resource, ProxyLLM):
            await _flush(resource, rollout, began, patience)


async def _flush(resource: ProxyLLM, rollout: AttemptedRollout, began: float, patience: float) -> None:
    url = resource.get_base_url()
    was_seen = url in _seen
    llm = resource.with_attempted_rollout(rollout)
    try:
        asking = partial(_request, "POST", llm.endpoint + FLUSH, llm, FLUSH_SECONDS + 5)
        status, body = await retried(asking, patience if was_seen else 0.0, name="The LLM proxy")
    except AWAY as error:
        if was_seen:
            raise Recoverable("the LLM proxy is no longer there, so calls of the attempt may be lost") from None
        logger.warning("The LLM proxy at %s does not answer (%s)", url, type(error).__name__)
        return
    if status == 503:
        raise Recoverable("the LLM proxy cannot store the attempt's calls now, as the store is away")
    if status == 202:
        logger.warning("Rollout %s left calls of its model under way; they are not waited for", rollout.rollout_id)
    elif status != 200:
        logger.warning(
            "The LLM proxy at %s answers a flush by status %d; calls of rollout %s may not be stored",
            url,
            status,
            rollout.rollout_id,
        )
        return
    facts: dict[str, Any] = orjson.loads(body)
    if refused := facts.get("refused"):
        raise Recoverable(f"the store refused {refused} of the attempt's calls; the log of the LLM proxy says why")
    if facts.get("kept_seconds", math.inf) < time.monotonic() - began:
        raise Recoverable("the LLM proxy was started again during the attempt, so calls of it may be lost")
    _seen.add(url)


async def _request(method: str, url: str, llm: LLM, seconds: float) -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {llm.api_key}"} if llm.api_key else {}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds)) as session,
            session.request(method, url, headers=headers) as response,
        ):
            return response.status, await response.read()
    except aiohttp.ClientError as error:
        raise ConnectionError(type(error).__name__) from None

"""Messages of a cloud's queue become rollouts of a store: at least once in, exactly one rollout each.

A message is taken off its queue only after the store has said that its rollout is stored. Until then it is held: its
lease is renewed, however long the store is away. A bridge that is killed leaves what it held to the next one, and a
message that comes twice is the same rollout, since its id is derived from the message's own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from pydantic import ConfigDict, ValidationError

from rollout_core.base.errors import ConfigError, Conflict, Recoverable, RetryHint, Stopped
from rollout_core.base.ids import content_id
from rollout_core.base.queue_settings import QueueSettings
from rollout_core.store.bridge.queues import CloudQueue, Message, RefusedCall
from rollout_core.store.contract import LightningStore
from rollout_core.store.types import EnqueueRolloutRequest

T = TypeVar("T")

log = logging.getLogger(__name__)

CARRIERS = 8
"""So many batches may be on their way from the queue to the store."""
BACK_OFF = RetryHint(0.2, 30.0)
MOST_DOUBLINGS = 10
RENEWALS_IN_LEASE = 3
REFUSED_SECONDS = 10
"""After which a refused message comes again, until the queue's own policy takes it to the dead letters."""
TOLD_SECONDS = 60.0
"""Between two lines about how much was carried."""
LAST_CALL_SECONDS = 5.0
"""For the last call of a start that has waited long enough."""
REASON_BYTES = 1_000
ID_DIGITS = 32


class QueuedRollout(EnqueueRolloutRequest):
    """What a message holds, as JSON: ``input``, any value, and what else `EnqueueRolloutRequest` takes."""

    model_config = ConfigDict(extra="forbid")


@dataclass
class Tally:
    """What a bridge has done."""

    received: int = 0
    """Messages, those that came again included."""
    stored: int = 0
    """Messages whose rollout is stored and that were taken off the queue."""
    refused: int = 0
    """Messages that no rollout can be made of, as often as they came."""

    def __str__(self) -> str:
        return f"{self.received:,} messages received, {self.stored:,} stored as rollouts, {self.refused:,} refused"


def rollout_request(message: Message, settings: QueueSettings) -> EnqueueRolloutRequest:
    """The rollout that a message asks for. Raises ConfigError where it is none.

    Its id is the message's own ``rollout_id``, else one that is derived from queue and message, and so the same each
    time the message comes. Its metadata name both.
    """

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    try:
        found = QueuedRollout.model_validate(json.loads(message.body, parse_constant=refuse))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in error.errors()]
        raise ConfigError(
            f"it is no rollout: {'; '.join(problems)[:300]}; expected an object with input, and optionally mode, "
            "resources_id, config, metadata and rollout_id"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is no JSON: {str(error)[:200]}") from None
    derived = content_id("queue-message/1", [settings.address, message.id])[:ID_DIGITS]
    named = found.rollout_id or f"{settings.kind}-{derived}"
    metadata = {**(found.metadata or {}), "queue": settings.address, "message": message.id}
    fields: dict[str, Any] = {**found.__dict__, "rollout_id": named, "metadata": metadata}
    return EnqueueRolloutRequest.model_validate(fields)


class Bridge:
    """Carries messages until it is asked to stop.

    Args:
        queue: has dead letters (`CloudQueue.look`).
        store: whose queue is fed.
        stop: set from outside; what is held is then stored while the store answers, and given back where not.
    """

    def __init__(self, queue: CloudQueue, store: LightningStore, stop: asyncio.Event) -> None:
        self.tally = Tally()
        self._queue, self._store, self._stop = queue, store, stop
        self._receiving = asyncio.Lock()
        self._held: dict[str, tuple[Message, float]] = {}
        """By handle: messages not dealt with, and when their lease was last renewed."""
        self._away: dict[str, float] = {}
        """What does not answer, and since when."""

    async def begin(self, most_seconds: float) -> str:
        """Wait until queue and store have answered once, for so long at most; what the queue says of itself.

        Raises Recoverable where that was too short, Stopped where the bridge is to stop before, and ConfigError as
        `CloudQueue.look` does, or where the store refuses who asks.
        """
        asking = asyncio.create_task(self._ask_both(time.monotonic() + most_seconds))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            # A call to what takes requests and answers none lasts as long as its client has patience.
            within = most_seconds + LAST_CALL_SECONDS
            await asyncio.wait({asking, stopping}, timeout=within, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            if self._stop.is_set():
                raise Stopped("the bridge is to stop before queue and store have answered")
            raise Recoverable(f"{self._queue.name} or the store has not answered within {within:.0f} s")
        finally:
            for task in (asking, stopping):
                task.cancel()
            await asyncio.gather(asking, stopping, return_exceptions=True)

    async def _ask_both(self, end: float) -> str:
        about_queue = await self._persistently(self._queue.name, self._queue.look, end)
        await self._persistently("the store", self._ask_store, end)
        return about_queue

    async def run(self) -> Tally:
        """Until `stop`. Raises ConfigError when queue or store refuse what only people can mend."""
        helpers = [asyncio.create_task(self._renew()), asyncio.create_task(self._tell())]
        carriers = [asyncio.create_task(self._carry()) for _ in range(CARRIERS)]
        try:
            await asyncio.gather(*carriers)
        finally:
            self._stop.set()
            for task in helpers:
                task.cancel()
            # A carrier that failed leaves the others time to end what they are at.
            await asyncio.gather(*carriers, *helpers, return_exceptions=True)
            await self._give_back()
        return self.tally

    # From the queue to the store

    async def _carry(self) -> None:
        while not self._stop.is_set():
            # One at a time asks, so that an empty queue is asked by one request, and a full one by all in turn.
            async with self._receiving:
                if self._stop.is_set():
                    return
                began, messages = time.monotonic(), ()
                with suppress(Stopped):
                    messages = await self._persistently(self._queue.name, self._queue.receive)
                    self._held.update({message.handle: (message, began) for message in messages})
            self.tally.received += len(messages)
            with suppress(Stopped):
                await self._deliver(messages)

    async def _deliver(self, messages: Sequence[Message]) -> None:
        readable: list[tuple[Message, EnqueueRolloutRequest]] = []
        refused: list[tuple[Message, str]] = []
        for message in messages:
            try:
                readable.append((message, rollout_request(message, self._queue.settings)))
            except ConfigError as error:
                refused.append((message, str(error)))
        if readable:
            stored, refused_too = await self._stored(readable)
            await self._persistently(self._queue.name, lambda: self._queue.acknowledge(stored))
            self._let_go(stored)
            self.tally.stored += len(stored)
            refused += refused_too
        # Last, so that dead letters that do not answer hold up no rollout.
        for message, reason in refused:
            await self._refuse(message, reason)

    async def _stored(
        self, asked: Sequence[tuple[Message, EnqueueRolloutRequest]]
    ) -> tuple[list[Message], list[tuple[Message, str]]]:
        """Enqueue all at once; where the store refuses the batch, one by one, so that one bad rollout holds up no
        other. What is stored, and what the store refuses, with its reasons."""
        requests = [request for _, request in asked]
        try:
            await self._persistently("the store", lambda: self._store.enqueue_many_rollouts(requests))
            return [message for message, _ in asked], []
        except (ConfigError, Conflict) as error:
            if len(asked) == 1:
                await self._raise_if_for_all(error)
                return [], [(asked[0][0], str(error))]
        parts = [await self._stored([one]) for one in asked]
        return [one for stored, _ in parts for one in stored], [one for _, refused in parts for one in refused]

    async def _raise_if_for_all(self, error: Exception) -> None:
        """A store that refuses everything, such as for a wrong key, is no fault of the message."""
        if isinstance(error, ConfigError):
            await self._persistently("the store", self._ask_store)

    async def _ask_store(self) -> None:
        await self._store.query_rollouts(limit=1)

    async def _refuse(self, message: Message, reason: str) -> None:
        # It quotes the message, which may hold anything; services take no control characters, and logs none either.
        reason = "".join(letter if letter.isprintable() else "?" for letter in reason)
        reason = reason.encode()[:REASON_BYTES].decode(errors="ignore")
        times = "" if message.times is None else f", received {message.times} times"
        log.warning("message %s of %s%s is refused: %s", message.id, self._queue.name, times, reason)
        self.tally.refused += 1
        if await self._buried(message, reason):
            await self._persistently(self._queue.name, lambda: self._queue.acknowledge([message]))
        else:
            await self._persistently(self._queue.name, lambda: self._queue.hold([message], REFUSED_SECONDS))
        self._let_go([message])

    async def _buried(self, message: Message, reason: str) -> bool:
        """Whether the dead letters of the settings have it; else it is for the queue's own policy."""
        if self._queue.settings.dead_letter is None:
            return False
        try:
            await self._persistently(self._queue.name, lambda: self._queue.bury(message, reason))
        except RefusedCall as error:
            again = f"it comes again in {REFUSED_SECONDS} s, until the queue's own policy takes it"
            log.warning("the dead letters do not take message %s: %s; %s", message.id, error, again)
            return False
        return True

    def _let_go(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._held.pop(message.handle, None)

    async def _give_back(self) -> None:
        """What is held and was not stored, to whoever receives next; where that fails, once its lease ends."""
        held = [message for message, _ in self._held.values()]
        if held:
            try:
                await self._queue.hold(held, 0)
                log.info("%d messages were given back to %s", len(held), self._queue.name)
            except (Recoverable, ConfigError) as error:
                log.warning("%d messages come again when their lease ends: %s", len(held), error)
        self._held.clear()

    # Meanwhile

    async def _renew(self) -> None:
        """Renew the leases of what is held, long before they end."""
        lease = self._queue.settings.lease_seconds
        while True:
            await asyncio.sleep(lease / RENEWALS_IN_LEASE / 2)
            now = time.monotonic()
            old = [message for message, since in self._held.values() if now - since > lease / RENEWALS_IN_LEASE]
            if not old:
                continue
            try:
                lost = await self._queue.hold(old, lease)
            except (Recoverable, ConfigError) as error:
                log.warning("leases of %d messages could not be renewed now: %s", len(old), error)
                continue
            self._held.update({message.handle: (message, now) for message in old if message.handle in self._held})
            for message in lost:
                log.warning("the lease of message %s was lost; it comes again, as the same rollout", message.id)

    async def _tell(self) -> None:
        logged = str(self.tally)
        while True:
            await asyncio.sleep(TOLD_SECONDS)
            if str(self.tally) != logged:
                logged = str(self.tally)
                log.info("%s so far", logged)

    async def _persistently(self, what: str, call: Callable[[], Awaitable[T]], end: float = math.inf) -> T:
        """Call until it succeeds, with growing pauses after passing faults. Raises Stopped in place of a further pause
        once the bridge is to stop, and Recoverable once the monotonic clock is at ``end``."""
        tries = 0
        while True:
            try:
                done = await call()
            except Recoverable as error:
                now = time.monotonic()
                since = self._away.setdefault(what, now)
                if since == now:
                    bound = "" if end == math.inf else f", for {max(0.0, end - now):.0f} s at most"
                    log.warning("%s; trying again until it answers%s", error, bound)
                if now >= end:
                    raise Recoverable(f"{what} has not answered for {now - since:.0f} s: {error}") from error
                delay = min(BACK_OFF.delay_for_try(tries), end - now)
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._stop.wait()
                if self._stop.is_set():
                    raise Stopped(f"{what} does not answer, and the bridge is to stop") from error
                tries = min(tries + 1, MOST_DOUBLINGS)
                continue
            if (since := self._away.pop(what, None)) is not None:
                log.info("%s answers again, after %.0f s", what, time.monotonic() - since)
            return done

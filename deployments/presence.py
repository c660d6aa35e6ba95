"""Which machines' workers are there, by leases in the database that all of them share.

A supervised worker keeps a lease of its name. Where one has run out, its machine has vanished or is cut off: the others
know after a minute and a half, where Prefect's heartbeats take ten minutes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from concurrent.futures import wait
from contextlib import AsyncExitStack, suppress
from uuid import uuid4

from rollout_core.base.stopping import in_thread
from rollout_core.store.sql.row_leases import Lease, LeaseBook
from tasks.runtime.connections import open_store

log = logging.getLogger(__name__)
LEASE_SECONDS = 45.0
BEAT_SECONDS = 10.0
SETTLE_SECONDS = 30.0
"""For which a lease must be seen to have run out, by a database that answers, before its worker counts as gone: after
an outage of the database all of them have, and each is renewed within a beat."""
ANSWER_SECONDS = 8.0
"""How long the database may take to answer."""


class Presence:
    """Of the worker ``name`` of ``pool``, from now until `end`; by a thread of its own."""

    def __init__(self, pool: str, name: str) -> None:
        self._pool, self._name = pool, name
        self._owner = f"{name}/{uuid4().hex[:8]}"
        self._watched: frozenset[str] = frozenset()
        self._gone_since: dict[str, float] = {}
        """By names of workers, monotonic seconds of the first look in a row that found their leases run out."""
        self._looked_at = float("-inf")
        """When the database answered last."""
        self._lease: Lease | None = None
        self._is_away = False
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._done = in_thread(self._run)

    def gone(self, workers: Collection[str]) -> set[str]:
        """Of ``workers`` of this pool, those that had a lease, and do not any more. Those asked for the first time are
        looked for from now on."""
        self._watched = frozenset(workers) - {self._name}
        looked_at, known = self._looked_at, dict(self._gone_since)
        if time.monotonic() - looked_at > 2 * BEAT_SECONDS + ANSWER_SECONDS:
            return set()
        return {worker for worker in self._watched if looked_at - known.get(worker, looked_at) >= SETTLE_SECONDS}

    @property
    def is_held(self) -> bool:
        """Whether the name is this process's alone. Another one may have it: an earlier supervisor that was killed, for
        a moment; or one of a machine, or a container, that is called alike."""
        return self._lease is not None

    def end(self) -> None:
        """Give up the lease, within the time that the database may take to answer."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ended.set)
        wait([self._done], timeout=ANSWER_SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._keep())

    async def _keep(self) -> None:
        book: LeaseBook | None = None
        async with AsyncExitStack() as stack:
            while not self._ended.is_set():
                try:
                    async with asyncio.timeout(ANSWER_SECONDS):
                        if book is None:
                            book = (await stack.enter_async_context(open_store())).leases
                        await self._beat(book)
                    self._looked_at, self._is_away = time.monotonic(), False
                except Exception as error:  # noqa: BLE001 - any of the database's; machines are known when it answers
                    self._gone_since = {}
                    if not self._is_away:
                        log.warning("the database does not answer, so other machines are not watched: %s", error)
                    self._is_away = True
                with suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_SECONDS):
                        await self._ended.wait()
            if book is not None and self._lease is not None:
                with suppress(Exception):  # it runs out
                    async with asyncio.timeout(ANSWER_SECONDS / 2):
                        await book.release(self._lease)

    async def _beat(self, book: LeaseBook) -> None:
        """Renew the own lease, and look at those of the workers that were asked for."""
        if self._lease is not None and not await book.renew(self._lease, seconds=LEASE_SECONDS):
            self._lease = None
        if self._lease is None:
            found = await book.take(self._lease_name(self._name), self._owner, seconds=LEASE_SECONDS)
            self._lease = found if isinstance(found, Lease) else None
        gone: dict[str, float] = {}
        for worker in self._watched:
            holding = await book.holding(self._lease_name(worker))
            if holding is not None and holding.seconds_left < 0:
                gone[worker] = self._gone_since.get(worker, time.monotonic())
        self._gone_since = gone

    def _lease_name(self, worker: str) -> str:
        return f"worker/{self._pool}/{worker}"

"""A cached stage computes under a lease of the store's database, so that of several machines one does the work and the
others take its result.

The lease is named by the stage's key. A thread renews it; whoever finds it taken by another is interrupted and writes
neither result nor progress. That spares double work and no more: results are named by their inputs, so one that is
computed twice is as good as one that is computed once. So a database that does not answer stops nothing: after
`AWAY_SECONDS` the stage begins, continues or writes its result without it, and logs it. One that refuses keeps
a stage from beginning, and stops none that has begun.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import AsyncExitStack, contextmanager, suppress
from uuid import uuid4

from rollout_core.base.errors import Recoverable, RolloutError, Stopped
from rollout_core.base.ids import ContentId
from rollout_core.base.locks import exclusive
from rollout_core.base.settings import lease_seconds
from rollout_core.base.stopping import (
    current_interruption,
    in_thread,
    on_abandoned,
    raise_if_abandoned,
    raise_if_stopping,
)
from rollout_core.inference.ledger import this_worker
from rollout_core.store.sql.row_leases import Holding, Lease, LeaseBook
from tasks.runtime import connections
from tasks.runtime.journal import stage_logger

AWAY_SECONDS = 5.0
"""How long a stage waits for a database that does not answer."""
FENCED_SECONDS = 4.0
"""How long the work of a stage may take to end once its lease is another's; then it is left behind."""
RENEWALS = 4
"""Of which one must succeed within the length of a lease."""
_LOOK_AGAIN_SECONDS = 0.5
_POLL_SECONDS = 0.1


@contextmanager
def alone(key: ContentId, stage: str) -> Iterator[Callable[[], None]]:
    """Keep others from the work of a key inside the block; waits for whoever is at it.

    Gives what is called directly before something is written for the key: it raises Stopped where the stage was given
    up, or its lease is another's. Raises Stopped, too, where the stage is to stop while it waits.
    """
    what = f"the result of stage {stage}"
    if connections.machines_meet():
        with _leased(key, stage) as keeper:

            def check() -> None:
                raise_if_abandoned(what)
                keeper.check()

            yield check
        return

    def on_wait() -> None:
        stage_logger().info("another process is computing %s on the same inputs; waiting for its result", stage)

    # Released by the system when its holder dies, where a lease has to run out.
    with exclusive(connections.lock_folder() / f"{key}.lock", on_wait=on_wait):
        yield lambda: raise_if_abandoned(what)


@contextmanager
def _leased(key: ContentId, stage: str) -> Iterator[_Keeper]:
    keeper = _Keeper(f"stage/{key}", stage)
    try:
        with on_abandoned(keeper.end):
            keeper.wait_until_held()
            yield keeper
    finally:
        keeper.end()
        keeper.wait_until_released()


class _Keeper:
    """Takes a lease, renews it and lets go of it, in an event loop of its own."""

    def __init__(self, name: str, stage: str) -> None:
        self._name = name
        self._stage = stage
        self._owner = f"{this_worker()}/{uuid4().hex[:8]}"
        self._seconds = lease_seconds()
        self._interruption = current_interruption()
        self._log = stage_logger()
        self._book: LeaseBook | None = None
        self._lease: Lease | None = None
        self._waits_for: str | None = None
        self._is_held = threading.Event()
        self._is_away = self._is_lost = self._goes_without = False
        self._refusal: Exception | None = None
        self._answered_at = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._done: Future[None] = in_thread(self._run)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._keep())

    def wait_until_held(self) -> None:
        """Returns without it, after a warning, where the database does not answer; it is taken when it does, if it is
        free then. Raises what will not pass, such as the ConfigError of a database that refuses."""
        while not self._is_held.wait(_POLL_SECONDS):
            raise_if_stopping(f"waiting for another that computes {self._stage}")
            if self._refusal is not None:
                raise self._refusal
            if time.monotonic() - self._answered_at > AWAY_SECONDS:
                self._log.warning(
                    "the database does not answer, so %s is computed without a lease; another machine may do the same",
                    self._stage,
                )
                self._goes_without = True
                return

    def check(self) -> None:
        """Raises Stopped once the lease is another's; asks the database now, if it answers."""
        if self._lease is not None and not self._is_lost and not self._is_away:
            with suppress(RuntimeError, CancelledError):  # it has ended meanwhile
                asked = asyncio.run_coroutine_threadsafe(self._renew(self._lease), self._loop)
                try:
                    asked.result(AWAY_SECONDS)
                except Exception as error:  # noqa: BLE001 - as in `_keep`: the stage has begun
                    self._note_away(error)
        if self._is_lost:
            raise Stopped(f"what stage {self._stage} made is not written: its lease is another's")

    def end(self) -> None:
        """Release the lease, from any thread; does not wait for that."""
        with suppress(RuntimeError):  # the loop is closed: it has ended
            self._loop.call_soon_threadsafe(self._ended.set)

    def wait_until_released(self) -> None:
        """For no longer than the database may take to answer; a lease that is not released runs out."""
        wait([self._done], timeout=AWAY_SECONDS)

    async def _keep(self) -> None:
        async with AsyncExitStack() as stack:
            while not self._ended.is_set():
                try:
                    if self._book is None:
                        self._book = (await stack.enter_async_context(connections.open_store())).leases
                    pause = await self._beat(self._book)
                except Exception as error:  # noqa: BLE001 - the thread must outlive it, and the stage must hear of it
                    self._note_failure(error)
                    pause = _LOOK_AGAIN_SECONDS
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._ended.wait()
            if self._book is not None and self._lease is not None:
                with suppress(RolloutError, TimeoutError):
                    async with asyncio.timeout(AWAY_SECONDS):
                        await self._book.release(self._lease)

    async def _beat(self, book: LeaseBook) -> float:
        """Take the lease or renew it; seconds until it is to be called again."""
        if self._lease is not None:
            await self._renew(self._lease)
            return self._seconds / RENEWALS
        async with asyncio.timeout(AWAY_SECONDS):
            found = await book.take(self._name, self._owner, seconds=self._seconds)
        self._note_answer()
        if isinstance(found, Holding):
            self._note_holder(found)
            return _LOOK_AGAIN_SECONDS
        self._lease = found
        self._is_held.set()
        return self._seconds / RENEWALS

    async def _renew(self, lease: Lease) -> None:
        assert self._book is not None, "the lease was taken from it"
        async with asyncio.timeout(AWAY_SECONDS):
            renewed = await self._book.renew(lease, seconds=self._seconds)
        if renewed:
            return self._note_answer()
        self._is_lost = True
        self._ended.set()
        by = "another"
        with suppress(RolloutError, TimeoutError):
            async with asyncio.timeout(1.0):
                holding = await self._book.holding(self._name)
            by = by if holding is None else f"{holding.owner} (epoch {holding.epoch}, this one had {lease.epoch})"
        reason = f"the lease of stage {self._stage} was taken by {by}, because it was not renewed for "
        reason += f"{self._seconds:g} s (ROLLOUT_LEASE_SECONDS); nothing more is written here, and its result is taken"
        if self._interruption is not None:
            self._interruption.request(Recoverable(reason), within_seconds=FENCED_SECONDS)

    def _note_answer(self) -> None:
        self._answered_at = time.monotonic()
        if self._is_away:
            self._is_away = False
            self._log.info("the database answers again to stage %s", self._stage)

    def _note_failure(self, error: Exception) -> None:
        """While the stage waits for the lease, it is to raise what will not pass. Once it has begun nobody would hear
        of that, so the database is asked again whatever it said."""
        will_pass = isinstance(error, Recoverable | TimeoutError)
        if will_pass or self._lease is not None or self._goes_without:
            self._note_away(error)
        else:
            self._refusal = error

    def _note_away(self, error: Exception) -> None:
        if not self._is_away:
            self._is_away = True
            self._log.warning(
                "the database does not answer (%s); stage %s continues, and another machine may do the same work",
                str(error) or "it takes too long", self._stage,
                exc_info=None if isinstance(error, RolloutError | TimeoutError) else error,
            )  # fmt: skip

    def _note_holder(self, holding: Holding) -> None:
        if self._waits_for != holding.owner:
            self._waits_for = holding.owner
            if self._goes_without:
                self._log.warning("%s is computing %s on the same inputs, too", holding.owner, self._stage)
                return
            self._log.info("%s is computing %s on the same inputs; waiting for its result", holding.owner, self._stage)

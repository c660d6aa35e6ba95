"""The tasks of one run, as runners see them: a store whose queue holds these rollouts and no others.

The store that a run shares with others holds their work in its queue too. Runners of this run claim here: what they
take, report and read goes to the store itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rollout_core.base.errors import Conflict
from rollout_core.base.loops import Bell
from rollout_core.inference.ledger import is_gone
from rollout_core.store import AttemptedRollout, LightningStore, NamedResources, ResourcesUpdate, Rollout
from rollout_core.store.forwarding_store import StoreView
from rollout_core.store.lifecycle import FINISHED

INTERRUPTIONS = 20
_REMEMBERED_CLAIMS = 10_000
_CHUNK = 1_000
_ENDS = frozenset({"update_many_attempts", "end_attempts", "update_attempt", "update_rollout", "cancel_rollouts"})


class RolloutQueue(StoreView):
    """A view of ``store``. Used from any thread and event loop; the store must allow that.

    ``max_failures``: attempts of a rollout of the run that may fail or run out of time before it has failed for good;
    None: what its config says. Attempts whose runner was killed or interrupted are no failures; rollouts are to be
    enqueued with ``INTERRUPTIONS`` attempts more for these.
    """

    def __init__(
        self,
        store: LightningStore,
        on_change: Callable[[], None] = lambda: None,
        *,
        max_failures: int | None = None,
    ) -> None:
        super().__init__(store)
        self._max_failures = max_failures
        self._forgiven: dict[str, int] = {}
        self._on_change = on_change
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque()
        self._taken: set[str] = set()
        """Claimed, and not known to have ended."""
        self._starting: set[str] = set()
        """Of them, those whose attempt is being started: the store still has them as queued."""
        self._claims: OrderedDict[str, dict[str, str]] = OrderedDict()
        """Rollouts and their attempts."""
        self._bell = Bell()
        self._resources: ResourcesUpdate | None = None
        self._as_stored: set[str] = set()
        """Those that get neither the run's resources nor its limit of failures."""

    # What there is to do

    def set_resources(self, resources: NamedResources) -> None:
        """What runners get with each task from now on. It is not stored: an address ends with its process."""
        version = 1 if self._resources is None else self._resources.version + 1
        self._resources = ResourcesUpdate(
            resources_id=f"rs-run-{version}", create_time=0.0, update_time=0.0, version=version, resources=resources
        )

    def add(self, rollout_ids: Iterable[str], *, as_stored: bool = False) -> None:
        """Hand these out too, those that are known already no second time.

        ``as_stored``: somebody else's, with the resources and the retries that the store has for them.
        """
        with self._lock:
            known = self._taken | self._starting | set(self._waiting)
            added = [rollout_id for rollout_id in dict.fromkeys(rollout_ids) if rollout_id not in known]
            self._waiting.extend(added)
            self._as_stored.update(added if as_stored else ())
            count = len(self._waiting)
        self._bell.ring(count)

    @property
    def taken(self) -> list[str]:
        """What runners have."""
        with self._lock:
            return list(self._taken)

    @property
    def num_waiting(self) -> int:
        """What nobody has claimed yet."""
        with self._lock:
            return len(self._waiting)

    def withdraw(self, rollout_ids: Iterable[str]) -> None:
        """Hand these out no more, and look no more at those that runners have."""
        gone = set(rollout_ids)
        with self._lock:
            self._waiting = deque(rollout_id for rollout_id in self._waiting if rollout_id not in gone)
            self._taken -= gone
            self._as_stored -= gone

    def clear(self) -> None:
        """Hand out nothing more."""
        with self._lock:
            self._waiting.clear()
            self._taken.clear()
            self._as_stored.clear()

    async def look(self) -> list[Rollout]:
        """Those of the taken ones that have finished; what is to be tried again waits again."""
        finished: list[Rollout] = []
        again: list[str] = []
        with self._lock:
            taken = list(self._taken - self._starting)
        for start in range(0, len(taken), _CHUNK):
            for rollout in await self.store.query_rollouts(rollout_id_in=taken[start : start + _CHUNK]):
                if rollout.status in FINISHED:
                    finished.append(rollout)
                elif rollout.status in ("queuing", "requeuing"):
                    if await self._has_failed(rollout.rollout_id):
                        finished.append(await self.store.update_rollout(rollout.rollout_id, status="failed"))
                    else:
                        again.append(rollout.rollout_id)
        with self._lock:
            self._taken.difference_update(rollout.rollout_id for rollout in finished)
            self._as_stored.difference_update(rollout.rollout_id for rollout in finished)
            again = [rollout_id for rollout_id in again if rollout_id in self._taken]
            self._taken.difference_update(again)
            self._waiting.extendleft(again)
        if again:
            self._bell.ring(len(again))
        return finished

    async def _has_failed(self, rollout_id: str) -> bool:
        if self._max_failures is None or rollout_id in self._as_stored:
            return False
        attempts = list(await self.store.query_attempts(rollout_id))[self._forgiven.get(rollout_id, 0) :]
        return sum(attempt.status in ("failed", "timeout") for attempt in attempts) >= self._max_failures

    async def retry(self, rollout_id: str) -> None:
        """Have a failed rollout tried again, as often as a new one."""
        self._forgiven[rollout_id] = len(await self.store.query_attempts(rollout_id))
        await self.store.update_rollout(rollout_id, status="requeuing")

    async def take_over(self, rollouts: Sequence[Rollout]) -> None:
        """End what ended workers of this machine, of an earlier run that was killed, had under way."""
        for rollout in rollouts:
            if isinstance(rollout, AttemptedRollout) and is_gone(rollout.attempt.worker_id):
                with contextlib.suppress(Conflict):
                    await self.store.update_attempt(
                        rollout.rollout_id, rollout.attempt.attempt_id, status="unresponsive", fenced=True
                    )

    async def adopt_claimed(self) -> None:
        """`take_over` what runners have."""
        taken = self.taken
        for start in range(0, len(taken), _CHUNK):
            await self.take_over(await self.store.query_rollouts(rollout_id_in=taken[start : start + _CHUNK]))
        self._on_change()

    def watch(self, rollout_ids: Iterable[str]) -> None:
        """Others work on these; when they end, or are to be tried again, it is noticed."""
        with self._lock:
            self._taken.update(rollout_ids)

    # As runners use it

    async def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the store's method of this name; after one that may end an attempt, say so."""
        found = await super().forward(name, *args, **kwargs)
        if name in _ENDS:
            self._on_change()
        return found

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        with self._lock:
            chosen = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
            self._taken.update(chosen)
            self._starting.update(chosen)
        if not chosen:
            return []
        try:
            free = {
                rollout.rollout_id
                for rollout in await self.store.query_rollouts(rollout_id_in=chosen)
                if rollout.status in ("queuing", "requeuing")
            }
            started = await self.store.start_many_attempts(
                [rollout_id for rollout_id in chosen if rollout_id in free], worker_id=worker_id
            )
        finally:  # also after an error: what was started, and what was not, is seen by the next look
            with self._lock:
                self._starting.difference_update(chosen)
        if len(free) < len(chosen):
            self._on_change()  # others have them, or they have ended
        return [self._with_resources(rollout) for rollout in started]

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        claimed = await self.dequeue_many_rollouts(limit=1, worker_id=worker_id)
        return claimed[0] if claimed else None

    async def claim_rollouts(
        self, claim_id: str, *, limit: int = 1, worker_id: str | None = None, repeated: bool = False
    ) -> Sequence[AttemptedRollout]:
        if repeated and claim_id in self._claims:
            attempts = self._claims[claim_id]
            rollouts = await self.store.query_rollouts(rollout_id_in=[*attempts])
            return [
                self._with_resources(rollout)
                for rollout in rollouts
                if isinstance(rollout, AttemptedRollout)
                and rollout.attempt.status == "preparing"
                and rollout.attempt.attempt_id == attempts[rollout.rollout_id]
            ]
        claimed = await self.dequeue_many_rollouts(limit=limit, worker_id=worker_id)
        if claimed:
            self._claims[claim_id] = {rollout.rollout_id: rollout.attempt.attempt_id for rollout in claimed}
            while len(self._claims) > _REMEMBERED_CLAIMS:
                self._claims.popitem(last=False)
        return claimed

    claim_task = LightningStore.claim_task  # made of the above and of the run's own resources

    async def release_rollouts(self, claimed: Sequence[AttemptedRollout]) -> None:
        await self.store.release_rollouts(claimed)
        ids = [rollout.rollout_id for rollout in claimed]
        with self._lock:
            back = [rollout_id for rollout_id in ids if rollout_id in self._taken]
            self._taken.difference_update(back)
            self._waiting.extendleft(reversed(back))
        self._bell.ring(len(back))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return self._resources or await self.store.get_latest_resources()

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        own = self._resources
        if own is not None and resources_id.startswith("rs-run-"):
            return own
        return await self.store.get_resources_by_id(resources_id)

    def _with_resources(self, rollout: AttemptedRollout) -> AttemptedRollout:
        own = self._resources
        if own is None or rollout.rollout_id in self._as_stored:
            return rollout
        return rollout.model_copy(update={"resources_id": own.resources_id})

    async def wait_for_work(self, timeout: float) -> bool:
        async def look() -> bool:
            return self.num_waiting > 0

        return await self._bell.wait(look, timeout, timeout, timeout)

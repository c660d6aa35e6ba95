"""What a run keeps of its training states and of the models between its first and its last: the last state, from which
it continues, and what somebody has named. The others are given up once a later one is stored, and deleted at once.

A state counts as stored once the result of its stage is there, so a run that is killed at any moment finds the one
before or the later one. What was given up still counts for the results that name it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Concatenate, ParamSpec, TypeVar

from prefect.context import FlowRunContext

from rollout_core.base.errors import NotFound
from rollout_core.base.ids import ContentId, named_ids
from rollout_core.base.stopping import is_stopping, run_async
from rollout_core.config import Run, RunInfo
from rollout_core.objects import Snapshot, SnapshotStore
from rollout_core.objects.records import Checkpoint
from rollout_core.objects.retention.pruning import Fate, free, prune_model, prune_state, stand_on
from rollout_core.objects.snapshots import RUN_NAME
from rollout_core.runs.run_records import RunRecords, runs_under_way, shown_state
from tasks.runtime.connections import objects, open_store
from tasks.runtime.dry_run import current_dry_run
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import retry

R = TypeVar("R")
RunT = TypeVar("RunT", bound=Run)
P = ParamSpec("P")

_PAUSE_PER_SECOND = 10.0
"""Deleting looks at every name of the storage; so many times as long as that took it is left alone, and done at the
end, so that a run with a large storage does not spend its time on it."""


class Keeping:
    """Of one pass of a run's body."""

    def __init__(self, run: RunInfo, run_id: str) -> None:
        self._run = run
        self._run_id = run_id
        self._before: list[ContentId] = []
        """States that the run has come by, and may name."""
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="free")
        self._freeing: Future[None] | None = None
        self._pause_ends = 0.0
        """By `time.monotonic`."""
        self._is_left = False
        """Whether something was given up since it was last deleted."""

    def close(self) -> None:
        """Wait until what was given up is deleted, but where the run is to stop: the next one does the rest."""
        if self._is_left and not is_stopping():
            self._pool.submit(self._freed)
        self._pool.shutdown(wait=not is_stopping(), cancel_futures=is_stopping())

    def later(self, checkpoint: Checkpoint) -> None:
        """The run has come to a state. If that is stored, those before it go."""
        retry(lambda: self._later(checkpoint))

    def _later(self, checkpoint: Checkpoint) -> None:
        state, store = checkpoint.train_state, objects()
        if not stand_on(store, state, self._run_id, self._run.name, self._fate):
            return
        for earlier in self._before:
            if earlier != state:
                prune_state(store, earlier, self._run_id)
        self._before = [state]
        self._free()

    def prune_model(self, checkpoint: Checkpoint) -> bool:
        """Have a model go whose state no run names any more; False while one does."""
        return retry(lambda: self._prune_model(checkpoint))

    def _prune_model(self, checkpoint: Checkpoint) -> bool:
        store = objects()
        if SnapshotStore(store).named_by(checkpoint.train_state):
            return False
        made_by = {"run_id": self._run_id, "step": checkpoint.step, "algorithm": checkpoint.algorithm}
        prune_model(store, checkpoint.model, **made_by)
        self._free()
        return True

    def _fate(self, record: Snapshot) -> Fate:
        """A try of this run that did not come to its end is what continues now."""
        try:
            head = RunRecords(objects()).find(record.run_id)
        except NotFound:
            return "stays"
        state = shown_state(head, runs_under_way(objects()))
        if state == "completed":
            return "stays"
        return "over" if state != "running" and record.meta.get(RUN_NAME) == self._run.name else "may go"

    def _free(self) -> None:
        is_busy = self._freeing is not None and not self._freeing.done()
        self._is_left = is_busy or time.monotonic() < self._pause_ends
        if not self._is_left:
            self._freeing = self._pool.submit(self._freed)

    def _freed(self) -> None:
        began = time.monotonic()
        try:
            store = objects()
            free(store, extra_roots=frozenset(named_ids([run_async(_served()).encode()])))
            ended = time.monotonic()
            self._pause_ends = ended + _PAUSE_PER_SECOND * max(0.0, ended - began - store.files.settle_seconds)
        except Exception as error:  # noqa: BLE001 - whatever storage raises: housekeeping deletes it, too
            stage_logger().warning("training states that were given up are not deleted yet: %s", error)


async def _served() -> str:
    async with open_store() as store:
        latest = await store.get_latest_resources()
        return "" if latest is None else latest.model_dump_json()


_current: ContextVar[Keeping | None] = ContextVar("rollout_keeping", default=None)


def keeping(body: Callable[Concatenate[RunT, P], R]) -> Callable[Concatenate[RunT, P], R]:
    """The body of a run that trains; a pass of it gives up states and models as ``run.keep_states`` says."""

    @functools.wraps(body)
    def passed(config: RunT, *args: P.args, **kwargs: P.kwargs) -> R:
        run, context = config.run, FlowRunContext.get()
        if context is None or context.flow_run is None or current_dry_run() is not None or run.keep_states == "all":
            return body(config, *args, **kwargs)
        found = Keeping(run, str(context.flow_run.id))
        token = _current.set(found)
        try:
            return body(config, *args, **kwargs)
        finally:
            _current.reset(token)
            found.close()

    return passed


def current_keeping() -> Keeping | None:
    """That of the run under way; None where it keeps all, and where it is only planned."""
    return _current.get()

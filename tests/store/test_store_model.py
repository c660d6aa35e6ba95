"""Random sequences of calls by several workers, against a model of the contract written down a second time.

The model below shares no code with the store: it is the contract's prose as a few dictionaries.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rollout_core.base.errors import ConfigError, Conflict
from rollout_core.store import (
    AttemptedRollout,
    InMemoryLightningStore,
    LightningStore,
    RolloutConfig,
    Span,
    SqlLightningStore,
)
from tests.store.postgres import PostgresServer

LOST = ("failed", "timeout", "unresponsive")
CONFIGS = [
    RolloutConfig(),
    RolloutConfig(max_attempts=3, retry_condition=["failed"]),
    RolloutConfig(timeout_seconds=10, max_attempts=2, retry_condition=["timeout"]),
    RolloutConfig(unresponsive_seconds=4, max_attempts=3, retry_condition=["unresponsive", "failed"]),
    RolloutConfig(timeout_seconds=10, unresponsive_seconds=4),
]
WORKERS = ["w1", "w2", "w3"]
REFUSED = [
    lambda store, _, bad: store.dequeue_rollout(bad),
    lambda store, rollout_id, bad: store.start_attempt(rollout_id, bad),
    lambda store, rollout_id, bad: store.start_many_attempts([rollout_id, bad], worker_id="w4"),
    # An empty id of a worker takes the attempt from its worker.
    lambda store, rollout_id, bad: store.update_attempt(rollout_id, bad, status="succeeded", worker_id="w4"),
    lambda store, _, bad: store.update_worker(bad),
    lambda store, _, bad: store.enqueue_rollout(1, rollout_id=bad),
]
"""Calls with an id that is none; they also get one of a rollout, which may be unknown."""


@dataclass
class ModelAttempt:
    attempt_id: str
    start: float
    status: str = "preparing"
    heartbeat: float | None = None
    end: float | None = None


@dataclass
class ModelRollout:
    config: RolloutConfig
    status: str = "queuing"
    end: float | None = None
    attempts: list[ModelAttempt] = field(default_factory=list)


class Model:
    """What the contract promises."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.rollouts: dict[str, ModelRollout] = {}
        self.queue: list[str] = []
        self.workers: set[str] = set()
        self.num_spans = 0

    def set_status(self, rollout_id: str, status: str) -> None:
        rollout = self.rollouts[rollout_id]
        rollout.status = status
        if status in ("queuing", "requeuing"):
            if rollout_id not in self.queue:
                self.queue.append(rollout_id)
        elif rollout_id in self.queue:
            self.queue.remove(rollout_id)
        if status not in ("succeeded", "failed", "cancelled"):
            rollout.end = None
        elif rollout.end is None:
            rollout.end = self.now
            self.end_superseded(rollout.attempts[:-1])

    def cancel(self, rollout_id: str) -> None:
        rollout = self.rollouts[rollout_id]
        if rollout.status in ("succeeded", "failed", "cancelled"):
            return
        self.set_status(rollout_id, "cancelled")
        for attempt in rollout.attempts[-1:]:
            if attempt.status in ("preparing", "running", "unresponsive"):
                attempt.status, attempt.end = "failed", self.now

    def end_superseded(self, attempts: list[ModelAttempt]) -> None:
        for attempt in attempts:
            if attempt.status in ("preparing", "running"):
                attempt.status, attempt.end = "failed", self.now

    def set_attempt(self, rollout_id: str, attempt: ModelAttempt, status: str) -> None:
        rollout = self.rollouts[rollout_id]
        attempt.status = status
        if status not in ("succeeded", "failed"):
            attempt.end = None
        elif attempt.end is None:
            attempt.end = self.now
        if attempt is not rollout.attempts[-1]:
            return
        if status == "succeeded":
            new = "succeeded"
        elif status in LOST:
            retry = status in rollout.config.retry_condition and len(rollout.attempts) < rollout.config.max_attempts
            new = "requeuing" if retry else "failed"
        elif status == "running":
            new = "running" if rollout.status in ("queuing", "requeuing", "preparing") else rollout.status
        else:
            new = "preparing" if rollout.status in ("queuing", "requeuing") else rollout.status
        if new != rollout.status:
            self.set_status(rollout_id, new)

    def watchdog(self) -> None:
        for rollout_id, rollout in self.rollouts.items():
            if rollout.status not in ("preparing", "running") or not rollout.attempts:
                continue
            attempt, config = rollout.attempts[-1], rollout.config
            if attempt.status not in ("preparing", "running"):
                continue
            if config.timeout_seconds is not None and self.now - attempt.start > config.timeout_seconds:
                self.set_attempt(rollout_id, attempt, "timeout")
            elif config.unresponsive_seconds is not None:
                last = attempt.start if attempt.heartbeat is None else attempt.heartbeat
                if self.now - last > config.unresponsive_seconds:
                    self.set_attempt(rollout_id, attempt, "unresponsive")

    def span(self, rollout_id: str, attempt: ModelAttempt) -> None:
        self.num_spans += 1
        rollout = self.rollouts[rollout_id]
        attempt.heartbeat = self.now
        revived = attempt is rollout.attempts[-1] or rollout.status not in ("succeeded", "failed", "cancelled")
        if attempt.status in ("preparing", "unresponsive") and revived:
            attempt.status = "running"
        working = attempt is rollout.attempts[-1] and attempt.status in ("preparing", "running")
        if working and rollout.status in ("queuing", "requeuing", "preparing"):
            self.set_status(rollout_id, "running")


class StoreAgainstModel(RuleBasedStateMachine):
    """Rules for every store; subclasses open one."""

    store: LightningStore

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.loop = asyncio.new_event_loop()
        self.model = Model()
        self.open_store()

    def open_store(self) -> None:
        raise NotImplementedError

    def do(self, call):
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        try:
            if hasattr(self, "store"):
                try:
                    self.compare()
                finally:
                    self.do(self.store.close())
        finally:
            self.loop.close()
            shutil.rmtree(self.folder)

    def pick(self, n: int) -> tuple[str, ModelRollout]:
        return list(self.model.rollouts.items())[n % len(self.model.rollouts)]

    def pick_attempt(self, n: int, m: int) -> tuple[str, ModelAttempt] | None:
        rollout_id, rollout = self.pick(n)
        # Counted from the end, because the latest attempts are the interesting ones.
        return (rollout_id, rollout.attempts[-1 - m % len(rollout.attempts)]) if rollout.attempts else None

    def note_attempt(self, claimed: AttemptedRollout) -> None:
        rollout = self.model.rollouts[claimed.rollout_id]
        self.model.end_superseded(rollout.attempts)
        rollout.attempts.append(ModelAttempt(claimed.attempt.attempt_id, self.model.now))
        self.model.set_status(claimed.rollout_id, "preparing")
        assert claimed.attempt.sequence_id == len(rollout.attempts)
        assert (claimed.status, claimed.attempt.status) == ("preparing", "preparing")

    @rule(config=st.sampled_from(CONFIGS))
    def enqueue(self, config):
        self.model.watchdog()
        rollout = self.do(self.store.enqueue_rollout(len(self.model.rollouts), config=config))
        self.model.rollouts[rollout.rollout_id] = ModelRollout(config)
        self.model.queue.append(rollout.rollout_id)

    @rule(limit=st.integers(1, 3), worker=st.sampled_from(WORKERS))
    def dequeue(self, limit, worker):
        self.model.watchdog()
        self.model.workers.add(worker)
        claimed = self.do(self.store.dequeue_many_rollouts(limit=limit, worker_id=worker))
        assert [rollout.rollout_id for rollout in claimed] == self.model.queue[:limit]
        for rollout in claimed:
            self.note_attempt(rollout)

    @precondition(lambda self: self.model.rollouts)
    @rule(n=st.integers(0, 9), worker=st.sampled_from(WORKERS))
    def start_attempt(self, n, worker):
        self.model.watchdog()
        self.model.workers.add(worker)
        self.note_attempt(self.do(self.store.start_attempt(self.pick(n)[0], worker)))

    @precondition(lambda self: self.model.rollouts)
    @rule(
        n=st.integers(0, 9),
        m=st.integers(0, 2),
        status=st.sampled_from(["preparing", "running", "succeeded", "failed", "timeout", "unresponsive"]),
        fenced=st.booleans(),
    )
    def update_attempt(self, n, m, status, fenced):
        picked = self.pick_attempt(n, m)
        if picked is None:
            return
        self.model.watchdog()
        rollout_id, attempt = picked
        rollout = self.model.rollouts[rollout_id]
        repeated = attempt is rollout.attempts[-1] and attempt.status == status and status in ("succeeded", "failed")
        refused = (
            attempt is not rollout.attempts[-1]
            or attempt.status in ("succeeded", "failed", "timeout")
            or rollout.status in ("succeeded", "failed", "cancelled")
        )
        try:
            updated = self.do(self.store.update_attempt(rollout_id, attempt.attempt_id, status=status, fenced=fenced))
        except Conflict:
            assert fenced and refused and not repeated
            return
        assert updated.status == status
        assert not fenced or repeated or not refused
        if not (fenced and repeated):
            self.model.set_attempt(rollout_id, attempt, status)

    @precondition(lambda self: self.model.rollouts)
    @rule(n=st.integers(0, 9), m=st.integers(0, 2))
    def add_span(self, n, m):
        picked = self.pick_attempt(n, m)
        if picked is not None:
            rollout_id, attempt = picked
            span = Span.from_attributes(rollout_id=rollout_id, attempt_id=attempt.attempt_id, attributes={})
            assert self.do(self.store.add_span(span)) is span
            self.model.span(rollout_id, attempt)

    @precondition(lambda self: self.model.rollouts)
    @rule(
        n=st.integers(0, 9),
        status=st.sampled_from(["queuing", "requeuing", "running", "succeeded", "failed", "cancelled"]),
    )
    def set_rollout_status(self, n, status):
        self.model.watchdog()
        rollout_id = self.pick(n)[0]
        self.do(self.store.update_rollout(rollout_id, status=status))
        self.model.set_status(rollout_id, status)

    @precondition(lambda self: self.model.rollouts)
    @rule(places=st.lists(st.integers(0, 9), max_size=3))
    def cancel(self, places):
        self.model.watchdog()
        wanted = [self.pick(n)[0] for n in places]
        found = self.do(self.store.cancel_rollouts(wanted))
        for rollout_id in wanted:
            self.model.cancel(rollout_id)
        assert [(rollout.rollout_id, rollout.status) for rollout in found] == [
            (rollout_id, self.model.rollouts[rollout_id].status) for rollout_id in wanted
        ]

    @rule(call=st.sampled_from(REFUSED), bad=st.sampled_from(["", "a\0b"]))
    def refuse(self, call, bad):
        """Before anything is done, the search for lost attempts included."""
        rollout_id = next(iter(self.model.rollouts), "nope")
        with pytest.raises(ConfigError):
            self.do(call(self.store, rollout_id, bad))

    @rule(seconds=st.sampled_from([1, 2.5, 4, 10, 11]))
    def wait(self, seconds):
        self.model.now += seconds

    @rule()
    def compare(self):
        self.model.watchdog()
        stored = self.do(self.store.query_rollouts())
        assert [rollout.rollout_id for rollout in stored] == list(self.model.rollouts)
        for rollout in stored:
            expected = self.model.rollouts[rollout.rollout_id]
            assert (rollout.status, rollout.end_time) == (expected.status, expected.end)
            attempts = self.do(self.store.query_attempts(rollout.rollout_id))
            assert [
                (attempt.attempt_id, attempt.status, attempt.last_heartbeat_time, attempt.end_time)
                for attempt in attempts
            ] == [(attempt.attempt_id, attempt.status, attempt.heartbeat, attempt.end) for attempt in expected.attempts]
            assert (rollout.attempt if isinstance(rollout, AttemptedRollout) else None) == (
                attempts[-1] if len(attempts) else None
            )
        counts = self.do(self.store.statistics())
        assert {name: counts.get(f"total_{name}") for name in ("rollouts", "attempts", "spans", "workers")} == {
            "rollouts": len(self.model.rollouts),
            "attempts": sum(len(rollout.attempts) for rollout in self.model.rollouts.values()),
            "spans": self.model.num_spans,
            "workers": len(self.model.workers),
        }
        finished = {rollout.rollout_id for rollout in stored if rollout.end_time is not None}
        waited = self.do(self.store.wait_for_rollouts(rollout_ids=list(self.model.rollouts), timeout=0))
        assert {rollout.rollout_id for rollout in waited} == finished


class MemoryAgainstModel(StoreAgainstModel):
    def open_store(self) -> None:
        self.store = InMemoryLightningStore(clock=lambda: self.model.now, scan_debounce_seconds=0)


class SqlAgainstModel(StoreAgainstModel):
    def url(self) -> str:
        return f"sqlite:///{self.folder}/store.db"

    def open_store(self) -> None:
        self.store = SqlLightningStore.from_url(self.url(), clock=lambda: self.model.now, scan_debounce_seconds=0)

    @rule()
    def reopen(self):
        self.do(self.store.close())
        self.open_store()


class PostgresAgainstModel(SqlAgainstModel):
    def url(self) -> str:
        return SERVER.database_of(Path(self.folder))


SERVER = PostgresServer()


@pytest.fixture(scope="module", autouse=True)
def _stop_server():
    yield
    SERVER.close()


TestMemoryAgainstModel = MemoryAgainstModel.TestCase
TestSqliteAgainstModel = SqlAgainstModel.TestCase
TestPostgresAgainstModel = PostgresAgainstModel.TestCase
TestMemoryAgainstModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestSqliteAgainstModel.settings = TestMemoryAgainstModel.settings
TestPostgresAgainstModel.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)

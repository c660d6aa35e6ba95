"""Runners: take rollouts from the store, have an agent work on them, and store what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Generic, Self, TypeVar

from rollout_core.agents.agent_calls import (
    ExecutionEvent,
    LeaseLost,
    TimedOut,
    call_agent,
    check_abandoned,
    spans_of_result,
)
from rollout_core.agents.delivery import AWAY, retried
from rollout_core.agents.emitters import emit_exception
from rollout_core.agents.heartbeats import Heartbeats, LaunchMode
from rollout_core.agents.hooks import Hook, call_hooks
from rollout_core.agents.lit_agent import CURRENT_RUNNER, LitAgent
from rollout_core.agents.proxy.call_delivery import flush_proxies, look_for_proxies
from rollout_core.agents.tracing import Trace, Tracer
from rollout_core.base.errors import ConfigError, Conflict, NotFound, Recoverable, in_words
from rollout_core.base.logs import about
from rollout_core.store import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    AttemptUpdate,
    LightningStore,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutMode,
    Span,
    TaskInput,
)
from rollout_core.store.resources import ClaimedTask

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
Ready = TypeVar("Ready")

_FIRST_POLL_SECONDS = 0.01
"""After work was found; from there the pause doubles up to ``poll_interval``."""
_PROBE_SECONDS = 10.0
"""Between looks whether a store is there at all whose queue is empty: over HTTP a lost answer says "empty" too."""
_LOOK_SECONDS = 0.1
"""Between looks at an event that cannot be awaited."""


class RunContext(Generic[Ready]):
    """A context manager for both kinds of blocks."""

    def __init__(self, made: AbstractContextManager[Ready]) -> None:
        self._made = made

    def __enter__(self) -> Ready:
        return self._made.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._made.__exit__(*error)

    async def __aenter__(self) -> Ready:
        return self._made.__enter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        return self._made.__exit__(*error)


class Runner(Generic[Task]):
    """What the trainer and the strategies need of a runner."""

    tracer: Tracer

    def imports(self) -> Sequence[str]:
        """See ``Tracer.imports``."""
        return ()

    def init(self, agent: LitAgent[Task], *, hooks: Sequence[Hook] = (), **kwargs: Any) -> None:
        """Prepare this process."""
        raise NotImplementedError

    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        """Prepare the worker of this number, which works for this store."""
        raise NotImplementedError

    def teardown_worker(self, worker_id: int) -> None:
        """Undo ``init_worker``."""

    def teardown(self) -> None:
        """Undo ``init``."""

    async def iter(self, *, event: ExecutionEvent | None = None) -> None:
        """Work until ``event`` is set."""
        raise NotImplementedError

    async def step(
        self,
        input: TaskInput,
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: ExecutionEvent | None = None,
    ) -> Rollout:
        """Work on one input, which need not be queued."""
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Not how a runner is used: raises RuntimeError."""
        raise RuntimeError("runners have iter() and step(), which are coroutines; a Trainer calls them")

    def for_worker(self) -> Runner[Task]:
        """A copy for one more worker of this process."""
        return copy.copy(self)

    def run_context(
        self,
        *,
        agent: LitAgent[Task],
        store: LightningStore,
        hooks: Sequence[Hook] = (),
        worker_id: int = 0,
    ) -> RunContext[Self]:
        """This runner, ready for ``iter`` and ``step`` without a trainer, in a ``with`` block or an ``async with``."""
        return RunContext(self._ready(agent, store, hooks, worker_id))

    @contextmanager
    def _ready(
        self, agent: LitAgent[Task], store: LightningStore, hooks: Sequence[Hook], worker_id: int
    ) -> Iterator[Self]:
        self.init(agent, hooks=hooks)
        try:
            self.init_worker(worker_id, store)
            CURRENT_RUNNER.remember(self)
            try:
                yield self
            finally:
                CURRENT_RUNNER.forget(self)
                self.teardown_worker(worker_id)
        finally:
            self.teardown()


class LitAgentRunner(Runner[Task]):
    """Runs a ``LitAgent``.

    Args:
        tracer: sees what the agent does.
        max_rollouts: ``iter`` ends after so many, failed ones included; None: when its event is set.
        poll_interval: longest pause between looks at an empty queue, in seconds; a store that can notify ends it.
        heartbeat_interval: seconds between signs of life of the worker, and between looks whether the attempt is still
            its own; 0 or less: none.
        interval_jitter: share by which pauses differ at random, so that runners do not ask all at once.
        heartbeat_launch_mode: see ``Heartbeats``.
        heartbeat_include_gpu: whether heartbeats say what the GPUs are at.
        store_patience_seconds: how long a store may be away before the runner fails.
    """

    cancelled_status: AttemptStatus = "failed"
    """Of an attempt whose runner is cancelled."""

    def __init__(
        self,
        tracer: Tracer,
        max_rollouts: int | None = None,
        poll_interval: float = 5.0,
        heartbeat_interval: float = 10.0,
        interval_jitter: float = 0.5,
        heartbeat_launch_mode: LaunchMode = "thread",
        heartbeat_include_gpu: bool = False,
        store_patience_seconds: float = 120.0,
    ) -> None:
        if max_rollouts is not None and max_rollouts < 0:
            raise ConfigError(f"max_rollouts is {max_rollouts}; expected 0 or more, or None for no limit")
        if not 0 <= interval_jitter <= 1:
            raise ConfigError(f"interval_jitter is {interval_jitter}; expected a share from 0 to 1")
        if poll_interval <= 0:
            raise ConfigError(f"poll_interval is {poll_interval}; expected seconds above 0")
        self.tracer = tracer
        self._max_rollouts = max_rollouts
        self._poll_interval = poll_interval
        self.heartbeat_interval = heartbeat_interval
        self._interval_jitter = interval_jitter
        self._launch_mode: LaunchMode = heartbeat_launch_mode
        self._include_gpu = heartbeat_include_gpu
        self._patience_seconds = store_patience_seconds
        self._agent: LitAgent[Task] | None = None
        self._store: LightningStore | None = None
        self._hooks: Sequence[Hook] = ()
        self.worker_id: int | None = None

    def imports(self) -> Sequence[str]:
        return [__name__, *self.tracer.imports()]

    def init(self, agent: LitAgent[Task], *, hooks: Sequence[Hook] = (), **kwargs: Any) -> None:
        self._agent = agent
        self._hooks = tuple(hooks)
        self.tracer.init()

    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        self.worker_id = worker_id
        self._store = store
        self.tracer.init_worker(worker_id, store)

    def teardown_worker(self, worker_id: int) -> None:
        self.tracer.teardown_worker(worker_id)
        self.worker_id = self._store = None

    def teardown(self) -> None:
        self.tracer.teardown()
        self._agent = None
        self._hooks = ()

    def for_worker(self) -> LitAgentRunner[Task]:
        made = copy.copy(self)
        made.tracer = copy.copy(self.tracer)
        return made

    @property
    def worker_name(self) -> str:
        """The worker in the store."""
        return f"Worker-{self.worker_id}"

    def get_store(self) -> LightningStore:
        """Raises ConfigError before ``init_worker``."""
        if self._store is None:
            raise ConfigError("the runner has no store; call init_worker(worker_id, store) first")
        return self._store

    def get_agent(self) -> LitAgent[Task]:
        """Raises ConfigError before ``init``."""
        if self._agent is None:
            raise ConfigError("the runner has no agent; call init(agent) first")
        return self._agent

    async def iter(self, *, event: ExecutionEvent | None = None) -> None:
        """Take rollouts from the queue and run them, one after the other, until ``event`` is set or ``max_rollouts``
        are done. A set event lets the rollout under way end first.

        Raises Recoverable if the store is away for too long, or if too many agents that ran out of time still run.
        """
        store = self.get_store()
        self.get_agent()
        pause, done, looked = _FIRST_POLL_SECONDS, 0, time.monotonic()
        beats = Heartbeats(
            store, self.worker_name, self.heartbeat_interval, self._launch_mode, include_gpu=self._include_gpu
        )
        async with beats:
            while not _is_set(event) and (self._max_rollouts is None or done < self._max_rollouts):
                check_abandoned()
                try:
                    claimed = await self._take(store, event)
                    if claimed is None and time.monotonic() - looked > _PROBE_SECONDS:
                        await self._ask(lambda: store.query_rollouts(limit=0), event)
                        looked = time.monotonic()
                except AWAY:
                    if _is_set(event):
                        return
                    raise
                if claimed is None:
                    await self._wait_for_work(store, pause, event)
                    pause = min(2 * pause, self._poll_interval)
                    continue
                pause = _FIRST_POLL_SECONDS
                error = await self._run(claimed.rollout, claimed.resources)
                if error is not None:
                    # Where an agent was when its time was up, only our own frames would say.
                    trace = None if isinstance(error, TimedOut) else error
                    logger.error("Rollout %s failed: %s", claimed.rollout.rollout_id, in_words(error), exc_info=trace)
                done += 1

    async def step(
        self,
        input: TaskInput,
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: ExecutionEvent | None = None,
    ) -> Rollout:
        """Store a rollout of this input, run it, and return it as it is then. ``resources`` are published first.
        Once ``event`` is set, a store that is away is not waited for to read it.

        Raises what the agent raises, when the failure is stored.
        """
        store = self.get_store()
        self.get_agent()
        resources_id = None
        if resources is not None:
            resources_id = (await store.add_resources(resources)).resources_id
        rollout = await store.start_rollout(input, mode=mode, resources_id=resources_id, worker_id=self.worker_name)
        error = await self._run(rollout)
        if error is not None:
            raise error
        found = await self._ask(lambda: store.get_rollout_by_id(rollout.rollout_id), event)
        if found is None:
            raise NotFound(f"the rollout {rollout.rollout_id} was run, and is no longer in the store")
        return found

    async def _take(self, store: LightningStore, event: ExecutionEvent | None) -> ClaimedTask | None:
        """The next rollout of the queue. One whose claim got no answer is not claimed twice."""
        claim_id, tries = f"{self.worker_name}-{secrets.token_hex(8)}", itertools.count()

        async def claim() -> ClaimedTask | None:
            return await store.claim_task(claim_id, worker_id=self.worker_name, repeated=next(tries) > 0)

        return await self._ask(claim, event)

    async def _wait_for_work(self, store: LightningStore, seconds: float, event: ExecutionEvent | None) -> None:
        """Wait until the store says that something is queued, at most about so long."""
        seconds *= 1 + self._interval_jitter * (2 * random.random() - 1)
        waiting = asyncio.ensure_future(store.wait_for_work(seconds))
        try:
            while not waiting.done() and not _is_set(event):
                await asyncio.wait({waiting}, timeout=_LOOK_SECONDS)
            if waiting.done():
                waiting.result()
        except AWAY:  # the next claim waits for it
            await asyncio.sleep(_FIRST_POLL_SECONDS)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _run(self, rollout: AttemptedRollout, found: ResourcesUpdate | None = None) -> Exception | None:
        """Run one attempt to its end in the store; what made it fail, None if it succeeded or was taken over.
        ``found``: its resources, where they are at hand."""
        CURRENT_RUNNER.set(self)
        with about(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id):
            return await self._run_attempt(rollout, found)

    async def _run_attempt(self, rollout: AttemptedRollout, found: ResourcesUpdate | None) -> Exception | None:
        hooks, who = self._hooks, {"agent": self.get_agent(), "runner": self, "rollout": rollout}
        outcome = _Outcome()
        try:
            await call_hooks(hooks, "on_rollout_start", **who)
            await self._trace(rollout, found, outcome)
        except asyncio.CancelledError:
            # The runner is to end now; what it leaves must be true, and this work is in nobody's hands any more.
            outcome.fail(Recoverable("the runner was cancelled"))
            outcome.is_cancelled = True
            await self._end_surely(rollout, outcome)
            raise
        except Exception as error:  # noqa: BLE001 - an agent's, or a span's that could not be stored
            outcome.fail(error)
        await self._end_surely(rollout, outcome)
        return outcome.error

    async def _end_surely(self, rollout: AttemptedRollout, outcome: _Outcome) -> None:
        """`_end`, which a cancellation waits for: an attempt that is left half ended is nobody's."""
        ending = asyncio.ensure_future(self._end(rollout, outcome))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait({ending})
            raise

    async def _trace(self, rollout: AttemptedRollout, found: ResourcesUpdate | None, outcome: _Outcome) -> None:
        store, agent = self.get_store(), self.get_agent()
        resources = await self._resources(rollout) if found is None else found.resources
        await look_for_proxies(resources)
        moment = {"agent": agent, "runner": self, "tracer": self.tracer, "rollout": rollout}
        began = time.monotonic()
        traced = self.tracer.trace_context(
            rollout.rollout_id, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id
        )
        async with traced as trace:
            outcome.trace = trace if isinstance(trace, Trace) else None
            await call_hooks(self._hooks, "on_trace_start", **moment)
            try:
                result = await call_agent(agent, rollout, resources, store, self.heartbeat_interval)
                outcome.spans = spans_of_result(result, rollout)
            except Exception as error:  # noqa: BLE001 - the agent's
                outcome.fail(error)
                if not isinstance(error, LeaseLost):
                    with contextlib.suppress(RuntimeError, NotImplementedError):  # a tracer that makes no spans
                        emit_exception(error)
            await call_hooks(self._hooks, "on_trace_end", **moment)
        if not isinstance(outcome.error, LeaseLost | TimedOut):
            seconds = time.monotonic() - began
            await flush_proxies(resources, rollout, seconds, has_failed=outcome.error is not None)

    async def _resources(self, rollout: AttemptedRollout) -> NamedResources:
        store, resources_id = self.get_store(), rollout.resources_id
        if resources_id is None:
            found = await self._ask(store.get_latest_resources)
            return {} if found is None else found.resources
        found = await self._ask(lambda: store.get_resources_by_id(resources_id))
        if found is None:
            raise ConfigError(f"the rollout names the resources {resources_id}, which are not in the store")
        return found.resources

    async def _end(self, rollout: AttemptedRollout, outcome: _Outcome) -> None:
        """Store the last spans, then the attempt's status, so that one who sees the status sees the spans."""
        if isinstance(outcome.error, LeaseLost):
            logger.warning("Rollout %s is no longer this worker's: %s", rollout.rollout_id, outcome.error)
            outcome.error = None
            return
        try:
            try:
                written = await self._store_end(rollout, outcome)
            except ConfigError as error:  # a span that no store can keep
                outcome.fail(error)
                outcome.spans = []
                written = await self._store_end(rollout, outcome)
        except (NotFound, ConfigError, *AWAY) as error:
            # Nothing more can be said of the attempt: the watchdog will end it, if its config has a time limit.
            logger.error("The end of rollout %s cannot be stored: %s", rollout.rollout_id, in_words(error))
            outcome.fail(error)
            return
        if isinstance(written, Conflict):
            logger.warning("Rollout %s was ended by others: %s", rollout.rollout_id, written)

    async def _store_end(self, rollout: AttemptedRollout, outcome: _Outcome) -> Attempt | Conflict:
        store, ids = self.get_store(), (rollout.rollout_id, rollout.attempt.attempt_id)
        last = outcome.spans
        if self._hooks or len(last) > 1:
            await self._number(ids, last)
        if self._hooks and not outcome.is_told:
            if last:
                await self._ask(lambda: store.add_many_spans(last))
            spans = [*(outcome.trace.spans if outcome.trace else ()), *last]
            outcome.is_told, outcome.spans, last = True, [], []
            await call_hooks(
                self._hooks, "on_rollout_end", agent=self.get_agent(), runner=self, rollout=rollout, spans=spans
            )
        status = self.cancelled_status if outcome.is_cancelled else outcome.status
        update = AttemptUpdate(rollout_id=ids[0], attempt_id=ids[1], status=status)
        if len(last) == 1:  # in one request, which also numbers it
            return (await self._ask(lambda: store.end_attempts([(last[0], update)])))[0]
        if last:
            await self._ask(lambda: store.add_many_spans(last))
        return (await self._ask(lambda: store.update_many_attempts([update], fenced=True)))[0]

    async def _number(self, ids: tuple[str, str], spans: Sequence[Span]) -> None:
        """Give those that bring no number the attempt's next ones."""
        unnumbered = [span for span in spans if not span.sequence_id]
        if unnumbered:
            pairs = [ids] * len(unnumbered)
            numbers = await self._ask(lambda: self.get_store().get_many_span_sequence_ids(pairs))
            for span, number in zip(unnumbered, numbers, strict=True):
                span.sequence_id = number

    async def _ask(self, call: Any, event: ExecutionEvent | None = None) -> Any:
        return await retried(call, self._patience_seconds, partial(_is_set, event))


class _Outcome:
    """What has come of one attempt so far."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.spans: list[Span] = []
        """Those that the agent returned."""
        self.trace: Trace | None = None
        self.is_cancelled = False
        """The runner was, and not the agent's work at fault."""
        self.is_told = False
        """The hooks know of the end."""

    def fail(self, error: Exception) -> None:
        """Note the first error."""
        if self.error is None:
            self.error = error

    @property
    def status(self) -> AttemptStatus:
        """Of the attempt."""
        if self.error is None:
            return "succeeded"
        return "timeout" if isinstance(self.error, TimedOut) else "failed"


def _is_set(event: ExecutionEvent | None) -> bool:
    return event is not None and event.is_set()

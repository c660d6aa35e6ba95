"""One call of an agent: on the event loop or in a thread, ended when its time is up or its lease is gone; and the spans
that its result stands for."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from opentelemetry.sdk.trace import ReadableSpan

from rollout_core.agents.emitters import reward_attributes
from rollout_core.agents.lit_agent import LitAgent, RolloutRawResult
from rollout_core.base.errors import ConfigError, Recoverable, in_words
from rollout_core.base.stopping import in_thread, is_stopping
from rollout_core.store import AttemptedRollout, LightningStore, NamedResources, Span, SpanCoreFields
from rollout_core.store.lifecycle import ENDED, FINISHED
from rollout_core.store.semconv import AGL_ANNOTATION

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""For an agent that is cancelled."""
MOST_ABANDONED = 16
"""Calls that may go on in this process after they were given up. A thread cannot be ended; a process can."""

owns_process = False
"""Whether this process is a runner's own, so that it may end itself where an agent blocks its event loop for ever."""

_abandoned: set[asyncio.Future[Any]] = set()


class ExecutionEvent(Protocol):
    """Set when the run is to end."""

    def set(self) -> None:
        """End the run."""
        ...

    def is_set(self) -> bool:
        """Whether it is to end."""
        ...


class TimedOut(Exception):
    """The agent ran longer than its rollout allows."""


class LeaseLost(Exception):
    """Somebody else has the rollout now, or finished it; the message says how."""


class WornOut(Recoverable):
    """Too many agents that ran out of time still run in this process; a fresh one should take its place."""


class AgentExit(Exception):
    """The agent's code asked the interpreter to exit, was cancelled by itself, or raised what is no Exception."""


def check_abandoned() -> None:
    """Raise WornOut if so many given-up calls still run that this process should be replaced by a fresh one."""
    if len(_abandoned) >= MOST_ABANDONED:
        raise WornOut(
            f"{len(_abandoned)} agents that ran out of time still run in threads of this process, which cannot end "
            "them; a fresh process is needed. Give the agents' own calls time-outs"
        )


async def call_agent(
    agent: LitAgent[Any],
    rollout: AttemptedRollout,
    resources: NamedResources,
    store: LightningStore,
    lease_seconds: float,
) -> RolloutRawResult:
    """What the agent returns for this attempt. Raises what it raises, TimedOut, and LeaseLost, which is looked for
    every ``lease_seconds`` (0: never). Then, and when this call is cancelled, the agent is cancelled, or, where it
    runs in a thread or does not let itself be cancelled, given up."""
    process = os.getpid()
    work = _begin(agent, rollout, resources, process)
    lease = asyncio.ensure_future(_lease_lost(store, rollout, lease_seconds))
    limit = rollout.config.timeout_seconds
    ends = None if limit is None else time.monotonic() + limit
    watchdog = _start_watchdog(rollout) if agent.is_async() else None
    try:
        while True:
            left = None if ends is None else max(0.0, ends - time.monotonic())
            done, _ = await asyncio.wait({work, lease}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work not in done:
                await _give_up(work, rollout)
                if lease in done:
                    raise LeaseLost(lease.result())
                raise TimedOut(f"the agent did not end within {limit} s")
            if work.cancelled() or work.exception() is not None or not inspect.isawaitable(work.result()):
                break
            # An asynchronous function behind an ordinary decorator, or the __call__ of an object.
            work = asyncio.ensure_future(_without_exit(work.result()))
            watchdog = watchdog or _start_watchdog(rollout)
    except asyncio.CancelledError:
        await _give_up(work, rollout)
        raise
    finally:
        lease.cancel()
        if watchdog is not None:
            watchdog.cancel()
        if os.getpid() != process:
            os._exit(0)  # a child that the agent forked has come back into the runner, whose work is not its own
    try:
        return work.result()
    except (asyncio.CancelledError, SystemExit, GeneratorExit) as error:
        raise AgentExit(f"the agent ended by {in_words(error)}") from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # such as a panic of Rust code, or the failure of an assertion of pytest's
        if is_stopping():  # a signal's, which has met the agent on the event loop
            raise
        raise AgentExit(f"the agent ended by {in_words(error)}") from error


def _begin(
    agent: LitAgent[Any], rollout: AttemptedRollout, resources: NamedResources, process: int
) -> asyncio.Future[Any]:
    kind = "training" if rollout.mode == "train" else "validation"
    if agent.is_async():
        call = getattr(agent, f"{kind}_rollout_async")
        return asyncio.ensure_future(_without_exit(call(rollout.input, resources, rollout)))
    return asyncio.wrap_future(in_thread(_guarded(getattr(agent, f"{kind}_rollout"), rollout, resources, process)))


def _start_watchdog(rollout: AttemptedRollout) -> threading.Timer | None:
    """For an asynchronous agent, which may block the event loop that its time limit is kept by."""
    if rollout.config.timeout_seconds is None:
        return None
    watchdog = threading.Timer(
        rollout.config.timeout_seconds + 2 * GRACE_SECONDS, _end_blocked_process, [rollout.rollout_id]
    )
    watchdog.daemon = True
    watchdog.start()
    return watchdog


def _end_blocked_process(rollout_id: str) -> None:
    logger.critical("The agent of rollout %s blocks the runner's event loop beyond its time limit", rollout_id)
    if owns_process:
        os._exit(1)  # the runner is replaced


async def _without_exit(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except SystemExit as error:  # which would end the event loop
        raise AgentExit("the agent ended by SystemExit") from error


def _guarded(
    method: Callable[..., Any], rollout: AttemptedRollout, resources: NamedResources, process: int
) -> Callable[[], Any]:
    def call() -> Any:
        try:
            return method(rollout.input, resources, rollout)
        finally:
            if os.getpid() != process:
                os._exit(0)  # as above: the fork copied this thread alone

    return call


async def _give_up(work: asyncio.Future[Any], rollout: AttemptedRollout) -> None:
    if not isinstance(work, asyncio.Task):
        _abandon(work, rollout)  # its thread continues
        return
    work.cancel()
    await asyncio.wait({work}, timeout=GRACE_SECONDS)
    if not work.done():
        _abandon(work, rollout)


def _abandon(work: asyncio.Future[Any], rollout: AttemptedRollout) -> None:
    logger.warning(
        "The agent of rollout %s still runs and cannot be ended; its results are ignored", rollout.rollout_id
    )
    _abandoned.add(work)
    work.add_done_callback(_note_end)


def _note_end(work: asyncio.Future[Any]) -> None:
    _abandoned.discard(work)
    if not work.cancelled():
        work.exception()  # seen, so that asyncio does not complain of it


async def _lease_lost(store: LightningStore, rollout: AttemptedRollout, every_seconds: float) -> str:
    """Returns once the attempt is no longer the rollout's, with the reason."""
    if every_seconds <= 0:
        await asyncio.Event().wait()
    while True:
        await asyncio.sleep(every_seconds)
        try:
            now = await store.get_rollout_by_id(rollout.rollout_id)
        except Exception as error:  # noqa: BLE001 - any store's; the agent works on, and the fence has the last word
            logger.warning("Cannot look at the lease of rollout %s: %s", rollout.rollout_id, in_words(error))
            continue
        if now is None:
            return "the rollout is gone"
        if isinstance(now, AttemptedRollout) and now.attempt.attempt_id != rollout.attempt.attempt_id:
            return f"attempt {now.attempt.attempt_id} has taken over"
        if isinstance(now, AttemptedRollout) and now.attempt.status in ENDED:
            return f"the attempt is already {now.attempt.status}"
        if now.status in FINISHED:
            return f"the rollout is already {now.status}"


# What comes of it


def spans_of_result(result: Any, rollout: AttemptedRollout) -> list[Span]:
    """The spans that a rollout's result stands for, with the sequence id 0; none for None.

    A number is the final reward. Raises TypeError for what is neither a number nor a list, ConfigError for a list of
    anything but spans of one kind and for a number that is not finite.
    """
    if result is None:
        return []
    ids: dict[str, Any] = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    if isinstance(result, list):
        if not result:
            logger.warning("Rollout %s returned an empty list; None says the same", rollout.rollout_id)
        return [_span(item, kind, ids) for kind in [_kind(result)] for item in result]
    if isinstance(result, Mapping):
        raise TypeError(
            f"the rollout returned {result!r:.80} ({type(result).__name__}); return the reward that trains as a "
            "number, or emit rewards of several names by emit_reward(..., primary_key=...) and return None"
        )
    try:
        attributes = reward_attributes(result)
    except TypeError:
        raise TypeError(
            f"the rollout returned {result!r:.80} ({type(result).__name__}); expected None, a number, or a list of "
            "spans"
        ) from None
    now = time.time()
    made = Span.from_attributes(**ids, name=AGL_ANNOTATION, attributes=attributes, start_time=now, end_time=now)
    made.resource.attributes["host.name"] = socket.gethostname()
    return [made]


def _kind(result: list[Any]) -> type | None:
    for kind in (ReadableSpan, Span, SpanCoreFields):
        if all(isinstance(item, kind) for item in result):
            return kind
    kinds = sorted({type(item).__name__ for item in result})
    raise ConfigError(
        f"the rollout returned a list of {', '.join(kinds)}; expected spans of one kind: ReadableSpan, Span or "
        "SpanCoreFields"
    )


def _span(item: Any, kind: type | None, ids: dict[str, str]) -> Span:
    if kind is ReadableSpan:
        return Span.from_opentelemetry(item, ids["rollout_id"], ids["attempt_id"], 0)
    if kind is SpanCoreFields:
        return Span.from_core_fields(item, sequence_id=0, **ids)
    if (item.rollout_id, item.attempt_id) != (ids["rollout_id"], ids["attempt_id"]):
        # Empty ids are to be filled in; others would file the span under somebody else's rollout.
        if item.rollout_id or item.attempt_id:
            raise ConfigError(
                f"the rollout {ids['rollout_id']}, attempt {ids['attempt_id']}, returned a span of rollout "
                f"{item.rollout_id!r}, attempt {item.attempt_id!r}; leave both empty, or give its own"
            )
        return item.model_copy(update=ids)
    return item

"""The status machine of rollouts and attempts: every decision about retries, lost attempts, heartbeats and workers.

Everything here is data or a pure function; ``operations`` applies it to what a call names. A rollout is the outside
view. It follows its latest attempt, by the tables below, and older attempts never touch it. Those that are under way
end when a newer one starts: what they still do counts for nothing.

    queuing ──claim──> preparing ──first span──> running ──> succeeded
       ^                   │                        │
       └──── requeuing <───┴── failed, timeout, unresponsive, if the config says to retry ──> otherwise failed

``cancel_rollouts`` cancels what has not finished. Any status can also be set by hand.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout_core.store.types import Attempt, AttemptStatus, Rollout, RolloutConfig, RolloutStatus, WorkerStatus

QUEUED: frozenset[RolloutStatus] = frozenset({"queuing", "requeuing"})
"""A rollout has a place in the queue exactly while it has one of these."""
RUNNING: frozenset[RolloutStatus] = frozenset({"preparing", "running"})
FINISHED: frozenset[RolloutStatus] = frozenset({"succeeded", "failed", "cancelled"})
"""A rollout has an end time, and its waiters are woken, exactly in these."""
ANY = QUEUED | RUNNING | FINISHED

ENDED: frozenset[AttemptStatus] = frozenset({"succeeded", "failed"})
"""An attempt has an end time exactly in these: its worker said so. A lost attempt's end is not known."""
WATCHED: frozenset[AttemptStatus] = frozenset({"preparing", "running"})
"""Attempts under way, as far as anybody knows. The watchdog may declare them lost."""
SUPERSEDED: AttemptStatus = "failed"
"""How an attempt under way ends when a newer one starts, when the rollout finishes by a newer one, and when it is
cancelled by `cancel_rollouts`."""

ATTEMPT_AFTER_SPAN: Mapping[AttemptStatus, AttemptStatus] = {"preparing": "running", "unresponsive": "running"}
"""What a span makes of its attempt, see ``attempt_after_span``; a status that is not listed stays."""

ROLLOUT_AFTER_SPAN: Mapping[RolloutStatus, RolloutStatus] = {
    "queuing": "running",
    "requeuing": "running",
    "preparing": "running",
}
"""What a span of the latest attempt makes of the rollout while that attempt is under way; a status that is not listed
stays."""

ROLLOUT_FOLLOWS: Mapping[AttemptStatus, frozenset[RolloutStatus]] = {
    "preparing": QUEUED,
    "running": QUEUED | RUNNING,
    "succeeded": ANY,
    "failed": ANY,
    "timeout": ANY,
    "unresponsive": ANY,
}
"""For each status of the latest attempt, the rollout statuses that give way to it."""

WORKER_AFTER_ATTEMPT: Mapping[AttemptStatus, WorkerStatus] = {
    "preparing": "busy",
    "running": "busy",
    "succeeded": "idle",
    "failed": "idle",
    "timeout": "unknown",
    "unresponsive": "unknown",
}
"""What an attempt's status says of the worker that holds it."""


def is_queuing(rollout: Rollout) -> bool:
    """Whether the rollout waits in the queue."""
    return rollout.status in QUEUED


def is_running(rollout: Rollout) -> bool:
    """Whether an attempt of the rollout is under way."""
    return rollout.status in RUNNING


def is_finished(rollout: Rollout) -> bool:
    """Whether the rollout is in a terminal status."""
    return rollout.status in FINISHED


def rollout_status_after(
    rollout: RolloutStatus, latest_attempt: AttemptStatus, sequence_id: int, config: RolloutConfig
) -> RolloutStatus:
    """The rollout's status once its latest attempt, number ``sequence_id``, has got the status ``latest_attempt``."""
    if rollout not in ROLLOUT_FOLLOWS[latest_attempt]:
        return rollout
    if latest_attempt in ("preparing", "running", "succeeded"):
        return latest_attempt
    retry = latest_attempt in config.retry_condition and sequence_id < config.max_attempts
    return "requeuing" if retry else "failed"


def attempt_after_span(attempt: AttemptStatus, rollout: RolloutStatus, *, is_latest: bool) -> AttemptStatus:
    """The status of an attempt once one of its spans has come, while its rollout is ``rollout``.

    An older attempt of a finished rollout is not revived: nobody would ever end it.
    """
    if not is_latest and rollout in FINISHED:
        return attempt
    return ATTEMPT_AFTER_SPAN.get(attempt, attempt)


def attempt_end_time(status: AttemptStatus, previous: float | None, now: float) -> float | None:
    """The end time of an attempt that gets ``status`` now: the first time it ended, or none."""
    if status not in ENDED:
        return None
    return now if previous is None else previous


def rollout_end_time(status: RolloutStatus, previous: float | None, now: float) -> float | None:
    """The end time of a rollout that gets ``status`` now: the first time it finished, or none."""
    if status not in FINISHED:
        return None
    return now if previous is None else previous


def is_watched(rollout: RolloutStatus, latest_attempt: Attempt | None) -> bool:
    """Whether the watchdog may declare the latest attempt of a rollout lost."""
    return latest_attempt is not None and rollout in RUNNING and latest_attempt.status in WATCHED


def lost_status(
    config: RolloutConfig, start_time: float, last_heartbeat_time: float | None, now: float
) -> AttemptStatus | None:
    """``timeout`` or ``unresponsive`` if an attempt under way is lost by now, else None. A timeout wins."""
    if config.timeout_seconds is not None and now - start_time > config.timeout_seconds:
        return "timeout"
    last_sign = start_time if last_heartbeat_time is None else last_heartbeat_time
    if config.unresponsive_seconds is not None and now - last_sign > config.unresponsive_seconds:
        return "unresponsive"
    return None


def due_time(config: RolloutConfig, start_time: float, last_heartbeat_time: float | None) -> float | None:
    """The earliest time at which ``lost_status`` can name this attempt; None: never.

    A store may keep an older value: heartbeats only move the time later, and the watchdog looks again when it comes.
    """
    last_sign = start_time if last_heartbeat_time is None else last_heartbeat_time
    limits: list[float] = []
    if config.timeout_seconds is not None:
        limits.append(start_time + config.timeout_seconds)
    if config.unresponsive_seconds is not None:
        limits.append(last_sign + config.unresponsive_seconds)
    return min(limits, default=None)


def fence(
    attempt_id: str,
    latest_attempt_id: str,
    attempt: AttemptStatus,
    rollout: RolloutStatus,
) -> str | None:
    """Why the holder of this attempt may no longer change it; None if its lease still stands.

    A lease ends when a newer attempt starts, when the attempt ended or timed out, and when the rollout was finished by
    other means, such as a cancellation. An unresponsive attempt keeps it until somebody else takes the rollout.
    """
    if attempt_id != latest_attempt_id:
        return f"attempt {attempt_id} was superseded by {latest_attempt_id}"
    if attempt in ENDED or attempt == "timeout":
        return f"attempt {attempt_id} is already {attempt}"
    if rollout in FINISHED:
        return f"the rollout is already {rollout}"
    return None

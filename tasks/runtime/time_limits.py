"""How long one try of a stage may take, by what the stage does; a stage whose time is up is asked to keep what it has.

What it stored is found by the next try, which continues from there: a learner from the snapshot of the step that it was
in, samples from those that are finished.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from rollout_core.base.errors import StageTimeout
from rollout_core.base.stopping import current_interruption
from rollout_core.config import StageTimeouts

KEEP_SECONDS = 120.0
"""For a stage to keep what it has, once its time is up; then it is left behind, and may write nothing more."""
StageTime = Literal["importing", "generating", "scoring", "learning", "agents", "filing"]
"""What a stage does, by the name of its field in `StageTimeouts`; one that looks up, files or writes is "filing"."""

_timeouts: ContextVar[StageTimeouts | None] = ContextVar("rollout_stage_timeouts", default=None)


@contextmanager
def limiting(timeouts: StageTimeouts) -> Iterator[None]:
    """Stages called inside the block may take so long, instead of the default."""
    token = _timeouts.set(timeouts)
    try:
        yield
    finally:
        _timeouts.reset(token)


def seconds_for(time: StageTime) -> float | None:
    """The longest time for a stage of this kind called here; None: any."""
    return getattr(_timeouts.get() or StageTimeouts(), time)


@contextmanager
def in_time(stage: str, time: StageTime, seconds: float | None) -> Iterator[None]:
    """Interrupt the call of a stage, if what it does inside the block takes longer. Waiting for another that computes
    the same is outside: what that one takes is not its time."""
    interruption = current_interruption()
    if seconds is None or interruption is None:
        yield
        return

    def end() -> None:
        reason = (
            f"stage {stage} took longer than {seconds:g} s (timeouts.{time}); what it stored is kept, and "
            "the next try continues from there. If it needs longer, raise the time-out"
        )
        interruption.request(StageTimeout(reason), within_seconds=KEEP_SECONDS)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

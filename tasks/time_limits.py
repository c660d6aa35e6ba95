"""How long one try of a stage may take, by what the stage does; a stage whose time is up is asked to keep what it has.

What it stored is found by the next try, which goes on from there: a learner from the snapshot of the step that it was
in, samples from those that are finished.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rollout_core.base.errors import StageTimeout
from rollout_core.base.stopping import current_interruption
from rollout_core.config import StageTimeouts

KEEP_SECONDS = 120.0
"""For a stage to keep what it has, once its time is up; then it is left behind, and may write nothing more."""
KINDS = {
    "import_model": "importing",
    "import_prompts": "importing",
    "import_sft": "importing",
    "import_pairs": "importing",
    "import_unpaired": "importing",
    "import_tasks": "importing",
    "import_prompt": "importing",
    "import_agent": "importing",
    "batch_inference": "generating",
    "infer_shard": "generating",
    "help_shard": "generating",
    "help_inference": "generating",
    "critique_prompt": "generating",
    "edit_prompt": "generating",
    "score_rewards": "scoring",
    "help_scoring": "scoring",
    "evaluate": "scoring",
    "evaluate_by": "scoring",
    "sft_update": "learning",
    "rm_update": "learning",
    "dpo_update": "learning",
    "kto_update": "learning",
    "ppo_update": "learning",
    "grpo_update": "learning",
    "run_agents": "agents",
    "serve_policy": "agents",
    "take_live_batch": "agents",
}
"""Stages by name and what they do; all others look up, file or write what is there: "filing"."""

_timeouts: ContextVar[StageTimeouts | None] = ContextVar("rollout_stage_timeouts", default=None)


@contextmanager
def limiting(timeouts: StageTimeouts) -> Iterator[None]:
    """Stages called inside the block may take so long, instead of the default."""
    token = _timeouts.set(timeouts)
    try:
        yield
    finally:
        _timeouts.reset(token)


def seconds_for(stage: str) -> float | None:
    """The longest time for a stage called here; None: any."""
    return getattr(_timeouts.get() or StageTimeouts(), kind_of(stage))


def kind_of(stage: str) -> str:
    """What a stage does, by the name of its field in `StageTimeouts`."""
    return KINDS.get(stage, "filing")


@contextmanager
def in_time(stage: str, seconds: float | None) -> Iterator[None]:
    """Interrupt the call of a stage, if what it does inside the block takes longer. Waiting for another that computes
    the same is outside: what that one takes is not its time."""
    interruption = current_interruption()
    if seconds is None or interruption is None:
        yield
        return

    def end() -> None:
        reason = (
            f"stage {stage} took longer than {seconds:g} s (timeouts.{kind_of(stage)}); what it stored is kept, and "
            "the next try goes on from there. If it needs longer, raise the time-out"
        )
        interruption.request(StageTimeout(reason), within_seconds=KEEP_SECONDS)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

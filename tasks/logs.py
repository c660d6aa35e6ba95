"""Log lines of stages and flows: where they go, and those on training, which people see who have no progress bar."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

INTERVAL_SECONDS = 30.0
_STEP_FIGURES = {
    "loss": "loss",
    "mean_token_accuracy": "token accuracy",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "value_loss": "value loss",
    "approx_kl": "KL to the sampling policy",
    "learning_rate": "learning rate",
}
_ITERATION_FIGURES = {
    "reward": "reward",
    "reward_std": "std",
    "objective/kl": "KL to the reference",
    "kl": "KL to the reference",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "cut off",
    "value_loss": "value loss",
    "loss": "loss",
}
_EVALUATION = "eval_"


def stage_logger() -> logging.Logger | logging.LoggerAdapter[Any]:
    """The run's logger, whose lines appear in the Prefect UI; a plain one outside a run."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("rollout")


class StepLog:
    """A line for the first and the last step, for each evaluation, and else at most one in half a minute."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._next = 0.0

    def note(self, row: Mapping[str, float], last_step: int) -> None:
        """Take the figures of a step; ``row["step"]`` counts up to ``last_step``."""
        step, now = int(row["step"]), time.monotonic()
        evaluated = [name for name in row if name.startswith(_EVALUATION)]
        if now < self._next and not evaluated and step < last_step:
            return
        self._next = now + INTERVAL_SECONDS
        names = {**_STEP_FIGURES, **{name: name for name in evaluated}}
        stage_logger().info("%s: step %d of %d: %s", self._title, step, last_step, figures_text(row, names))


def log_iteration(title: str, summary: Mapping[str, float]) -> None:
    """One line on an iteration of PPO or GRPO, from the figures of its checkpoint."""
    stage_logger().info("%s: %s", title, figures_text(summary, _ITERATION_FIGURES))


def figures_text(row: Mapping[str, float], names: Mapping[str, str]) -> str:
    """Those of ``names`` that ``row`` has, in their order, each with the name that people read."""
    return ", ".join(f"{shown} {row[name]:.4g}" for name, shown in names.items() if name in row)

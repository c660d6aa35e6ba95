"""Held-out rows during training: the learner's own loss and figures, without gradient and without a trace.

Dropout is off, generators of random numbers stay where they were, and rows come in their own order, so a run with
evaluation trains exactly as one without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from accelerate import Accelerator

from rollout_core.algorithms.loop import MinibatchLoss, StepFigures
from rollout_core.algorithms.parallel import split_across_ranks
from rollout_core.algorithms.state import TrainState
from rollout_core.base.errors import Fatal
from rollout_core.config import PreferenceSettings, SFTSettings

BatchT = TypeVar("BatchT")
PREFIX = "eval_"


class Evaluable(Protocol, Generic[BatchT]):
    """What of an algorithm an evaluation needs."""

    name: str
    num_items: int

    def minibatch(self, positions: Sequence[int]) -> BatchT:
        """The items at ``positions``."""
        ...

    def loss(self, batch: BatchT, step_batches: Sequence[BatchT]) -> MinibatchLoss:
        """As in `Algorithm`."""
        ...


class Evaluation(Generic[BatchT]):
    """An algorithm over held-out rows, and when to run it."""

    def __init__(
        self,
        algorithm: Evaluable[BatchT],
        accelerator: Accelerator,
        *,
        minibatch_size: int,
        every_steps: int | None = None,
    ) -> None:
        self._algorithm = algorithm
        self._accelerator = accelerator
        self._minibatch_size = minibatch_size
        self._every_steps = every_steps

    def after_step(self, state: TrainState, is_last: bool) -> dict[str, float]:
        """Figures for the row of the step that was just done; none where no evaluation is due.

        Raises Fatal where the loss is not finite.
        """
        if is_last or (self._every_steps is not None and state.step % self._every_steps == 0):
            return self.run(state)
        return {}

    @torch.no_grad()
    def run(self, state: TrainState) -> dict[str, float]:
        """``eval_loss`` over all rows, the loss of a step that had them all, and the other figures by their names.

        Several processes share the rows. Collective.
        """
        size, count = self._minibatch_size, self._algorithm.num_items
        batches = [self._algorithm.minibatch(range(start, min(start + size, count))) for start in range(0, count, size)]
        was_training = state.model.training
        state.model.eval()
        figures = StepFigures()
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            for batch, counts in split_across_ranks(batches):
                with self._accelerator.autocast():
                    figures.add(self._algorithm.loss(batch, batches), counts=counts)
        state.model.train(was_training)
        row = {f"{PREFIX}{name}": value for name, value in figures.row().items()}
        if not all(map(math.isfinite, row.values())):
            raise Fatal(
                f"{self._algorithm.name} step {state.step}: figures of the held-out rows are not finite: {row}; "
                "look at the rows of evaluation.dataset"
            )
        return row


def evaluation_of(
    held_out: Evaluable[BatchT] | None, settings: SFTSettings | PreferenceSettings, accelerator: Accelerator
) -> Evaluation[BatchT] | None:
    """What ``settings`` say of an algorithm over held-out items; None where there is none."""
    if held_out is None or settings.evaluation is None:
        return None
    every_steps = settings.evaluation.every_steps
    return Evaluation(held_out, accelerator, minibatch_size=settings.minibatch_size, every_steps=every_steps)

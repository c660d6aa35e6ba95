"""One update from its start to its filed checkpoint, with evaluation on held-out rows.

Evaluation is the learner's own loss and figures, without gradient and without a trace: dropout is off, the generators
of random numbers stay where they were, and rows come in their own order, so a run with evaluation trains exactly as one
without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator

from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.dataset_algorithm import DatasetAlgorithm
from rollout_core.algorithms.loop import Algorithm, LoopHooks, StepFigures, checkpoint_layers, train
from rollout_core.algorithms.parallel import any_rank, is_first, split_across_ranks
from rollout_core.algorithms.resumption import Origin, Resumption
from rollout_core.algorithms.state import TrainState
from rollout_core.algorithms.tracking import Series, Tracking
from rollout_core.base.errors import ConfigError, Fatal, Stopped
from rollout_core.config import DatasetSettings, LearnerSettings
from rollout_core.objects.records import Checkpoint

BatchT = TypeVar("BatchT")
PREFIX = "eval_"


def train_to_end(
    algorithm: Algorithm[Any],
    state: TrainState,
    settings: LearnerSettings,
    accelerator: Accelerator,
    context: UpdateContext,
    tokenizer_from: Path,
    *,
    total_steps: int | None = None,
    max_minutes: float | None = None,
    evaluation: Evaluation[Any] | None = None,
    figures: Mapping[str, float] | None = None,
) -> Checkpoint:
    """Train ``state`` by ``algorithm``, from the last snapshot of this update if there is one, and file the outcome.

    ``state`` is that at the update's start, which may be at a later step than 0. ``total_steps`` as in `train`,
    ``max_minutes`` in a budget; ``figures`` of the whole update go into each of its rows. Raises Stopped, with the
    state of the step kept, when the context is stopping.
    """
    first_step = state.step
    if settings.gradient_checkpointing:
        checkpoint_layers(state.model, *state.modules.values())
    max_seconds = None if max_minutes is None else 60.0 * max_minutes
    series = _series(algorithm.name, settings, context)
    with (
        Resumption(context, algorithm.name, settings, tokenizer_from) as resumption,
        Tracking(settings.trackers if is_first() else (), series) as tracking,
    ):
        if resumption.restore(state) is Origin.GIVEN and state.step >= algorithm.num_steps:
            raise ConfigError(
                f"the snapshot to start from is of step {state.step}, and the budget ends at step "
                f"{algorithm.num_steps}; raise algorithm.budget"
            )
        tracking.catch_up({**row, **(figures or {})} for row in state.metrics)
        context.on_start(state.step - first_step, algorithm.num_steps - first_step)

        def on_step(row: dict[str, float]) -> None:
            if state.step < algorithm.num_steps:
                resumption.after_step(state)
            tracking.log({**row, **(figures or {})})
            context.on_step({**row, "step": row["step"] - first_step})
            if state.step < algorithm.num_steps and any_rank(context.is_stopping(), accelerator.device):
                resumption.save_now(state)
                raise Stopped(
                    f"the {algorithm.name} update was asked to stop and did at step {state.step} of "
                    f"{algorithm.num_steps}, which is kept: run again to continue from there"
                )

        hooks = LoopHooks(
            evaluate=evaluation.after_step if evaluation is not None else lambda state, is_last: {},
            on_step=on_step,
            on_snapshot=resumption.save,
            on_failure=resumption.save_now,
            keep_batch=context.objects.put_json,
        )
        train(algorithm, state, settings, accelerator, total_steps=total_steps, max_seconds=max_seconds, hooks=hooks)
        for row in state.metrics:
            row.update(figures or {})
        return resumption.finish(state)


def _series(algorithm: str, settings: LearnerSettings, context: UpdateContext) -> Series:
    return Series(
        folder=context.tracking or context.cache.parent / "tracking",
        run_name=f"{context.run_name}-{algorithm}" if context.run_name else algorithm,
        id=context.series or context.key,
        update=context.key,
        base_model=context.base_model,
        settings=settings,
    )


class Evaluation(Generic[BatchT]):
    """An algorithm over held-out rows, and when to run it."""

    def __init__(
        self,
        algorithm: DatasetAlgorithm[BatchT],
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
    held_out: DatasetAlgorithm[BatchT] | None, settings: DatasetSettings, accelerator: Accelerator
) -> Evaluation[BatchT] | None:
    """What ``settings`` say of an algorithm over held-out items; None where there is none."""
    if held_out is None or settings.evaluation is None:
        return None
    every_steps = settings.evaluation.every_steps
    return Evaluation(held_out, accelerator, minibatch_size=settings.minibatch_size, every_steps=every_steps)

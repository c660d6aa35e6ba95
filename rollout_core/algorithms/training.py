"""One update around the loop: go on from its last snapshot, train to the end, file the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from rollout_core.algorithms.checkpointing import checkpoint_layers
from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.evaluation import Evaluation
from rollout_core.algorithms.loop import Algorithm, LoopHooks, train
from rollout_core.algorithms.parallel import any_rank, is_first
from rollout_core.algorithms.resumption import Origin, Resumption
from rollout_core.algorithms.state import TrainState
from rollout_core.algorithms.tracking import Series, Tracking
from rollout_core.base.errors import ConfigError, Stopped
from rollout_core.config import LearnerSettings
from rollout_core.objects.records import Checkpoint


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
    series = Series(
        folder=context.tracking or context.cache.parent / "tracking",
        run_name=f"{context.run_name}-{algorithm.name}" if context.run_name else algorithm.name,
        id=context.series or context.key,
        update=context.key,
        base_model=context.base_model,
        settings=settings,
    )
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
                    f"the {algorithm.name} update was told to stop and did at step {state.step} of "
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

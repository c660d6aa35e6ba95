"""How many optimizer steps a budget gives, before the first of them is taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count

from rollout_core.config import PreferenceSettings, SFTSettings
from rollout_core.data.examples import epoch_order


def num_steps(
    settings: SFTSettings | PreferenceSettings, num_items: int, *, seed: int, item_tokens: Callable[[int], int]
) -> int:
    """Optimizer steps of a run over ``num_items`` items: as many as the first limit of ``settings.budget`` allows.

    ``item_tokens`` gives the tokens that are computed for an item. A schedule can span the whole run, for tokens count
    in the order of training, which follows from ``seed``. Wall time is not known beforehand and not looked at here.
    """
    budget, per_step = settings.budget, settings.minibatch_size * settings.gradient_accumulation
    limits = []
    if budget.max_steps is not None:
        limits.append(budget.max_steps)
    if budget.max_tokens is not None:
        limits.append(_steps_of_tokens(budget.max_tokens, num_items, per_step, seed, item_tokens))
    if budget.epochs is not None or not limits:
        limits.append(math.ceil(num_items * (budget.epochs or 1) / per_step))
    return min(limits)


def _steps_of_tokens(
    max_tokens: int, num_items: int, per_step: int, seed: int, item_tokens: Callable[[int], int]
) -> int:
    """The step that reaches ``max_tokens`` is the last one."""
    whole_epoch = sum(map(item_tokens, range(num_items)))
    epochs = (max_tokens - 1) // whole_epoch
    tokens = epochs * whole_epoch
    order = epoch_order(num_items, seed=seed, epoch=epochs)
    for number in count(1):
        tokens += item_tokens(order[number - 1])
        if tokens >= max_tokens:
            return math.ceil((epochs * num_items + number) / per_step)
    raise AssertionError("an epoch has the tokens that are left")

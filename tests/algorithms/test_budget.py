"""Budgets as numbers of steps: by hand, and against the tokens a run really computes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from updates import positions_at, preference_update as update, sft_settings, update_context

from rollout_core.algorithms.supervised import num_steps
from rollout_core.config import BudgetConfig, identity
from rollout_core.data.packing import SHARED_PREFIX_TOKENS, Document, num_branch_tokens, pack_branches


def steps(budget: dict[str, Any], lengths: list[int], *, minibatch_size: int = 2) -> int:
    settings = sft_settings(budget=BudgetConfig(**budget), minibatch_size=minibatch_size, gradient_accumulation=2)
    return num_steps(settings, len(lengths), seed=3, item_tokens=lambda item: lengths[item])


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({}, 3),  # 10 items, 4 a step
        ({"epochs": 2}, 5),
        ({"max_steps": 7}, 7),
        ({"max_steps": 7, "epochs": 1}, 3),
        ({"max_steps": 2, "epochs": 1}, 2),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 400}, 1),
        ({"max_tokens": 401}, 2),
        ({"max_tokens": 1000}, 3),
        ({"max_tokens": 4000}, 10),
        ({"max_tokens": 4000, "epochs": 2}, 5),
        ({"max_tokens": 4000, "max_steps": 6}, 6),
        ({"max_minutes": 5}, 3),
    ],
)
def test_steps_by_hand(budget: dict[str, Any], expected: int):
    assert steps(budget, [100] * 10) == expected


def test_the_step_that_reaches_the_tokens_is_the_last():
    draw = random.Random(0)
    lengths = [draw.randrange(1, 50) for _ in range(13)]
    for max_tokens in range(1, 1500, 37):
        total, step = 0, 0
        while total < max_tokens:
            total += sum(lengths[item] for item in positions_at(step, num_items=13, per_step=4, seed=3))
            step += 1
        assert steps({"max_tokens": max_tokens}, lengths) == step


@pytest.mark.parametrize("prefix", [0, 3, SHARED_PREFIX_TOKENS, 20])
def test_tokens_of_a_pair_are_those_that_are_computed(prefix: int):
    document = Document(list(range(prefix)), ([1, 2, 3], [4, 5]))
    assert num_branch_tokens(document) == pack_branches([document]).num_tokens


@pytest.mark.parametrize("kind", ["rm", "dpo", "kto"])
def test_a_run_ends_with_its_tokens(kind: str, tiny_model: Path, tmp_path: Path):
    place = update_context(tmp_path)
    checkpoint = update(kind, tiny_model, place, budget={"max_tokens": 700})
    rows = [json.loads(line) for line in place.objects.get_bytes(checkpoint.metrics).splitlines()]
    assert sum(row["num_tokens"] for row in rows) >= 700 > sum(row["num_tokens"] for row in rows[:-1])


def test_wall_time_of_an_earlier_process_counts(tiny_model: Path, tmp_path: Path):
    """The first step uses up what is allowed; the finished state is taken up with its time."""
    started: list[tuple[int, int]] = []
    place = update_context(tmp_path, on_start=lambda first, last: started.append((first, last)))
    for _ in range(2):
        assert update("dpo", tiny_model, place, budget={"max_steps": 6, "max_minutes": 1e-9}).step == 1
    assert started == [(0, 6), (1, 6)]


def test_budgets_that_mean_the_same_as_before_have_the_same_identity():
    assert identity(BudgetConfig()) == {"max_steps": None, "epochs": 1} == identity(BudgetConfig(epochs=1))
    assert identity(BudgetConfig(max_steps=5)) == {"max_steps": 5, "epochs": 1}
    assert identity(BudgetConfig(max_steps=5, epochs=1)) != identity(BudgetConfig(max_steps=5))
    assert identity(BudgetConfig(max_minutes=5)) == {"max_steps": None, "epochs": 1, "max_minutes": 5.0}

"""Curricula: the share that is open, by hand; what steps and iterations draw; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from updates import positions_at, sft_rows, sft_settings, update_context

from rollout_core.algorithms.dataset_updates import sft_update
from rollout_core.algorithms.supervised import SFT
from rollout_core.base.errors import ConfigError
from rollout_core.config import BudgetConfig, Curriculum, GRPOSettings, PromptCurriculum, identity
from rollout_core.data.curriculum import (
    OpenPrompts,
    by_reward,
    competence,
    easiest_first,
    in_words,
    num_open,
    open_positions,
    order_prompts,
    sorted_rows,
)
from rollout_core.data.datasets import PromptRow, SftRow, to_jsonl
from rollout_core.data.examples import Example
from rollout_core.objects import ObjectStore


@pytest.mark.parametrize(
    ("progress", "power", "share"),
    [
        (0.0, 1, 0.1),
        (0.25, 1, 0.55),  # half way to 0.5: 0.5 * 0.9 + 0.1
        (0.25, 2, 0.7106335),  # sqrt(0.5 * 0.99 + 0.01)
        (0.125, 2, 0.5074446),  # sqrt(0.25 * 0.99 + 0.01)
        (0.5, 2, 1.0),
        (0.9, 1, 1.0),
    ],
)
def test_the_open_share_is_that_of_the_paper(progress: float, power: float, share: float):
    assert competence(progress, Curriculum(power=power)) == pytest.approx(share, abs=1e-7)


def test_at_least_one_is_open_and_never_more_than_there_are():
    assert [num_open(step, 4, 3, Curriculum(initial=0.01, power=1)) for step in range(5)] == [1, 2, 3, 3, 3]


def sft(lengths: list[int], **changes: Any) -> SFT:
    examples = [Example(list(range(2, 2 + length)), [True] * length) for length in lengths]
    settings = sft_settings(minibatch_size=2, **{"budget": BudgetConfig(max_steps=8), **changes})
    return SFT(None, examples, settings, seed=3, device=torch.device("cpu"))


def test_steps_draw_short_rows_first_and_then_what_they_draw_without_a_curriculum():
    lengths = [9, 3, 7, 5, 4, 8, 6, 10]
    algorithm, plain = sft(lengths, curriculum=Curriculum(initial=0.25, power=1)), sft(lengths)
    found = [sorted(map(len, algorithm.sequences(batch))) for step in range(8) for batch in algorithm.minibatches(step)]
    assert found[0] == [3, 4], "two of eight are open, and both are drawn"
    opened = [num_open(step, 8, 8, Curriculum(initial=0.25, power=1)) for step in range(8)]
    assert opened == [2, 4, 5, 7, 8, 8, 8, 8]
    for lengths_of_step, of in zip(found, opened, strict=True):
        assert max(lengths_of_step) < 3 + of
    easiest = easiest_first(lengths)
    for step in range(4, 8):
        positions = positions_at(step, num_items=8, per_step=2, seed=3)
        assert found[step] == sorted(lengths[easiest[position]] for position in positions)
        assert len(plain.minibatches(step)) == 1


def test_rows_are_sorted_by_their_key_equal_ones_as_they_stand(tmp_path: Path):
    objects = ObjectStore.from_url(str(tmp_path))
    levels = [2.5, 1, 2.5, -3]
    rows = [row.model_copy(update={"extras": {"level": level}}) for row, level in zip(sft_rows(4), levels, strict=True)]
    found = sorted_rows(objects, objects.put_bytes(to_jsonl(rows)), SftRow, "level")
    assert objects.get_bytes(found) == to_jsonl([rows[3], rows[1], rows[0], rows[2]])


@pytest.mark.parametrize("level", [None, "hard", True])
def test_a_row_without_its_number_is_named(tmp_path: Path, tiny_model: Path, level: Any):
    place = update_context(tmp_path)
    rows = [row.model_copy(update={"extras": {"level": 1}}) for row in sft_rows(3)]
    rows[1] = rows[1].model_copy(update={"extras": {} if level is None else {"level": level}})
    dataset = place.objects.put_bytes(to_jsonl(rows))
    settings = sft_settings(curriculum=Curriculum(by="key", key="level"))
    seen = "nothing" if level is None else repr(level)
    with pytest.raises(
        ConfigError, match=rf"^row 2 has {seen} as 'level', and a curriculum by key needs a number there"
    ):
        sft_update(place.objects.put_tree(tiny_model), dataset, settings, place)


def test_iterations_draw_from_what_is_open_then_each_without_repeating_a_prompt(tmp_path: Path):
    objects = ObjectStore.from_url(str(tmp_path))
    order = [4, 2, 0, 1, 3, 5, 7, 6]
    opened = OpenPrompts(order=objects.put_json(order), places=2, num_open=(2, 4, 8))
    found = opened.positions(objects, 6, seed=1)
    assert set(found[:2]) == {4, 2} and set(found[2:4]) < {4, 2, 0, 1} and len(set(found[2:4])) == 2
    assert found[4:] == open_positions(4, 6, order=order, num_open=8, seed=1)
    assert opened.positions(objects, 3, seed=1) == found[:3]


def test_what_a_curriculum_cannot_be_is_said():
    with pytest.raises(ValidationError, match='key and by = "key" belong together'):
        Curriculum(by="key")
    with pytest.raises(ValidationError, match="by share of the steps, whose number would depend on them"):
        type(sft_settings()).model_validate(
            {**sft_settings().model_dump(), "curriculum": {}, "budget": {"max_tokens": 100}}
        )


def test_configurations_without_one_keep_their_identity_and_prompts_are_in_that_of_samples():
    fields = {"prompts": {"path": "x"}, "optimizer": {"lr": 1e-4}}
    plain, eased = (GRPOSettings.model_validate({**fields, **more}) for more in ({}, {"curriculum": {"by": "reward"}}))
    assert eased.curriculum == PromptCurriculum(by="reward") and identity(eased) == identity(plain)
    assert "curriculum" not in identity(sft_settings())
    assert identity(sft_settings(curriculum=Curriculum()))["curriculum"]["until"] == 0.5


def test_a_plan_says_what_is_open_when():
    assert in_words(Curriculum(power=1), 1000, 10, "step") == "by length: 100 of 1,000 at first, all from step 6 of 10"
    named = Curriculum(by="key", key="level", initial=0.5, until=1.0)
    assert in_words(named, 8, 2, "iteration") == "by level: 4 of 8 at first, all never in 2 iterations"
    assert in_words(named, 8, None, "step").endswith("all after 100% of the steps")


def test_prompts_are_as_hard_as_their_completions_earn_little():
    """Of (1, -) one counts; a prompt without a score is as hard as the hardest."""
    assert by_reward([1.0, None, 0.0, 0.5, None, None], 3) == [-1.0, -0.25, -0.25]
    with pytest.raises(ConfigError, match="3 completions of 2 prompts were scored"):
        by_reward([1.0, 0.0, 1.0], 2)


def test_prompts_are_ordered_once_and_iterations_open_more_of_them(tmp_path: Path):
    """With power 1, initial 0.25 and until 1, of 4 prompts 1 is open at first, 2 after a third and 3 after two."""
    objects = ObjectStore.from_url(str(tmp_path))
    rows = [PromptRow(prompt=name, extras={"level": level}) for name, level in zip("abcd", (3, 1, 2, 1), strict=True)]
    prompts = objects.put_bytes(to_jsonl(rows))
    options: Any = {"key": "level", "scores": None, "models": tmp_path}
    order = order_prompts(objects, prompts, prompts, by="key", **options)
    assert objects.get_json(order.order) == [1, 3, 2, 0]
    assert (order.num_prompts, order.easiest, order.hardest) == (4, 1.0, 3.0)
    curriculum = {"by": "key", "key": "level", "initial": 0.25, "until": 1.0, "power": 1}
    fields = {"prompts": {"path": "x"}, "optimizer": {"lr": 1e-4}, "iterations": 3, "prompts_per_iteration": 5}
    settings = GRPOSettings.model_validate({**fields, "curriculum": curriculum})
    opened = order.opened(2, settings)
    assert (opened.order, opened.places, opened.num_open) == (order.order, 5, (1, 2, 3))
    redrawn = GRPOSettings.model_validate({**fields, "curriculum": curriculum, "dynamic_sampling": {"max_rounds": 4}})
    assert order.opened(0, redrawn).places == 20, "each round of an iteration has places of its own"

"""A moving average of the weights: what it is by hand, what is exported and evaluated, and that training is unmoved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from updates import LORA, rows_of, sft_rows, sft_settings, update_context

from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.dataset_updates import sft_update
from rollout_core.algorithms.state import ADAPTER, TRAINED
from rollout_core.base.errors import ConfigError
from rollout_core.config import BudgetConfig, HeldOutRows, JsonlDataset, SnapshotPolicy, identity
from rollout_core.data.datasets import to_jsonl
from rollout_core.models.pretrained import load_causal_lm
from rollout_core.objects.records import Checkpoint
from rollout_core.objects.snapshots import SnapshotStore
from rollout_core.plans.memory_and_disk import training_of

DECAY = 0.75
EACH_STEP = {"snapshots": SnapshotPolicy(every_steps=1, keep_last=9), "budget": BudgetConfig(max_steps=3)}
HELD_OUT = HeldOutRows(dataset=JsonlDataset(path="x"))


def train(place: UpdateContext, model: Path, **changes) -> Checkpoint:
    settings = sft_settings(evaluation=HELD_OUT, **{**EACH_STEP, **changes})
    dataset, held_out = (place.objects.put_bytes(to_jsonl(sft_rows(count))) for count in (20, 3))
    return sft_update(place.objects.put_tree(model), dataset, settings, place, held_out=held_out)[0]


def states(place: UpdateContext, folder: Path) -> list[Path]:
    """Folders of all snapshots, by step."""
    store = SnapshotStore(place.objects)
    for item in store.list():
        store.restore(item.id, folder / str(item.step))
    return [folder / str(step) for step in sorted(item.step for item in store.list())]


def step_by_step(place: UpdateContext, model: Path, **changes) -> Checkpoint:
    """Three runs of one, two and three steps: each goes on from the snapshot that the one before left."""
    for steps in (1, 2, 3):
        found = train(place, model, **{**changes, "budget": BudgetConfig(max_steps=steps)})
    return found


def test_the_average_is_that_of_the_weights_after_each_step(tiny_model: Path, tmp_path: Path):
    place, plain = update_context(tmp_path / "averaged"), update_context(tmp_path / "plain")
    averaged, trained = step_by_step(place, tiny_model, ema_decay=DECAY), step_by_step(plain, tiny_model)
    expected = {name: tensor.double() for name, tensor in load_causal_lm(tiny_model).state_dict().items()}
    folders = states(place, tmp_path / "states")
    assert len(folders) == 3
    for folder in folders:
        weights = load_file(folder / f"{TRAINED}.safetensors")
        own = load_causal_lm(folder / "model").state_dict()
        for name in expected:
            if f"model.{name}" not in weights:  # tied to one that is
                continue
            expected[name] = DECAY * expected[name] + (1 - DECAY) * weights[f"model.{name}"].double()
            assert torch.allclose(own[name].double(), expected[name], atol=1e-7, rtol=1e-6), name
    raw = load_causal_lm(plain.model(trained.model)).state_dict()
    assert all(torch.equal(raw[name.removeprefix("model.")], tensor) for name, tensor in weights.items())
    assert averaged.model != trained.model

    rows, plain_rows = rows_of(averaged, place.objects), rows_of(trained, plain.objects)
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain_rows], "training goes on from the weights"
    assert rows[-1]["eval_loss"] > plain_rows[-1]["eval_loss"], "the average of three steps has learned less"
    again = update_context(tmp_path / "again")
    start = place.model(averaged.model)
    held_out = train(again, start, optimizer=sft_settings().optimizer.model_copy(update={"lr": 1e-30}))
    assert rows_of(held_out, again.objects)[-1]["eval_loss"] == pytest.approx(rows[-1]["eval_loss"], abs=1e-6)


def test_adapters_are_averaged_before_they_are_merged(tiny_model: Path, tmp_path: Path):
    place = update_context(tmp_path)
    lora = LORA.model_copy(update={"dropout": 0.0, "target_modules": ("q_proj",)})
    train(place, tiny_model, ema_decay=DECAY, lora=lora)
    *_, last = states(place, tmp_path / "states")
    averages, weights = load_file(last / f"{ADAPTER}.safetensors"), load_file(last / f"{TRAINED}.safetensors")
    assert {f"model.{name}" for name in averages} == weights.keys()
    assert not any(torch.equal(tensor, weights[f"model.{name}"]) for name, tensor in averages.items())
    base, merged = (load_causal_lm(folder).state_dict() for folder in (tiny_model, last / "model"))
    a, b = (averages[f"model.layers.0.self_attn.q_proj.lora_{matrix}.default.weight"] for matrix in "AB")
    layer = "model.layers.0.self_attn.q_proj.weight"
    assert torch.allclose(merged[layer], base[layer] + lora.alpha / lora.r * (b @ a), atol=1e-6)


def test_a_state_without_an_average_is_no_start_of_one_with_it(tiny_model: Path, tmp_path: Path):
    place = update_context(tmp_path)
    first = train(place, tiny_model)
    other = update_context(tmp_path, key=first.model, start_from=first.train_state)
    with pytest.raises(ConfigError, match="train state is of a run without ema_decay, this one is with"):
        train(other, tiny_model, ema_decay=DECAY, budget=BudgetConfig(max_steps=4))


def test_it_is_part_of_what_is_computed_and_of_the_estimate():
    assert "ema_decay" not in identity(sft_settings())
    assert identity(sft_settings(ema_decay=DECAY))["ema_decay"] == DECAY
    assert training_of(sft_settings(ema_decay=DECAY), 8).averaged and not training_of(sft_settings(), 8).averaged

"""Weights in bfloat16 beside float32 masters, and both in the host's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from updates import LORA, grpo, rows_of, sft_rows, sft_settings, update_context

from rollout_core.algorithms.dataset_updates import sft_update
from rollout_core.algorithms.loop import build_optimizer
from rollout_core.algorithms.masters import lay_out
from rollout_core.algorithms.state import TrainState, master_of
from rollout_core.config import OptimizerConfig, SFTSettings, identity
from rollout_core.data.datasets import to_jsonl
from rollout_core.models.architecture import with_lora
from rollout_core.models.pretrained import load_causal_lm
from rollout_core.objects.records import Checkpoint

ROUNDED: dict[str, Any] = {"weights": "bfloat16", "precision": "bfloat16"}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)


def test_a_master_keeps_what_rounding_would_lose():
    """SGD of rate 2^-10 and a gradient of 1 on a weight of 1: bfloat16 has 8 digits, so the weight would never move."""
    model = Small()
    nn.init.ones_(model.layer.weight)
    lay_out(model, sft_settings(**ROUNDED))
    weight, bias = model.layer.weight, model.layer.bias
    assert (weight.dtype, bias.dtype, master_of(weight).dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert master_of(bias) is bias
    optimizer = build_optimizer(OptimizerConfig(kind="sgd", lr=2**-10), list(model.parameters()))
    state = TrainState(model, optimizer)
    for _ in range(4):
        weight.float().sum().backward()
        assert weight.grad is None, "handed over"
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state.round_masters()
    assert master_of(weight).tolist() == [[1 - 4 * 2**-10] * 2]
    assert weight.tolist() == [[1 - 2**-8] * 2], "the next number below 1 that bfloat16 has"


def test_gradients_of_minibatches_are_summed_in_float32():
    model = Small()
    lay_out(model, sft_settings(**ROUNDED))
    for gradient in (256.0, 1.0, 1.0):
        (gradient * model.layer.weight).sum().backward()
    assert master_of(model.layer.weight).grad.tolist() == [[258.0, 258.0]], "in bfloat16 256 + 1 is 256"


def test_frozen_weights_of_a_model_with_adapters_are_rounded_and_its_adapters_are_not(tiny_model: Path):
    model = with_lora(load_causal_lm(tiny_model), LORA, seed=1)
    lay_out(model, sft_settings(**ROUNDED, lora=LORA))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name or parameter.dim() < 2 else torch.bfloat16), name
        assert master_of(parameter) is parameter


def test_offloaded_weights_step_as_those_that_are_not(tiny_model: Path, tmp_path: Path):
    """On a CPU both are in one memory, and the arithmetic is the same to the bit."""
    plain, moved = (sft(tmp_path / str(offload), tiny_model, offload=offload) for offload in (False, True))
    assert (moved.model, moved.metrics) == (plain.model, plain.metrics)


def sft(folder: Path, model: Path, **changes: Any) -> Checkpoint:
    place = update_context(folder)
    dataset = place.objects.put_bytes(to_jsonl(sft_rows(20)))
    return sft_update(place.objects.put_tree(model), dataset, sft_settings(**changes), place)[0]


def test_rounded_weights_learn_what_float32_ones_do(tiny_model: Path, tmp_path: Path):
    losses = []
    for name, changes in (("float32", {"precision": "bfloat16"}), ("bfloat16", ROUNDED)):
        checkpoint = sft(tmp_path / name, tiny_model, optimizer=OptimizerConfig(lr=1e-2), **changes)
        losses.append([row["loss"] for row in rows_of(checkpoint, update_context(tmp_path / name).objects)])
        model = load_causal_lm(update_context(tmp_path / name).model(checkpoint.model))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        fine = [p for p in model.parameters() if p.dim() > 1 and not torch.equal(p, p.to(torch.bfloat16).float())]
        assert fine, "a checkpoint holds the masters"
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[1][-1] < 0.8 * losses[1][0]


def test_a_frozen_reference_is_rounded_as_the_policy_is(tiny_model: Path, tmp_path: Path):
    firsts = []
    checkpoint = grpo(update_context(tmp_path), tiny_model, on_checkpoint=firsts.append, **ROUNDED)
    first, last = (rows_of(each, update_context(tmp_path).objects) for each in (firsts[0], checkpoint))
    assert first[0]["kl"] == pytest.approx(0, abs=1e-4) and last[-1]["kl"] > 1e-4


def test_what_does_not_go_together_is_said():
    def parsed(**changes: Any) -> SFTSettings:
        return SFTSettings.model_validate({"dataset": {"path": "x"}, "optimizer": {"lr": 1e-3}, **changes})

    with pytest.raises(ValidationError, match='weights are bfloat16, but precision is "auto"'):
        parsed(weights="bfloat16")
    with pytest.raises(ValidationError, match='offload: with "ddp" every process'):
        parsed(offload=True, parallel={"nproc": 2})
    assert not {"weights", "offload"} & identity(parsed()).keys()
    assert identity(parsed(**ROUNDED, offload=True))["weights"] == "bfloat16"

"""Adapters on weights of four bits (QLoRA): what is stored, computed, trained and saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from updates import rows_of, sft_rows, sft_settings, update_context

from rollout_core.algorithms.dataset_updates import sft_update
from rollout_core.config import LoRAConfig, OptimizerConfig, ParallelConfig, identity
from rollout_core.data.datasets import to_jsonl
from rollout_core.models.architecture import quantized_parameters, with_lora
from rollout_core.models.pretrained import load_causal_lm
from rollout_core.objects.records import Checkpoint
from rollout_core.plans.memory_and_disk import ModelSize, Training, estimate_memory

pytest.importorskip("bitsandbytes", reason="an extra")
from rollout_core.models.quantized import NF4Linear

NF4 = LoRAConfig(r=4, quantization="nf4")


def test_weights_are_the_nearest_of_sixteen_quantiles_times_the_largest_of_their_block():
    """Levels of the paper, appendix E; with scales that are stored exactly where all blocks have one."""
    levels = torch.tensor([-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0])
    layer = nn.Linear(64, 2, bias=False)
    rows = torch.linspace(-1, 0, 64)
    layer.weight.data = torch.stack([2 * rows, 2 * rows])
    found = NF4Linear(layer).weight
    nearest = levels[(rows[:, None] - levels).abs().argmin(1)]
    assert torch.allclose(found[0], 2 * nearest, atol=0.02) and torch.equal(found[0], found[1])


def test_products_and_gradients_are_those_of_the_weights_that_four_bits_stand_for():
    torch.manual_seed(0)
    layer = NF4Linear(nn.Linear(128, 32))
    plain = nn.Linear(128, 32)
    plain.weight.data, plain.bias.data = layer.weight.clone(), layer.bias.detach().clone()
    ours, theirs = (torch.linspace(-1, 1, 5 * 128).view(5, 128).requires_grad_() for _ in range(2))
    (layer(ours) ** 2).sum().backward()
    (plain(theirs) ** 2).sum().backward()
    assert torch.allclose(layer(ours), plain(theirs), atol=1e-5) and torch.allclose(ours.grad, theirs.grad, atol=1e-4)
    assert layer.packed.numel() == 128 * 32 // 2 and layer.packed.dtype == torch.uint8
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(ours).dtype == torch.bfloat16


def sft(folder: Path, model: Path, steps: int) -> Checkpoint:
    place = update_context(folder)
    dataset = place.objects.put_bytes(to_jsonl(sft_rows(20)))
    budget = sft_settings().budget.model_copy(update={"max_steps": steps})
    settings = sft_settings(lora=NF4, optimizer=OptimizerConfig(lr=1e-2), budget=budget)
    return sft_update(place.objects.put_tree(model), dataset, settings, place)[0]


def test_a_checkpoint_is_what_was_trained_and_it_learns(tiny_model: Path, tmp_path: Path):
    checkpoint = sft(tmp_path, tiny_model, steps=12)
    place = update_context(tmp_path)
    losses = [row["loss"] for row in rows_of(checkpoint, place.objects)]
    assert losses[-1] < 0.9 * losses[0]
    merged, base = (load_causal_lm(folder).state_dict() for folder in (place.model(checkpoint.model), tiny_model))
    assert merged.keys() == base.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    layer = nn.Linear(*reversed(base[name].shape), bias=False)
    layer.weight.data = base[name]
    change = merged[name] - NF4Linear(layer).weight
    assert torch.linalg.matrix_rank(change, atol=1e-5) == 4, "four bits, and an adapter of rank 4"


def test_what_is_stored_in_four_bits_is_counted_and_what_cannot_be_is_said(tiny_model: Path):
    model = with_lora(load_causal_lm(tiny_model), NF4, seed=1)
    stored = [module for module in model.modules() if isinstance(module, NF4Linear)]
    assert quantized_parameters(model, NF4) == sum(2 * module.packed.numel() for module in stored) > 0
    size = ModelSize(num_parameters=20_000, num_layers=2, hidden_size=10, intermediate_size=40)
    training = Training(100, "adamw", trained_parameters=10, quantized_parameters=16_384)
    expected = 4 * (20_000 - 16_384) + int(16_384 * 0.515869140625) + 4 * 4 * 10
    assert estimate_memory(size, training, "cuda").fixed == expected
    assert "quantization" not in identity(LoRAConfig()) and identity(NF4)["quantization"] == "nf4"
    with pytest.raises(ValidationError, match="fsdp2 cuts no weights of four bits"):
        type(sft_settings()).model_validate(
            {**sft_settings().model_dump(), "lora": NF4, "parallel": ParallelConfig(nproc=2, kind="fsdp2")}
        )

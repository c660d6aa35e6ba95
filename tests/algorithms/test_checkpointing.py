"""Gradient checkpointing: the same gradients to the last bit, from less memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from updates import ppo, preference_update as update, sft_settings, update_context

from rollout_core.algorithms.layers import checkpoint_layers
from rollout_core.algorithms.policy import Policy
from rollout_core.algorithms.supervised import SFT
from rollout_core.base.errors import ConfigError
from rollout_core.config import LearnerSettings, identity
from rollout_core.data.examples import Example
from rollout_core.data.packing import Document, pack_branches
from rollout_core.models.pretrained import load_causal_lm

CPU = torch.device("cpu")


def rows(count: int, length: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(2, 250) for _ in range(draw.randrange(2, length))] for _ in range(count)]


def sft_loss(model: Any, packed: bool) -> torch.Tensor:
    examples = [Example(ids, [True] * len(ids)) for ids in rows(8, 40)]
    learner = SFT(Policy(model, packed=packed), examples, sft_settings(), seed=0, device=CPU)
    [batch] = learner.minibatches(0)
    return learner.loss(batch, [batch]).loss


def pair_loss(model: Any, packed: bool) -> torch.Tensor:
    """Answers after a shared prefix."""
    documents = [Document(ids[:20] + [5] * 10, ([*ids[20:], 7], [9, 3])) for ids in rows(4, 40)]
    batch = pack_branches(documents)
    return Policy(model, packed=packed)(batch).logprobs.square().mean()


def gradients(folder: Path, loss: Any, *, packed: bool, train: bool, checkpointed: bool) -> tuple[dict, int]:
    """Gradients by name, and the bytes that autograd kept for the backward pass."""
    model = load_causal_lm(folder).train(train)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    if checkpointed:
        checkpoint_layers(model)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss(model, packed)
    value.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, sum(kept.values())


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("loss", [sft_loss, pair_loss])
def test_gradients_are_equal_and_less_is_kept(loss: Any, packed: bool, train: bool, tiny_model: Path):
    """With dropout in training mode, without it in evaluation mode."""
    plain, plain_bytes = gradients(tiny_model, loss, packed=packed, train=train, checkpointed=False)
    ours, our_bytes = gradients(tiny_model, loss, packed=packed, train=train, checkpointed=True)
    assert plain.keys() == ours.keys() and all(torch.equal(plain[name], ours[name]) for name in plain)
    assert our_bytes < plain_bytes / 2


@pytest.mark.parametrize("kind", ["rm", "dpo", "kto"])
def test_an_update_ends_in_the_same_bytes(kind: str, tiny_model: Path, tmp_path: Path):
    plain = update(kind, tiny_model, update_context(tmp_path / "plain"))
    assert update(kind, tiny_model, update_context(tmp_path / "less"), gradient_checkpointing=True) == plain


@pytest.mark.parametrize("values", ["head", "model"])
def test_ppo_ends_in_the_same_bytes(values: str, tiny_model: Path, tmp_path: Path):
    plain, less = (
        ppo(update_context(tmp_path / str(on)), tiny_model, values=values, gradient_checkpointing=on)
        for on in (False, True)
    )
    assert plain == less


def test_it_stays_out_of_the_cache_key():
    settings = LearnerSettings.model_validate({"optimizer": {"lr": 1.0}})
    assert identity(settings) == identity(settings.model_copy(update={"gradient_checkpointing": True}))


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ConfigError, match="Linear has no layers that can be checkpointed"):
        checkpoint_layers(torch.nn.Linear(1, 1))

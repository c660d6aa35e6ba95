"""Learning rates by depth, against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from rollout_core.algorithms.layers import layer_rates
from rollout_core.algorithms.loop import build_optimizer
from rollout_core.algorithms.policy import ValueModel, zero_head
from rollout_core.base.errors import ConfigError
from rollout_core.config import LoRAConfig, OptimizerConfig, identity
from rollout_core.models.architecture import with_lora

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 50, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
HALVED = OptimizerConfig(kind="sgd", lr=0.8, layer_decay=0.5)


def qwen(**changes: Any) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **changes))


def rates_of(model: nn.Module, *others: nn.Module, config: OptimizerConfig = HALVED) -> dict[nn.Parameter, float]:
    """What plain gradient descent with gradients of one takes off each parameter."""
    modules = (model, *others)
    parameters = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = build_optimizer(config, parameters, layer_rates(config, model, *others))
    for group in optimizer.param_groups:
        group["lr"] = config.lr * group["rate_scale"]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    taken = {p: (old - p.detach()).flatten() for p, old in zip(parameters, before, strict=True)}
    assert all(torch.allclose(change, change[:1], atol=1e-6) for change in taken.values())
    return {parameter: round(float(change[0]), 5) for parameter, change in taken.items()}


def expected(name: str) -> float:
    """Two layers: 0.8 halved three times for the embeddings, twice and once for the layers."""
    for part, rate in ((".0.", 0.2), (".1.", 0.4), ("embed_tokens", 0.1), ("wte", 0.1), ("wpe", 0.1)):
        if part in name:
            return rate
    return 0.8


@pytest.mark.parametrize("kind", ["qwen2", "qwen2, tied", "gpt2", "reward model", "qwen2 with adapters"])
def test_a_layer_has_half_the_rate_of_the_next_one(kind: str):
    model = {
        "qwen2": qwen,
        "qwen2, tied": lambda: qwen(tie_word_embeddings=True),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)),
        "reward model": lambda: Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_labels=1)),
        "qwen2 with adapters": lambda: with_lora(qwen(), LoRAConfig(r=2), seed=1),
    }[kind]()
    found = rates_of(model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name: found[parameter] for name, parameter in trained.items()} == {name: expected(name) for name in trained}
    if "adapters" in kind:
        assert set(found.values()) == {0.2, 0.4}


def test_modules_beside_the_model_go_by_their_own_depth():
    model = qwen()
    head, values = zero_head(model), ValueModel(qwen().base_model)
    found = rates_of(model, head, values)
    assert {found[parameter] for parameter in head.parameters()} == {0.8}
    named = dict(values.named_parameters())
    assert {name: found[parameter] for name, parameter in named.items()} == {name: expected(name) for name in named}


def test_groups_have_the_names_of_their_layers_and_vectors_do_not_decay():
    config = HALVED.model_copy(update={"weight_decay": 0.1})
    model = qwen()
    optimizer = build_optimizer(config, list(model.parameters()), layer_rates(config, model))
    assert [(group["name"], group["weight_decay"]) for group in optimizer.param_groups] == [
        ("embeddings", 0.1),
        ("layer 1", 0.1),
        ("layer 1, without decay", 0.0),
        ("layer 2", 0.1),
        ("layer 2, without decay", 0.0),
        ("output, without decay", 0.0),
        ("output", 0.1),
    ]


def test_no_decay_is_one_rate_and_the_identity_it_had():
    assert layer_rates(OptimizerConfig(lr=1.0), nn.Linear(1, 1)) is None
    assert "layer_decay" not in identity(OptimizerConfig(lr=1.0)) and identity(HALVED)["layer_decay"] == 0.5
    with pytest.raises(
        ConfigError, match=r"Linear has no layers that can be distinguished; leave out optimizer\.layer_d"
    ):
        layer_rates(HALVED, nn.Linear(1, 1))

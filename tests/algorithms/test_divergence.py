"""The KL divergence of one model from another: arithmetic by hand, transformers' own logits, adapters, and refusals."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from updates import save_state

from rollout_core.algorithms import divergence
from rollout_core.algorithms.divergence import mean_kl
from rollout_core.algorithms.loop import build_optimizer
from rollout_core.algorithms.output_layer import token_divergence
from rollout_core.algorithms.policy_losses import kl_estimate
from rollout_core.algorithms.state import TrainState
from rollout_core.base.errors import ConfigError
from rollout_core.config import LoRAConfig, OptimizerConfig
from rollout_core.models.architecture import LogitTransform, with_lora
from rollout_core.models.pretrained import copy_tokenizer, load_causal_lm

PROMPTS = [[3, 4, 5], [3, 4, 5], [6, 7]]
COMPLETIONS = [[8, 9, 10, 2], [11], [12, 13, 2]]


def head(*logits: float) -> nn.Linear:
    """An output layer that gives these logits for the hidden state 1."""
    layer = nn.Linear(1, len(logits), bias=False)
    layer.weight.data = torch.tensor(logits)[:, None]
    return layer


def test_it_is_that_of_arithmetic_by_hand():
    p, q = head(0.0, 0.0), head(math.log(0.25), math.log(0.75))  # (1/2, 1/2) and (1/4, 3/4)
    ones = torch.ones(2, 1)
    found = token_divergence(ones, ones, p, q, torch.tensor([0, 1]), temperature=1.0)
    exact = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)  # 0.1438
    assert found.kl.tolist() == pytest.approx([exact, exact], abs=1e-6)
    k1, k3 = (kl_estimate(found.logprobs, found.ref_logprobs, kind=kind) for kind in ("k1", "k3"))
    assert k1.tolist() == pytest.approx([math.log(2), math.log(2 / 3)], abs=1e-6)
    assert k3.tolist() == pytest.approx([0.5 - 1 + math.log(2), 1.5 - 1 - math.log(1.5)], abs=1e-6)
    # Both tokens are as likely under p, so the means of both estimates are the divergence itself.
    assert float(k1.mean()) == pytest.approx(exact, abs=1e-6) and float(k3.mean()) == pytest.approx(exact, abs=1e-6)
    # At temperature 1/2 the second distribution is (1/10, 9/10).
    colder = token_divergence(ones, ones, p, q, torch.tensor([0, 1]), temperature=0.5).kl
    assert float(colder[0]) == pytest.approx(0.5 * math.log(5) + 0.5 * math.log(5 / 9), abs=1e-6)
    # The second model doubles its logits, the first one, whose logits are 0, caps them.
    transforms = LogitTransform(cap=1.0), LogitTransform(scale=2.0)
    doubled = token_divergence(ones, ones, p, q, torch.tensor([0, 1]), temperature=1.0, transforms=transforms).kl
    assert torch.allclose(doubled, colder, atol=1e-6)


def reference_kl(model: Path, other: Path, temperature: float) -> list[torch.Tensor]:
    """By transformers' logits of each row by itself and torch.distributions: exact, k1 and k3 at each token."""
    pair = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (model, other)]
    columns = []
    for prompt, rest in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.tensor([[*prompt, *rest]])
        with torch.no_grad():
            p, q = (
                torch.distributions.Categorical(logits=one(ids).logits[0, len(prompt) - 1 : -1] / temperature)
                for one in pair
            )
        tokens = torch.tensor(rest)
        ratio = q.log_prob(tokens) - p.log_prob(tokens)
        columns.append(torch.stack([torch.distributions.kl_divergence(p, q), -ratio, ratio.exp() - 1 - ratio]))
    return list(torch.cat(columns, dim=1))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_is_that_of_transformers_logits_whatever_is_computed_together(
    tiny_model, other_tiny_model, temperature, monkeypatch
):
    expected = [float(column.mean()) for column in reference_kl(tiny_model, other_tiny_model, temperature)]
    for tokens in (8192, 1):
        monkeypatch.setattr(divergence, "BATCH_TOKENS", tokens)
        found = mean_kl(tiny_model, other_tiny_model, PROMPTS, COMPLETIONS, temperature=temperature, num_threads=1)
        assert found.num_tokens == 8 and found[1:] == pytest.approx(expected, rel=1e-4)
    assert found.exact > 0.01
    greedy = mean_kl(tiny_model, other_tiny_model, PROMPTS, COMPLETIONS, temperature=0.0, num_threads=1)
    plain = mean_kl(tiny_model, other_tiny_model, PROMPTS, COMPLETIONS, num_threads=1)
    assert greedy == plain
    assert mean_kl(tiny_model, tiny_model, PROMPTS, COMPLETIONS, num_threads=1)[1:] == pytest.approx(
        (0, 0, 0), abs=1e-7
    )


def test_it_is_had_of_a_model_trained_with_adapters(tiny_model, tmp_path):
    adapted = with_lora(load_causal_lm(tiny_model), LoRAConfig(), seed=1).eval()
    state = TrainState(adapted, build_optimizer(OptimizerConfig(lr=1e-2), list(adapted.parameters())))
    save_state(state, tmp_path / "same", tokenizer_from=tiny_model)
    same = mean_kl(tmp_path / "same/model", tiny_model, PROMPTS, COMPLETIONS, num_threads=1)
    assert same.exact == pytest.approx(0, abs=1e-7)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    save_state(state, tmp_path / "moved", tokenizer_from=tiny_model)
    moved = mean_kl(tmp_path / "moved/model", tiny_model, PROMPTS, COMPLETIONS, num_threads=1)
    expected = reference_kl(tmp_path / "moved/model", tiny_model, 1.0)[0]
    assert moved.exact == pytest.approx(float(expected.mean()), rel=1e-4) and moved.exact > 1e-3


def test_models_of_other_tokens_are_not_compared(tiny_model, tmp_path):
    other = tmp_path / "wider"
    model = load_causal_lm(tiny_model)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.save_pretrained(other)
    copy_tokenizer(tiny_model, other)
    with pytest.raises(ConfigError, match=r"outputs for \d+ tokens, and the model that it is compared with for \d+"):
        mean_kl(tiny_model, other, PROMPTS, COMPLETIONS, num_threads=1)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"7"', '"seven"'))
    with pytest.raises(ConfigError, match="its tokenizer has another vocabulary"):
        mean_kl(tiny_model, other, PROMPTS, COMPLETIONS, num_threads=1)
    with pytest.raises(ConfigError, match="none of the completions has a token"):
        mean_kl(tiny_model, tiny_model, [[3]], [[]], num_threads=1)

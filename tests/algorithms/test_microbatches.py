"""Microbatches of so many tokens: they hold what they may, are about equally long, and change no gradient."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM
from updates import sft_settings

from rollout_core.algorithms.parallel import token_microbatches
from rollout_core.algorithms.policy import Policy
from rollout_core.algorithms.supervised import SFT
from rollout_core.base.errors import ConfigError
from rollout_core.config import GRPOSettings, parse_config
from rollout_core.data.examples import Example

CPU = torch.device("cpu")


def test_microbatches_by_hand():
    """The longest item first, each where the fewest tokens are; one too long is by itself."""
    assert token_microbatches([8, 500, 8, 8, 490], 512, 1) == [[1, 3], [0, 2, 4]]
    assert token_microbatches([8, 500, 8], 100, 1) == [[1], [0, 2]]
    assert token_microbatches([3, 3, 3], 9, 2) == [[0, 2], [1]]


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 600), min_size=1, max_size=40), st.integers(1, 700), st.integers(1, 4))
def test_every_item_is_in_one_microbatch_that_holds_what_it_may(sizes: list[int], max_tokens: int, processes: int):
    parts = token_microbatches(sizes, max_tokens, processes)
    assert sorted(item for part in parts for item in part) == list(range(len(sizes)))
    assert all(len(part) == 1 or sum(sizes[item] for item in part) <= max_tokens for part in parts)
    assert len(parts) % processes == 0 or len(parts) == len(sizes)
    loads = [sum(sizes[item] for item in part) for part in parts]
    assert loads == sorted(loads, reverse=True)
    if len(parts) == processes:
        assert loads[0] - loads[-1] <= max(sizes), "none of the longest could have gone elsewhere"


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).train()


def test_rows_of_8_and_500_tokens_give_equal_gradients_and_a_bounded_peak():
    draw = random.Random(1)
    lengths = [500 if row % 4 == 0 else 8 for row in range(16)]
    rows = [Example([draw.randrange(64) for _ in range(n)], [place > n // 2 for place in range(n)]) for n in lengths]
    gradients, losses, peaks = [], [], []
    for max_tokens in (None, 512):
        trained = model()
        settings = sft_settings(minibatch_size=8, gradient_accumulation=2, max_tokens_per_microbatch=max_tokens)
        learner = SFT(Policy(trained), rows, settings, seed=3, device=CPU)
        batches = learner.minibatches(0)
        assert sum(len(learner.sequences(batch)) for batch in batches) == 16
        parts = [learner.loss(batch, batches).loss for batch in batches]
        torch.stack(parts).sum().backward()
        losses.append(sum(part.item() for part in parts))
        gradients.append([parameter.grad for parameter in trained.parameters()])
        peaks.append(max(learner.num_tokens(batch) for batch in batches))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert peaks[0] > 1000 and peaks[1] <= 512


def test_a_loss_by_minibatches_is_refused():
    document = {"prompts": {"path": "x"}, "optimizer": {"lr": 1e-6}, "max_tokens_per_microbatch": 100}
    with pytest.raises(ConfigError, match='loss_type = "bnpo" is a mean over minibatches of equally many rows'):
        parse_config({**document, "loss_type": "bnpo"}, GRPOSettings)
    assert (
        "max_tokens_per_microbatch"
        not in parse_config(
            {key: value for key, value in document.items() if key != "max_tokens_per_microbatch"}, GRPOSettings
        ).cache_identity()
    )

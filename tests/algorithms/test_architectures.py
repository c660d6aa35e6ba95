"""For every kind of model a plan says what training does: both ask the same code, without weights and with them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from updates import rows_of, sft_rows, sft_settings, update_context

from rollout_core.algorithms.dataset_updates import sft_update
from rollout_core.algorithms.layers import checkpoint_layers
from rollout_core.algorithms.policy import Policy
from rollout_core.algorithms.supervised import RewardModel, load_reward_model
from rollout_core.base.errors import ConfigError
from rollout_core.config import BudgetConfig
from rollout_core.data.datasets import to_jsonl
from rollout_core.data.packing import Document, pack
from rollout_core.models.bounded.inspecting import check_training
from rollout_core.models.pretrained import load_causal_lm, load_tokenizer
from tests.rows import tokenize_sft

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": 50,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PACKED = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "gpt_neox", "gpt2", "olmo2", "opt"]
PACKED += ["mixtral", "qwen2_moe", "qwen3_moe", "cohere", "cohere2", "granite", "granitemoe"]
PADDED = ["gpt_oss", "bloom", "nemotron", "gemma2", "recurrent_gemma"]
"""Attention with sinks, ALiBi or a cap, layers that do not hand on what they are given, and recurrent ones."""
REFUSED = ["minicpm3", "bert"]
"""They scale what goes into their output layer, or have weights of their own before it."""
NOT_CAUSAL = ["bert-generation", "roberta", "xlm"]
"""Unless their configuration says that they are decoders."""
PARTLY = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "olmo2", "qwen2_moe", "qwen3_moe"]
"""Their last layer is attention and then a feed-forward part, which is computed where its output is read."""
DOCUMENTS = [Document(list(range(3, 12))), Document([5, 6, 7], [[7, 8, 9], [20, 21]]), Document([4, 9, 8, 7])]


def config_of(kind: str) -> Any:
    own = {"is_decoder": True} if kind == "bert" else {}
    return AutoConfig.for_model(kind, **(GPT2 if kind == "gpt2" else SIZES | EXPERTS | own))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def make(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return model


def plain_logprobs(folder: Path) -> torch.Tensor:
    """Of the documents' targets, a row at a time and without anything of ours."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for document in DOCUMENTS:
        first = len(document.prefix) if document.branches else 1
        for row in [[*document.prefix, *branch] for branch in document.branches] or [list(document.prefix)]:
            logprobs = model(torch.tensor([row])).logits[0].log_softmax(-1)
            found += [logprobs[place - 1, row[place]] for place in range(first, len(row))]
    return torch.stack(found)


@pytest.mark.parametrize("kind", PACKED + PADDED)
def test_a_model_that_the_plan_lets_through_is_trained_and_computes_what_transformers_does(kind: str, folder: Path):
    make(kind, folder)
    check_training(folder, is_reward_model=False)
    policy = Policy(load_causal_lm(folder).eval())
    assert policy.packed == (kind in PACKED)
    logprobs = policy(pack(DOCUMENTS)).logprobs
    torch.testing.assert_close(logprobs, plain_logprobs(folder), atol=1e-5, rtol=1e-4)
    logprobs.sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in policy.parameters())


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_training_refuses_is_refused_by_the_plan_in_the_same_words(kind: str, folder: Path):
    make(kind, folder)
    told = []
    for look in (lambda: check_training(folder, is_reward_model=False), lambda: Policy(load_causal_lm(folder))):
        with pytest.raises(ConfigError, match="makes its logits in another way than by its output layer, a") as caught:
            look()
        told.append(str(caught.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("kind", NOT_CAUSAL)
def test_a_model_whose_tokens_see_later_ones_is_refused_by_the_plan(kind: str, folder: Path):
    make(kind, folder)
    told = []
    for look in (lambda: check_training(folder, is_reward_model=False), lambda: Policy(load_causal_lm(folder))):
        with pytest.raises(
            ConfigError, match=r"is not causal: its tokens see those behind them, as .*; choose another"
        ) as caught:
            look()
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_a_model_whose_tokens_see_later_ones_is_refused_whatever_its_configuration_says(folder: Path):
    """Padding would change its rows."""
    sizes = {"vocab_size": 50, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("xlnet", **sizes))
    with pytest.raises(ConfigError, match="XLNetLMHeadModel is not causal: its tokens see those behind them"):
        Policy(model.train())
    assert model.training


@pytest.mark.parametrize("kind", ["granite", "mamba"])
def test_a_reward_model_of_what_transformers_has_no_classifier_of_is_refused(kind: str, folder: Path):
    make(kind, folder)
    told = []
    for look in (
        lambda: check_training(folder, is_reward_model=True),
        lambda: load_reward_model(folder, new_head=True),
    ):
        with pytest.raises(
            ConfigError, match=f"has no sequence classifier of a '{kind}', .*; choose another"
        ) as caught:
            look()
        told.append(str(caught.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "gpt_neox", "gemma2"])
def test_a_reward_model_is_judged_alike(kind: str, folder: Path):
    config = config_of(kind)
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    check_training(folder, is_reward_model=True)
    RewardModel(load_reward_model(folder))


def read_of(policy: Policy, seen: list[int] | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities after long prompts, and the gradients of their sum; ``seen`` gets how many tokens pass through
    the last layer's feed-forward part."""
    batches = [
        pack([Document(list(range(3, 23)), [[7, 8, 9], [20, 21]])]),
        pack([Document(list(range(9, 40)), [[7], [2, 21]])]),
    ]
    if seen is not None:
        part = policy.model.base_model.layers[-1].mlp
        part.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    # Backward passes come after both forward ones: with checkpointing each computes its own layers again.
    logprobs = [policy(batch).logprobs for batch in batches]
    for found in logprobs:
        found.sum().backward()
    named = {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}
    return torch.cat(logprobs).detach(), named


@pytest.mark.parametrize("kind", PARTLY)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_last_layer_is_computed_where_it_is_read_with_the_gradients_of_the_whole(
    kind: str, checkpointed: bool, folder: Path
):
    make(kind, folder)
    whole = read_of(Policy(load_causal_lm(folder).eval(), packed=False))
    model = load_causal_lm(folder).eval()
    Policy(model)  # more than one may be made of a model
    policy = Policy(copy.deepcopy(model))
    if checkpointed:
        checkpoint_layers(policy.model)
    seen: list[int] = []
    found = read_of(policy, seen)
    assert seen[:2] == [4, 2] and set(seen) == {4, 2}, "of 25 and 34 tokens those that predict a target"
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
def test_a_step_of_a_model_that_changes_its_logits_is_that_of_plain_torch(
    kind: str, folder: Path, tiny_model: Path, tmp_path: Path
):
    tokenizer = load_tokenizer(tiny_model)
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": len(tokenizer), "final_logit_softcapping": 2.0, "logits_scaling": 3.0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows, place = sft_rows(8), update_context(tmp_path)
    settings = sft_settings(budget=BudgetConfig(max_steps=1), max_tokens_per_microbatch=24)
    dataset = place.objects.put_bytes(to_jsonl(rows))
    checkpoint, _ = sft_update(place.objects.put_tree(folder), dataset, settings, place)

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    examples, _ = tokenize_sft(tokenizer, rows, loss_on=settings.loss_on, max_seq_len=64)
    losses = []
    for example in examples:
        ids, trained = torch.tensor([example.token_ids]), torch.tensor(example.trained[1:])
        losses.append(
            torch.nn.functional.cross_entropy(plain(ids).logits[0, :-1], ids[0, 1:], reduction="none")[trained]
        )
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in plain.parameters()]).norm()
    [row] = rows_of(checkpoint, place.objects)
    assert (row["loss"], row["grad_norm"]) == pytest.approx((loss.item(), norm.item()), rel=1e-5)

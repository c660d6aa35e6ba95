"""Packed forward passes: what a plain pass over each sequence gives, whatever stands beside it."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)
from updates import sft_settings

from rollout_core.algorithms.dataset_updates import check_sequence_length
from rollout_core.algorithms.output_layer import target_logprobs, weighted_nll
from rollout_core.algorithms.policy import Policy, Teacher
from rollout_core.algorithms.supervised import RewardModel, score_sequences
from rollout_core.base.errors import ConfigError
from rollout_core.config import Distillation, ModelSource
from rollout_core.data.packing import Document, pack, pack_completions, unpacked_rows
from rollout_core.models.architecture import LogitTransform

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SFT_SETTINGS = sft_settings()
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, **HEADS),
    "llama": LlamaConfig(**SIZES, **HEADS),
    "mistral, window of 6": MistralConfig(**SIZES, **HEADS, sliding_window=6),
    # One document has rows of 12 and of 16 tokens behind a prefix, so rows of both kinds of factors share tokens.
    "phi3, LongRoPE beyond 13": Phi3Config(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        max_position_embeddings=64,
        original_max_position_embeddings=13,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 13,
            "short_factor": [1.0, 1.2, 1.5, 2.0],
            "long_factor": [1.5, 3.0, 6.0, 9.0],
        },
    ),
    "deepseek_v3, values of another width": DeepseekV3Config(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        first_k_dense_replace=2,
    ),
    # Logits of these tiny models go beyond 10.
    "gemma2, capped logits": Gemma2Config(
        **SIZES, **HEADS, final_logit_softcapping=3.0, attn_logit_softcapping=0.5, sliding_window=6
    ),
    "gemma3, capped logits": Gemma3TextConfig(**SIZES, **HEADS, final_logit_softcapping=3.0, sliding_window=6),
    "granite, divided logits": GraniteConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, logits_scaling=6.0),
    "cohere, scaled logits": CohereConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, logit_scale=0.3),
    "gpt2": GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
}


def make_model(kind: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(50) for _ in range(count)]


def documents(seed: int = 0) -> list[Document]:
    rng = random.Random(seed)
    return [
        Document(draw(rng, 9)),
        Document(draw(rng, 9)),
        Document(draw(rng, 7), [draw(rng, 5), draw(rng, 9), draw(rng, 9)]),
        Document(draw(rng, 4), trained=[True, False, True, True]),
        Document(draw(rng, 1), [draw(rng, 3)]),
        Document(draw(rng, 1), [draw(rng, 1), draw(rng, 2)]),
    ]


def plain_rows(model, items: list[Document]) -> list[torch.Tensor]:
    """One tensor a row: the logits of its targets, each row alone through the model as transformers has it."""
    rows = []
    for item in items:
        for branch in item.branches or [None]:
            ids = torch.tensor([[*item.prefix, *(branch or ())]])
            logits = model(input_ids=ids).logits[0]
            if branch is None:
                chosen = [t for t in range(1, ids.shape[1]) if item.trained is None or item.trained[t]]
            else:
                chosen = list(range(len(item.prefix), ids.shape[1]))
            rows.append(logits[torch.tensor(chosen) - 1])
    return rows


def plain_logprobs(model, items: list[Document]) -> list[torch.Tensor]:
    """One tensor a row: log-probabilities of its targets."""
    targets = torch.split(pack(items).targets, [len(row) for row in plain_rows(model, items)])
    rows = [torch.log_softmax(row, -1) for row in plain_rows(model, items)]
    return [row.gather(1, chosen[:, None]).squeeze(1) for row, chosen in zip(rows, targets, strict=True)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logprobs_and_gradients_equal_a_plain_pass_over_each_row(kind, packed):
    plain = make_model(kind)
    policy = Policy(copy.deepcopy(plain), packed=packed)
    assert policy.packed is (packed and not kind.startswith("gemma2"))
    batch = pack(documents())
    expected = plain_logprobs(plain, documents())
    found = policy(batch).logprobs
    assert torch.allclose(found, torch.cat(expected), atol=1e-5)
    padded = batch.padded(found)
    for row, values in enumerate(expected):
        assert torch.allclose(padded[row, : len(values)], values, atol=1e-5)
        assert batch.mask[row].sum() == len(values) and (padded[row, len(values) :] == 0).all()
    assert torch.allclose(batch.row_sums(found), torch.stack([row.sum() for row in expected]), atol=1e-4)
    weights = torch.rand(batch.num_targets)
    (weights * found).sum().backward()
    (weights * torch.cat(expected)).sum().backward()
    for (name, ours), theirs in zip(policy.model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4), name


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if "logits" in kind])
def test_what_a_model_makes_of_its_output_layers_product_is_in_every_loss(kind):
    """Loss and gradient are those of plain torch, from the logits that the model itself gives."""
    plain, teacher = make_model(kind), make_model(kind)
    for parameter in teacher.parameters():
        parameter.data.mul_(0.9)
    items, batch = documents(), pack(documents())
    weights = torch.rand(batch.num_targets)
    rows = torch.cat(plain_rows(plain, items))
    others = torch.cat(plain_rows(teacher, items)).detach()
    logprobs, targets = torch.log_softmax(rows, -1), batch.targets[:, None]
    chosen = logprobs.gather(1, targets).squeeze(1)
    cold = torch.log_softmax(rows / 0.7, -1)
    expected = {
        "summed": -(weights * chosen).sum(),
        "by token": (weights * chosen).sum(),
        "at a temperature": (weights * cold.gather(1, targets).squeeze(1)).sum(),
        "entropy": -(weights[:, None] * cold.exp() * cold).sum(),
        "distilled": (weights[:, None] * others.softmax(-1) * (others.log_softmax(-1) - logprobs)).sum(),
    }
    policy = Policy(copy.deepcopy(plain))
    taught = Teacher(
        teacher, Distillation(teacher=ModelSource(uri="x"), beta=0.0), SFT_SETTINGS, torch.device("cpu")
    ).target(batch, weights)
    losses = {
        "summed": lambda: policy(batch, nll_weights=weights).loss,
        "by token": lambda: (weights * policy(batch).logprobs).sum(),
        "at a temperature": lambda: (weights * policy(batch, temperature=0.7).logprobs).sum(),
        "entropy": lambda: (weights * policy(batch, temperature=0.7, entropy=True).entropy).sum(),
        "distilled": lambda: policy(batch, distill=taught).loss,
    }
    for name, loss in losses.items():
        own = torch.autograd.grad(found := loss(), list(policy.model.parameters()))
        theirs = torch.autograd.grad(expected[name], list(plain.parameters()), retain_graph=True)
        assert found.item() == pytest.approx(expected[name].item(), rel=1e-5, abs=1e-6), name
        norms = [float(torch.stack([grad.norm() for grad in grads]).norm()) for grads in (own, theirs)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5, abs=1e-6), name
        for mine, other in zip(own, theirs, strict=True):
            assert torch.allclose(mine, other, atol=1e-5, rtol=1e-4), name


def test_the_model_is_saved_as_it_came(tmp_path, tiny_model):
    from rollout_core.models.pretrained import load_causal_lm

    load_causal_lm(tiny_model).save_pretrained(tmp_path / "plain")
    model = load_causal_lm(tiny_model)
    assert Policy(model).packed
    model.save_pretrained(tmp_path / "packed")
    for path in (tmp_path / "plain").iterdir():
        assert path.read_bytes() == (tmp_path / "packed" / path.name).read_bytes()


@given(order=st.permutations(range(6)))
@settings(max_examples=10, deadline=None)
def test_neighbours_and_order_never_change_a_row(order):
    policy = Policy(make_model("qwen2"))
    items = documents()
    alone = [pack([item]) for item in items]
    with torch.no_grad():
        expected = [policy(batch).logprobs for batch in alone]
        found = policy(pack([items[number] for number in order])).logprobs
    assert torch.allclose(found, torch.cat([expected[number] for number in order]), atol=1e-5)


def test_gradient_checkpointing_changes_nothing():
    plain = make_model("qwen2").train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable()
    grads = []
    for model in (plain, checkpointed):
        Policy(model)(pack(documents())).logprobs.sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*grads, strict=True))


def test_the_layout_by_hand():
    batch = pack([Document([1, 2, 3], [[4, 5], [6]]), Document([7, 8], trained=[True, True])])
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 0, 1]
    assert batch.targets.tolist() == [4, 5, 6, 8]
    assert batch.predictors.tolist() == [2, 3, 2, 6]
    assert batch.rows.tolist() == [0, 0, 1, 2]
    assert batch.ends.tolist() == [4, 5, 7]
    assert batch.padded(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [[1, 2], [3, 0], [4, 0]]
    assert unpacked_rows(batch.layout) == [[0, 1, 2, 3, 4], [0, 1, 2, 5], [6, 7]]
    assert (batch.num_tokens, batch.num_targets, batch.num_rows, batch.width) == (8, 4, 3, 2)


def test_neighbours_with_one_prompt_share_it():
    shared = pack_completions([[1, 2], [1, 2], [3], [1, 2]], [[4], [5, 6], [7], [8]])
    assert shared.input_ids.tolist() == [1, 2, 4, 5, 6, 3, 7, 1, 2, 8]
    assert shared.num_rows == 4


@pytest.mark.parametrize("document", [Document([]), Document([1], [[2], []])])
def test_an_empty_sequence_is_refused(document):
    with pytest.raises(ConfigError, match="document 0 of a batch has an empty prompt or completion"):
        pack([document])


# The output layer


@pytest.fixture(params=["whole", "in chunks, kept", "in chunks, made anew"])
def chunked(request, monkeypatch):
    from rollout_core.algorithms import output_layer

    if request.param != "whole":
        monkeypatch.setattr(output_layer, "CHUNK_ELEMENTS", 21)
    if request.param == "in chunks, made anew":
        monkeypatch.setattr(output_layer, "KEPT_ELEMENTS", 0)


def head_inputs(bias: bool) -> tuple:
    torch.manual_seed(1)
    options = {"dtype": torch.float64, "requires_grad": True}
    hidden, weight = torch.randn(7, 3, **options), torch.randn(5, 3, **options)
    return hidden, weight, torch.randn(5, **options) if bias else None, torch.randint(0, 5, (7,))


TRANSFORMS = [LogitTransform(), LogitTransform(scale=0.3), LogitTransform(cap=1.5)]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_target_logprobs_and_entropy_against_torch_and_by_gradcheck(chunked, bias, temperature, transform):
    hidden, weight, offset, targets = head_inputs(bias)
    options = {"transform": transform, "temperature": temperature, "entropy": True}
    found = target_logprobs(hidden, weight, offset, targets, **options)
    logits = transformed(torch.nn.functional.linear(hidden, weight, offset), transform) / temperature
    expected = torch.distributions.Categorical(logits=logits)
    assert torch.allclose(found.logprobs, expected.log_prob(targets), atol=1e-12)
    assert torch.allclose(found.entropy, expected.entropy(), atol=1e-12)
    assert found.is_best.tolist() == (logits.argmax(-1) == targets).tolist()
    inputs = [item for item in (hidden, weight, offset) if item is not None]

    def both(*given):
        out = target_logprobs(given[0], given[1], given[2] if bias else None, targets, **options)
        return out.logprobs, out.entropy

    assert torch.autograd.gradcheck(both, inputs)


def transformed(product: torch.Tensor, transform: LogitTransform) -> torch.Tensor:
    return product * transform.scale if transform.cap is None else transform.cap * torch.tanh(product / transform.cap)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_weighted_nll_is_minus_the_weighted_logprobs(chunked, bias, transform):
    hidden, weight, offset, targets = head_inputs(bias)
    weights = torch.rand(7, dtype=torch.float64)
    loss, is_best = weighted_nll(hidden, weight, offset, targets, weights, transform=transform)
    found = target_logprobs(hidden, weight, offset, targets, transform=transform)
    assert torch.allclose(loss, -(weights * found.logprobs).sum(), atol=1e-12)
    assert is_best.tolist() == found.is_best.tolist()
    inputs = [item for item in (hidden, weight, offset) if item is not None]

    def nll(*given):
        return weighted_nll(given[0], given[1], given[2] if bias else None, targets, weights, transform=transform)[0]

    assert torch.autograd.gradcheck(nll, inputs)


class Products(TorchDispatchMode):
    """Counts products of matrices inside the block."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["logprobs", "nll"])
def test_a_frozen_output_layer_costs_no_product_for_its_gradient_and_changes_no_other(chunked, bias, kind):
    hidden, weight, offset, targets = head_inputs(bias)
    weights = torch.rand(7, dtype=torch.float64)

    def gradient_and_products() -> tuple[torch.Tensor, int]:
        hidden.grad = None
        with Products() as products:
            if kind == "nll":
                weighted_nll(hidden, weight, offset, targets, weights)[0].backward()
            else:
                (weights * target_logprobs(hidden, weight, offset, targets).logprobs).sum().backward()
        assert hidden.grad is not None
        return hidden.grad, products.count

    trained, of_trained = gradient_and_products()
    assert weight.grad is not None
    weight.requires_grad_(False).grad = None
    if offset is not None:
        offset.requires_grad_(False).grad = None
    frozen, of_frozen = gradient_and_products()
    assert torch.equal(frozen, trained)
    assert weight.grad is None and of_frozen < of_trained


def test_large_logits_keep_their_last_digits():
    hidden = torch.tensor([[1000.0]])
    weight = torch.tensor([[1.0], [1.001], [0.5]])
    found = target_logprobs(hidden, weight, None, torch.tensor([0]))
    expected = torch.log_softmax((hidden.double() @ weight.double().T), -1)[0, 0]
    assert float(found.logprobs) == pytest.approx(float(expected), abs=1e-4)


def test_rows_on_either_side_of_long_rope_have_in_company_what_they_have_alone():
    """So a step's gradient is the same however it is cut."""
    kind = "phi3, LongRoPE beyond 13"
    policy = Policy(make_model(kind))
    items = [*documents(), Document(list(range(13))), Document(list(range(14)))]
    with torch.no_grad():
        alone = [policy(pack([item])).logprobs for item in items]
        together = policy(pack(items)).logprobs
        pairs = [policy(pack([items[number] for number in pair])).logprobs for pair in ((0, 7), (6, 7), (2, 0))]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)
    for found, pair in zip(pairs, ((0, 7), (6, 7), (2, 0)), strict=True):
        assert torch.allclose(found, torch.cat([alone[number] for number in pair]), atol=1e-5)
    # The two sets of factors are not the same thing.
    plain = make_model(kind)
    with torch.no_grad():
        in_company = plain(input_ids=torch.tensor([[*range(13), 0], [*range(14)]])).logits[0, :13]
        by_itself = plain(input_ids=torch.tensor([[*range(13)]])).logits[0]
    assert not torch.allclose(in_company, by_itself, atol=1e-2)


@pytest.mark.parametrize("packed", [True, False])
def test_rows_of_dynamic_ntk_have_in_company_what_they_have_alone(packed):
    """Its frequencies change beyond the model's positions alone, and longer rows are refused."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **HEADS, max_position_embeddings=20, rope_parameters=rope)
    policy = Policy(AutoModelForCausalLM.from_config(config).eval(), packed=packed)
    items = [*documents(), Document(list(range(3))), Document(list(range(20)))]
    with torch.no_grad():
        together, alone = policy(pack(items)).logprobs, [policy(pack([item])).logprobs for item in items]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)
    check_sequence_length(policy.model, 20)
    with pytest.raises(ConfigError, match="the longest row has 21 tokens, the model has 20 positions"):
        check_sequence_length(policy.model, 21)


def test_reward_models_with_long_rope_score_a_row_as_if_it_were_alone():
    config = copy.deepcopy(CONFIGS["phi3, LongRoPE beyond 13"])
    config.num_labels = 1
    torch.manual_seed(0)
    model = RewardModel(AutoModelForSequenceClassification.from_config(config).eval())
    sequences = [list(range(1, 1 + length)) for length in (5, 13, 14, 20)]
    alone = [score_sequences(model, [sequence], device=torch.device("cpu"))[0] for sequence in sequences]
    assert score_sequences(model, sequences, device=torch.device("cpu")) == pytest.approx(alone, abs=1e-5)

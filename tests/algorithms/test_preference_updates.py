"""Preference updates from content ids to content ids: resumed bit for bit, references kept, checkpoints of use."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from updates import COMMON, KINDS, preference_data, preference_update as update, rows_of, save_state, update_context

from rollout_core.algorithms import dataset_updates, preference as reference_module
from rollout_core.algorithms.dataset_updates import _computed_otherwise, preference_update
from rollout_core.algorithms.policy import Policy
from rollout_core.algorithms.preference import reference_logprobs
from rollout_core.algorithms.supervised import load_reward_model, set_padding
from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config import AnyPairSettings, DPOSettings, TrainDPOConfig, parse_config
from rollout_core.config.rewards import CompositeReward, ExpressionReward, ModelReward, WeightedReward
from rollout_core.data.packing import Document
from rollout_core.models.pretrained import load_causal_lm, load_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Checkpoint
from rollout_core.rewards.loading import load_reward
from rollout_core.rewards.scoring import RewardInput, score

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_training_raises_margins_and_lowers_the_loss(kind, tiny_model, tmp_path):
    place = update_context(tmp_path)
    rows = rows_of(update(kind, tiny_model, place, budget={"max_steps": 12}), place.objects)
    losses, margins = ([row[name] for row in rows] for name in ("loss", "rewards/margins"))
    assert sum(losses[-4:]) < sum(losses[:4])
    assert sum(margins[-4:]) > sum(margins[:4])


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_losses_without_a_reference_learn_and_load_none(loss, tiny_model, tmp_path):
    """The content id of the reference names nothing that could be loaded."""
    place = update_context(tmp_path)
    model, dataset = place.objects.put_tree(tiny_model), place.objects.put_bytes(preference_data("dpo"))
    document = {**COMMON, "budget": {"max_steps": 12}, "loss": loss, "beta": 2.0 if loss == "simpo" else 0.5}
    settings = TypeAdapter(AnyPairSettings).validate_python(document)
    checkpoint, _ = preference_update(model, hash_bytes(b"nothing"), dataset, settings, place)
    rows = rows_of(checkpoint, place.objects)
    losses, margins = ([row[name] for row in rows] for name in ("loss", "rewards/margins"))
    assert sum(losses[-4:]) < sum(losses[:4]) and sum(margins[-4:]) > sum(margins[:4])
    assert ("nll_loss" in rows[0]) == (loss == "orpo")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "simpo"}, "algorithm.beta: required, but not given"),
        ({"loss": "orpo", "label_smoothing": 0.1}, r'kind = "orpo" has no use for label_smoothing \(of dpo\)'),
        ({"kind": "simpo", "beta": 2.0, "label_smoothing": 0.1}, r"has no use for label_smoothing \(of dpo\)"),
        ({"gamma": 1.0}, r'kind = "dpo" has no use for gamma \(of simpo\)'),
        (
            {"loss": "orpo", "reference": {"uri": "x"}},
            "a reference is given, but this loss compares",
        ),
    ],
)
def test_keys_of_another_loss_of_pairs_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"algorithm": {"base_model": {"uri": "m"}, **COMMON, **changes}}, TrainDPOConfig)


def test_the_reference_is_read_once_for_all_epochs_runs_and_algorithms(tiny_model, tmp_path, monkeypatch):
    place = update_context(tmp_path)
    update("dpo", tiny_model, place)

    from rollout_core.algorithms import dataset_updates

    loaded = []

    def load(folder: Path, *_):
        loaded.append(folder)
        return load_causal_lm(folder)

    monkeypatch.setattr(dataset_updates, "load_to_train", load)
    update("ipo", tiny_model, update_context(tmp_path, key=hash_bytes(b"other"), run_id="other"))
    assert len(loaded) == 1, "the policy alone"


def documents(count: int) -> list[Document]:
    rng = random.Random(0)

    def some(length: int) -> list[int]:
        return [rng.randrange(2, 250) for _ in range(length)]

    return [Document(some(rng.randrange(1, 30)), (some(3), some(rng.randrange(1, 9)))) for _ in range(count)]


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_reference_with_rounded_weights_is_kept_apart_and_the_policy_begins_as_its_reference(
    kind, tiny_model, tmp_path
):
    lora = {"r": 4, "alpha": 8}
    forms = {
        "adapters": {"lora": lora, "precision": "bfloat16"},
        "four bits": {"lora": {**lora, "quantization": "nf4"}, "precision": "bfloat16"},
        "rounded": {"lora": lora, "weights": "bfloat16", "precision": "bfloat16"},
        "rounded, all trained": {"weights": "bfloat16", "precision": "bfloat16"},
    }
    losses = {}
    for name, changes in forms.items():  # over one store, so that each could take what another left
        place = replace(update_context(tmp_path), key=hash_bytes(name.encode()))
        rows = rows_of(update(kind, tiny_model, place, budget={"max_steps": 2}, **changes), place.objects)
        losses[name] = rows[1]["loss"]
        assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-3), name
    assert len(set(losses.values())) == len(losses)


def test_reference_logprobs_are_kept_chunk_by_chunk_and_made_again_when_damaged(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(reference_module, "CHUNK_DOCUMENTS", 4)
    monkeypatch.setattr(reference_module, "BATCH_TOKENS", 60)
    objects, model, items = ObjectStore.from_url(str(tmp_path)), hash_bytes(b"model"), documents(11)
    loads = []

    def load() -> Policy:
        loads.append(1)
        return Policy(load_causal_lm(tiny_model).eval())

    def logprobs(some, folder=objects):
        return reference_logprobs(folder, model, some, load, precision="no/cpu", autocast=torch.no_grad, device=CPU)

    first = logprobs(items)
    plain = load_causal_lm(tiny_model).eval()
    for number, (prompt, answer) in enumerate((d.prefix, branch) for d in items for branch in d.branches):
        ids = torch.tensor([[*prompt, *answer]])
        logps = torch.log_softmax(plain(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])
        assert float(first[number]) == pytest.approx(logps[len(prompt) - 1 :].sum().item(), abs=1e-3)
    assert torch.equal(logprobs(items), first) and len(loads) == 1
    assert torch.equal(logprobs([*items[:8], documents(30)[-1]])[:16], first[:16]) and len(loads) == 2
    refs = list(objects.list_refs("reference-logprobs"))
    assert len(refs) == 4
    for blob in list(dict(objects.blobs())):
        objects.delete(blob)
    assert torch.equal(logprobs(items), first) and len(loads) == 3


def test_reference_logprobs_of_portable_arithmetic_and_of_other_threads_are_kept_apart(monkeypatch):
    fields = {"dataset": {"path": "x"}, "optimizer": {"lr": 1e-3}}
    settings = DPOSettings.model_validate({"kind": "dpo", **fields})
    assert _computed_otherwise(settings, None) == []
    assert _computed_otherwise(settings, None, 2) == ["threads 2"]
    monkeypatch.setattr(dataset_updates, "is_portable_here", lambda: True)
    assert _computed_otherwise(settings, None, 1) == ["portable", "threads 1"]


def test_a_reference_that_is_not_finite_is_fatal(tiny_model, tmp_path):
    broken = load_causal_lm(tiny_model).eval()

    def load() -> Policy:
        policy = Policy(broken)
        torch.nn.init.constant_(broken.get_input_embeddings().weight, float("nan"))
        return policy

    with pytest.raises(Fatal, match="not finite"):
        reference_logprobs(
            ObjectStore.from_url(str(tmp_path)), hash_bytes(b"m"), documents(2), load,
            precision="no/cpu", autocast=torch.no_grad, device=CPU,
        )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory) -> tuple[Checkpoint, Path]:
    """A reward model and its folder."""
    place = update_context(tmp_path_factory.mktemp("reward"))
    checkpoint = update("rm", tiny_model, place, budget={"max_steps": 12})
    return checkpoint, place.model(checkpoint.model)


def test_the_reward_model_loads_as_a_sequence_classifier_and_scores_the_same(trained, tiny_model):
    _, folder = trained
    plain = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    tokenizer = load_tokenizer(folder)
    texts = [("sort 3 1 2 =", " 1 2 3"), ("sort 9 8 1 0 =", " 0 1 8 9"), ("sort 4 4 =", " 4 4")]
    ids = [
        (tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id])
        for prompt, answer in texts
    ]
    longest = max(len(prompt) + len(answer) for prompt, answer in ids)
    padded = [[*p, *a, *[tokenizer.pad_token_id] * (longest - len(p) - len(a))] for p, a in ids]
    expected = plain(input_ids=torch.tensor(padded)).logits[:, 0].tolist()

    samples = [
        RewardInput(prompt, answer, num_tokens=len(ids_a), prompt_token_ids=ids_p, token_ids=ids_a)
        for (prompt, answer), (ids_p, ids_a) in zip(texts, ids, strict=True)
    ]
    spec = ModelReward(model=str(folder))
    assert score(load_reward(spec), samples) == pytest.approx(expected, abs=1e-5)
    doubled = CompositeReward(parts=(WeightedReward(weight=2.0, reward=spec), WeightedReward(weight=-1.0, reward=spec)))
    assert score(load_reward(doubled), samples) == pytest.approx(expected, abs=1e-5)
    shaped = ExpressionReward(expression="max(quality, 0) - 0.5 * num_tokens", rewards={"quality": spec})
    assert score(load_reward(shaped), samples) == pytest.approx(
        [max(value, 0) - 0.5 * sample.num_tokens for value, sample in zip(expected, samples, strict=True)], abs=1e-5
    )
    with pytest.raises(Fatal, match="a completion without any"):
        score(load_reward(spec), [RewardInput("sort 1 =", "1")])
    with pytest.raises(Fatal, match=r"no reward model: it lacks score\.weight"):
        score(load_reward(ModelReward(model=str(tiny_model))), samples)


def test_training_goes_on_from_the_head_of_a_reward_model(trained, tiny_model, tmp_path):
    _, folder = trained
    kept = load_reward_model(folder, new_head=True).score.weight
    assert torch.equal(kept, load_reward_model(folder).score.weight)
    assert not torch.equal(kept, load_reward_model(tiny_model, new_head=True).score.weight)
    assert update("rm", folder, update_context(tmp_path), budget={"max_steps": 1}).step == 1


def test_a_policy_from_preferences_is_a_usable_model(tiny_model, tmp_path):
    place = update_context(tmp_path)
    checkpoint = update("kto", tiny_model, place)
    AutoModelForCausalLM.from_pretrained(place.model(checkpoint.model))
    assert load_tokenizer(place.model(checkpoint.model)).eos_token_id is not None


def test_padding_with_eos_is_left_unnamed(tiny_model):
    model, tokenizer = load_reward_model(tiny_model, new_head=True), load_tokenizer(tiny_model)
    set_padding(model, tokenizer)
    assert model.config.pad_token_id == tokenizer.pad_token_id
    tokenizer.pad_token = tokenizer.eos_token
    set_padding(model, tokenizer)
    assert model.config.pad_token_id is None


def test_a_model_of_another_architecture_or_vocabulary_is_no_reference(tiny_model, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    place = update_context(tmp_path)
    other = tmp_path / "llama"
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(other)
    load_tokenizer(tiny_model).save_pretrained(other)
    settings = DPOSettings.model_validate(COMMON)
    model, dataset = place.objects.put_tree(tiny_model), place.objects.put_bytes(preference_data("dpo"))
    with pytest.raises(ConfigError, match="is a 'llama', the model a 'qwen2'"):
        preference_update(model, place.objects.put_tree(other), dataset, settings, place)

    words = tmp_path / "words"
    load_causal_lm(tiny_model).save_pretrained(words)
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(words)
    with pytest.raises(ConfigError, match="has another vocabulary"):
        preference_update(model, ContentId(place.objects.put_tree(words)), dataset, settings, place)


def test_a_train_state_of_a_reward_model_is_none_of_a_policy(trained, tiny_model, tmp_path):
    from rollout_core.algorithms.loop import build_optimizer
    from rollout_core.algorithms.state import TrainState, load_state
    from rollout_core.config import OptimizerConfig

    config, (_, folder) = OptimizerConfig(lr=1e-3), trained
    rewarding, policy = load_reward_model(folder), load_causal_lm(tiny_model)
    states = [TrainState(model, build_optimizer(config, list(model.parameters()))) for model in (rewarding, policy)]
    (tmp_path / "state").mkdir()
    save_state(states[0], tmp_path / "state", tokenizer_from=tiny_model)
    with pytest.raises(ConfigError, match="is of a Qwen2ForSequenceClassification, this run trains a Qwen2ForCausalLM"):
        load_state(states[1], tmp_path / "state")

"""Every kind of bad input that a training run can be given: one clear line, before anything is trained."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast, T5Config

from rollout_core.base.errors import ConfigError
from rollout_core.config import CONFIG_KINDS, apply_overrides, parse_config
from rollout_core.config.rewards import FunctionReward
from rollout_core.models.facts import ModelSize
from rollout_core.plans import memory_and_disk as resources
from rollout_core.plans.learner_plan import plan_training
from rollout_core.plans.memory_and_disk import Training, estimate_memory, readable, state_bytes
from rollout_core.rewards.loading import load_reward
from rollout_core.rewards.scoring import RewardInput, score
from rollout_core.store.reachable import plain_connections

PLANS: dict[str, Any] = dict.fromkeys(("sft", "ppo", "grpo", "rm", "dpo", "ipo", "kto"), plan_training)
PAIR = {"prompt": "sort 2 1 =", "chosen": " 1 2", "rejected": " 2 1"}
GOOD = {"prompt": "sort 2 1 =", "completion": " 1 2", "label": True}
BAD = {"prompt": "sort 2 1 =", "completion": " 2 1", "label": False}
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": "sort 2 1 =", "completion": " 1 2"}],
    "ppo": [{"prompt": "sort 2 1 =", "answer": "1 2"}],
    "grpo": [{"prompt": "sort 2 1 =", "answer": "1 2"}],
    "rm": [PAIR],
    "dpo": [PAIR],
    "ipo": [PAIR],
    "kto": [GOOD, BAD],
}


@pytest.fixture(autouse=True)
def work(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, weights_stay_unread: None) -> Path:
    """A folder with a model; whoever loads weights fails the test."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "model")
    return tmp_path


def plan(kind: str, rows: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """Parse and plan. ``changes`` has __ for the dots of a key below ``algorithm``."""
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS[kind]))
    on_policy = kind in ("ppo", "grpo")
    algorithm: dict[str, Any] = {
        "kind": kind,
        "base_model": {"uri": "model"},
        "optimizer": {"lr": 1e-3},
        "prompts" if on_policy else "dataset": {"path": "rows.jsonl"},
    }
    if not on_policy:
        algorithm["sequence"] = {"max_length": 64}
    document: dict[str, Any] = {"algorithm": algorithm}
    if on_policy:
        document["backend"] = {"kind": "transformers"}
    overrides = {f"algorithm.{key.replace('__', '.')}": value for key, value in changes.items()}
    config = parse_config(apply_overrides(document, overrides), CONFIG_KINDS[f"train-{kind}"])
    return PLANS[kind](config, Path.cwd(), plain_connections())


def refusal(kind: str, rows: list[dict[str, Any]] | None = None, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(kind, rows, **changes)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message.removeprefix("config: ").removeprefix("algorithm.")


@pytest.mark.parametrize("kind", PLANS)
def test_what_is_sound_is_planned(kind: str):
    told = plan(kind)["resources"]
    assert list(told) == [f"{kind} memory (estimate)", f"{kind} disk (estimate)"]


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("rate", [0, -1e-3])
def test_a_learning_rate_of_zero_or_below(kind: str, rate: float):
    assert refusal(kind, optimizer__lr=rate) == f"optimizer.lr: Input should be greater than 0; got {rate}"


@pytest.mark.parametrize("kind", ["dpo", "ipo", "kto"])
def test_beta_zero(kind: str):
    assert refusal(kind, beta=0) == "beta: Input should be greater than 0; got 0"


def test_groups_of_one():
    assert refusal("grpo", samples_per_prompt=1).startswith("algorithm: samples_per_prompt is 1, but a")


@pytest.mark.parametrize("kind", ["rm", "dpo", "ipo"])
def test_pairs_without_a_difference(kind: str):
    same = {**PAIR, "rejected": PAIR["chosen"]}
    assert refusal(kind, [PAIR, same]) == (
        "dataset.path: rows.jsonl:2: chosen and rejected are the same; there is nothing to prefer"
    )


@pytest.mark.parametrize("kind", ["rm", "dpo"])
def test_pairs_whose_texts_differ_but_not_their_tokens(kind: str, work: Path):
    tokenizer = word_tokenizer(262)
    tokenizer.save_pretrained(work / "model")
    rows = [{"prompt": "w1", "chosen": "w2 w3", "rejected": "w2  w3"}]
    message = refusal(kind, rows)
    assert message == "dataset.path: rows.jsonl:1: chosen and rejected give the same tokens; there is nothing to prefer"


@pytest.mark.parametrize(
    ("kind", "row", "key"),
    [
        ("sft", {"prompt": "a", "completion": ""}, "completion"),
        ("sft", {"messages": [{"role": "assistant", "content": ""}]}, "an assistant message"),
        ("dpo", {"prompt": "a", "chosen": "", "rejected": "b"}, "chosen"),
        ("rm", {"prompt": "a", "chosen": "b", "rejected": ""}, "rejected"),
        ("kto", {"prompt": "a", "completion": "", "label": True}, "completion"),
    ],
)
def test_empty_completions(kind: str, row: dict[str, Any], key: str):
    assert refusal(kind, [*ROWS[kind], row]).startswith(
        f"dataset.path: rows.jsonl:{len(ROWS[kind]) + 1}: {key} is empty"
    )


@pytest.mark.parametrize("row", [GOOD, BAD])
def test_kto_without_both_kinds(row: dict[str, Any]):
    label = str(row["label"]).lower()
    assert refusal("kto", [row, row]).startswith(f"dataset.path: all 2 rows have label {label}; KTO needs desirable")


@pytest.mark.parametrize("kind", ["sft", "rm", "dpo", "ipo", "kto"])
def test_sequences_longer_than_the_model(kind: str):
    message = refusal(kind, sequence__max_length=300)
    assert message == "sequence.max_length: 300 tokens, but the model has 256 positions"


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_prompts_longer_than_the_model(kind: str):
    message = refusal(kind, [{"prompt": "9" * 250, "answer": "9"}], sampling__max_tokens=20)
    assert message.startswith("prompts.path: prompt 1: ") and "exceed the model's context of 256 tokens" in message


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    words = ["<unk>", "</s>", *(f"w{number}" for number in range(size - 2))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize("kind", PLANS)
def test_a_tokenizer_with_more_words_than_the_model(kind: str, work: Path):
    word_tokenizer(400).save_pretrained(work / "model")
    message = refusal(kind)
    assert message.startswith("base_model: ") and "ids up to 399, the model embeds 262" in message


@pytest.mark.parametrize("kind", ["dpo", "ipo", "kto"])
def test_a_reference_that_reads_other_token_ids(kind: str, work: Path):
    shutil.copytree(work / "model", work / "reference")
    word_tokenizer(262).save_pretrained(work / "reference")
    message = refusal(kind, reference={"uri": "reference"})
    assert message.startswith("reference: the tokenizer of the reference") and "another vocabulary" in message


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_a_reward_model_that_reads_other_token_ids(kind: str, work: Path):
    reward_model(work, work / "reward")
    word_tokenizer(262).save_pretrained(work / "reward")
    message = refusal(kind, reward={"kind": "model", "model": "reward"})
    assert message.startswith("reward: the tokenizer of reward model 'reward' has another vocabulary")


def reward_model(work: Path, folder: Path) -> None:
    shutil.copytree(work / "model", folder)
    config = AutoConfig.from_pretrained(work / "model", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize("kind", ["dpo", "ipo", "kto"])
def test_a_reference_of_another_architecture(kind: str, work: Path):
    shutil.copytree(work / "model", work / "reference")
    LlamaConfig(vocab_size=262, hidden_size=8, num_attention_heads=2).save_pretrained(work / "reference")
    message = refusal(kind, reference={"uri": "reference"})
    assert message.startswith("reference: the reference in ") and "is a 'llama', the model a 'qwen2'" in message


@pytest.mark.parametrize("kind", ["sft", "ppo", "grpo", "dpo", "ipo", "kto"])
def test_a_reward_model_in_place_of_a_language_model(kind: str, work: Path):
    reward_model(work, work / "reward")
    message = refusal(kind, base_model__uri="reward")
    assert message == ("base_model: 'reward' is a reward model, which has no output for tokens; give a language model")
    assert plan("rm", base_model__uri="reward")["rows"] == 1, "a reward model may be trained on"


@pytest.mark.parametrize("kind", PLANS)
def test_a_checkpoint_that_is_no_causal_language_model(kind: str, work: Path):
    T5Config(vocab_size=262).save_pretrained(work / "model")
    assert "a 't5' is not a causal language model" in refusal(kind)


@pytest.mark.parametrize("kind", PLANS)
def test_weights_of_another_shape_than_the_configuration_says(kind: str, work: Path):
    file = work / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] * 2}))
    assert "do not fit its config.json: " in refusal(kind)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_reward_that_is_no_number(value: str, work: Path):
    Path("mine.py").write_text(f"def reward(sample): return float('{value}')\n")
    assert plan("ppo", reward={"kind": "function", "callable": "mine.py:reward"})["training prompts"] == 1
    function = load_reward(FunctionReward(callable="mine.py:reward"), base=work)
    sample = RewardInput(prompt="p", completion="c", extras={}, finish_reason="stop", num_tokens=1, id="first")
    with (
        closing(function),
        pytest.raises(RuntimeError, match=rf"returned {value} for sample 0 \(first\); expected a finite number"),
    ):
        score(function, [sample])


# What the machine has


def test_a_model_that_cannot_fit_is_refused_and_one_that_may_not_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resources, "device_memory", lambda: (2**20, 2**30))
    assert plan("sft")["resources"]["sft memory (estimate)"].endswith("; available 1.0 MiB (may not fit)")
    monkeypatch.setattr(resources, "device_memory", lambda: (2**20, 2**20))
    message = refusal("sft")
    assert message.startswith("sft: weights, gradients and optimizer state take ")
    assert message.endswith("here has 1.0 MiB; choose a smaller model or an optimizer with less state")


def test_a_disk_that_cannot_hold_the_last_state_is_refused(monkeypatch: pytest.MonkeyPatch, work: Path):
    monkeypatch.setattr(resources, "free_disk", lambda folder: 2**20)
    message = refusal("sft")
    assert message.startswith("sft: the model and a training state take ")
    assert f"the object store in {work}/objects has 1.0 MiB free; make room" in message
    monkeypatch.setattr(resources, "free_disk", lambda folder: 5 * 2**19)
    told = plan("sft", budget={"max_steps": 500}, snapshots={"every_steps": 50})["resources"]
    assert told["sft disk (estimate)"].endswith("; free 2.5 MiB (may not fit)")


def test_the_estimate_counts_what_each_way_of_training_holds():
    model = ModelSize(num_parameters=1000, num_layers=2, hidden_size=10, intermediate_size=40)
    plain = Training(tokens_per_pass=100, optimizer="adamw", precision="float32")
    assert state_bytes(model, plain) == 12_000
    assert estimate_memory(model, plain).fixed == 16_000
    assert estimate_memory(model, plain).activations == 100 * 2 * (140 + 160) * 4
    sgd = Training(100, "sgd", "bfloat16", gradient_checkpointing=True, frozen_models=1)
    assert (estimate_memory(model, sgd).fixed, estimate_memory(model, sgd).activations) == (12_000, 7500)
    both = Training(100, "adamw", trained_models=2, frozen_models=1)
    assert estimate_memory(model, both).fixed == 36_000
    assert estimate_memory(model, plain).copy == 12_000 and estimate_memory(model, plain, "cuda").copy == 0
    adapters = Training(100, "adamw", frozen_models=1, trained_parameters=10)
    assert state_bytes(model, adapters) == 4_000 + 3 * 40, "the merged model, adapters, their optimizer state"
    assert estimate_memory(model, adapters).fixed == 2 * 4_000 + 4 * 40
    replicas, shards = (Training(100, "adamw", processes=4, sharded=sharded) for sharded in (False, True))
    assert [estimate_memory(model, four).fixed for four in (replicas, shards)] == [64_000, 16_000], "on one CPU"
    assert [estimate_memory(model, four, "cuda").fixed for four in (replicas, shards)] == [16_000, 4_000], "on each GPU"
    assert estimate_memory(model, shards).activations == 4 * estimate_memory(model, plain).activations
    rounded, moved = (Training(100, "adamw", **{name: True}) for name in ("rounded", "offloaded"))
    assert estimate_memory(model, rounded, "cuda").fixed == 2_000 + 16_000, "beside masters"
    apart = estimate_memory(model, moved, "cuda")
    assert (apart.fixed, apart.host) == (4_000, 16_000) and estimate_memory(model, moved).fixed == 20_000
    adapted = Training(100, "adamw", trained_parameters=10, frozen_models=1, rounded=True)
    assert estimate_memory(model, adapted, "cuda").fixed == 2 * 2_000 + 4 * 40, "frozen weights have no masters"
    cut = Training(100, "adamw", processes=4, sharded=True, offloaded=True)
    assert (estimate_memory(model, cut, "cuda").fixed, estimate_memory(model, cut, "cuda").host) == (4_000, 16_000)
    parts = Training(100, "adamw", precision="float32", processes=4, cut_parameters=800)
    assert (estimate_memory(model, parts).fixed, estimate_memory(model, parts, "cuda").fixed) == (25_600, 6_400)
    assert estimate_memory(model, parts, "cuda").activations == 100 * 2 * (90 + (50 + 160) // 4) * 4, "of all tokens"
    assert [readable(size) for size in (5, 2048, 3 * 2**29)] == ["5 B", "2.0 KiB", "1.5 GiB"]

"""Bad input that can be known before work is one clear ConfigError of the plan, which builds and loads nothing."""

from __future__ import annotations

import importlib
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MiniCPM3Config, MiniCPM3ForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import hash_bytes
from rollout_core.config import CONFIG_KINDS, ModelSource, apply_overrides, parse_config
from rollout_core.models.facts import ModelSize
from rollout_core.models.locating import import_model
from rollout_core.objects import ObjectStore, SnapshotStore
from rollout_core.plans import memory_and_disk as resources
from rollout_core.plans.learner_plan import plan_nightly, plan_training
from rollout_core.plans.memory_and_disk import Need, States, Training
from rollout_core.store.reachable import plain_connections
from tests.plan.planning import CHAT, LONG, PLANS, TEMPLATE, cache_hub_model, document, files, jsonl, plan, refusal
from tests.rewards.judge_server import JudgeServer

SOLUTION = {"kind": "exact_match", "answer_key": "solution"}


def test_a_disk_that_cannot_hold_the_states_of_all_iterations_is_refused(work: Path, monkeypatch: pytest.MonkeyPatch):
    """But not for those that an earlier try of the run has stored, nor where the check is switched off."""
    fact = plan("train-grpo", work)["resources"]["grpo disk (estimate)"]
    assert " training states of " in fact
    config = parse_config(document("train-grpo"), CONFIG_KINDS["train-grpo"])
    monkeypatch.setattr("rollout_core.plans.memory_and_disk.free_disk", lambda folder: 2**20)

    def planned() -> dict[str, Any]:
        return plan_training(config, work, plain_connections())

    with pytest.raises(ConfigError, match=r"grpo: the model and .* training states? take .* 1.0 MiB free; make room"):
        planned()
    monkeypatch.setenv("ROLLOUT_DISK_CHECK", "off")
    assert "free 1.0 MiB (may not fit)" in planned()["resources"]["grpo disk (estimate)"]
    monkeypatch.delenv("ROLLOUT_DISK_CHECK")
    state = work / "state"
    state.mkdir()
    (state / "weights").write_bytes(bytes(2**26))
    snapshots = SnapshotStore(plain_connections().open_objects())
    snapshots.save(state, run_id="one", step=1, algorithm="grpo", meta={"run": config.run.name})
    assert "of which 64.0 MiB are there; free 65.0 MiB" in planned()["resources"]["grpo disk (estimate)"]


def test_a_plan_says_where_epochs_end_training_before_the_steps_that_are_asked_for(work: Path):
    def told(**budget: int) -> str | None:
        return plan("train-sft", work, algorithm__budget=budget).get("budget")

    assert told(epochs=1, max_steps=300) == (
        "epochs = 1 ends training after 1 optimizer steps, before max_steps = 300; leave out epochs for as many steps"
    )
    assert told(epochs=3000, max_steps=300) is told(max_steps=300) is told(epochs=1) is None


@pytest.mark.parametrize("keep", ["all", "last"])
def test_what_earlier_updates_leave_counts_for_the_later_ones(work: Path, monkeypatch: pytest.MonkeyPatch, keep: str):
    """Each update alone would fit; of a run that keeps its last state the models of the others stay."""
    changes = {"sft__budget__max_steps": 1, "ppo__iterations": 1, "run__keep_states": keep}
    sizes: dict[str, int] = {}

    def measured(model, training, folder, states, before):
        alone = resources.state_bytes(model, training) * states.ends + states.models * model.weight_bytes
        sizes["ppo" if sizes else "sft"] = alone
        sizes["model"] = model.weight_bytes
        return []

    with monkeypatch.context() as patched:
        patched.setattr("rollout_core.plans.learner_plan.disk_needs", measured)
        plan("nightly", work, **changes)
    state = sizes["sft"] - sizes["model"]
    left = state if keep == "all" else sizes["model"]  # the state has the model that the next update begins with
    together = sizes["ppo"] + left
    assert together > max(sizes["sft"], sizes["ppo"])
    monkeypatch.setattr(resources, "free_disk", lambda folder: together)
    told = plan("nightly", work, **changes)["resources"]
    beside = state if keep == "all" else sizes["sft"]
    assert f" plus {resources.readable(beside)} of the updates before" in told["ppo disk (estimate)"]
    assert ("(may not fit)" in told["ppo disk (estimate)"]) == (keep == "last")
    monkeypatch.setattr(resources, "free_disk", lambda folder: together - 1)
    refused = refusal("nightly", work, **changes)
    assert refused.startswith("ppo: the model and a training state take ")
    assert f"plus {resources.readable(left)} that the updates before it leave" in refused


@pytest.mark.parametrize("night", ["small", "another"])
@pytest.mark.parametrize("keep", ["all", "last"])
def test_a_run_that_fits_is_not_refused_for_what_is_stored_already(
    work: Path, monkeypatch: pytest.MonkeyPatch, keep: str, night: str
):
    """A night takes all that is free, trains SFT, and is killed. It goes on; and so does one of another name."""
    changes: dict[str, Any] = {"run__name": "small", "run__keep_states": keep}
    changes |= {"sft__budget__max_steps": 1, "ppo__iterations": 1}
    training: dict[str, int] = {}

    def measured(model, asked, folder, states, before):
        training["model"] = model.weight_bytes
        training["ppo" if training.get("sft") else "sft"] = resources.state_bytes(model, asked)
        return []

    with monkeypatch.context() as patched:
        patched.setattr("rollout_core.plans.learner_plan.disk_needs", measured)
        plan("nightly", work, **changes)
    model, sft = training["model"], training["sft"]
    # The model to begin with, what SFT leaves, and the state of PPO; on the way, with "last", that of SFT too.
    needed = model + training["ppo"] + (sft if keep == "all" else model)
    monkeypatch.setattr(resources, "free_disk", lambda folder: needed - 1)
    assert refusal("nightly", work, **changes).startswith("ppo: the model and a training state take ")
    monkeypatch.setattr(resources, "free_disk", lambda folder: needed)
    plan("nightly", work, **changes)
    objects = plain_connections().open_objects()
    import_model(ModelSource(uri="model"), objects, work)
    monkeypatch.setattr(resources, "free_disk", lambda folder: needed - model)
    plan("nightly", work, **changes)  # it was killed before it had stored a state
    state = work / "state"
    state.mkdir()
    (state / "weights").write_bytes(bytes(sft))
    snapshots = SnapshotStore(objects)
    saved = snapshots.save(state, run_id="one", step=1, algorithm="sft", meta={"run": night})
    monkeypatch.setattr(resources, "free_disk", lambda folder: needed - model - sft)
    plan("nightly", work, **changes)
    snapshots.drop_name(saved, "a later run")  # its model is stored yet
    plan("nightly", work, **changes)


def test_states_of_other_runs_and_models_do_not_count_for_more_than_an_update_writes(
    work: Path, monkeypatch: pytest.MonkeyPatch
):
    snapshots = SnapshotStore(plain_connections().open_objects())
    for number in range(9):
        state = work / f"state-{number}"
        state.mkdir()
        (state / "weights").write_text(f"of a small model, {number}")
        snapshots.save(state, run_id=str(number), step=1, algorithm="sft", meta={"run": "another"})
    monkeypatch.setattr(resources, "free_disk", lambda folder: 1000)
    assert refusal("train-sft", work).startswith("sft: the model and a training state take ")


def test_states_that_are_not_stored_are_no_part_of_the_estimate(work: Path):
    def told(every: int, models: str = "each", keep: str = "all") -> str:
        changes = {"algorithm__iterations": 8, "algorithm__snapshots__every_steps": 1000, "run__keep_states": keep}
        changes["algorithm__store_models"] = models
        found = plan("train-grpo", work, **changes, algorithm__state_every=every)["resources"]
        assert ("grpo temporary disk (estimate)" in found) == (every > 1)
        return found["grpo disk (estimate)"]

    assert " for 8 training states of " in told(1) and " and the model;" in told(1)
    assert " for 3 training states of " in told(3) and " and 6 models of " in told(3)
    assert " for 3 training states of " in told(3, "with_states") and " and the model;" in told(3, "with_states")
    assert " for 2 training states of " in told(1, keep="last") and " and the model;" in told(1, keep="last")
    assert " for 2 training states of " in told(3, keep="last") and " and 3 models of " in told(3, keep="last")


def test_states_that_are_not_stored_need_room_for_two_beside_what_is_stored_on_the_same_disk(tmp_path, monkeypatch):
    model = ModelSize(num_parameters=2**20, num_layers=2, hidden_size=10, intermediate_size=40)
    training = Training(tokens_per_pass=100, optimizer="adamw")
    states = States(ends=2, most=3, models=7, held=2)  # of 12 MiB, models of 4 MiB
    store, place = tmp_path / "store", Path(tempfile.gettempdir())

    def needs(stored_mib: int, temporary_mib: int, *, same: bool, folder: Path | None = store) -> list[Need]:
        free = {store: stored_mib * 2**20, place: temporary_mib * 2**20}
        monkeypatch.setattr(resources, "free_disk", free.__getitem__)
        monkeypatch.setattr(resources, "_device", lambda folder: 1 if same else folder)
        return resources.disk_needs(model, training, folder, states)

    def refused(*mib: int, same: bool) -> list[str]:
        return [need.what for need in needs(*mib, same=same) if need.problem]

    assert refused(52, 24, same=False) == refused(76, 76, same=True) == []
    assert refused(52, 23, same=False) == refused(75, 75, same=True) == ["temporary disk"]
    assert refused(51, 24, same=False) == refused(51, 51, same=True) == ["disk"]
    [need] = needs(0, 23, same=True, folder=None)  # a bucket
    assert need.problem is not None and " take 24.0 MiB, but " in need.problem and "TMPDIR" in need.problem
    _, need = needs(80, 80, same=True)
    assert f"24.0 MiB in {place} (TMPDIR) for 2 training states that are not stored, plus 64.0 MiB of" in need.text
    assert "; free 80.0 MiB (may not fit); " in need.text
    assert "within 10 s (ROLLOUT_STOP_SECONDS) where it writes 1.2 MiB a second" in need.text
    monkeypatch.setenv("ROLLOUT_DISK_CHECK", "off")
    assert refused(51, 23, same=False) == []
    states = States(ends=2, most=3)
    assert [need.what for need in needs(52, 0, same=False)] == ["disk"], "where all are stored none is held"


def test_states_by_tokens_and_seconds_are_more_than_steps_tell(work: Path):
    def told(**changes: Any) -> str:
        return plan("train-sft", work, **changes)["resources"]["sft disk (estimate)"]

    steps = {"algorithm__budget__max_steps": 8, "algorithm__snapshots__every_steps": 4, "run__keep_states": "all"}
    assert told(**steps).startswith("up to ")
    asked = {"algorithm__snapshots__every_tokens": 10, "algorithm__snapshots__every_seconds": 60.0}
    found = told(**steps, **asked)
    assert not found.startswith("up to ")
    assert " for 2 training states " in found
    assert "snapshots.every_tokens and snapshots.every_seconds" in found
    each = steps | {"algorithm__snapshots__every_steps": 1}  # there cannot be more
    assert told(**each, **asked) == told(**each)
    last = told(**steps | {"run__keep_states": "last"}, **asked)
    assert last.startswith("up to ") and " for 2 training states " in last, "however many are asked for"


@pytest.mark.parametrize("kind", PLANS)
def test_a_sound_run_is_planned_and_nothing_is_written(work: Path, kind: str):
    before = dict(files(work))
    facts = plan(kind, work)
    assert facts["model"] == "model"
    assert {key: value for key, value in files(work) if "__pycache__" not in key} == before


def test_a_plan_tells_what_it_found(work: Path):
    facts = plan("train-sft", work)
    assert list(facts.pop("resources")) == ["sft memory (estimate)", "sft disk (estimate)"]
    assert facts.pop("data report") == {
        "rows": 1,
        "examples": 1,
        "tokens": 11,
        "trained tokens": 5,
        "trained share": "45.5%",
        "truncated rows": 0,
        "skipped rows": 0,
        "longest rows": "sft.jsonl:1 (11 tokens)",
        "template problems": 0,
    }
    assert facts == {"model": "model", "sft rows": 1, "trained tokens": 5, "truncated rows": 0}
    assert plan("train-ppo", work)["training prompts"] == 2
    assert plan("nightly", work)["held-out prompts"] == 1
    assert plan("infer-batch", work, workers__count=2) == {"model": "model", "inputs": 2, "workers": 2}


# Values


@pytest.mark.parametrize(
    ("kind", "key", "value", "expected"),
    [
        ("train-sft", "algorithm.loss", {}, "algorithm.loss: unknown key; did you mean 'loss_on'?"),
        ("infer-batch", "inptu", {}, "inptu: unknown key; did you mean 'input'?"),
        ("train-sft", "algorithm.minibatch_size", "eight", "algorithm.minibatch_size: Input should be a valid integer"),
        ("train-sft", "algorithm.dataset.path", 3, "algorithm.dataset.path: Input should be a valid string"),
        ("train-sft", "algorithm.dataset", "sft.jsonl", "algorithm.dataset: Input should be a valid dictionary"),
        ("train-sft", "algorithm.optimizer.lr", -1e-3, "algorithm.optimizer.lr: Input should be greater than 0"),
        ("train-sft", "algorithm.optimizer.lr", float("inf"), "algorithm.optimizer.lr: Input should be a finite"),
        ("train-sft", "algorithm.optimizer.betas", [0.9, 1.0], "algorithm.optimizer.betas.1: Input should be less"),
        (
            "train-sft",
            "algorithm.optimizer.kind",
            "lion",
            "algorithm.optimizer.kind: no optimizer 'lion' in torch.optim; expected one of sgd, adam, adamw, ASGD",
        ),
        ("train-sft", "algorithm.gradient_accumulation", 0, "algorithm.gradient_accumulation: Input should be greater"),
        ("train-sft", "algorithm.budget.max_steps", 0, "algorithm.budget.max_steps: Input should be greater"),
        ("train-sft", "algorithm.snapshots.every_steps", 0, "algorithm.snapshots.every_steps: Input should be greater"),
        ("train-sft", "seed", 2**31, "seed: Input should be less than 2147483648"),
        ("train-ppo", "algorithm.lam", 1.5, "algorithm.lam: Input should be less than or equal to 1"),
        ("train-ppo", "algorithm.gamma", 0, "algorithm.gamma: Input should be greater than 0"),
        ("train-ppo", "algorithm.clip", 0, "algorithm.clip: Input should be greater than 0"),
        ("train-ppo", "algorithm.kl.target", 0, "algorithm.kl.target: Input should be greater than 0"),
        (
            "train-ppo",
            "algorithm.sampling.temperature",
            0,
            "algorithm: on-policy training needs samples of the policy itself",
        ),
        ("infer-batch", "sampling.max_tokens", 0, "sampling.max_tokens: Input should be greater than or equal to 1"),
        ("infer-batch", "sampling.top_p", 1.5, "sampling.top_p: Input should be less than or equal to 1"),
        ("infer-batch", "sampling.stop", [""], "sampling.stop.0: String should have at least 1 character"),
        ("infer-batch", "workers.count", 0, "workers.count: Input should be greater than or equal to 1"),
        ("nightly", "promotion.tolerance", -1, "promotion.tolerance: Input should be greater than or equal to 0"),
        ("nightly", "promotion", {"tolerance": 0.1, "min_gain": 0.1}, "promotion: tolerance 0.1 accepts a loss and"),
        ("nightly", "promotion.guards", [{"kind": "kk"}], "promotion.guards.0.kind: Input should be 'length' or"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_key(work: Path, kind: str, key: str, value: Any, expected: str):
    assert refusal(kind, work, **{key: value}).startswith(f"config: {expected}")


@pytest.mark.parametrize(
    ("promotion", "expected"),
    [
        (
            {"confidence": 0.95},
            "promotion.confidence: 1 held-out prompts are too few for an interval; give at least 10, or leave it out",
        ),
        (
            {"guards": [{"kind": "length"}, {"kind": "prompts", "prompts": {"path": "gone.jsonl"}}]},
            "promotion.guards.1.prompts.path: ",
        ),
        (
            {"guards": [{"kind": "prompts", "prompts": {"path": "held-out.jsonl"}, "reward": SOLUTION}]},
            "promotion.guards.0.prompts.path: row 1 has no 'solution', which the exact_match reward reads",
        ),
        ({"guards": [{"kind": "reward", "reward": SOLUTION}]}, "promotion.guards.0.reward: row 1 has no 'solution'"),
        (
            {"guards": [{"kind": "reward", "reward": {"kind": "function", "callable": "gone.py:f"}}]},
            "promotion.guards.0.reward: reward file ",
        ),
        (
            {"guards": [{"kind": "kl", "max_kl": 0.1}, {"kind": "kl", "max_kl": 0.1, "estimator": "k3"}]},
            "promotion.guards.1.estimator: k3 is computed from the log-probabilities of tokens that the model drew "
            "from its own distribution, and with ",
        ),
    ],
)
def test_a_promotion_that_could_not_be_judged_is_refused(work: Path, promotion: dict[str, Any], expected: str):
    assert refusal("nightly", work, promotion=promotion).startswith(expected)


# Models


def test_a_missing_model_folder_is_named_with_where_it_was_looked_for(work: Path):
    shutil.rmtree(work / "model")
    for kind in PLANS:
        key = "algorithm.base_model.uri" if kind.startswith("train") else "model.uri"
        message = refusal(kind, work, **{key: "./model"})
        assert message.startswith(
            f"{key.removesuffix('.uri')}: model folder './model' does not exist (looked at {work}"
        )


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(work: Path):
    config = work / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 100}))
    assert "do not fit: the tokenizer has ids up to 261, the model embeds 100" in refusal("train-sft", work)


def make_word_tokenizer(folder: Path, num_words: int) -> Path:
    words = ["<unk>", "</s>", *(f"w{number}" for number in range(num_words))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    return folder


def test_another_tokenizer_is_held_against_the_model_and_counts_the_prompts(work: Path):
    make_word_tokenizer(work / "large", 300)
    make_word_tokenizer(work / "small", 20)
    message = refusal("infer-batch", work, model__tokenizer="large")
    assert "the tokenizer has ids up to 301, the model embeds 262" in message
    jsonl(work / "prompts.jsonl", {"prompt": "w1 " * 200})
    told = plan("infer-batch", work, failures__max_share=1.0)["prompts too long"]
    assert told.startswith("1, which will fail, such as: 600 tokens"), "in the model's own tokens it is too long"
    assert plan("infer-batch", work, model__tokenizer="small") == {"model": "model", "inputs": 1, "workers": 1}


def test_a_checkpoint_of_the_object_store_takes_no_other_tokenizer(work: Path):
    message = refusal("infer-batch", work, model__uri=hash_bytes(b"x"), model__tokenizer="small")
    assert "is a checkpoint with its own tokenizer; leave out tokenizer 'small'" in message


def test_a_checkpoint_is_looked_up_in_the_object_store_with_its_tokenizer_and_context(work: Path):
    unknown = "a" * 64
    for kind in PLANS:
        key = "algorithm__base_model__uri" if kind.startswith("train") else "model__uri"
        message = refusal(kind, work, **{key: unknown})
        assert f"model {unknown} is not in the object store file://{work}/objects" in message
    stored = import_model(ModelSource(uri="model"), ObjectStore.from_url(str(work / "objects")), work)
    before = dict(files(work))
    assert plan("infer-batch", work, model__uri=stored) == {"model": stored, "inputs": 2, "workers": 1}
    assert dict(files(work)) == before, "nothing of it is copied to stay"
    jsonl(work / "prompts.jsonl", {"prompt": LONG})
    assert "model's context of 256 tokens" in refusal("infer-batch", work, model__uri=stored)


def test_what_a_plan_is_not_given_a_way_to_is_told(work: Path):
    changed = apply_overrides(document("train-sft"), {"algorithm.base_model.uri": "a" * 64})
    facts = plan_training(parse_config(changed, CONFIG_KINDS["train-sft"]), work)
    assert facts["not checked"].startswith("object store and database; algorithm.base_model (model aaaa")


# Notes of what was found before


def test_what_an_earlier_run_found_of_the_same_files_is_not_looked_at_again(
    work: Path, monkeypatch: pytest.MonkeyPatch
):
    def planned() -> dict[str, Any]:
        config = parse_config(document("nightly"), CONFIG_KINDS["nightly"])
        return plan_nightly(config, work, plain_connections(), keep=True)

    # What is free may change from one plan to the next.
    monkeypatch.setattr("rollout_core.plans.memory_and_disk.device_memory", lambda: (2**33, 2**34))
    monkeypatch.setattr("rollout_core.plans.memory_and_disk.free_disk", lambda folder: 2**36)
    facts = planned()
    import_model(ModelSource(uri="model"), ObjectStore.from_url(str(work / "objects")), work)  # as the run does then
    looked: list[str] = []
    for name in (
        "rollout_core.plans.plan.check_model",
        "rollout_core.plans.plan.tokenize_prompts",
        "rollout_core.plans.learner_plan.check_training",
    ):
        module, _, function = name.rpartition(".")
        real = getattr(importlib.import_module(module), function)
        monkeypatch.setattr(name, noting(looked, function, real))
    assert planned() == facts and looked == []

    jsonl(work / "held-out.jsonl", {"prompt": "sort 3 2 =", "answer": "2 3"})
    planned()
    assert looked == ["check_model", "tokenize_prompts"], "other prompts, and the tokenizer for them"
    for _ in range(2):
        looked.clear()
        jsonl(work / "held-out.jsonl", {"prompt": LONG, "answer": "9"})
        with pytest.raises(ConfigError, match="evaluation"):
            planned()
        assert "tokenize_prompts" in looked, "what was refused is refused again"
    jsonl(work / "held-out.jsonl", {"prompt": "sort 3 2 =", "answer": "2 3"})
    looked.clear()
    planned()
    assert looked == []
    config = work / "model" / "config.json"
    config.write_text(config.read_text() + " ")
    planned()
    assert {"check_model", "check_training"} <= set(looked), "a file of the model was written"


def noting(calls: list[str], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **options: Any) -> Any:
        calls.append(name)
        return real(*given, **options)

    return call


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for GPUs is asked which there are")
def test_a_plan_of_what_is_known_does_without_the_heavy_libraries(work: Path):
    """A run that finds everything in its caches starts in a second, not in ten."""
    config = parse_config(document("nightly"), CONFIG_KINDS["nightly"])
    plan_nightly(config, work, plain_connections(), keep=True)
    import_model(config.model, ObjectStore.from_url(str(work / "objects")), work)
    program = f"""
import sys
from pathlib import Path
from rollout_core.config import CONFIG_KINDS, parse_config
from rollout_core.plans.learner_plan import plan_nightly
from rollout_core.store.reachable import plain_connections
plan_nightly(parse_config({document("nightly")!r}, CONFIG_KINDS["nightly"]), Path(), plain_connections(), keep=True)
print(*sorted({{"torch", "vllm", "transformers", "matplotlib"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=work, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_dry_run_looks_at_everything_again(work: Path, monkeypatch: pytest.MonkeyPatch):
    config = parse_config(document("nightly"), CONFIG_KINDS["nightly"])
    plan_nightly(config, work, plain_connections(), keep=True)
    monkeypatch.setattr("rollout_core.plans.learner_plan.check_training", refuse)
    with pytest.raises(ConfigError, match="by script"):
        plan_nightly(config, work, plain_connections())


def refuse(*_: object, **options: object) -> None:
    raise ConfigError("by script")


# Settings


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("STORAGE", "s4://x", "object store: storage URL 's4://x' is unknown; expected a path"),
        ("STORAGE", "s3:/bucket/x", "object store: storage URL 's3:/bucket/x' has one slash"),
        ("STORAGE", "sft.jsonl/x", "object store: {work}/sft.jsonl is a file; expected a folder"),
        ("DATABASE", "oracle://x", "database: database URL is 'oracle://x'; expected sqlite:///"),
        ("DATABASE", "sqlite:///sft.jsonl", "database: sft.jsonl is not a database of this store"),
        ("DATABASE", "sqlite:///sft.jsonl/x.db", "database: sft.jsonl/x.db cannot be created: {work}/sft.jsonl is no"),
    ],
)
def test_settings_that_cannot_be_are_refused_and_nothing_is_created(
    work: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, expected: str
):
    monkeypatch.chdir(work)
    monkeypatch.setenv(f"ROLLOUT_{setting}", value)
    before = dict(files(work))
    for kind in PLANS:
        assert refusal(kind, work).startswith(expected.format(work=work))
    assert {key: data for key, data in files(work) if "__pycache__" not in key} == before


def test_a_database_of_another_program_is_refused_and_left_as_it_is(work: Path):
    with sqlite3.connect(work / "rollout.db") as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    before = (work / "rollout.db").read_bytes()
    assert "rollout.db is a database of another program" in refusal("train-sft", work)
    assert (work / "rollout.db").read_bytes() == before


def test_the_tokenizer_of_a_cached_revision_is_that_revisions(work: Path, monkeypatch: pytest.MonkeyPatch):
    """No other revision is in the cache, so asking for any other would fail."""
    cache_hub_model(work, monkeypatch, "somebody/tiny", "v2")
    assert plan("infer-batch", work, model__uri="somebody/tiny", model__revision="v2")["inputs"] == 2
    assert "could not be reached" in refusal("infer-batch", work, model__uri="somebody/tiny")


# Rows

FILES = [
    ("train-sft", "sft.jsonl", "algorithm.dataset.path"),
    ("train-ppo", "prompts.jsonl", "algorithm.prompts.path"),
    ("train-grpo", "prompts.jsonl", "algorithm.prompts.path"),
    ("infer-batch", "prompts.jsonl", "input.glob"),
    ("nightly", "sft.jsonl", "sft.dataset.path"),
    ("nightly", "prompts.jsonl", "ppo.prompts.path"),
    ("nightly", "held-out.jsonl", "evaluation.prompts.path"),
]


@pytest.mark.parametrize(("kind", "name", "key"), FILES)
def test_a_file_that_is_missing_or_empty_is_named_with_its_key(work: Path, kind: str, name: str, key: str):
    (work / name).write_text("\n  \n")
    empty = refusal(kind, work)
    (work / name).unlink()
    missing = refusal(kind, work)
    for message in (empty, missing):
        assert message.startswith(f"{key}: ") and name in message
    assert "no rows" in empty or "without a row" in empty
    assert "cannot be read: No such file" in missing or "no such file" in missing


@pytest.mark.parametrize(("kind", "name", "key"), FILES)
def test_a_malformed_line_is_named_by_path_and_line(work: Path, kind: str, name: str, key: str):
    good = (work / name).read_text()
    (work / name).write_text(good + "\n{not json\n")
    line = len(good.splitlines()) + 2
    message = refusal(kind, work)
    assert message.startswith(f"{key}: ") and f"{name}:{line}: not valid JSON" in message


def test_every_malformed_line_is_told_at_once(work: Path):
    (work / "prompts.jsonl").write_text('{"promt": "a"}\n{"prompt": 3}\n[]\n')
    with pytest.raises(ConfigError) as caught:
        plan("train-ppo", work)
    assert [line.split(": ", 2)[1] for line in caught.value.violations] == [f"prompts.jsonl:{n}" for n in (1, 2, 3)]
    assert "did you mean 'prompt' by 'promt'?" in caught.value.violations[0]


@pytest.mark.parametrize(
    ("kind", "name", "key"), [row for row in FILES if row[1] != "sft.jsonl" and row[0] != "infer-batch"]
)
def test_prompts_longer_than_the_context_are_one_line(work: Path, kind: str, name: str, key: str):
    jsonl(work / name, {"prompt": "sort 1 =", "answer": "1"}, *[{"prompt": LONG, "answer": "9"}] * 3)
    message = refusal(kind, work)
    assert message.startswith(f"{key}: prompt 2 (and 2 more): ")
    assert "exceed the model's context of 256 tokens; shorten the prompt or lower" in message


def test_room_for_the_completion_counts_and_so_does_the_backends_own_limit(work: Path):
    assert "sampling.max_tokens 254 exceed" in refusal("train-ppo", work, algorithm__sampling__max_tokens=254)
    assert "context of 20 tokens" in refusal("train-ppo", work, backend__max_model_len=20)
    message = refusal("infer-batch", work, backend__max_model_len=512)
    assert message == "backend.max_model_len: 512 tokens, but the model has 256 positions"


def test_completions_in_parts_are_told_and_refused_where_an_engine_does_not_go_on_from_tokens(work: Path):
    cut = {"algorithm__sampling__max_tokens": 30, "algorithm__partial_rollouts__max_tokens_per_iteration": 10}
    told = plan("train-ppo", work, **cut)["partial rollouts"]
    assert told == "10 tokens of a completion in an iteration, so that it takes up to 3"
    backend = {"kind": "scripted", "text": "1 2"}
    message = refusal("train-ppo", work, backend=backend, **cut)
    assert message.startswith(
        "algorithm.sampling: partial_rollouts and backend 'scripted': a completion continues from"
    )
    assert "context of" in refusal("train-ppo", work, backend__max_model_len=20, **cut), "whole completions have room"


def test_a_prompt_without_tokens_is_refused(work: Path):
    jsonl(work / "prompts.jsonl", {"prompt": "", "answer": "x"})
    assert "prompt 1 has no tokens" in refusal("train-ppo", work)


def test_rows_longer_than_max_seq_len_are_told_and_rows_without_a_target_are_refused(work: Path):
    jsonl(work / "sft.jsonl", {"prompt": LONG, "completion": "9"}, {"prompt": "sort 1 =", "completion": " 1"})
    assert plan("train-sft", work)["truncated rows"] == 1
    jsonl(work / "sft.jsonl", {"prompt": LONG, "completion": "9"})
    message = refusal("train-sft", work)
    assert message.startswith("algorithm.dataset.path: none of 1 rows has a token to train within sequence.max_length")
    message = refusal("train-sft", work, algorithm__sequence__max_length=1000)
    assert message == "algorithm.sequence.max_length: 1000 tokens, but the model has 256 positions"


# Models


@pytest.mark.parametrize("kind", ["train-sft", "train-ppo", "train-grpo"])
def test_a_model_that_the_trainer_cannot_do_is_refused_by_the_plan(work: Path, kind: str):
    config = {"vocab_size": 262, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    MiniCPM3ForCausalLM(MiniCPM3Config(**config, **heads)).save_pretrained(work / "model")
    message = refusal(kind, work)
    assert message.startswith("algorithm: MiniCPM3ForCausalLM makes its logits in another way than by its output layer")


def test_a_chat_template_that_asks_for_the_date_is_told(work: Path):
    assert "chat template" not in plan("train-sft", work)
    (work / "model" / "chat_template.jinja").write_text(TEMPLATE + "{{ strftime_now('%d %b %Y') }}")
    assert "asks for the date (strftime_now)" in plan("train-sft", work)["chat template"]


# Chat rows


def test_a_given_chat_template_is_told_and_read(work: Path):
    jsonl(work / "sft.jsonl", CHAT)
    (work / "chat.jinja").write_text("{% set mark = mark or '>' %}" + TEMPLATE.replace("}}>", "}}{{ mark }}"))
    given = {"algorithm__base_model__chat_template": "chat.jinja"}
    told = plan("train-sft", work, **given)
    assert told["chat template"].startswith("chat.jinja") and told["sft rows"] == 1
    values = {"algorithm__base_model__chat_template_kwargs": {"mark": "]"}}
    assert plan("train-sft", work, **given, **values)["chat template"].startswith('chat.jinja, with mark = "]"')
    message = refusal("train-sft", work, **given, algorithm__base_model__chat_template_kwargs={"mrak": "]"})
    assert message == (
        "algorithm.base_model: chat_template_kwargs: chat_template chat.jinja never reads 'mrak'; did you mean 'mark'?"
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('no user') }}", "the chat template refuses these messages: no user, which are one of a"),
        ("{{ messages[0].role }}", "the chat template leaves out what a user says; expected one that writes messages"),
        ("{% for m in messages %}\n{{ m.content }}", "chat_template, line 2: not a Jinja template: Unexpected end of"),
        ("nowhere.jinja", "chat_template nowhere.jinja cannot be read"),
    ],
)
@pytest.mark.parametrize("kind", ["train-grpo", "infer-batch", "nightly"])
def test_a_given_chat_template_that_is_none_is_refused(work: Path, kind: str, template: str, expected: str):
    key = "algorithm.base_model" if kind == "train-grpo" else "model"
    message = refusal(kind, work, **{f"{key}.chat_template".replace(".", "__"): template})
    assert message.startswith(f"{key}: ") and expected in message


def test_where_a_turn_ends_and_what_the_template_leaves_out_is_told(work: Path, chat_base: Path):
    asked = {"messages": CHAT["messages"][:1], "answer": "1 2"}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    jsonl(work / "prompts.jsonl", {"prompt": "sort 1 =", "answer": "1"}, asked, {**asked, "tools": [tool]})
    shutil.copytree(chat_base, work / "base")
    given = {"algorithm__base_model__uri": "base"}
    told = plan("train-grpo", work, **given)["chat template"]
    assert told == (
        "ends a turn by <|im_end|> and the model stops at <|endoftext|>: in conversations engines stop at <|im_end|>, "
        "too; leaves out tools of 1 conversations of algorithm.prompts.path (prompt 3 the first)"
    )
    endless = plan("train-grpo", work, **given, algorithm__base_model__chat_template=TEMPLATE)["chat template"]
    assert endless.startswith("given as text; ends no turn: answers to 2 conversations of algorithm.prompts.path (prom")
    jsonl(work / "prompts.jsonl", asked, {**asked, "tools": [tool]})
    batch = plan("infer-batch", work, model__uri="base")["chat template"]
    assert batch.endswith("leaves out tools of 1 conversations of input.glob (prompt 2 the first)")
    jsonl(work / "sft.jsonl", {"prompt": "a", "completion": "b"}, CHAT)
    (work / "model" / "chat_template.jinja").write_text(TEMPLATE)
    report = plan("train-sft", work)["data report"]
    assert report["rows ended with EOS, as the template ends no turn"] == "1, sft.jsonl:2 the first"


def test_an_endpoint_that_renders_chats_itself_takes_no_template(work: Path):
    endpoint = {"kind": "openai", "url": "http://127.0.0.1:1/v1", "api": "chat"}
    message = refusal("infer-batch", work, backend=endpoint, model__chat_template=TEMPLATE)
    assert message.startswith("backend.api: the endpoint puts messages through its own chat template")


@pytest.mark.parametrize(("kind", "name", "key"), FILES)
def test_chat_rows_without_a_chat_template_are_refused(work: Path, kind: str, name: str, key: str):
    asked = {"messages": CHAT["messages"][:1], "answer": "1 2"}
    jsonl(work / name, CHAT if name == "sft.jsonl" else asked)
    message = refusal(kind, work)
    assert message.startswith(f"{key}: ") and "chat messages, but the tokenizer has no chat template" in message
    (work / "model" / "chat_template.jinja").write_text(TEMPLATE)
    plan(kind, work)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{% for m in messages %}", "refuses these messages: Unexpected end of template"),
        ("{{ messages[0].content + 1 }}", "refuses these messages: can only concatenate str"),
    ],
)
@pytest.mark.parametrize(("kind", "name"), [("train-sft", "sft.jsonl"), ("infer-batch", "prompts.jsonl")])
def test_a_chat_template_that_fails_is_one_clear_error(work: Path, kind: str, name: str, template: str, reason: str):
    jsonl(work / name, CHAT)
    (work / "model" / "chat_template.jinja").write_text(template)
    assert reason in refusal(kind, work)
    if kind == "infer-batch":  # what one sample cannot do stops no other
        assert reason in plan(kind, work, failures__max_share=1.0)["prompts refused"]


def test_a_template_that_cannot_tell_turns_apart_is_refused_unless_all_is_trained(work: Path):
    """This one marks the last message, so a turn reads differently once another follows."""
    turns = [*CHAT["messages"], {"role": "user", "content": "sort 4 3"}, {"role": "assistant", "content": "3 4"}]
    jsonl(work / "sft.jsonl", {"messages": turns})
    marking = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}"
    (work / "model" / "chat_template.jinja").write_text(marking)
    message = refusal("train-sft", work)
    assert "sft.jsonl:1: the chat template renders turn 2 differently" in message and "loss_on.kind = 'full'" in message
    assert plan("train-sft", work, algorithm__loss_on__kind="full")["sft rows"] == 1


# Rewards


@pytest.mark.parametrize(
    ("callable_", "expected"),
    [
        ("mine.py:rewrad", "reward mine.py:rewrad: there is no 'rewrad'; did you mean 'reward'?"),
        ("nothing.py:reward", "nothing.py does not exist; "),
        ("no_such_module_abc:reward", "reward module no_such_module_abc cannot be found"),
        ("mine.py:two", "has the signature (sample, other), but is called with (sample): missing a required argument"),
    ],
)
@pytest.mark.parametrize("kind", ["train-ppo", "train-grpo", "nightly"])
def test_a_reward_that_cannot_be_called_is_refused(work: Path, kind: str, callable_: str, expected: str):
    key = "reward" if kind == "nightly" else "algorithm.reward"
    message = refusal(kind, work, **{key: {"kind": "function", "callable": callable_}})
    assert message.startswith(f"{key}: ") and expected in message


@pytest.mark.parametrize(
    ("kind", "key"), [("train-ppo", "algorithm.loss"), ("train-grpo", "algorithm.loss"), ("nightly", "ppo.loss")]
)
def test_a_loss_that_cannot_be_called_is_one_violation(work: Path, kind: str, key: str):
    (work / "mine.py").write_text("def loss(logprobs, **others): raise AssertionError\n")
    plan(kind, work, **{key: {"path": "mine.py:loss"}})
    message = refusal(kind, work, **{key: {"path": "mine.py:los"}})
    assert message == f"{key}: loss mine.py:los: there is no 'los'; did you mean 'loss'?"
    assert "calls it by name with (logprobs, old" in refusal(
        kind, work, **{key: {"path": "mine.py:loss", "kwargs": {"mask": 1}}}
    )


def test_a_reward_of_the_users_own_is_loaded_but_never_called(work: Path):
    (work / "mine.py").write_text("def reward(sample): raise AssertionError\n")
    plan("train-ppo", work, algorithm__reward={"kind": "function", "callable": "mine.py:reward"})


@pytest.mark.parametrize(
    ("line", "reason"),
    [("os._exit(0)", "it ended its process with exit code 0"), ("time.sleep(20)", "it took longer than 1 s")],
)
@pytest.mark.parametrize("callable_", ["mine.py:reward", "pack.mine:reward"])
def test_a_reward_that_ends_or_hangs_its_process_is_refused(work: Path, callable_: str, line: str, reason: str):
    (work / "pack").mkdir()
    (work / "pack" / "__init__.py").write_text(f"import os, time\n{line}\n")
    (work / "pack" / "mine.py").write_text("def reward(sample): return 0.0\n")
    (work / "mine.py").write_text(f"import os, time\n{line}\ndef reward(sample): return 0.0\n")
    reward = {"kind": "function", "callable": callable_, "timeout_seconds": 1.0}
    message = refusal("train-ppo", work, algorithm__reward=reward)
    assert message.startswith(f"algorithm.reward: reward {callable_} cannot be loaded: {reason}")


def test_the_plan_says_how_a_reward_is_called_and_what_its_columns_lack(work: Path):
    (work / "mine.py").write_text("def reward(completions, answer, **kwargs): raise AssertionError\n")
    jsonl(work / "prompts.jsonl", {"prompt": "sort 2 1 =", "answer": "1 2"}, {"prompt": "sort 3 1 ="})
    reward = {"kind": "function", "callable": "mine.py:reward"}
    facts = plan("train-ppo", work, algorithm__reward=reward)
    assert facts["reward mine.py:reward"].startswith("TRL's form: called with lists over all samples of completions, ")
    (work / "mine.py").write_text("def reward(completions, anwser, **kwargs): raise AssertionError\n")
    assert refusal("train-ppo", work, algorithm__reward=reward) == (
        "algorithm.prompts.path: no row has 'anwser', which reward mine.py:reward takes; did you mean 'answer'?"
    )


def test_rows_without_the_answer_are_counted_in_one_line(work: Path):
    jsonl(work / "prompts.jsonl", *[{"prompt": "sort 1 =", "anwser": "1"}] * 3)
    message = refusal("train-ppo", work)
    assert message == (
        "algorithm.prompts.path: row 1 has no 'answer', which the exact_match reward reads (and 2 more rows); did "
        "you mean 'anwser'?"
    )


def test_a_judge_is_looked_for_and_what_its_template_and_rows_lack_is_named(work: Path):
    jsonl(work / "prompts.jsonl", {"prompt": "sort 2 1 =", "subject": "numbers"}, {"prompt": "sort 3 1 ="})
    with JudgeServer() as server:
        judge = {"url": server.url, "model": "wise"}
        reward: dict[str, Any] = {"kind": "judge", "judges": [judge], "template": "{{ subject }} {{ completion }}"}
        optional = reward | {"template": "{{ subject | default('') }} {{ completion }}"}
        plan("train-ppo", work, algorithm__reward=optional)
        assert not server.bodies, "a plan asks no question"
        wrong = reward | {"template": "{{ subjekt }} {{ completion }}"}
        assert refusal("train-ppo", work, algorithm__reward=wrong) == (
            "algorithm.prompts.path: row 1 has no 'subjekt', which the judge reward reads (and 1 more rows); did you "
            "mean 'subject'?"
        )
        wrong = reward | {"template": "{{ completion }}", "reference_key": "answer"}
        assert refusal("train-ppo", work, algorithm__reward=wrong) == (
            "algorithm.prompts.path: row 1 has no 'answer', which the judge reward reads (and 1 more rows); found: "
            "subject"
        )
        keyed = {"kind": "judge", "judges": [judge | {"api_key": "JUDGE_KEY"}]}
        message = refusal("train-ppo", work, algorithm__reward=keyed)
        assert message.startswith("algorithm.reward.judges: secret 'JUDGE_KEY' is not among those allowed")
        reward = {"kind": "judge", "judges": [judge | {"model": "wisest"}]}
        facts = plan("train-ppo", work, algorithm__reward=reward)
        assert "serves 'wisest'; it lists wise" in json.dumps(facts), "gateways do not list all that they serve"
    reward = {"kind": "judge", "judges": [judge]}
    facts = plan("train-ppo", work, algorithm__reward=reward)
    assert "the judge does not answer" in json.dumps(facts), "it may by the time that the run needs it"


# Places and software


@pytest.mark.parametrize(("kind", "key"), [("nightly", "report_dir"), ("infer-batch", "output.dir")])
def test_an_output_folder_that_cannot_be_made_is_refused_before_work_not_after(work: Path, kind: str, key: str):
    for path in ("mine.py", "mine.py/below/it"):
        assert refusal(kind, work, **{key: path}) == (
            f"{key}: {work / 'mine.py'} is a file; expected a folder, or one that can be made"
        )
    plan(kind, work, **{key: "new/folder/of/folders"})
    assert not (work / "new").exists()


def test_processes_that_have_no_gpu_or_no_common_store_are_refused(work: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout_core.plans.learner_plan.num_gpus", lambda: 1)
    message = refusal("train-sft", work, algorithm__minibatch_size=2, algorithm__parallel__nproc=2)
    assert message == "algorithm.parallel.nproc: 2 processes, and 1 GPUs for them"
    monkeypatch.setattr("rollout_core.plans.learner_plan.num_gpus", lambda: 0)
    monkeypatch.setenv("ROLLOUT_STORAGE", "memory://plan")
    expected = "algorithm: it is trained in other processes, but the object store memory://plan exists in this one only"
    for kind, change in (
        ("train-sft", {"algorithm__minibatch_size": 2, "algorithm__parallel__nproc": 2}),
        ("train-grpo", {"algorithm__async_depth": 1}),
    ):
        assert refusal(kind, work, **change).startswith(expected)


def test_all_that_is_wrong_is_told_at_once(work: Path):
    (work / "sft.jsonl").write_text("")
    jsonl(work / "held-out.jsonl", {"prompt": "sort 1 ="})
    with pytest.raises(ConfigError) as caught:
        plan("nightly", work, reward__answer_key="answer", report_dir="mine.py")
    assert [line.split(":")[0] for line in caught.value.violations] == [
        "sft.dataset.path",
        "evaluation.prompts.path",
        "report_dir",
    ]


@pytest.mark.parametrize(
    ("kind", "what"),
    [("train-sft", "algorithm"), ("train-grpo", "algorithm"), ("nightly", "ppo")],
)
def test_layers_that_are_to_have_adapters_are_looked_up(work: Path, kind: str, what: str):
    plan(kind, work, **{f"{what}.lora": {"r": 4}})
    message = refusal(kind, work, **{f"{what}.lora": {"target_modules": ["query"]}})
    assert message.startswith(f"{what}: lora.target_modules ['query'] names no layer of Qwen2ForCausalLM; its linear")


def test_layers_of_a_mixture_of_experts_that_get_no_adapter_are_named(work: Path):
    config = {"vocab_size": 262, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    MixtralForCausalLM(MixtralConfig(**config, **heads, num_local_experts=4)).save_pretrained(work / "model")
    named = "layers without adapters"
    assert plan("train-sft", work, **{"algorithm.lora": {"r": 4}})[named] == (
        "model.layers.*.mlp.gate (1%), model.layers.*.mlp.experts (38%) of the parameters; they stay as they are"
    )
    assert named not in plan("train-sft", work, **{"algorithm.lora": {"target_modules": ["q_proj"]}})
    message = refusal("train-sft", work, **{"algorithm.lora": {"target_modules": ["experts"]}})
    assert "names model.layers.0.mlp.experts, a MixtralExperts, and only linear layers can have adapters" in message


def test_layers_that_are_to_be_cut_among_processes_are_looked_up(work: Path, weights_stay_unread: None):
    tensor = {"algorithm.parallel": {"nproc": 2, "kind": "tensor"}}
    whole = plan("train-sft", work)["resources"]["sft memory (estimate)"]
    cut = plan("train-sft", work, **tensor)["resources"]["sft memory (estimate)"]
    assert whole != cut and cut.startswith("2 processes together")
    message = refusal("train-sft", work, **{"algorithm.parallel": {"nproc": 3, "kind": "tensor"}})
    assert message == (
        'algorithm: parallel.kind = "tensor" cannot cut a Qwen2ForCausalLM: num_attention_heads is 4, which '
        '3 processes cannot share evenly; use "fsdp2"'
    )


def test_a_teacher_that_cannot_be_cut_is_refused(work: Path, weights_stay_unread: None):
    shutil.copytree(work / "model", work / "teacher")
    config = json.loads((work / "teacher" / "config.json").read_text())
    (work / "teacher" / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    taught = {"algorithm.distillation": {"teacher": {"uri": str(work / "teacher")}}}
    plan("train-sft", work, **taught)
    message = refusal("train-sft", work, **taught, **{"algorithm.parallel": {"nproc": 2, "kind": "tensor"}})
    assert message.startswith(
        'algorithm.distillation.teacher: parallel.kind = "tensor" cannot cut a Qwen2ForCausalLM: '
    )
    assert "attention_dropout is 0.1" in message

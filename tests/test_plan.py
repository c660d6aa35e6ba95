"""Bad input that can be known before work is one clear ConfigError of the plan, which builds and loads nothing."""

from __future__ import annotations

import functools
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout_core import batch_plan
from rollout_core.algorithms import state
from rollout_core.batch_plan import plan_batch
from rollout_core.config import CONFIG_KINDS, InputGlob, ModelSource, apply_overrides, parse_config
from rollout_core.connections import Connections, plain_connections
from rollout_core.errors import ConfigError
from rollout_core.ids import hash_bytes
from rollout_core.inference import engines
from rollout_core.inference.prompt_files import PromptFiles, open_prompts
from rollout_core.inference.prompt_shards import import_shards
from rollout_core.learner_plan import plan_on_policy, plan_sft
from rollout_core.model_import import import_model
from rollout_core.nightly_plan import plan_nightly
from rollout_core.objects import ObjectStore

PLANS: dict[str, Callable[..., dict[str, Any]]] = {
    "nightly": plan_nightly,
    "train-sft": plan_sft,
    "train-ppo": plan_on_policy,
    "train-grpo": plan_on_policy,
    "infer-batch": functools.partial(plan_batch, thorough=True),
}
CHAT = {"messages": [{"role": "user", "content": "sort 2 1"}, {"role": "assistant", "content": "1 2"}]}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LONG = "sort " + "9 " * 300 + "="


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch: pytest.MonkeyPatch, weights_stay_unread: None) -> None:
    """Neither an engine nor a model's weights: whoever tries fails the test."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a plan must build no engine and load no weights")

    for owner, name in (
        (engines, "build_backend"),
        (state, "load_policy"),
        (state, "load_file"),
    ):
        monkeypatch.setattr(owner, name, refuse)


@pytest.fixture
def work(tmp_path: Path, tiny_model: Path) -> Path:
    """A folder with a model, data and a reward, to be damaged."""
    shutil.copytree(tiny_model, tmp_path / "model")
    jsonl(tmp_path / "sft.jsonl", {"prompt": "sort 2 1 =", "completion": " 1 2"})
    jsonl(tmp_path / "prompts.jsonl", {"prompt": "sort 2 1 =", "answer": "1 2"}, {"prompt": "sort 3 =", "answer": "3"})
    jsonl(tmp_path / "held-out.jsonl", {"prompt": "sort 5 4 =", "answer": "4 5"})
    (tmp_path / "mine.py").write_text("def reward(sample): return 0.0\ndef two(sample, other): return 0.0\n")
    return tmp_path


def jsonl(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def document(kind: str) -> dict[str, Any]:
    """A sound configuration of each kind of run, in the files of `work`."""
    sft = {"dataset": {"path": "sft.jsonl"}, "packing": {"max_seq_len": 64}, "optimizer": {"lr": 1e-3}}
    ppo = {"prompts": {"path": "prompts.jsonl"}, "optimizer": {"lr": 1e-4}}
    backend, model = {"kind": "transformers"}, {"uri": "model"}
    return {
        "nightly": {
            "model": model,
            "backend": backend,
            "sft": sft,
            "ppo": ppo,
            "evaluation": {"prompts": {"path": "held-out.jsonl"}},
            "report_dir": "report",
        },
        "train-sft": {"algorithm": {**sft, "base_model": model}},
        "train-ppo": {"algorithm": {**ppo, "base_model": model}, "backend": backend},
        "train-grpo": {"algorithm": {**ppo, "base_model": model}, "backend": backend},
        "infer-batch": {
            "model": model,
            "backend": backend,
            "sampling": {"max_tokens": 16},
            "input": {"glob": "prompts.jsonl"},
            "output": {"dir": "out"},
        },
    }[kind]


def plan(kind: str, base: Path, **changes: Any) -> dict[str, Any]:
    """Parse and plan, as the command and the flows do. ``changes`` has __ for the dots of a key."""
    connections = plain_connections()
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    config = parse_config(apply_overrides(document(kind), overrides), CONFIG_KINDS[kind])
    return PLANS[kind](config, base, connections=connections)


def refusal(kind: str, base: Path, **changes: Any) -> str:
    """The one line that a plan refuses with."""
    with pytest.raises(ConfigError) as caught:
        plan(kind, base, **changes)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def files(folder: Path) -> Iterator[tuple[str, bytes]]:
    yield from sorted((str(path), path.read_bytes()) for path in folder.rglob("*") if path.is_file())


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
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_key(work: Path, kind: str, key: str, value: Any, expected: str):
    assert refusal(kind, work, **{key: value}).startswith(f"config: {expected}")


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
    told = plan("infer-batch", work)["prompts too long"]
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
    assert "model's context of 256 tokens" in plan("infer-batch", work, model__uri=stored)["prompts too long"]


def test_what_a_plan_is_not_given_a_way_to_is_told(work: Path):
    changed = apply_overrides(document("train-sft"), {"algorithm.base_model.uri": "a" * 64})
    facts = plan_sft(parse_config(changed, CONFIG_KINDS["train-sft"]), work)
    assert facts["not checked"].startswith("object store and database; algorithm.base_model (model aaaa")


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
    cache = work / "hub" / "models--somebody--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "v2").write_text("abc123")
    shutil.copytree(work / "model", cache / "snapshots" / "abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(work / "hub"))
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


def test_a_prompt_without_tokens_is_refused(work: Path):
    jsonl(work / "prompts.jsonl", {"prompt": "", "answer": "x"})
    assert "prompt 1 has no tokens" in refusal("train-ppo", work)


def test_rows_longer_than_max_seq_len_are_told_and_rows_without_a_target_are_refused(work: Path):
    jsonl(work / "sft.jsonl", {"prompt": LONG, "completion": "9"}, {"prompt": "sort 1 =", "completion": " 1"})
    assert plan("train-sft", work)["truncated rows"] == 1
    jsonl(work / "sft.jsonl", {"prompt": LONG, "completion": "9"})
    message = refusal("train-sft", work)
    assert message.startswith("algorithm.dataset.path: none of 1 rows has a token to train within packing.max_seq_len")
    message = refusal("train-sft", work, algorithm__packing__max_seq_len=1000)
    assert message == "algorithm.packing.max_seq_len: 1000 tokens, but the model has 256 positions"


# Chat rows


def test_prompts_that_will_fail_are_counted_and_stop_nothing(work: Path):
    jsonl(work / "prompts.jsonl", {"prompt": "sort 1 ="}, {"prompt": LONG}, {"prompt": ""})
    facts = plan("infer-batch", work)
    assert facts["prompts too long"].startswith("1, which will fail, such as: 602 tokens + sampling.max_tokens 16")
    assert facts["prompts refused"].startswith("1, which will fail, such as: has no tokens")
    assert plan("infer-batch", work, backend__max_model_len=17)["prompts too long"].startswith("2, which")
    assert plan("infer-batch", work, sampling__max_tokens=254)["prompts too long"].startswith("2, which")


def test_rows_that_were_just_read_are_not_read_again(work: Path, monkeypatch: pytest.MonkeyPatch):
    """A command plans, and the flow that it starts plans again."""
    first = plan("infer-batch", work)
    with monkeypatch.context() as patch:
        patch.setattr(PromptFiles, "rows", lambda self: pytest.fail("they were just read"))
        assert plan("infer-batch", work) == first
    jsonl(work / "prompts.jsonl", {"prompt": "another"})
    assert plan("infer-batch", work)["inputs"] == 1


def test_an_earlier_run_is_told(work: Path):
    (work / "out").mkdir()
    (work / "out" / "run-id").write_text("01ARZ3NDEKTSV4RRFFQ69G5FAV\n")
    told = plan("infer-batch", work)["goes on with run"]
    assert told == "01ARZ3NDEKTSV4RRFFQ69G5FAV (unknown to this object store, so it begins anew)"


def test_of_many_prompts_some_are_looked_at(work: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_plan, "SAMPLED_ROWS", 50)
    jsonl(work / "prompts.jsonl", *[{"prompt": LONG if number >= 500 else "sort 1 ="} for number in range(1000)])
    fresh = plan("infer-batch", work)
    assert fresh["inputs"] == 1000
    count, _, rest = fresh["prompts too long"].partition(" ")
    assert 10 < int(count) < 40 and rest.startswith("of 50 looked at, which will fail")
    # The same, once the rows were imported.
    objects = ObjectStore.from_url(str(work / "objects"))
    prompts = open_prompts(InputGlob(glob="prompts.jsonl"), work, objects)
    import_shards(objects, prompts.rows(), shard_size=100, source=prompts.identity())
    monkeypatch.setattr(PromptFiles, "rows", lambda self: pytest.fail("they were read before"))
    known = plan("infer-batch", work, workers__shard_size=100)
    assert known["inputs"] == 1000 and " of 50 looked at" in known["prompts too long"]


def test_a_model_that_was_imported_is_known_without_its_tokenizer_until_it_changes(
    work: Path, monkeypatch: pytest.MonkeyPatch
):
    config = parse_config(document("infer-batch"), CONFIG_KINDS["infer-batch"])
    objects = ObjectStore.from_url(str(work / "objects"))
    connections = Connections(lambda: objects, lambda: f"sqlite:///{work / 'rollout.db'}")
    import_model(config.model, objects, work)
    with monkeypatch.context() as patched:
        patched.setattr("rollout_core.models.load_tokenizer", lambda folder: pytest.fail("it was looked at before"))
        assert plan_batch(config, work, None, connections)["model"] == "model"
        import_model(config.model, objects, work)
        jsonl(work / "prompts.jsonl", CHAT)
        with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
            plan_batch(config, work, None, connections)
    (work / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json"):
        plan_batch(config, work, None, connections)


def test_a_gated_model_is_held_against_the_secrets(work: Path, monkeypatch: pytest.MonkeyPatch):
    cache = work / "hub" / "models--meta-llama--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc123")
    shutil.copytree(work / "model", cache / "snapshots" / "abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(work / "hub"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    told = plan("infer-batch", work, model__uri="meta-llama/tiny")["hub token"]
    assert told == "not set; meta-llama/tiny may ask for ROLLOUT_SECRET_HF_TOKEN"
    monkeypatch.setenv("ROLLOUT_SECRET_HF_TOKEN", "hf_secret")
    assert plan("infer-batch", work, model__uri="meta-llama/tiny")["hub token"] == "set"
    assert "hub token" not in plan("infer-batch", work)


@pytest.mark.parametrize(("kind", "name", "key"), FILES)
def test_chat_rows_without_a_chat_template_are_refused(work: Path, kind: str, name: str, key: str):
    jsonl(work / name, {**CHAT, **({} if name == "sft.jsonl" else {"answer": "1 2"})})
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
    # What one sample of batch inference cannot do stops no other.
    assert reason in (plan(kind, work)["prompts refused"] if kind == "infer-batch" else refusal(kind, work))


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


def test_a_reward_of_the_users_own_is_loaded_but_never_called(work: Path):
    (work / "mine.py").write_text("def reward(sample): raise AssertionError\n")
    plan("train-ppo", work, algorithm__reward={"kind": "function", "callable": "mine.py:reward"})


def test_rows_without_the_answer_are_counted_in_one_line(work: Path):
    jsonl(work / "prompts.jsonl", *[{"prompt": "sort 1 =", "anwser": "1"}] * 3)
    message = refusal("train-ppo", work)
    assert message == (
        "algorithm.prompts.path: row 1 has no 'answer', which the exact_match reward compares with (and 2 more rows)"
    )


# Places and software


@pytest.mark.parametrize(("kind", "key"), [("nightly", "report_dir"), ("infer-batch", "output.dir")])
def test_an_output_folder_that_cannot_be_made_is_refused_before_work_not_after(work: Path, kind: str, key: str):
    for path in ("mine.py", "mine.py/below/it"):
        assert refusal(kind, work, **{key: path}) == (
            f"{key}: {work / 'mine.py'} is a file; expected a folder, or one that can be made"
        )
    plan(kind, work, **{key: "new/folder/of/folders"})
    assert not (work / "new").exists()


def test_an_output_that_the_next_run_would_read_is_refused(work: Path):
    message = refusal("infer-batch", work, **{"input.glob": "**/*.jsonl"})
    assert "output.dir: " in message and "out/completions.jsonl would be part of the input '**/*.jsonl'" in message


def test_a_run_id_that_is_none_is_refused(work: Path):
    config = parse_config(document("infer-batch"), CONFIG_KINDS["infer-batch"])
    with pytest.raises(ConfigError, match="run id: 'yesterday' is no run id; expected a ULID"):
        plan_batch(config, work, "yesterday")  # pyright: ignore[reportArgumentType]
    (work / "out").mkdir()
    (work / "out" / "run-id").write_text("damaged\n")
    assert "'damaged' is no run id" in refusal("infer-batch", work)


def test_vllm_that_is_not_installed_is_told(work: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = refusal("infer-batch", work, backend={"kind": "vllm"})
    assert message.startswith("backend: vLLM is not installed; install rollout[vllm]")


def test_processes_that_have_no_gpu_or_no_common_store_are_refused(work: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout_core.learner_plan.num_gpus", lambda: 1)
    message = refusal("train-sft", work, algorithm__minibatch_size=2, algorithm__parallel__nproc=2)
    assert message == "algorithm.parallel.nproc: 2 processes, and 1 GPUs for them"
    monkeypatch.setattr("rollout_core.learner_plan.num_gpus", lambda: 0)
    monkeypatch.setenv("ROLLOUT_STORAGE", "memory://plan")
    message = refusal("train-sft", work, algorithm__minibatch_size=2, algorithm__parallel__nproc=2)
    assert message.startswith(
        "algorithm.parallel.nproc: 2 processes, but the object store memory://plan exists in this"
    )


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


# Sampling


SCHEMA = {"kind": "json_schema", "definition": {"type": "object"}}
VLLM_SERVER = {"kind": "openai", "url": "http://127.0.0.1:9/v1"}
OTHER_SERVER = {**VLLM_SERVER, "dialect": "openai"}


@pytest.mark.parametrize(
    ("structured", "expected"),
    [
        ({"kind": "json_schema", "definition": "{"}, "structured.definition: not JSON: "),
        ({"kind": "json_schema", "definition": "[]"}, "structured.definition: a JSON Schema is an object here"),
        (
            {"kind": "json_schema", "definition": {"properties": {"a": {"type": "strin"}}}},
            "structured.definition: not a JSON Schema: properties.a.type: 'strin' is not valid",
        ),
        ({"kind": "regex", "pattern": "("}, "structured.pattern: not a regular expression: missing )"),
        ({"kind": "choice", "choices": []}, "structured.choices: Tuple should have at least 1 item"),
        ({"kind": "grammar", "grammar": ""}, "structured.grammar: String should have at least 1 character"),
        ({"kind": "xml"}, "structured.kind: Input should be 'json_schema' or 'regex' or 'choice' or 'grammar'"),
    ],
)
def test_a_form_that_is_none_is_told_when_it_is_read(work: Path, structured: dict[str, Any], expected: str):
    assert f"sampling.{expected}" in refusal("infer-batch", work, sampling__structured=structured)


@pytest.mark.parametrize(
    ("backend", "sampling", "expected"),
    [
        ({"kind": "transformers"}, {"structured": SCHEMA}, "sampling.structured: backend 'transformers' has no guided"),
        ({"kind": "scripted"}, {"logprobs": 2}, "sampling.logprobs: backend 'scripted' has its text from"),
        ({"kind": "vllm"}, {"temperature": 2.5}, "sampling.temperature: vLLM takes at most 2, got 2.5"),
        (VLLM_SERVER, {"temperature": 2.5}, "sampling.temperature: vLLM takes at most 2, got 2.5"),
        ({**VLLM_SERVER, "api": "chat"}, {"logprobs": 20}, "with api 'chat' has at most 19"),
        (OTHER_SERVER, {"top_k": 5}, "sampling.top_k: backend 'openai' with dialect 'openai' knows no such field"),
        (OTHER_SERVER, {"structured": SCHEMA}, "guided decoding for kind 'json_schema' with api 'chat' only"),
        (
            OTHER_SERVER,
            {"stop": list("abcde")},
            "sampling.stop: backend 'openai' with dialect 'openai' takes at most 4",
        ),
        ({"kind": "transformers"}, {"stop_token_ids": [99999]}, "sampling.stop_token_ids: token 99999, but the model"),
        ({"kind": "transformers"}, {"min_tokens": 17}, "sampling: min_tokens 17 is more than max_tokens 16"),
    ],
)
def test_what_a_backend_cannot_do_is_refused_by_the_plan(work: Path, backend, sampling, expected):
    changes = {f"sampling__{name}": value for name, value in sampling.items()}
    assert expected in refusal("infer-batch", work, backend=backend, **changes)


def test_what_a_backend_can_do_is_planned(work: Path):
    every = {
        "min_tokens": 2,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logprobs": 3,
    }
    for backend, more in (({"kind": "transformers"}, {}), ({"kind": "vllm"}, {"structured": SCHEMA})):
        changes = {f"sampling__{name}": value for name, value in (every | more).items()}
        assert plan("infer-batch", work, backend=backend, **changes)["inputs"] == 2


@pytest.mark.parametrize("field", [{"min_tokens": 2}, {"presence_penalty": 0.5}, {"structured": SCHEMA}])
def test_training_takes_samples_of_the_policy_itself(work: Path, field: dict[str, Any]):
    [(name, value)] = field.items()
    expected = f"on-policy training needs samples of the policy itself: leave out sampling.{name}"
    assert expected in refusal("train-ppo", work, **{f"algorithm__sampling__{name}": value})


def test_an_endpoint_that_is_out_of_reach_is_named_and_one_without_its_key_refused(work: Path, monkeypatch):
    facts = plan("infer-batch", work, backend=VLLM_SERVER)
    assert "backend (the endpoint does not answer: http://127.0.0.1:9/v1: ConnectError" in facts["not checked"]
    assert "secret 'A_KEY' is not among those allowed here" in refusal(
        "infer-batch", work, backend={**VLLM_SERVER, "api_key": "A_KEY"}
    )
    monkeypatch.setenv("ROLLOUT_SECRETS", "A_KEY")
    assert "set ROLLOUT_SECRET_A_KEY" in refusal("infer-batch", work, backend={**VLLM_SERVER, "api_key": "A_KEY"})

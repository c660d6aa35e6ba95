"""What only the plan of batch inference finds: prompts that will fail, earlier runs, what each backend can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import CONFIG_KINDS, InputGlob, parse_config
from rollout_core.data.dataset_sources import PromptFiles, open_prompts
from rollout_core.inference.shards import import_shards
from rollout_core.models.locating import import_model
from rollout_core.objects import ObjectStore
from rollout_core.plans import batch_plan
from rollout_core.plans.batch_plan import plan_batch
from rollout_core.store.reachable import Connections
from tests.plan.planning import CHAT, LONG, cache_hub_model, document, jsonl, plan, refusal


def test_prompts_that_will_fail_are_counted_and_more_than_may_fail_are_refused(work: Path):
    jsonl(work / "prompts.jsonl", {"prompt": "sort 1 ="}, {"prompt": LONG}, {"prompt": ""})
    assert refusal("infer-batch", work).startswith(
        "failures.max_share: 2 of 3 prompts will fail, more than 0.1 allows; such as: 602 tokens + sampling.max_tokens "
    )
    assert "failures" not in plan("infer-batch", work, failures__max_share=2 / 3)
    facts = plan("infer-batch", work, failures__max_share=1.0)
    assert facts["prompts too long"].startswith("1, which will fail, such as: 602 tokens + sampling.max_tokens 16")
    assert facts["prompts refused"].startswith("1, which will fail, such as: has no tokens")
    for change in ({"backend__max_model_len": 17}, {"sampling__max_tokens": 254}):
        assert plan("infer-batch", work, **change, failures__max_share=1.0)["prompts too long"].startswith("2, which")


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
    told = plan("infer-batch", work)["continues run"]
    assert told == "01ARZ3NDEKTSV4RRFFQ69G5FAV (unknown to this object store, so it begins anew)"


def test_of_many_prompts_some_are_looked_at(work: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_plan, "SAMPLED_ROWS", 50)
    jsonl(work / "prompts.jsonl", *[{"prompt": LONG if number >= 500 else "sort 1 ="} for number in range(1000)])
    fresh = plan("infer-batch", work)
    assert fresh["inputs"] == 1000
    count, _, rest = fresh["prompts too long"].partition(" ")
    assert 10 < int(count) < 40 and rest.startswith("of 50 looked at, which will fail")
    assert fresh["failures"] == f"{count} of 50 prompts looked at: the run may fail, as failures.max_share is 0.1"
    assert refusal("infer-batch", work, failures__max_share=0.01).startswith(
        f"failures.max_share: {count} of 1000 prom"
    )
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
        patched.setattr(
            "rollout_core.models.pretrained.load_tokenizer", lambda folder: pytest.fail("it was looked at before")
        )
        assert plan_batch(config, work, connections)["model"] == "model"
        import_model(config.model, objects, work)
        jsonl(work / "prompts.jsonl", CHAT)
        with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
            plan_batch(config, work, connections)
    (work / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json"):
        plan_batch(config, work, connections)


def test_a_gated_model_is_held_against_the_secrets(work: Path, monkeypatch: pytest.MonkeyPatch):
    cache_hub_model(work, monkeypatch, "meta-llama/tiny")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    told = plan("infer-batch", work, model__uri="meta-llama/tiny")["hub token"]
    assert told == "not set; meta-llama/tiny may ask for ROLLOUT_SECRET_HF_TOKEN"
    monkeypatch.setenv("ROLLOUT_SECRET_HF_TOKEN", "hf_secret")
    assert plan("infer-batch", work, model__uri="meta-llama/tiny")["hub token"] == "set"
    assert "hub token" not in plan("infer-batch", work)


def test_an_output_that_the_next_run_would_read_is_refused(work: Path):
    message = refusal("infer-batch", work, **{"input.glob": "**/*.jsonl"})
    assert "output.dir: " in message and "out/completions.jsonl would be part of the input '**/*.jsonl'" in message


def test_a_run_id_that_is_none_is_refused(work: Path):
    config = parse_config(document("infer-batch"), CONFIG_KINDS["infer-batch"])
    with pytest.raises(ConfigError, match="run id: 'yesterday' is no run id; expected a ULID"):
        plan_batch(config, work, run_id="yesterday")  # pyright: ignore[reportArgumentType]
    (work / "out").mkdir()
    (work / "out" / "run-id").write_text("damaged\n")
    assert "'damaged' is no run id" in refusal("infer-batch", work)


def test_vllm_that_is_not_installed_is_told(work: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = refusal("infer-batch", work, backend={"kind": "vllm"})
    assert message.startswith("backend: vLLM is not installed; install rollout-post-training[vllm]")


@pytest.mark.parametrize(("heads", "size"), [(1, 64), (2, 32), (4, 16)])
def test_heads_that_vllm_has_no_attention_for_on_a_cpu_are_told(work: Path, heads: int, size: int):
    with_heads(work, heads)
    if size == 16:
        message = refusal("infer-batch", work, backend={"kind": "vllm"})
        assert message.startswith("backend: the model's attention has heads of 16 numbers, and vLLM on a CPU takes")
    else:
        assert plan("infer-batch", work, backend={"kind": "vllm"})["inputs"] == 2
    assert plan("infer-batch", work, backend={"kind": "transformers"})["inputs"] == 2


def with_heads(work: Path, heads: int) -> None:
    """Of the same matrices: so many heads, which are the wider."""
    file = work / "model" / "config.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "num_attention_heads": heads, "num_key_value_heads": heads}))


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
    with_heads(work, 2)
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
    with_heads(work, 2)
    for backend, more in (({"kind": "transformers"}, {}), ({"kind": "vllm"}, {"structured": SCHEMA})):
        changes = {f"sampling__{name}": value for name, value in (every | more).items()}
        assert plan("infer-batch", work, backend=backend, **changes)["inputs"] == 2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("infer-batch", "run.resume: a batch resumes by itself when it is started again; leave it out"),
        ("nightly", "run.resume: a nightly run resumes by itself when it is started again; leave it out"),
    ],
)
def test_a_snapshot_to_start_from_is_refused_where_none_is_started_from(work: Path, kind: str, expected: str):
    assert expected in refusal(kind, work, run__resume="latest")


@pytest.mark.parametrize("field", [{"min_tokens": 2}, {"presence_penalty": 0.5}, {"structured": SCHEMA}])
def test_training_takes_samples_of_the_policy_itself(work: Path, field: dict[str, Any]):
    [(name, value)] = field.items()
    expected = f"on-policy training needs samples of the policy itself: leave out sampling.{name}"
    assert expected in refusal("train-ppo", work, **{f"algorithm__sampling__{name}": value})


def test_an_endpoint_that_is_out_of_reach_is_named_and_one_without_its_key_refused(work: Path, monkeypatch):
    facts = plan("infer-batch", work, backend=VLLM_SERVER)
    assert (
        "backend (the endpoint does not answer: http://127.0.0.1:9/v1: ClientConnectorError: " in facts["not checked"]
    )
    assert "secret 'A_KEY' is not among those allowed here" in refusal(
        "infer-batch", work, backend={**VLLM_SERVER, "api_key": "A_KEY"}
    )
    monkeypatch.setenv("ROLLOUT_SECRETS", "A_KEY")
    assert "set it in ROLLOUT_SECRET_A_KEY" in refusal("infer-batch", work, backend={**VLLM_SERVER, "api_key": "A_KEY"})

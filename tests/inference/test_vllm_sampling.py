"""Sampling parameters of vLLM held against transformers; guided decoding; several samples of a prompt; adapters."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from alike import PROMPTS, assert_alike, requests
from batches import Ready

from rollout_core.config import (
    ChoiceOutput,
    GrammarOutput,
    JsonSchemaOutput,
    ModelSource,
    RegexOutput,
    SamplingParams,
    TransformersBackend,
)
from rollout_core.data.datasets import PromptRow
from rollout_core.data.samples import Completion, Failure, encode_completion, make_samples
from rollout_core.inference.backend import GathersStream, ModelRef, Request
from rollout_core.inference.batch import BatchOptions, complete_samples
from rollout_core.inference.hf import TransformersEngine
from rollout_core.models.locating import import_model
from rollout_core.objects import ObjectStore
from rollout_core.store import SqlLightningStore

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def small_in_engine(vllm_engine, small):
    vllm_engine.update_weights(small)


@pytest.fixture(scope="module")
def hf(small):
    return TransformersEngine(TransformersBackend(), small)


@pytest.fixture(scope="module")
def greedy(hf, tokenizer) -> list[Completion]:
    return hf.generate(requests(tokenizer, SamplingParams(temperature=0.0, max_tokens=24)))


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": 4},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.2},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.3, "logprobs": 2},
        {"ignore_eos": True},
    ],
    ids=lambda change: " ".join(change),
)
def test_it_does_what_transformers_does(vllm_engine, hf, greedy, tokenizer, change):
    asked = requests(tokenizer, SamplingParams(temperature=0.0, max_tokens=24, **change))
    expected = hf.generate(asked)
    assert_alike(vllm_engine.generate(asked), expected)
    if change.keys() & {"repetition_penalty", "presence_penalty", "frequency_penalty"}:
        assert [one.token_ids for one in expected] != [one.token_ids for one in greedy]


def test_stop_tokens_and_strings_end_a_completion_but_not_too_early(vllm_engine, hf, greedy, tokenizer):
    for prompt, plain in zip(PROMPTS, greedy, strict=True):
        for change in (
            {"stop_token_ids": (plain.token_ids[5],)},
            {"stop_token_ids": (plain.token_ids[5],), "min_tokens": 9},
            {"stop_token_ids": (plain.token_ids[5],), "stop": ("never to be seen",)},
            {"stop": (plain.text[5:8],), "min_tokens": 8},
            {"min_tokens": 24},
        ):
            asked = requests(tokenizer, SamplingParams(temperature=0.0, max_tokens=24, **change), [prompt])
            [stopped] = hf.generate(asked)
            assert_alike(vllm_engine.generate(asked), [stopped])
            assert len(stopped.token_ids) >= change.get("min_tokens", 1)
            if stopped.token_ids[-1:] == list(change.get("stop_token_ids", ())):
                assert stopped.finish_reason == "stop", "the token is kept, for training"
                assert stopped.text == tokenizer.decode(stopped.token_ids[:-1]), "its text is not"


def test_ends_of_the_model_are_ignored_when_asked(vllm_engine, hf, tokenizer):
    params = SamplingParams(temperature=2.0, max_tokens=60, ignore_eos=True)
    for engine in (vllm_engine, hf):
        found = engine.generate(requests(tokenizer, params, PROMPTS * 4))
        assert {len(completion.token_ids) for completion in found} == {60}
        assert any(tokenizer.eos_token_id in completion.token_ids for completion in found)


def test_alternatives_are_the_likeliest_of_the_distribution_drawn_from(vllm_engine, hf, tokenizer):
    asked = requests(tokenizer, SamplingParams(temperature=0.8, top_k=2, max_tokens=16, logprobs=5))
    for engine in (vllm_engine, hf):
        for completion in engine.generate(asked):
            assert {len(top) for top in completion.top_logprobs} == {2}, "no others could be drawn"
            for token, logprob, top in zip(
                completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True
            ):
                assert dict(top)[token] == logprob and top[0][1] >= top[1][1]
                assert sum(2.718281828**p for _, p in top) == pytest.approx(1, abs=1e-4)
            row = json.loads(encode_completion(completion))
            assert [[token for token, _ in top] for top in row["top_logprobs"]] == [
                [token for token, _ in top] for top in completion.top_logprobs
            ]
    assert "top_logprobs" not in json.loads(
        encode_completion(hf.generate(requests(tokenizer, SamplingParams(max_tokens=2)))[0])
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=24, logprobs=3, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=20),
        SamplingParams(max_tokens=24, logprobs=3, structured=RegexOutput(pattern="[0-9]{1,20}")),
    ],
    ids=["penalties", "guided"],
)
def test_all_of_it_is_bitwise_equal_in_any_batch(vllm_engine, tokenizer, params):
    asked = requests(tokenizer, params, PROMPTS * 6)
    together = [encode_completion(completion) for completion in vllm_engine.generate(asked)]
    assert [encode_completion(completion) for completion in vllm_engine.generate(asked[::-1])][::-1] == together
    assert [encode_completion(vllm_engine.generate([request])[0]) for request in asked[:8]] == together[:8]


SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["s", "m", "l"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("structured", "fits"),
    [
        (ChoiceOutput(choices=("yes", "no", "12 3")), lambda text: text in ("yes", "no", "12 3")),
        (RegexOutput(pattern=r"[0-9]{3}-[ab]{2,4}"), lambda text: re.fullmatch(r"[0-9]{3}-[ab]{2,4}", text)),
        (
            GrammarOutput(grammar='root ::= "sort " digit digit digit? " ="\ndigit ::= [0-9]'),
            lambda text: re.fullmatch("sort [0-9]{2,3} =", text),
        ),
    ],
    ids=["choice", "regex", "grammar"],
)
def test_every_guided_completion_has_its_form(vllm_engine, tokenizer, structured, fits, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=60, structured=structured)
    for completion in vllm_engine.generate(requests(tokenizer, params, PROMPTS * 4)):
        assert completion.finish_reason == "stop" and fits(completion.text), completion.text


def test_every_guided_completion_is_json_of_its_schema(vllm_engine, tokenizer):
    """Penalties keep a model of random weights from going on with white space for ever."""
    params = SamplingParams(
        max_tokens=80, presence_penalty=2, frequency_penalty=2, structured=JsonSchemaOutput(definition=SCHEMA)
    )
    found = vllm_engine.generate(requests(tokenizer, params, PROMPTS * 8))
    ended = [completion for completion in found if completion.finish_reason == "stop"]
    assert len(ended) >= 20
    for completion in ended:
        jsonschema.validate(json.loads(completion.text), SCHEMA)
        assert completion.text.index("size") < completion.text.index("count"), "in the order of the schema"


def test_a_form_that_cannot_be_followed_fails_the_sample_with_its_reason(vllm_engine, tokenizer):
    params = SamplingParams(structured=GrammarOutput(grammar="root ::= ((("))
    outcomes = list(vllm_engine.stream(requests(tokenizer, params)))
    assert all(isinstance(outcome, Failure) and "vLLM refuses it" in outcome.reason for outcome in outcomes)
    assert vllm_engine.generate(requests(tokenizer, SamplingParams(max_tokens=2)))


async def test_more_samples_of_a_prompt_are_others_and_keep_those_there_are(vllm_engine, small, tmp_path, tokenizer):
    params = SamplingParams(max_tokens=24)
    rows = [PromptRow(prompt=prompt) for prompt in PROMPTS]
    objects = ObjectStore.from_url(f"file://{tmp_path / 'objects'}")
    asked: list[str] = []
    stream = vllm_engine.stream

    class Remembering(GathersStream):
        model_id, batch_invariant = small.content_id, True

        def stream(self, requests):
            for outcome in stream(requests):
                asked.append(outcome.key)
                yield outcome

    async def complete(n: int) -> dict[str, dict]:
        samples = make_samples(tokenizer, rows, model=small.content_id, params=params, samples_per_prompt=n)
        async with SqlLightningStore.from_url(f"sqlite:///{tmp_path / 'rollout.db'}") as store:
            completed = await complete_samples(
                store,
                objects,
                Ready(Remembering()),
                samples,
                params,
                source=small.content_id,
                worker_id="w",
                options=BatchOptions(),
            )
        return {row["id"]: row for row in map(json.loads, completed.lines)}

    two = await complete(2)
    assert len(asked) == 10
    four = await complete(4)
    assert len(asked) == 20 and sorted(asked) == sorted(four), "nothing is generated twice"
    assert {key: four[key] for key in two} == two
    assert len({tuple(row["token_ids"]) for row in four.values()}) == 20, "all are different"


def test_a_model_with_an_adapter_goes_into_the_running_engine(vllm_engine, small, tokenizer, tmp_path):
    from tests.models.test_adapters import make_adapter

    adapter = make_adapter(small.folder, tmp_path / "adapter")
    objects = ObjectStore.from_url(f"file://{tmp_path / 'objects'}")
    merged = import_model(ModelSource(uri=str(small.folder), adapter=str(adapter)), objects, tmp_path)
    adapted = ModelRef(merged, objects.local_tree(merged, tmp_path / "cache"))
    asked = requests(tokenizer, SamplingParams(temperature=0.0, max_tokens=24))
    plain = vllm_engine.generate(asked)
    vllm_engine.update_weights(adapted)
    found = vllm_engine.generate(asked)
    assert_alike(found, TransformersEngine(TransformersBackend(), adapted).generate(asked))
    assert [one.token_ids for one in found] != [one.token_ids for one in plain]


# Engines of their own


def test_a_crowd_of_prompts_with_seeds_is_taken_in_and_changes_nothing(small):
    """More prompt tokens at once than vLLM takes in one step: on a CPU the engine died of a prompt cut in two."""
    from rollout_core.config import VLLMBackend
    from rollout_core.inference.vllm_backend import VLLMEngine

    engine = VLLMEngine(VLLMBackend(max_model_len=224, max_num_seqs=64), small)
    try:
        asked = [Request(f"r{n}", [5 + n, *range(6, 205)], SamplingParams(max_tokens=8), n) for n in range(64)]
        together = engine.generate(asked)
        assert [engine.generate([request])[0] for request in asked[::9]] == together[::9]
    finally:
        engine.close()

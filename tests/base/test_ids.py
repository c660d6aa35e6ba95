"""Ids: pinned digests, canonical JSON, and what must and must not change an id."""

import copy
import string

import pytest
from hypothesis import given, strategies as st

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, canonical_json, content_id, hash_bytes, new_run_id, sample_id, seed_of
from rollout_core.config import SamplingParams

MODEL = hash_bytes(b"a model")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def test_pinned_digests_have_not_changed():
    # Printed by this file's own functions when the schemas got version 1; a change here orphans all stored results.
    assert hash_bytes(b"hello") == "ea8f163db38682925e4491c5e58d4bb3506ef8c14eb78a86e908c5624a67200f"
    assert content_id("example/1", {"b": [1, 2.5, None], "a": "é"}) == PINNED_STRUCTURE
    assert sample_id(MODEL, "hello", SamplingParams(), 0) == PINNED_SAMPLE


PINNED_STRUCTURE = "362d0f007b4bfb1a016a310b1d0c738fe87c8eea0e22e505aa4be6e4c39600e4"
PINNED_SAMPLE = "0abdc6441a10142258a37c22c37804262c7f45f34339da819905f63f3a205ba0"


@given(st.dictionaries(st.text(), JSON))
def test_ids_ignore_the_order_of_keys(value):
    assert content_id("x/1", value) == content_id("x/1", dict(reversed(value.items())))


@given(JSON, st.sampled_from(["a/1", "a/2", "b/1"]), st.sampled_from(["a/1", "a/2", "b/1"]))
def test_another_tag_gives_another_id(value, one, other):
    assert (content_id(one, value) == content_id(other, value)) == (one == other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "\ud800", object(), {"a": {1, 2}}])
def test_canonical_json_refuses_what_json_cannot_say(bad):
    with pytest.raises(ConfigError, match="no canonical JSON"):
        canonical_json(bad)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"top_k": 3},
        {"max_tokens": 17},
        {"seed": 1},
        {"stop": ("x",)},
        {"logprobs": 1},
        {"min_tokens": 1},
        {"stop_token_ids": (5,)},
        {"ignore_eos": True},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"structured": {"kind": "regex", "pattern": "a"}},
        {"structured": {"kind": "choice", "choices": ("a",)}},
    ],
)
def test_every_sampling_parameter_enters_the_sample_id(change):
    assert sample_id(MODEL, "p", SamplingParams(**change), 0) != sample_id(MODEL, "p", SamplingParams(), 0)


def test_every_field_of_sampling_but_n_is_told_apart():
    changed = {"temperature", "top_p", "top_k", "max_tokens", "seed", "stop"} | SamplingParams.identity_without_default
    assert changed | {"stream"} == set(SamplingParams.model_fields), "a new field stays out of ids at its default"


def test_the_form_of_completions_has_one_identity_and_keeps_the_order_of_its_keys():
    def sample(definition) -> ContentId:
        params = SamplingParams(structured={"kind": "json_schema", "definition": definition})  # type: ignore[arg-type]
        return sample_id(MODEL, "p", params, 0)

    table = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert sample(table) == sample('{"type": "object",\n "properties": {"b": {}, "a": {}}}')
    assert sample(table) != sample({"type": "object", "properties": {"a": {}, "b": {}}}), "another order of generation"
    first, other = (SamplingParams(stop_token_ids=ids) for ids in ((7, 3), (3, 7, 3)))
    assert sample_id(MODEL, "p", first, 0) == sample_id(MODEL, "p", other, 0)


@given(st.text(), st.text(), st.integers(0, 9), st.integers(0, 9))
def test_prompt_and_index_enter_the_sample_id(one, other, i, j):
    same = sample_id(MODEL, one, SamplingParams(), i) == sample_id(MODEL, other, SamplingParams(), j)
    assert same == (one == other and i == j)


def test_a_content_id_is_exactly_64_lower_case_hex_digits():
    for bad in ("", "a" * 63, "A" * 64, "g" * 64, "a" * 64 + "\n", 5):
        with pytest.raises(ConfigError, match="not a content id"):
            ContentId(bad)  # type: ignore[arg-type]
    good = ContentId("a" * 64)
    assert copy.deepcopy(good) == good and good.short == "a" * 12


def test_seeds_follow_from_ids_and_fit_31_bits():
    assert seed_of(MODEL) == seed_of(ContentId(MODEL)) and 0 <= seed_of(MODEL) < 2**31


def test_run_ids_are_sortable_ulids():
    first = new_run_id()
    assert len(first) == 26 and set(first) <= set(string.digits + string.ascii_uppercase)

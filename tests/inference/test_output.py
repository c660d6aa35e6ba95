"""The output of batch inference: rows as promised, as JSON lines and as Parquet, and no file written twice."""

from __future__ import annotations

import copy
import io
import json
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config import InferBatchConfig, parse_config
from rollout_core.data.datasets import PromptRow
from rollout_core.data.samples import Completion, Failure, encode_completion, encode_failure, identities_of
from rollout_core.inference import output
from rollout_core.inference.folders import LocalFolder
from rollout_core.inference.output import file_name, output_chunks, output_id, shard_rows, write_known
from rollout_core.inference.shards import import_shards, read_shard, shard_samples, shards_of
from rollout_core.models.messages import ChatMessage
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import ShardCompletions

MODEL = hash_bytes(b"model")
CHAT = (ChatMessage(role="user", content="hi"),)
ROWS = [
    PromptRow(prompt="a", id="mine", extras={"answer": 1, "completion": "the row's own"}),
    PromptRow(prompt="b", extras={"deep": {"x": [1.5, None]}}),
    PromptRow(prompt="b"),
    PromptRow(messages=CHAT),
]


def configured(**changes: Any) -> InferBatchConfig:
    document = {
        "model": {"uri": "models/tiny"},
        "sampling": {"temperature": 0.5, "max_tokens": 8},
        "input": {"glob": "x"},
        "output": {"dir": "out"},
    }
    return parse_config(document, InferBatchConfig, overrides=changes)


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(str(tmp_path / "objects"))


def complete(objects: ObjectStore, tokenizer: Any, config: InferBatchConfig, rows: list[PromptRow]) -> ShardCompletions:
    """A shard of ``rows`` whose last sample failed."""
    if not tokenizer.chat_template:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompts = import_shards(objects, rows, shard_size=100)
    [(shard, _)] = shards_of(objects, prompts)
    params, copies = config.sampling.params, config.sampling.n
    identities = identities_of(MODEL, params, None)
    samples, _ = shard_samples(tokenizer, read_shard(objects, shard), identities, samples_per_prompt=copies)
    lines = [
        encode_completion(Completion(sample.id, [1, number], [-0.5, -0.25], f"after {number}", "stop"))
        for number, sample in enumerate(samples)
    ]
    lines[-1] = encode_failure(Failure(samples[-1].id, "too long"))
    return ShardCompletions(
        completions=objects.put_bytes(b"".join(lines)),
        rows=shard,
        model=MODEL,
        num_samples=len(samples),
        num_failed=1,
        num_passing=0,
        num_prompt_tokens=0,
        num_tokens=0,
        finish_reasons={},
        lengths=(),
    )


def written(objects: ObjectStore, shard: ShardCompletions, config: InferBatchConfig, moment: float = 0.25) -> bytes:
    return b"".join(output_chunks(config, shard_rows(objects, shard, config, [moment] * shard.num_samples)))


def lines(data: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in data.splitlines()]


def test_a_line_says_what_was_asked_and_what_came_of_it(objects: ObjectStore, tokenizer: Any):
    config = configured()
    shard = complete(objects, tokenizer, config, ROWS)
    first, second, third, chat = lines(written(objects, shard, config))
    assert first == {
        "id": "mine",
        "prompt": "a",
        "completion": "after 0",
        "sampling_params": config.sampling.model_dump(mode="json"),
        "model_uri": "models/tiny",
        "finish_reason": "stop",
        "model_content_id": MODEL,
        "completion_blob_id": shard.completions,
        "generated_at": "1970-01-01T00:00:00.250Z",
        "answer": 1,
    }, "and an extra never hides a field of the output"
    assert second["deep"] == {"x": [1.5, None]} and second["id"] != third["id"], "the samples' own ids"
    assert chat["prompt"] == [{"role": "user", "content": "hi"}]


def test_a_failed_sample_keeps_its_line_with_the_reason(objects: ObjectStore, tokenizer: Any):
    config = configured()
    *good, failed = lines(written(objects, complete(objects, tokenizer, config, ROWS), config))
    assert (failed["completion"], failed["finish_reason"], failed["error"]) == (None, "error", "too long")
    assert not any("error" in line for line in good)


def test_several_completions_of_a_prompt_are_numbered_and_a_time_that_is_unknown_is_null(
    objects: ObjectStore, tokenizer: Any
):
    config = configured(**{"sampling.n": 3})
    found = lines(written(objects, complete(objects, tokenizer, config, ROWS[:2]), config, moment=0.0))
    assert [(line["prompt"], line["index"]) for line in found] == [(p, i) for p in "ab" for i in range(3)]
    assert {line["generated_at"] for line in found} == {None}


def test_token_ids_and_logprobs_are_written_when_asked_for(objects: ObjectStore, tokenizer: Any):
    config = configured(**{"output.token_ids": True, "output.logprobs": True})
    first, *_, failed = lines(written(objects, complete(objects, tokenizer, config, ROWS), config))
    assert (first["token_ids"], first["logprobs"]) == ([1, 0], [-0.5, -0.25])
    assert (failed["token_ids"], failed["logprobs"]) == ([], [])


def test_parquet_has_typed_columns_of_the_same_rows(
    objects: ObjectStore, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(output, "ROWS_OF_A_GROUP", 3)
    config = configured(**{"output.format": "parquet", "output.token_ids": True, "output.logprobs": True})
    shard = complete(objects, tokenizer, config, ROWS)
    file = pq.ParquetFile(io.BytesIO(written(objects, shard, config)))
    assert file.num_row_groups == 2
    assert {field.name: str(field.type) for field in file.schema_arrow} == {
        "id": "string",
        "prompt": "string",
        "messages": "list<element: struct<role: string, content: string, reasoning_content: string, "
        "tool_call_id: string, name: string, tool_calls: list<element: struct<id: string, type: string, "
        "function: struct<name: string, arguments: string>>>>>",
        "completion": "string",
        "sampling_params": "string",
        "model_uri": "string",
        "finish_reason": "string",
        "model_content_id": "string",
        "completion_blob_id": "string",
        "generated_at": "timestamp[ms, tz=UTC]",
        "error": "string",
        "index": "int32",
        "token_ids": "list<element: int32>",
        "logprobs": "list<element: float>",
        "extras": "string",
    }
    first, second, third, chat = file.read().to_pylist()
    assert (first["id"], first["prompt"], first["messages"], first["completion"]) == ("mine", "a", None, "after 0")
    assert first["generated_at"] == datetime.fromtimestamp(0.25, UTC) and first["error"] is None
    assert orjson.loads(first["extras"]) == {"answer": 1, "completion": "the row's own"}
    assert orjson.loads(second["extras"]) == {"deep": {"x": [1.5, None]}} and third["extras"] == "{}"
    assert orjson.loads(first["sampling_params"]) == config.sampling.model_dump(mode="json")
    assert (first["token_ids"], first["logprobs"]) == ([1, 0], [-0.5, -0.25])
    absent = dict.fromkeys(("reasoning_content", "tool_call_id", "name", "tool_calls"))
    assert (chat["prompt"], chat["messages"]) == (None, [{"role": "user", "content": "hi", **absent}])
    assert (chat["completion"], chat["finish_reason"], chat["error"]) == (None, "error", "too long")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_output_is_written_in_constant_memory(
    objects: ObjectStore, tokenizer: Any, form: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(output, "ROWS_OF_A_GROUP", 500)
    monkeypatch.setattr(output, "LINES_TOGETHER", 500)
    config = configured(**{"output.format": form})
    shard = complete(objects, tokenizer, config, [PromptRow(prompt=f"{n} " + "word " * 40) for n in range(100)])

    def rows(repeats: int) -> Iterator[Any]:
        for _ in range(repeats):
            yield from shard_rows(objects, shard, config, [0.5] * 100)

    def peak(repeats: int) -> int:
        tracemalloc.start()
        try:
            assert sum(map(len, output_chunks(config, rows(repeats)))) > 0
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(60) < 1.5 * peak(10)


# What is written again


def test_a_file_that_is_there_unchanged_is_not_written_again(objects: ObjectStore, tmp_path: Path):
    folder, name, calls = LocalFolder(tmp_path / "out"), "completions.jsonl", []

    def chunks(data: bytes = b"one\n") -> list[bytes]:
        calls.append(data)
        return [data]

    one, two = hash_bytes(b"content one"), hash_bytes(b"content two")

    def write(content: ContentId) -> bool:
        return write_known(objects, folder, name, content, chunks)

    path = tmp_path / "out" / name
    assert write(one) and path.read_bytes() == b"one\n"
    assert not write(one) and len(calls) == 1
    path.write_bytes(b"someone's edit\n")
    assert write(one) and path.read_bytes() == b"one\n"
    path.unlink()
    assert write(one) and path.exists()
    assert write(two), "what stands for the content changed"
    assert write(one), "the last content counts"
    for blob in list(dict(objects.blobs())):
        objects.delete(blob)
    assert write(one), "a note that is lost is made anew"
    assert len(objects.ref_names("output-files")) == 1, "a file has one note, however often it is written"


def test_rows_and_form_are_part_of_what_an_output_is(objects: ObjectStore, tokenizer: Any):
    """The same completions beside other extras are another output."""
    config = configured()
    shard = complete(objects, tokenizer, config, [PromptRow(prompt="a"), PromptRow(prompt="b")])
    other = complete(objects, tokenizer, config, [PromptRow(prompt="a", extras={"tag": 1}), PromptRow(prompt="b")])
    assert shard.completions == other.completions
    ids = [
        output_id(config, [shard]),
        output_id(config, [other]),
        output_id(config, [shard, other]),
        output_id(configured(**{"output.format": "parquet"}), [shard]),
        output_id(configured(**{"output.token_ids": True}), [shard]),
        output_id(configured(**{"output.logprobs": True}), [shard]),
        output_id(configured(**{"model.uri": "elsewhere"}), [shard]),
    ]
    assert len(set(ids)) == len(ids)
    assert output_id(configured(**{"workers.count": 7, "output.dir": "b", "output.events": True}), [shard]) == ids[0]


def test_the_file_is_named_by_its_form():
    assert file_name(configured().output) == "completions.jsonl"
    assert file_name(configured(**{"output.format": "parquet"}).output) == "completions.parquet"


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_integers_of_any_size_come_back_as_they_were(objects: ObjectStore, tokenizer: Any, form: str):
    config = configured(**{"output.format": form})
    extras = {"whole": 2**64 + 1, "deep": [{"less": -(2**70)}], "float": 1e300}
    shard = complete(objects, tokenizer, config, [PromptRow(prompt="a", extras=extras), PromptRow(prompt="b")])
    data = written(objects, shard, config)
    if form == "jsonl":
        first = json.loads(data.splitlines()[0])
        assert first["sampling_params"] == config.sampling.model_dump(mode="json")
    else:
        [first] = pq.read_table(io.BytesIO(data)).slice(0, 1).to_pylist()
        first = json.loads(first["extras"])
    assert {key: first[key] for key in extras} == extras


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_the_likeliest_tokens_are_written_where_both_keys_ask_for_them(objects: ObjectStore, tokenizer: Any, form: str):
    asked = {"output.format": form, "output.logprobs": True, "sampling.logprobs": 2}
    config = configured(**asked)
    shard = complete(objects, tokenizer, config, [PromptRow(prompt="a"), PromptRow(prompt="b"), PromptRow(prompt="c")])
    rows = objects.get_bytes(shard.completions).splitlines(keepends=True)
    first = json.loads(rows[0]) | {"top_logprobs": [[[1, -0.5], [7, -1.5]], [[0, -0.25]]]}
    shard = shard.model_copy(
        update={"completions": objects.put_bytes(b"".join([json.dumps(first).encode() + b"\n", *rows[1:]]))}
    )
    data = written(objects, shard, config)
    if form == "jsonl":
        told = [row["top_logprobs"] for row in lines(data)]
    else:
        told = [
            [[list(entry.values()) for entry in top] for top in row["top_logprobs"]]
            for row in pq.read_table(io.BytesIO(data)).to_pylist()
        ]
    assert told == [[[[1, -0.5], [7, -1.5]], [[0, -0.25]]], [], []]
    plain = configured(**asked | {"output.logprobs": False})
    data = written(objects, shard, plain)
    names = list(lines(data)[0]) if form == "jsonl" else pq.read_schema(io.BytesIO(data)).names
    assert "top_logprobs" not in names

"""The output of batch inference: the folder's run id, rows as promised, and files that appear whole."""

from __future__ import annotations

import os

import orjson
import pytest

from rollout_core.config import SamplingParams
from rollout_core.datasets import PromptRow
from rollout_core.errors import ConfigError
from rollout_core.ids import hash_bytes, new_run_id
from rollout_core.inference.output import output_rows, resolve_run_id, write_atomically
from rollout_core.inference.samples import SampledCompletion, make_samples

MODEL, BLOB = hash_bytes(b"model"), hash_bytes(b"blob")
PARAMS = SamplingParams(temperature=0.5, max_tokens=8)


@pytest.fixture
def rows(tokenizer):
    samples = make_samples(
        tokenizer,
        [
            PromptRow(prompt="a", id="mine", extras={"answer": 1, "completion": "the row's own"}),
            PromptRow(prompt="b"),
            PromptRow(prompt="b"),
        ],
        model=MODEL,
        params=PARAMS,
    )
    completions = [
        SampledCompletion(sample.id, [1, 2], [-0.5, -0.25], f"after {number}", "stop")
        for number, sample in enumerate(samples)
    ]
    lines = output_rows(
        samples,
        completions,
        params=PARAMS,
        model_uri="models/tiny",
        model_id=MODEL,
        blob_id=BLOB,
        finished_at={samples[0].id: 0.25},
    )
    return samples, [orjson.loads(line) for line in lines]


def test_a_row_says_what_was_asked_and_what_came_of_it(rows):
    _, [first, *_] = rows
    assert first == {
        "id": "mine",
        "prompt": "a",
        "completion": "after 0",
        "sampling_params": PARAMS.model_dump(mode="json"),
        "model_uri": "models/tiny",
        "finish_reason": "stop",
        "model_content_id": MODEL,
        "completion_blob_id": BLOB,
        "generated_at": "1970-01-01T00:00:00.250Z",
        "answer": 1,
    }


def test_a_row_without_an_id_of_its_own_has_the_samples(rows):
    samples, (_, second, third) = rows
    assert (second["id"], third["id"]) == (samples[1].id, samples[2].id) and second["id"] != third["id"]
    assert second["generated_at"] is None


def test_an_extra_never_hides_a_field_of_the_output(rows):
    assert rows[1][0]["completion"] == "after 0"


def test_a_folder_keeps_its_run_id(tmp_path):
    folder = tmp_path / "out"
    first = resolve_run_id(folder, None)
    assert len(first) == 26 and resolve_run_id(folder, None) == first
    assert resolve_run_id(tmp_path / "other", None) != first


def test_the_run_id_asked_for_counts(tmp_path):
    asked = new_run_id()
    assert resolve_run_id(tmp_path, asked) == asked


@pytest.mark.parametrize("wrong", ["", "../../etc", "01ARZ3NDEKTSV4RRFFQ69G5FA", "01arz3ndektsv4rrffq69g5fav"])
def test_what_is_no_run_id_is_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match="no run id; expected a ULID"):
        resolve_run_id(tmp_path, wrong)
    (tmp_path / "run-id").write_text(wrong)
    with pytest.raises(ConfigError, match="run-id"):
        resolve_run_id(tmp_path, None)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out" / "completions.jsonl"
    write_atomically(path, [b"one\n", b"two\n"])
    assert path.read_bytes() == b"one\ntwo\n"

    def broken():
        yield b"three\n"
        assert path.read_bytes() == b"one\ntwo\n", "the old file stays while the new one is written"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, broken())
    assert path.read_bytes() == b"one\ntwo\n"
    assert os.listdir(path.parent) == ["completions.jsonl"], "no leftovers"

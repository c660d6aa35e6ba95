"""Which samples are behind a checkpoint, and which checkpoints saw a row."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config import SamplingParams
from rollout_core.data.datasets import PromptRow, to_jsonl
from rollout_core.data.examples import positions_between
from rollout_core.data.sample_lineage import number_of, samples_behind, who_saw
from rollout_core.data.samples import Completion, encode_completion, encode_samples, identify, identities_of
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import Lineage, record_lineage
from tests.cli.test_cli import refused, rollout
from tests.objects.test_lineage import made

ROWS = [PromptRow(prompt=f"prompt {number}", extras={"answer": str(number)}) for number in range(8)]
BASE, TUNED, FIRST, SECOND = (hash_bytes(bytes([n])) for n in range(4))


@pytest.fixture
def objects(tmp_path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path / 'objects'}")


def record(objects: ObjectStore, lineage: Lineage) -> None:
    """File it as made a moment after all others."""
    later = timedelta(seconds=len(objects.ref_names("makers")))
    record_lineage(objects, lineage.model_copy(update={"created_at": lineage.created_at + later}))


def update(objects: ObjectStore, start: ContentId, model: ContentId, chosen: list[int], data: ContentId) -> None:
    """An iteration over two samples of each of these rows, and its lineage."""
    rows = [ROWS[number] for number in chosen]
    params = SamplingParams(max_tokens=4)
    identities = identities_of(start, params, None)
    samples = identify(rows, [[1]] * len(rows), [0] * len(rows), identities, samples_per_prompt=2)
    drawn = objects.put_bytes(encode_samples(samples))
    record(objects, made("enqueue_prompts", {"prompts": data, "model": start}, drawn))
    lines = [encode_completion(Completion(item.id, [7], [-0.5], "text", "stop")) for item in samples]
    completions = objects.put_bytes(b"".join(lines))
    record(objects, made("batch_inference", {"prompts": {"samples": drawn}}, completions, drawn))
    scores = objects.put_bytes(json.dumps([float(number) for number in range(len(samples))]).encode())
    record(objects, made("score_rewards", {"completions": completions}, scores, completions))
    inputs: dict[str, Any] = {"scores": {"scores": scores, "completions": completions}, "samples": drawn}
    record(objects, made("grpo_update", {"model": start, "label": f"of {chosen}", **inputs}, model))


@pytest.fixture
def data(objects: ObjectStore) -> ContentId:
    """Prompts of two iterations, after an SFT of ten steps of two of other eight rows."""
    rows = objects.put_bytes(b"".join(b'{"completion":"%d","prompt":"p"}\n' % number for number in range(8)))
    metrics = objects.put_bytes(b"".join(b'{"loss":1.0,"step":%d}\n' % step for step in range(1, 6)))
    report = objects.put_bytes(b'{"num_examples":8,"num_left_out":0,"num_rows":8}')
    settings = {"minibatch_size": 2, "gradient_accumulation": 1}
    inputs = {"model": BASE, "dataset": rows, "settings": settings, "seed": 3}
    record(objects, made("sft_update", inputs, TUNED, metrics, report))
    prompts = objects.put_bytes(to_jsonl(ROWS))
    update(objects, TUNED, FIRST, [0, 1], prompts)
    update(objects, FIRST, SECOND, [2, 3], prompts)
    return prompts


def test_every_sample_behind_a_checkpoint_is_a_line_with_its_reward(objects: ObjectStore, data: ContentId):
    found = [json.loads(line) for line in samples_behind(objects, SECOND)]
    labels = [item["label"] for item in found]
    assert labels == [""] * 8 + ["of [0, 1]"] * 4 + ["of [2, 3]"] * 4
    assert found[0] == {
        "checkpoint": TUNED,
        "stage": "sft_update",
        "label": "",
        "number": 1,
        "row": {"completion": "0", "prompt": "p"},
    }
    last = found[-1]
    assert (last["checkpoint"], last["sample"]["prompt"], last["reward"]) == (SECOND, "prompt 3", 3.0)
    assert last["sample"]["id"] == last["completion"]["id"] and last["completion"]["token_ids"] == [7]
    assert len(list(samples_behind(objects, FIRST))) == 12
    with pytest.raises(NotFound, match="no stage that trained is recorded"):
        list(samples_behind(objects, BASE))


def test_the_checkpoints_that_saw_a_prompt_are_those_that_learnt_from_it_and_what_came_of_them(objects, data):
    def seen(number: int) -> list[tuple[ContentId | None, int | None, tuple[float, ...]]]:
        return [(item.checkpoint, item.times, item.rewards) for item in who_saw(objects, data, number)]

    assert seen(1) == [(FIRST, 2, (0.0, 1.0)), (SECOND, 0, ())]
    assert seen(4) == [(SECOND, 2, (2.0, 3.0))]
    assert seen(8) == []
    assert number_of(objects, data, "prompt 3") == 4
    for number in (0, 9):
        with pytest.raises(ConfigError, match=f"has no row {number}"):
            list(who_saw(objects, data, number))


def test_a_model_in_the_precision_of_its_base_has_seen_what_its_training_saw(objects: ObjectStore, data: ContentId):
    rounded, later = hash_bytes(b"rounded"), hash_bytes(b"later")
    record(objects, made("round_weights", {"model": SECOND, "base": BASE}, rounded))
    update(objects, rounded, later, [5], data)
    assert [item.checkpoint for item in who_saw(objects, data, 1)] == [FIRST, SECOND, later]
    assert len(list(samples_behind(objects, rounded))) == 16


def test_of_an_update_from_rows_the_order_tells_which_it_took(objects: ObjectStore, data: ContentId):
    """Ten items of eight rows: each once, and two of them again."""
    rows = hash_bytes(b"".join(b'{"completion":"%d","prompt":"p"}\n' % number for number in range(8)))
    again = positions_between(8, 10, num_items=8, seed=3)
    for number in range(1, 9):
        first, *later = who_saw(objects, rows, number)
        assert (first.checkpoint, first.times) == (TUNED, 2 if number - 1 in again else 1)
        assert [item.times for item in later] == [0, 0]


def test_samples_by_command(objects: ObjectStore, data: ContentId, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLOUT_STORAGE", objects.url)
    done = rollout("lineage", SECOND, "--samples")
    assert done.exit_code == 0 and len(done.stdout.splitlines()) == 16
    for asked in (["--row", "4"], ["--prompt", "prompt 3"]):
        done = rollout("lineage", data[:8], *asked, "--format", "json")
        assert [json.loads(line)["checkpoint"] for line in done.stdout.splitlines()] == [SECOND]
    shown = rollout("lineage", data[:8], "--row", "4").stdout.splitlines()
    assert len(shown) == 1 and shown[0].startswith(SECOND[:12]) and "samples of it, rewards" in shown[0]
    assert "give one of them" in refused(rollout("lineage", data, "--samples", "--row", "1"))

"""Samples of a run page by page, over shards and searches that stop midway, and completions token by token."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer, decoders, models
from typer.testing import CliRunner

from flows.cli import app
from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId, content_id
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.objects import ObjectStore
from rollout_core.runs import browsing
from rollout_core.runs.browsing import SampleBrowser, SampleFile, SampleList, Search, find_list, sample_lists
from rollout_core.runs.learned import Learned, learned_from
from rollout_core.runs.run_records import RunDetail, RunHead, RunRecords, StageCall
from rollout_core.runs.tokens import TokenTexts
from tests.runs.test_run_records import call, evaluated

PLAIN = Search()


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"{tmp_path}/objects")


def completion(sample: str, text: str, reason: str = "stop") -> bytes:
    return encode_completion(Completion(sample, [1, 2], [-0.1, -0.2], text, reason))  # pyright: ignore[reportArgumentType]


def shards(objects: ObjectStore, sizes: list[int], copies: int = 2) -> RunDetail:
    """The record of a batch whose prompts are numbered through, each completed twice."""
    calls, ids, first = [], [], 0
    for size in sizes:
        numbers = range(first, first + size)
        rows = objects.put_bytes(b"".join(orjson.dumps({"prompt": f"prompt {n}"}) + b"\n" for n in numbers))
        lines = [completion(content_id("s", [n, c]), f"answer {n} {c}") for n in numbers for c in range(copies)]
        made = objects.put_bytes(b"".join(lines))
        counts = {"num_samples": size * copies, "model": content_id("m", [])}
        calls.append(call("infer_shard", kind="ShardCompletions", rows=rows, completions=made, **counts))
        ids.append(rows)
        first += size
    index = objects.put_bytes(json.dumps({"shards": ids, "sizes": sizes}).encode())
    # They end in another order than they stand in.
    return RunDetail(config={}, calls=(call("import_prompts", kind="PromptShards", index=index), *reversed(calls)))


def numbers(
    browser: SampleBrowser, of: SampleList, search: Search, start: int = 0, **more
) -> tuple[list[int], int | None]:
    page = browser.page(of, search, **{"start": start, "limit": 100, "seconds": 60.0, **more})
    return [row.number for row in page.rows], page.next


def test_a_batch_is_browsed_over_its_shards_in_the_order_of_its_rows(objects: ObjectStore) -> None:
    [batch] = sample_lists(objects, shards(objects, [3, 2, 4]))
    browser = SampleBrowser(objects)
    assert (batch.label, batch.num_samples, batch.mean) == ("batch", 18, None)
    assert numbers(browser, batch, PLAIN, 4, limit=4) == ([4, 5, 6, 7], 8)
    page = browser.page(batch, PLAIN, start=4, limit=4, seconds=60)
    assert [row.prompt for row in page.rows] == ["prompt 2", "prompt 2", "prompt 3", "prompt 3"]
    assert [row.completion for row in page.rows] == ["answer 2 0", "answer 2 1", "answer 3 0", "answer 3 1"]
    assert math.isnan(page.rows[0].reward)
    assert numbers(browser, batch, PLAIN, 16) == ([16, 17], None)
    assert numbers(browser, batch, PLAIN, 18) == ([], None)
    assert numbers(browser, batch, Search(text="answer 4 1")) == ([9], None)
    assert numbers(browser, batch, Search(text="prompt 4")) == ([8, 9], None)
    assert numbers(browser, batch, Search(below=1.0)) == ([], None), "nothing was scored"
    assert browser.sample(batch, 17).prompt == "prompt 8"
    with pytest.raises(NotFound, match="no sample 18"):
        browser.sample(batch, 18)


def test_a_page_reads_one_shard_and_keeps_no_more_than_it_may(objects: ObjectStore, monkeypatch) -> None:
    [batch] = sample_lists(objects, shards(objects, [50] * 20))
    read: list[ContentId] = []
    get = objects.get_bytes
    monkeypatch.setattr(objects, "get_bytes", lambda blob: read.append(blob) or get(blob))
    browser = SampleBrowser(objects, kept_bytes=20_000)
    for start in (1990, 1991, 1992):
        assert numbers(browser, batch, PLAIN, start)[0][0] == start
    assert len(read) == 2, "its completions and its rows, once"
    numbers(browser, batch, Search(text="nowhere"))
    assert sum(each.size for each in browser._known.values()) <= 20_000


def test_what_a_page_needs_is_read_once_however_large(objects: ObjectStore, monkeypatch) -> None:
    [batch] = sample_lists(objects, shards(objects, [5, 5]))
    scored = replace(batch.files[0], scores=objects.put_json([0.5] * 10))
    batch = replace(batch, files=(scored, batch.files[1]))
    read: list[ContentId] = []
    get = objects.get_bytes
    monkeypatch.setattr(objects, "get_bytes", lambda blob: read.append(blob) or get(blob))
    browser = SampleBrowser(objects, kept_bytes=1)
    for start in (0, 3, 6):
        assert numbers(browser, batch, PLAIN, start, limit=3)[0] == [start, start + 1, start + 2]
    assert len(read) == 3 and set(read) == set(scored.blobs)
    numbers(browser, batch, PLAIN, 12)
    assert {blob for _, blob in browser._known} == {batch.files[1].prompts, batch.files[1].completions}


def test_a_search_says_where_it_stopped_and_goes_on_there(objects: ObjectStore, monkeypatch) -> None:
    [batch] = sample_lists(objects, shards(objects, [400] * 3, copies=1))
    monkeypatch.setattr(browsing, "_LOOK_AT_CLOCK", 100)
    browser, start, found, pages = SampleBrowser(objects), 0, [], 0
    while start is not None:
        rows, start = numbers(browser, batch, Search(text=" 77"), start, seconds=-1.0)
        found += rows
        pages += 1
    assert found == [n for n in range(1200) if str(n).startswith("77")]
    assert pages > 10


def test_samples_that_were_left_out_shift_no_prompt_and_texts_are_found_as_people_write_them(objects) -> None:
    prompts = ['say "no"\n', "Grüße", "c", "d"]
    samples = [Sample(content_id("s", [text]), text, [1], 0, None, {}) for text in prompts]
    kept = [samples[1], samples[3]]
    file = SampleFile(
        objects.put_bytes(encode_samples(samples)),
        objects.put_bytes(b"".join(completion(each.id, f"of {each.prompt}", "length") for each in kept)),
        2,
        objects.put_json([None, 0.25]),
        objects.put_json({"names": ["a", "b"], "weights": [1.0, 2.0], "values": [None, [0.5, None]]}),
        objects.put_json(
            [{"verdicts": [[], [{"judge": "wise", "value": 7.0, "reasoning": "short"}]], "human": [None, 6.0]}]
        ),
    )
    of = SampleList("iteration 1", False, (file,), 2, 0.25, None)
    browser = SampleBrowser(objects)
    assert [row.prompt for row in browser.page(of, PLAIN, start=0, limit=9, seconds=9).rows] == ["Grüße", "d"]
    assert numbers(browser, of, Search(text="üß")) == ([0], None)
    assert numbers(browser, of, Search(text='say "no"')) == ([], None), "its sample was left out"
    assert numbers(browser, of, Search(text=kept[0].id[:8])) == ([], None), "an id is no text of a sample"
    assert numbers(browser, of, Search(below=0.5)) == ([1], None), "without a reward it is not below"
    assert numbers(browser, of, Search(finish_reason="stop")) == ([], None)
    assert browser.reward_parts(of, 0) == (("a", 1.0, None), ("b", 2.0, None))
    assert browser.reward_parts(of, 1) == (("a", 1.0, 0.5), ("b", 2.0, None))
    assert browser.verdicts(of, 0) == () and browser.verdicts(of, 1) == (("wise", 7.0, "short"), ("a person", 6.0, ""))
    assert browser.rewards(file) == {samples[3].id: 0.25}
    objects.delete(file.completions)
    with pytest.raises(NotFound, match="any more"):
        SampleBrowser(objects).page(of, PLAIN, start=0, limit=9, seconds=9)


def test_the_list_that_is_meant(objects: ObjectStore) -> None:
    detail = RunDetail(config={}, calls=(evaluated(objects, "after PPO", {"a": ("b", 1.0)}),))
    lists = sample_lists(objects, detail)
    assert find_list(lists, detail, None).label == find_list(lists, detail, "after PPO").label == "after PPO"
    for wrong, known in (("no", lists), (None, [])):
        with pytest.raises(ConfigError):
            find_list(known, detail, wrong)


def drawn(objects: ObjectStore, label: str, *rewards: float) -> tuple[StageCall, StageCall]:
    """Completions of two tokens each and their scores, as an iteration has them."""
    ids = [content_id("s", [label, number]) for number in range(len(rewards))]
    counts = {"num_samples": len(ids), "mean": 0.5}
    samples = objects.put_bytes(encode_samples(Sample(each, "p", [1], 0, None, {}) for each in ids))
    made = objects.put_bytes(b"".join(completion(each, "text") for each in ids))
    scores = objects.put_json(list(rewards))
    return (
        call("batch_inference", label, "Completions", samples=samples, completions=made),
        call("score_rewards", label, "Scores", completions=made, scores=scores, **counts),
    )


def updated(objects: ObjectStore, completions: str, *rows: Any) -> StageCall:
    """An update that learned from these, with what it kept of them."""
    lines = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    kept = {"advantages": objects.put_bytes(lines)} if rows else {}
    return call("grpo_update", "iteration 1", "Checkpoint", **kept).model_copy(update={"inputs": (completions,)})


def what_was_learned(objects: ObjectStore, *calls: StageCall, label: str, config: Any = None) -> list[Learned]:
    detail, browser = RunDetail(config=config or {}, calls=calls), SampleBrowser(objects)
    chosen = find_list(sample_lists(objects, detail), detail, label)
    rows = browser.page(chosen, PLAIN, start=0, limit=9, seconds=9).rows
    return [learned_from(browser, detail, chosen, row) for row in rows]


def test_a_sample_has_the_advantages_of_the_update_that_learned_from_it(objects: ObjectStore) -> None:
    made, scored = drawn(objects, "iteration 1", 0.0, 1.0, 1.0)
    completions = made.result["completions"]
    first, second, third = what_was_learned(
        objects, made, scored, updated(objects, completions, -2.0, [0.5, -0.25], None), label="iteration 1"
    )
    assert (first.update, list(first.advantages), first.mean) == ("grpo_update iteration 1", [-2.0, -2.0], -2.0)
    assert (list(second.advantages), second.mean) == ([0.5, -0.25], 0.125)
    assert first.scale == second.scale == math.sqrt((4.0 + (0.25 + 0.0625) / 2) / 2)
    assert [first.level(value) for value in (-2.0, -0.5, -0.1, 0.0, 0.5, 2.0)] == [-2, -1, 0, 0, 1, 2]
    assert not third.advantages and "cut at the length limit" in third.why


def test_why_the_advantages_of_a_sample_are_not_known(objects: ObjectStore) -> None:
    made, scored = drawn(objects, "iteration 1", 0.0, 1.0)
    completions = made.result["completions"]
    held_out = evaluated(objects, "before", {"a": ("b", 1.0)})
    kept = updated(objects, completions, 1.0, 1.0)
    gone = kept.model_copy(update={"result": {"advantages": content_id("no", [])}})
    for calls, config, why in (
        ((), {}, "no update"),
        ((updated(objects, completions),), {}, "kept no advantages"),
        ((updated(objects, completions),), {"grpo": {"loss": "gkd"}}, "teacher"),
        ((gone,), {}, "not in the storage any more"),
        ((updated(objects, completions, [1.0], [1.0]),), {}, "a form that this version does not read"),
    ):
        for found in what_was_learned(objects, made, scored, *calls, label="iteration 1", config=config):
            assert not found.advantages and why in found.why
    (found,) = what_was_learned(objects, held_out, made, scored, kept, label="before")
    assert "held out" in found.why
    (found, *_) = what_was_learned(objects, *shards(objects, [2]).calls, label="batch")
    assert "no update" in found.why


def test_advantages_are_found_by_id_where_an_update_learned_from_some_of_what_was_drawn(objects: ObjectStore) -> None:
    made, scored = drawn(objects, "iteration 1, round 2", 0.0, 1.0, 0.5)
    lines = objects.get_bytes(ContentId(made.result["completions"])).splitlines(keepends=True)
    chosen = objects.put_bytes(completion(content_id("s", ["other"]), "of round 1") + lines[2] + lines[0])
    mixed = objects.put_bytes(lines[0] + lines[2] + lines[1])
    select = call("select_groups", "iteration 1", "SelectedGroups", completions=chosen)
    replay = call("replay_groups", "iteration 1", "Replayed", completions=mixed)
    replay = replay.model_copy(update={"inputs": (chosen,)})
    label = "iteration 1, round 2"
    found = what_was_learned(objects, made, scored, select, updated(objects, chosen, 9.0, 2.0, 1.0), label=label)
    assert [list(each.advantages) for each in found] == [[1.0, 1.0], [], [2.0, 2.0]]
    assert "not among the completions" in found[1].why
    calls = (made, scored, select, replay, updated(objects, mixed, 3.0, 4.0, 5.0))
    assert [each.advantages[0] for each in what_was_learned(objects, *calls, label=label)] == [3.0, 5.0, 4.0]


def test_an_agents_samples_are_read_by_its_models_tokens(objects: ObjectStore, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    Tokenizer(models.WordLevel(vocab={"ask": 0, "yes": 1, "no": 2}, unk_token="no")).save(
        str(folder / "tokenizer.json")
    )
    name = content_id("stored-sample/1", [1])
    (made, scored) = (objects.put_bytes(completion(name, "")), objects.put_json([1.0]))
    samples = objects.put_bytes(encode_samples([Sample(name, "", [0], 0, "ro-1", {})]))
    ids = {"samples": samples, "completions": made, "scores": scored}
    detail = RunDetail(
        config={},
        calls=(
            call("roll_out", "iteration 1", "AgentRollouts", rollouts="a" * 64, model=objects.put_tree(folder)),
            call("collect_samples", "iteration 1", "Experience", num_samples=1, mean=1.0, **ids).model_copy(
                update={"inputs": ("a" * 64,)}
            ),
        ),
    )
    (of,), browser = sample_lists(objects, detail), SampleBrowser(objects)
    shown = TokenTexts(objects).readable(of.model, browser.sample(of, 0))
    assert (shown.prompt, shown.completion, shown.reward) == ("ask", "yes no", 1.0)


def test_a_batch_is_printed_in_parts_and_whole_as_json(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime(2026, 11, 25, tzinfo=UTC)
    head = RunHead(id="ba7c0000-0000", name="many", flow="infer-batch", state="completed", began=now, written=now)
    RunRecords(objects).write(head, shards(objects, [20, 25, 5]))
    monkeypatch.setenv("ROLLOUT_STORAGE", objects.url)

    def printed(*options: str) -> list[str]:
        done = CliRunner().invoke(app, ["samples", "many", *options])
        assert done.exit_code == 0, done.output
        return done.stdout.splitlines()

    first = printed()
    assert first[0] == "batch: 100 samples, without rewards" and "     0  -  stop, 2 tokens" in first
    assert len(first) == 1 + 3 * 20 + 1 and first[-1].startswith("more fit: --from 20 continues")
    assert printed("--from", "99")[1:] == ["    99  -  stop, 2 tokens", "        prompt 49", "        answer 49 1"]
    rows = [json.loads(line) for line in printed("--json")]
    assert [row["number"] for row in rows] == list(range(100))
    assert (rows[7]["prompt"], rows[7]["completion"], rows[7]["reward"]) == ("prompt 3", "answer 3 1", None)
    assert [json.loads(line)["number"] for line in printed("--json", "--text", "prompt 4", "--limit", "3")] == [
        8,
        9,
        80,
    ]
    assert printed("--worse-than", "1")[1:] == []


def test_tokens_are_decoded_as_parts_of_one_text(objects: ObjectStore, tmp_path: Path) -> None:
    vocabulary = {"h": 0, "i": 1, "<s>alert(1)</s>": 2, "Ã": 3, "¼": 4}  # the last two are the bytes of one letter
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    model, texts = objects.put_tree(tmp_path / "model"), TokenTexts(objects)
    line = Completion(
        "a" * 64, [0, 3, 4, 2, 99, 1], [-0.01, -0.3, -1.0, -3.0, -9.0, -0.0], "hü", "stop", written=[(0, 5)]
    )
    samples = [Sample(ContentId("a" * 64), "p", [1], 0, None, {})]
    file = SampleFile(objects.put_bytes(encode_samples(samples)), objects.put_bytes(encode_completion(line)), 1)
    view = SampleBrowser(objects).sample(SampleList("x", False, (file,), 1, None, model), 0)
    tokens = texts.tokens(model, view)
    assert [token.text for token in tokens][:4] == ["h", "", "ü", "<s>alert(1)</s>"]
    assert [token.level for token in tokens] == [0, 1, 2, 3, 4, -1]
    assert tokens[2].probability == pytest.approx(math.exp(-1.0))
    for gone in (None, content_id("m", []), objects.put_bytes(b"no folder")):
        assert [token.text for token in texts.tokens(gone, view)][:2] == ["[0]", "[3]"]
    (tmp_path / "model/tokenizer.json").write_text("{}")
    assert texts.tokens(objects.put_tree(tmp_path / "model"), view)[0].text == "[0]"

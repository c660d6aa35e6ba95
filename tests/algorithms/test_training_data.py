"""Tokenised rows on disk: the same items, made once for equal rows, tokenizer and settings, in flat memory."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tokenizers.processors import TemplateProcessing
from updates import positions_at

from rollout_core.algorithms.preference import unpaired_documents
from rollout_core.base.errors import Conflict
from rollout_core.base.ids import ContentId
from rollout_core.config import DPOSettings, JsonlDataset, KTOSettings, OptimizerConfig, SequenceConfig, SFTSettings
from rollout_core.data import examples as data, training_data
from rollout_core.data.dataset_sources import import_dataset, read_dataset
from rollout_core.data.datasets import PairRow, SftRow, UnpairedRow, to_jsonl
from rollout_core.data.examples import EXAMPLES, Example, epoch_order
from rollout_core.data.preference_data import PAIRS, UNPAIRED, Pair, UnpairedPreference
from rollout_core.data.tokenized import DataReport, ItemForm, ItemTable, ItemWriter, Mapped
from rollout_core.data.training_data import look_at_rows, pair_form, sft_form, training_items, unpaired_form
from rollout_core.models.pretrained import load_tokenizer, tokenizer_id
from rollout_core.objects import ObjectStore
from rollout_core.objects.retention.garbage import collect_garbage
from tests.support.rows import parse_sft, tokenize_pairs, tokenize_sft, tokenize_unpaired

COMMON: Any = {"dataset": JsonlDataset(path="x"), "optimizer": OptimizerConfig(lr=1e-3)}
SFT = SFTSettings(**COMMON, sequence=SequenceConfig(max_length=24))


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(str(tmp_path / "objects"))


def sft_rows(count: int) -> list[SftRow]:
    return [SftRow(prompt=f"sort {number} 1 =", completion=" 1 2 3"[: 2 + number % 5]) for number in range(count)]


@pytest.mark.parametrize(
    ("form", "items"),
    [
        (EXAMPLES, [Example([3, 1, 2], [False, True, True]), Example([7], [True])]),
        (PAIRS, [Pair([], [1], [2, 3], -0.1), Pair([5, 6], [1], [9], 0.0)]),
        (
            UNPAIRED,
            [
                UnpairedPreference([1], [2], True),
                UnpairedPreference([1, 2], [3], False),
                UnpairedPreference([4], [], True),
            ],
        ),
    ],
)
def test_items_come_back_as_they_went_in(tmp_path: Path, form: ItemForm[Any], items: list[Any]):
    with ItemWriter(form, tmp_path) as writer:
        for item in items:
            writer.append(item)
    table = ItemTable(form, tmp_path)
    assert list(table) == items and table[:] == items and table[-1] == items[-1] and len(table) == len(items)
    assert type(getattr(table[0], next(iter(form.lists)))) is list
    with pytest.raises(IndexError):
        table[len(items)]
    for file in tmp_path.glob("*.npy"):
        np.load(file, allow_pickle=False)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), max_size=8))
def test_any_lists_of_token_ids_come_back(tmp_path_factory: pytest.TempPathFactory, lists: list[list[int]]):
    folder = tmp_path_factory.mktemp("items")
    with ItemWriter(EXAMPLES, folder) as writer:
        for ids in lists:
            writer.append(Example(ids, [True] * len(ids)))
    table = ItemTable(EXAMPLES, folder)
    assert [item.token_ids for item in table] == lists
    assert table.lengths("token_ids").tolist() == [len(ids) for ids in lists]


def test_a_mapped_sequence_makes_its_items_when_asked():
    made: list[int] = []

    def double(item: int) -> int:
        made.append(item)
        return 2 * item

    mapped = Mapped([1, 2, 3], double)
    assert len(mapped) == 3 and made == []
    assert mapped[1] == 4 and mapped[-2:] == [4, 6] and list(mapped) == [2, 4, 6]
    assert made == [2, 2, 3, 1, 2, 3]


def test_kept_items_are_those_tokenised_at_once_whatever_the_chunks(
    tiny_model: Path, tmp_path: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(data, "ROWS_AT_ONCE", 3)
    tokenizer = load_tokenizer(tiny_model)
    rows = sft_rows(10)
    dataset = import_dataset(objects, rows).data
    examples, report = training_items(objects, tmp_path / "cache", dataset, tiny_model, sft_form(SFT))
    expected, told = tokenize_sft(tokenizer, rows, loss_on=SFT.loss_on, max_seq_len=24)
    assert (list(examples), report) == (expected, told)

    dpo, kto = DPOSettings(**COMMON), KTOSettings(**COMMON)
    pairs = [PairRow(prompt=f"{number} =", chosen="1", rejected="2", margin=0.1) for number in range(7)]
    dataset = import_dataset(objects, pairs).data
    found = training_items(objects, tmp_path / "cache", dataset, tiny_model, pair_form(dpo, need_prompts=True))
    plain = tokenize_pairs(tokenizer, pairs, max_seq_len=1024, need_prompts=True)
    assert (list(found[0]), found[1]) == plain
    judged = [UnpairedRow(prompt=f"{number} =", completion="1", label=number % 2 == 0) for number in range(7)]
    dataset = import_dataset(objects, judged).data
    found = training_items(objects, tmp_path / "cache", dataset, tiny_model, unpaired_form(kto))
    assert (list(found[0]), found[1]) == tokenize_unpaired(tokenizer, judged, max_seq_len=1024)


def test_what_a_plan_tokenised_training_does_not_again(
    tiny_model: Path, tmp_path: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(to_jsonl(sft_rows(10)))
    source = JsonlDataset(path=str(file))
    calls: list[int] = []
    whole = training_data.each_example

    def counting(*arguments: Any, **options: Any) -> DataReport:
        calls.append(1)
        return whole(*arguments, **options)

    monkeypatch.setattr(training_data, "each_example", counting)

    def look(*, keep: bool) -> DataReport:
        rows = read_dataset(source, SftRow, base=tmp_path, objects=objects, download=False)
        tokenizer, found = load_tokenizer(tiny_model), tokenizer_id(tiny_model)
        return look_at_rows(rows, lambda: tokenizer, sft_form(SFT), objects=objects, tokenizer_id=found, keep=keep)

    reports = [look(keep=keep) for keep in (False, True, True, False)]
    assert len(calls) == 2, "a plan that only looks keeps nothing; one that does spares the next"
    assert all(report == reports[0] for report in reports) and reports[0].longest[0][0].startswith(str(file))
    dataset = import_dataset(objects, sft_rows(10)).data
    examples, report = training_items(objects, tmp_path / "cache", dataset, tiny_model, sft_form(SFT))
    assert len(calls) == 2 and len(examples) == report.num_examples
    assert all(place.startswith("row ") for place, _ in report.longest), "of rows, wherever they stood"


def test_a_second_run_tokenises_nothing_and_any_change_of_what_counts_does(
    tiny_model: Path, tmp_path: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
):
    def run(dataset: ContentId, folder: Path = tiny_model, settings: SFTSettings = SFT, cache: str = "cache") -> int:
        calls.clear()
        training_items(objects, tmp_path / cache, dataset, folder, sft_form(settings))
        return len(calls)

    calls: list[int] = []
    whole = training_data.each_example

    def counting(*arguments: Any, **options: Any) -> DataReport:
        calls.append(1)
        return whole(*arguments, **options)

    monkeypatch.setattr(training_data, "each_example", counting)
    dataset = import_dataset(objects, sft_rows(4)).data
    assert run(dataset) == 1 and run(dataset) == 0
    assert run(dataset, cache="another machine's") == 0
    assert run(import_dataset(objects, sft_rows(5)).data) == 1
    assert run(dataset, settings=SFT.model_copy(update={"sequence": SequenceConfig(max_length=8)})) == 1
    shutil.copytree(tiny_model, tmp_path / "other")
    assert run(dataset, tmp_path / "other") == 0, "the same tokenizer in another folder"
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages }}")
    assert run(dataset, tmp_path / "other") == 1

    kept = objects.get_ref(next(f"tokenized/{name.split('/')[1]}" for name in objects.ref_names("tokenized")))
    assert kept is not None
    for name in objects.ref_names("tokenized"):
        objects.delete(objects.manifest(ContentId(objects.get_ref(name) or "")).files[0].content_id)
    shutil.rmtree(tmp_path / "cache")
    assert run(dataset) == 1, "what was lost is made again"


def test_rows_edited_while_they_are_tokenised_are_not_kept_for_those_they_were(
    tiny_model: Path, tmp_path: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
):
    tokenizer, file = load_tokenizer(tiny_model), tmp_path / "rows.jsonl"
    original, edited = to_jsonl(sft_rows(5)), to_jsonl(sft_rows(9)[4:])
    file.write_bytes(original)
    rows = read_dataset(JsonlDataset(path="rows.jsonl"), SftRow, base=tmp_path)
    keep_items = training_data.keep_items

    def edit_and_keep(*arguments: Any) -> Any:
        file.write_bytes(edited)
        return keep_items(*arguments)

    monkeypatch.setattr(training_data, "keep_items", edit_and_keep)
    options: Any = {"objects": objects, "tokenizer_id": tokenizer_id(tiny_model), "keep": True}
    with pytest.raises(Conflict, match=r"dataset 'rows\.jsonl' changed while it was read"):
        look_at_rows(rows, lambda: tokenizer, sft_form(SFT), **options)
    monkeypatch.undo()
    file.write_bytes(original)
    dataset = import_dataset(objects, rows)
    items, _ = training_items(objects, tmp_path / "cache", dataset.data, tiny_model, sft_form(SFT))
    assert list(items) == tokenize_sft(tokenizer, list(rows), loss_on=SFT.loss_on, max_seq_len=24)[0]


def test_what_is_kept_outlives_a_cleaning_of_the_object_store(tiny_model: Path, tmp_path: Path, objects: ObjectStore):
    dataset = import_dataset(objects, sft_rows(4)).data
    before, _ = training_items(objects, tmp_path / "cache", dataset, tiny_model, sft_form(SFT))
    collect_garbage(objects, min_age=timedelta(0))
    after, _ = training_items(objects, tmp_path / "other cache", dataset, tiny_model, sft_form(SFT))
    assert list(after) == list(before) and not objects.exists(dataset)


def test_a_failed_tokenisation_keeps_nothing(tiny_model: Path, tmp_path: Path, objects: ObjectStore):
    dataset = import_dataset(objects, sft_rows(2)).data
    short = SFT.model_copy(update={"sequence": SequenceConfig(max_length=2)})
    with pytest.raises(ValueError, match="none of 2 rows has a token to train"):
        training_items(objects, tmp_path / "cache", dataset, tiny_model, sft_form(short))
    assert objects.ref_names("tokenized") == []


def test_memory_does_not_grow_with_the_rows(tiny_model: Path, tmp_path: Path, objects: ObjectStore):
    """Python's and numpy's memory, from stored rows to a step's examples."""
    peaks = []
    for count in (1000, 41_000):
        dataset = import_dataset(objects, sft_rows(count)).data
        tracemalloc.start()
        examples, _ = training_items(objects, tmp_path / "cache", dataset, tiny_model, sft_form(SFT))
        [examples[place] for place in positions_at(3, num_items=count, per_step=64, seed=1)]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # As Python objects an example takes over 400 bytes. What remains: a row's number, its place in the order, and
    # buffers of the object store's threads, 4 MiB each, of which now one and now two are there at once.
    assert peaks[1] - peaks[0] < 40_000 * 150 + 2**22


def test_the_order_of_an_epoch_is_what_it_always_was():
    """Values of the first version; runs that were begun then go on bit for bit."""
    assert epoch_order(8, seed=7, epoch=0) == GOLDEN_ORDER
    assert positions_at(1, num_items=8, per_step=6, seed=7)[:2] == GOLDEN_ORDER[6:]


GOLDEN_ORDER = [5, 0, 6, 2, 4, 3, 7, 1]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_a_mismatched_answer_is_that_of_the_next_row_with_another_prompt(prompts: list[int]):
    items = [UnpairedPreference([prompt], [10 + row], True) for row, prompt in enumerate(prompts)]
    for row, document in enumerate(unpaired_documents(items)):
        around = [*items[row + 1 :], *items[:row]]
        other = next((item for item in around if item.prompt != items[row].prompt), items[row])
        assert document.branches == (items[row].completion, other.completion)


def test_the_report_names_the_longest_rows_and_shares(tiny_model: Path):
    tokenizer = load_tokenizer(tiny_model)
    rows = [SftRow(prompt="1" * length, completion="2") for length in (3, 30, 5, 30, 7, 9, 11)]
    _, report = tokenize_sft(tokenizer, rows, loss_on=SFT.loss_on, max_seq_len=24)
    lengths = [len(tokenizer("1" * length)["input_ids"]) + 2 for length in (30, 30, 11, 9, 7)]
    assert report.longest == tuple(zip(("row 2", "row 4", "row 7", "row 6", "row 5"), lengths, strict=True))
    assert (report.num_truncated, report.num_left_out, report.num_examples) == (2, 2, 5)
    assert report.trained_share == report.num_trained_tokens / report.num_tokens == 10 / report.num_tokens
    document = json.loads(json.dumps(report.document()))
    assert DataReport.from_document(document) == report
    placed = report.placed(lambda row: f"x.jsonl:{row * 2}")
    assert placed.longest[0] == ("x.jsonl:2", lengths[0]) and placed.figures()["longest rows"].startswith("x.jsonl:2 (")


def test_problems_of_the_template_are_counted_and_the_first_are_told(tiny_model: Path):
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501
    chat = json.dumps({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1"},
                                    {"role": "assistant", "content": "2"}]})  # fmt: skip
    rows = parse_sft((chat + "\n").encode() * 7, "x")
    _, report = tokenize_sft(tokenizer, rows, loss_on=SFT.loss_on, max_seq_len=99)
    assert report.num_template_problems == 7 and len(report.template_problems) == 5
    assert report.template_problems[0] == "row 1: the chat template leaves out or rewrites turn 1, the system's"


def test_a_prompt_has_one_bos_and_a_completion_one_end(tiny_model: Path):
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.bos_token = "<pad>"
    form = {"single": "<pad> $A", "special_tokens": [("<pad>", tokenizer.bos_token_id)]}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**form)
    rows = [SftRow(prompt=f"{bos}1=", completion=f"2{eos}") for bos in ("", "<pad>") for eos in ("", "<|endoftext|>")]
    examples, report = tokenize_sft(tokenizer, rows, loss_on=SFT.loss_on, max_seq_len=99)
    assert tokenizer.decode(examples[0].token_ids) == "<pad>1=2<|endoftext|>"
    assert all(example == examples[0] for example in examples) and not report.num_template_problems

"""Data sets of every kind give the same rows, the same content id and errors that name the place."""

from __future__ import annotations

import json
import tracemalloc
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rollout_core.base import watching
from rollout_core.base.errors import ConfigError, DataError
from rollout_core.config import (
    DatasetSource,
    HuggingFaceDataset,
    JsonlDataset,
    ParquetDataset,
    StoredDataset,
    TrainSFTConfig,
    parse_config,
)
from rollout_core.data import dataset_sources
from rollout_core.data.dataset_sources import import_dataset, read_dataset, stored_rows
from rollout_core.data.datasets import PairRow, PromptRow, Row, SftRow, UnpairedRow, to_jsonl
from rollout_core.models.locating import Unchecked
from rollout_core.objects import ObjectStore

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
ROWS: dict[type[Row], list[dict[str, Any]]] = {
    SftRow: [{"messages": CHAT, "source": "a"}, {"messages": CHAT[:1] + CHAT, "source": "ü"}],
    PromptRow: [{"prompt": "hi", "answer": "1", "id": "x"}, {"prompt": "yo", "answer": "2", "id": "y"}],
    PairRow: [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5}, {"chosen": "b", "rejected": "c"}],
    UnpairedRow: [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "completion": "c", "label": False},
    ],
}


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(str(tmp_path / "objects"))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_same_keys(rows)), path, row_group_size=1)


def _same_keys(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in keys} for row in rows]


def sources_of(folder: Path, rows: list[dict[str, Any]], objects: ObjectStore) -> dict[str, DatasetSource]:
    """The same rows in every form there is."""
    tree = folder / "tree"
    tree.mkdir()
    write_jsonl(folder / "all.jsonl", rows)
    write_jsonl(folder / "part-1.jsonl", rows[:1])
    write_jsonl(folder / "part-2.jsonl", rows[1:])
    write_jsonl(tree / "1.jsonl", rows[:1])
    write_parquet(folder / "all.parquet", rows)
    write_parquet(tree / "2.parquet", rows[1:])
    saved = datasets.Dataset.from_list(_same_keys(rows))
    saved.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(folder / "splits")
    return {
        "jsonl": JsonlDataset(path="all.jsonl"),
        "pattern": JsonlDataset(path="part-*.jsonl"),
        "parquet": ParquetDataset(kind="parquet_path", path="all.parquet"),
        "saved": HuggingFaceDataset(kind="hugging_face", uri="saved"),
        "split": HuggingFaceDataset(kind="hugging_face", uri="splits"),
        "object": StoredDataset(kind="object", id=objects.put_file(folder / "all.jsonl")),
        "short id": StoredDataset(kind="object", id=objects.put_file(folder / "all.parquet")[:8]),
        "tree": StoredDataset(kind="object", id=objects.put_tree(tree)),
        "saved tree": StoredDataset(kind="object", id=objects.put_tree(folder / "saved")),
    }


@pytest.mark.parametrize("model", ROWS, ids=lambda model: model.__name__)
def test_equal_rows_have_one_content_id_whatever_they_are_read_from(
    tmp_path: Path, objects: ObjectStore, model: type[Row]
):
    sources = sources_of(tmp_path, ROWS[model], objects)
    imported = {
        name: import_dataset(objects, read_dataset(source, model, base=tmp_path, objects=objects))
        for name, source in sources.items()
    }
    assert set(imported.values()) == {imported["jsonl"]} and imported["jsonl"].num_rows == 2
    rows = list(stored_rows(objects, imported["jsonl"].data, model))
    assert rows == list(read_dataset(sources["jsonl"], model, base=tmp_path))
    assert objects.get_bytes(imported["jsonl"].data) == to_jsonl(rows)


def test_a_folder_of_data_files_is_read_through_datasets(
    tmp_path: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    write_parquet(tmp_path / "files" / "train.parquet", ROWS[PairRow])
    source = HuggingFaceDataset(kind="hugging_face", uri="files")
    write_jsonl(tmp_path / "same.jsonl", ROWS[PairRow])
    same = read_dataset(JsonlDataset(path="same.jsonl"), PairRow, base=tmp_path)
    assert list(read_dataset(source, PairRow, base=tmp_path)) == list(same)


def test_whoever_watches_sees_how_many_bytes_of_every_form_were_read(
    tmp_path: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watching, "STEP_BYTES", 1)
    for name, source in sources_of(tmp_path, ROWS[PromptRow], objects).items():
        seen: list[tuple[int, int]] = []
        with watching.watched(lambda done, total, seen=seen: seen.append((done, total))):
            read_dataset(source, PromptRow, base=tmp_path, objects=objects).check()
        assert seen, name
        done, total = seen[-1]
        assert 0.9 * total < done <= total and len({total for _, total in seen}) == 1, (name, seen)
    read_dataset(source, PromptRow, base=tmp_path, objects=objects).check()
    assert seen[-1] == (done, total), "nobody watches any more"


def refusal(source: DatasetSource, base: Path, model: type[Row] = SftRow, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_dataset(source, model, base=base, **options).check()
    return str(caught.value)


def test_a_malformed_row_is_named_by_its_place_in_every_form(tmp_path: Path, objects: ObjectStore):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}]
    places = {
        "jsonl": "all.jsonl:2",
        "pattern": "part-2.jsonl:1",
        "parquet": "all.parquet:row 2",
        "saved": "saved:row 2",
        "split": "splits:row 2",
    }
    sources = sources_of(tmp_path, rows, objects)
    for name, source in sources.items():
        message = refusal(source, tmp_path, objects=objects)
        place, reason = message.rsplit(": ", 1)
        assert reason == "completion is empty; there is nothing to train"
        if name in places:
            assert place == places[name]
    tree = StoredDataset.model_validate(sources["tree"]).id
    assert refusal(sources["tree"], tmp_path, objects=objects).startswith(f"{tree[:12]}/2.parquet:row 1: ")
    with pytest.raises(DataError):
        import_dataset(objects, read_dataset(sources["parquet"], SftRow, base=tmp_path))


def test_a_table_that_holds_what_json_cannot_is_refused_by_row(tmp_path: Path):
    source = ParquetDataset(kind="parquet_path", path="x.parquet")
    for row, problem in (
        ({"prompt": "a", "extra": float("nan")}, "Out of range float"),
        ({"prompt": b"a"}, "bytes is not JSON"),
        ({"prompt": Decimal("1.50"), "at": datetime(2026, 1, 2)}, "Decimal is not JSON"),
    ):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "x.parquet")
        message = refusal(source, tmp_path, PromptRow)
        assert message.startswith("x.parquet:row 1: value has no canonical JSON form: ") and problem in message
    column = pyarrow.array([10**17], pyarrow.timestamp("ms"))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "at": column}), tmp_path / "x.parquet")
    assert "x.parquet: not readable as Parquet: " in refusal(source, tmp_path, PromptRow)


def test_times_decimals_and_bytes_of_a_table_are_carried_as_json(tmp_path: Path, objects: ObjectStore):
    moment = datetime(2026, 1, 2, 3, 4, 5, 600_000)
    columns: dict[str, Any] = {
        "prompt": ["a"],
        "answer": [1],
        "at": pyarrow.array([moment], pyarrow.timestamp("us")),
        "utc": pyarrow.array([moment], pyarrow.timestamp("ms", tz="UTC")),
        "exactly": pyarrow.array([1], pyarrow.timestamp("ns")),
        "day": [moment.date()],
        "clock": [moment.time()],
        "took": [timedelta(days=1, seconds=2, microseconds=3)],
        "price": pyarrow.array([Decimal("12345678901234567890.10")], pyarrow.decimal128(38, 2)),
        "image": [b"\xff\xfe\x00"],
        "nested": [[{"at": moment.date(), "bytes": [b"", b"x"]}]],
        "nothing": pyarrow.array([None], pyarrow.timestamp("us")),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    source = ParquetDataset(kind="parquet_path", path="x.parquet")
    [row] = read_dataset(source, PromptRow, base=tmp_path)
    assert row.extras == {
        "answer": 1,
        "at": "2026-01-02T03:04:05.600000",
        "utc": "2026-01-02T03:04:05.600000+00:00",
        "exactly": "1970-01-01T00:00:00.000000001",
        "day": "2026-01-02",
        "clock": "03:04:05.600000",
        "took": "P1DT2.000003S",
        "price": "12345678901234567890.10",
        "image": "//4A",
        "nested": [{"at": "2026-01-02", "bytes": ["", "eA=="]}],
    }
    stored = import_dataset(objects, read_dataset(source, PromptRow, base=tmp_path))
    assert [kept.extras for kept in stored_rows(objects, stored.data, PromptRow)] == [row.extras]


def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "no.parquet").write_text("hello")
    (tmp_path / "empty").mkdir()
    datasets.DatasetDict({"test": datasets.Dataset.from_list([{"a": 1}])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "note").mkdir()
    (tmp_path / "note" / "a.txt").write_text("x")
    note = objects.put_tree(tmp_path / "note")
    cases = [
        (ParquetDataset(kind="parquet_path", path="no.parquet"), "no.parquet: not readable as Parquet: "),
        (ParquetDataset(kind="parquet_path", path="*.parq"), "dataset '*.parq' cannot be read: No such file"),
        (HuggingFaceDataset(kind="hugging_face", uri="./none"), "dataset folder './none' does not exist"),
        (HuggingFaceDataset(kind="hugging_face", uri="splits"), "dataset 'splits' has no split 'train'; it has test"),
        (StoredDataset(kind="object", id="a" * 64), f"dataset {'a' * 64} is not in the object store"),
        (StoredDataset(kind="object", id="a" * 8), "dataset aaaaaaaa is not in the object store"),
        (StoredDataset(kind="object", id=note), f"object {note[:12]} is a folder without a .jsonl or .parquet file"),
    ]
    for source, expected in cases:
        message = refusal(source, tmp_path, objects=objects)
        assert message.startswith(expected) and "\n" not in message
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refusal(HuggingFaceDataset(kind="hugging_face", uri="somebody/rows"), tmp_path) == (
        "dataset 'somebody/rows' is not a folder here, and the hub could not be reached to look for it there"
    )
    with pytest.raises(Unchecked, match="which is read when the run starts"):
        read_dataset(
            HuggingFaceDataset(kind="hugging_face", uri="somebody/rows"), SftRow, base=tmp_path, download=False
        ).check()
    with pytest.raises(Unchecked, match="object store cannot be reached"):
        read_dataset(StoredDataset(kind="object", id="a" * 64), SftRow, base=tmp_path).check()


def test_rows_know_their_places_over_blank_lines_and_files(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "1"}\n\n{"prompt": "2"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "3"}')
    rows = read_dataset(JsonlDataset(path="?.jsonl"), PromptRow, base=tmp_path)
    for _ in range(2):  # each iteration reads anew
        assert [row.prompt for row in rows] == ["1", "2", "3"]
        assert [rows.place(row) for row in range(3)] == ["a.jsonl:2", "a.jsonl:4", "b.jsonl:1"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.setattr(dataset_sources, "TABLE_BATCH_ROWS", 50)
    peaks = []
    for count in (500, 4000):
        rows = [{"prompt": f"{number} " * 20, "completion": "b" * 100} for number in range(count)]
        write_jsonl(tmp_path / "x.jsonl", rows)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=50)
        del rows
        by_kind = {
            "jsonl": JsonlDataset(path="x.jsonl"),
            "parquet": ParquetDataset(kind="parquet_path", path="x.parquet"),
        }
        stream = read_dataset(by_kind[kind], SftRow, base=tmp_path)
        tracemalloc.start()
        assert stream.check() == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # A row in memory takes over 500 bytes, its place in the file 8.
    assert peaks[1] - peaks[0] < 100 * 3500


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ({"path": "x"}, JsonlDataset(path="x")),
        ({"kind": "parquet_path", "path": "x"}, ParquetDataset(kind="parquet_path", path="x")),
        ({"kind": "object", "id": "abcdef01"}, StoredDataset(kind="object", id="abcdef01")),
        (
            {"kind": "hugging_face", "uri": "a/b", "split": "test"},
            HuggingFaceDataset(kind="hugging_face", uri="a/b", split="test"),
        ),
    ],
)
def test_the_kind_says_which_data_set_it_is(dataset: dict[str, Any], expected: DatasetSource):
    assert sft_config(dataset).algorithm.dataset == expected


def sft_config(dataset: Any) -> TrainSFTConfig:
    algorithm = {"base_model": {"uri": "m"}, "optimizer": {"lr": 1.0}, "dataset": dataset}
    return parse_config({"algorithm": algorithm}, TrainSFTConfig)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ({}, "algorithm.dataset.path: required, but not given"),
        ({"kind": "object"}, "algorithm.dataset.id: required, but not given"),
        ({"kind": "object", "id": "xyz"}, "algorithm.dataset.id: String should match pattern"),
        ({"kind": "parquet_path", "pth": "x", "path": "y"}, "algorithm.dataset.pth: unknown key; did you mean 'path'?"),
        ({"kind": "parquet", "path": "x"}, "algorithm.dataset.kind: Input should be 'jsonl_path' or 'parquet_path' or"),
        ("x.jsonl", "algorithm.dataset: Input should be a valid dictionary; got 'x.jsonl'"),
    ],
)
def test_a_wrong_data_set_is_told_in_one_line_of_the_kind_meant(dataset: Any, expected: str):
    with pytest.raises(ConfigError) as caught:
        sft_config(dataset)
    assert [line[: len(expected) + 8] for line in caught.value.violations] == [f"config: {expected}"]

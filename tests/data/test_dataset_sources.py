"""Data sets of every kind give the same rows, the same content id and errors that name the place."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings, strategies as st

from rollout_core.base import watching
from rollout_core.base.errors import ConfigError, DataError
from rollout_core.config import (
    ColumnSource,
    DatasetSource,
    FilesDataset,
    HuggingFaceDataset,
    InputGlob,
    JsonlDataset,
    ParquetDataset,
    StoredDataset,
    TrainSFTConfig,
    parse_config,
)
from rollout_core.data import datasets as rows_module, row_files as files
from rollout_core.data.dataset_sources import hash_rows, import_dataset, open_prompts, read_dataset, stored_rows
from rollout_core.data.datasets import (
    PairRow,
    PromptRow,
    Reading,
    Row,
    SftRow,
    TaskRow,
    UnpairedRow,
    parse_documents,
    parse_rows,
    to_jsonl,
)
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
        ({"prompt": "a", "id": float("nan")}, "id: expected a finite number, got nan"),
        ({"prompt": b"a"}, "prompt: value has no canonical JSON form: bytes is not JSON"),
        ({"prompt": "a", "id": True}, "id: expected a string, got true"),
    ):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "x.parquet")
        assert refusal(source, tmp_path, PromptRow).startswith(f"x.parquet:row 1: {problem}")
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
        (
            HuggingFaceDataset(kind="hugging_face", uri="splits", revision="v2"),
            f"dataset 'splits' is the folder {tmp_path / 'splits'}, which has no revisions; leave out revision 'v2'",
        ),
        (StoredDataset(kind="object", id="a" * 64), f"dataset {'a' * 64} is not in the object store"),
        (StoredDataset(kind="object", id="a" * 8), "dataset aaaaaaaa is not in the object store"),
        (StoredDataset(kind="object", id=note), f"object {note[:12]} is a folder without a file of rows; expected .js"),
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
    monkeypatch.setattr(files, "TABLE_BATCH_ROWS", 50)
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


# -- forms of files ----------------------------------------------------------------------------------------------------

RESTATED = [
    {"prompt": "hé", "answer": 4, "share": 0.5, "right": True, "deep": {"x": [1, 2]}},
    {"prompt": "yo", "id": "7"},
]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
}


def jsonl_bytes(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def arrow_bytes(rows: list[dict[str, Any]], new: Callable[..., Any]) -> bytes:
    table = pyarrow.Table.from_pylist(_same_keys(rows))
    sink = pyarrow.BufferOutputStream()
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    return sink.getvalue().to_pybytes()


def parquet_bytes(rows: list[dict[str, Any]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_same_keys(rows)), sink)
    return sink.getvalue().to_pybytes()


def forms_of(rows: list[dict[str, Any]]) -> dict[str, bytes]:
    """Files of every form that has types, by a name that may say nothing."""
    lines = jsonl_bytes(rows)
    forms = {
        "x.jsonl": lines,
        "x.ndjson": lines.replace(b"\n", b"\r\n"),
        "mac": lines.replace(b"\n", b"\r"),
        "bom.jsonl": b"\xef\xbb\xbf" + lines,
        "nulls.jsonl": jsonl_bytes(_same_keys(rows)),
        "x.json": json.dumps(rows).encode(),
        "several-lines.json": b"\n " + json.dumps(rows, indent=1, ensure_ascii=False).encode() + b"\n",
        "x.parquet": parquet_bytes(rows),
        "x.arrow": arrow_bytes(rows, pyarrow.ipc.new_file),
        "stream.arrow": arrow_bytes(rows, pyarrow.ipc.new_stream),
        "no-ending": arrow_bytes(rows, pyarrow.ipc.new_stream),
    }
    packed = {f"x.jsonl{suffix}": pack(lines) for suffix, pack in PACKERS.items()}
    unnamed = {f"packed-{suffix[1:]}": pack(lines) for suffix, pack in PACKERS.items()}
    return {**forms, **packed, **unnamed, "two.jsonl.gz": b"".join(map(gzip.compress, lines.splitlines(True)))}


def rows_of(folder: Path, name: str, model: type[Row] = PromptRow, **options: Any) -> list[Row]:
    return list(read_dataset(FilesDataset(path=name, **options), model, base=folder))


def test_files_of_every_form_give_the_same_rows(tmp_path: Path, objects: ObjectStore):
    written = forms_of(RESTATED)
    for name, data in written.items():
        (tmp_path / name).write_bytes(data)
    expected = rows_of(tmp_path, "x.jsonl")
    for name, data in written.items():
        assert rows_of(tmp_path, name) == expected, name
        stored = StoredDataset(kind="object", id=objects.put_stream([data]))
        assert list(read_dataset(stored, PromptRow, base=tmp_path, objects=objects)) == expected, name
        prompts = open_prompts(InputGlob(glob=name), tmp_path)
        assert list(prompts.rows()) == expected and prompts.identity() is not None
    assert rows_of(tmp_path, "*") == expected * len(written), "one pattern takes files of every form"


values = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({"prompt": st.text(max_size=5)}, optional={"n": values, "m": values}), min_size=1)
)
def test_rows_of_arrays_and_compressed_files_are_those_of_lines(rows: list[dict[str, Any]]):
    for name, data in (
        ("x.json", json.dumps(rows, indent=2).encode()),
        ("x.json", b"[" + b",\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows) + b"]"),
        ("x.json.gz", gzip.compress(json.dumps(rows).encode())),
        ("x.jsonl.zst", PACKERS[".zst"](jsonl_bytes(rows))),
    ):
        for size in (1, 7, 10_000):
            chunks = [data[start : start + size] for start in range(0, len(data), size)]
            file = files.DataFile(name, lambda data=data: data[:8], lambda chunks=chunks: iter(chunks), nullcontext)
            found = parse_documents(files.file_documents([file], Reading()), PromptRow)
            assert to_jsonl(row for _, _, row in found) == to_jsonl(parse_rows(jsonl_bytes(rows), "x", PromptRow))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"prompt": st.text(st.characters(codec="utf-8"), max_size=5)},
            optional={
                "n": st.none() | st.integers(-(2**53), 2**53),
                "flag": st.booleans(),
                "deep": st.fixed_dictionaries({}, optional={"x": st.none() | st.text("ab"), "y": st.integers(0, 9)}),
                "many": st.lists(st.text("ab"), max_size=2),
            },
        ),
        min_size=1,
        max_size=5,
    )
)
def test_equal_rows_have_one_content_id_in_every_form_with_types(rows: list[dict[str, Any]]):
    whole = [{**row, "deep": {"x": "a", "y": 1, **row.get("deep", {})}, "many": row.get("many", ["a"])} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        for name, data in forms_of(whole).items():
            (Path(folder) / name).write_bytes(data)
        saved = datasets.Dataset.from_list(_same_keys(whole))
        saved.save_to_disk(Path(folder) / "saved")
        on_disk = HuggingFaceDataset(kind="hugging_face", uri="saved")
        found = {name: hash_rows(rows_of(Path(folder), name)) for name in forms_of(whole)}
        found["saved"] = hash_rows(read_dataset(on_disk, PromptRow, base=Path(folder)))
    assert len(set(found.values())) == 1, found


def test_csv_is_text_but_for_declared_types(tmp_path: Path):
    table = 'id,question,answer,right,turns\n007,"two\nlines, ""2""",42,true,"[{""a"": 1}]"\n2,b,,,\n\n'
    (tmp_path / "x.csv").write_text(table)
    (tmp_path / "x.tsv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfprompt\tid\r\na,b\t1\r\n"))
    columns = {"prompt": "question"}
    first, second = rows_of(tmp_path, "x.csv", columns=columns)
    assert first == PromptRow(
        prompt='two\nlines, "2"', id="007", extras={"answer": "42", "right": "true", "turns": '[{"a": 1}]'}
    )
    assert second == PromptRow(prompt="b", id="2"), "an empty field is an absent key"
    types = {"answer": {"type": "int"}, "ok": {"column": "right", "type": "bool"}, "turns": {"type": "json"}}
    first, _ = rows_of(tmp_path, "x.csv", columns={**columns, **types})
    assert first.extras == {"answer": 42, "ok": True, "turns": [{"a": 1}]}
    assert rows_of(tmp_path, "x.tsv.gz") == [PromptRow(prompt="a,b", id="1")]
    wrong = FilesDataset(path="x.csv", columns=columns | {"n": ColumnSource(column="right", type="int")})
    assert refusal(wrong, tmp_path, PromptRow) == 'x.csv:2: n: expected int, as columns says, got "true"'


def test_a_number_in_a_csv_is_whole_or_refused():
    def read(kind: str, value: Any) -> Any:
        reading = Reading({"n": ColumnSource(type=kind)})  # pyright: ignore[reportArgumentType]
        return reading.shaped({"n": value}, PromptRow.own_keys)["n"]

    assert [read("int", value) for value in ("42", " 42.0", "-7", 42.0, Decimal(3))] == [42, 42, -7, 42, 3]
    assert [read("float", value) for value in ("4.5", 4)] == [4.5, 4.0]
    assert [read("text", value) for value in (7, "7", True, date(2026, 1, 2), [1])] == [
        "7",
        "7",
        "true",
        "2026-01-02",
        "[1]",
    ]
    for kind, value in (("int", "4.5"), ("int", "1e3"), ("int", "٤"), ("bool", "maybe"), ("json", "{"), ("float", "x")):
        with pytest.raises(ValueError, match=f"n: expected {kind}, as columns says, got "):
            read(kind, value)


def test_columns_are_renamed_in_every_form_and_unknown_ones_are_refused(tmp_path: Path):
    rows = [{"question": "a", "solution": 1, "other": "x"}, {"question": "b", "solution": 2}]
    expected = [PromptRow(prompt="a", extras={"answer": 1, "other": "x"}), PromptRow(prompt="b", extras={"answer": 2})]
    for name, data in forms_of(rows).items():
        (tmp_path / name).write_bytes(data)
        assert rows_of(tmp_path, name, columns={"prompt": "question", "answer": "solution"}) == expected, name
        for wrong in ({"prompt": "questoin"}, {"prompt": "question", "answer": "result"}):
            message = refusal(FilesDataset(path=name, columns=wrong), tmp_path, PromptRow)
            unknown = [*wrong.values()][-1]
            assert message == f"columns: the rows have no '{unknown}'; they have 'question', 'solution', 'other'", name
    both = FilesDataset(path="x.jsonl", columns={"prompt": "question", "other": "solution"})
    assert refusal(both, tmp_path, PromptRow) == (
        "x.jsonl:1: has 'other' and 'solution', which columns also calls so; rename or remove one"
    )
    swapped = rows_of(tmp_path, "x.parquet", columns={"prompt": "question", "solution": "other", "other": "solution"})
    assert swapped[0].extras == {"solution": "x", "other": 1}
    prompts = [open_prompts(InputGlob(glob="x.jsonl", columns=of), tmp_path) for of in ({"prompt": "question"}, {})]
    assert len(list(prompts[0].rows())) == 2 and prompts[0].identity() != prompts[1].identity()


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("x.jsonl", '{"prompt": "a"}'.encode("utf-16"), "x.jsonl:1: UTF-16 text; save it as UTF-8"),
        ("x.csv", "prompt\na\n".encode("utf-16-le"), "x.csv:1: UTF-16 text; save it as UTF-8"),
        ("x.jsonl", '{"prompt": "a"}'.encode("utf-32"), "x.jsonl:1: UTF-32 text; save it as UTF-8"),
        ("x.jsonl.gz", gzip.compress(b"{}" * 999)[:-9], "x.jsonl.gz: not readable as gzip: "),
        ("x.xz", lzma.compress(b"{}" * 999)[:-9], "x.xz: not readable as xz: "),
        ("x.bz2", bz2.compress(b"{}" * 999)[:-9], "x.bz2: not readable as bzip2: "),
        ("x.zst", PACKERS[".zst"](bytes(range(256)) * 99)[:-9], "x.zst: not readable as zstd: "),
        ("x.gz", gzip.compress(gzip.compress(b"{}")), "x.gz: compressed twice; decompress it once"),
        ("x.parquet.gz", gzip.compress(b"PAR1"), "x.parquet.gz: a Parquet file that is compressed as a whole; decompr"),
        (
            "x.zip",
            b"PK\x03\x04...",
            "x.zip: a zip archive; unpack it, or compress its files by gzip, zstd, bzip2 or xz",
        ),
        ("x.arrow", b"no arrow", "x.arrow: not readable as Arrow: "),
        ("x.json", b'{\n "data": [\n', "x.json:1: a JSON object over several lines; expected one a line, or an array"),
        ("x.json", b'[{"prompt": "a"},\n', "x.json:2: not a JSON array: it has no end; the file may be cut"),
        ("x.json", b'[\n{"prompt": "a"},\n]', "x.json:3: not a JSON array: nothing stands before ']'"),
        ("x.json", b'[{"prompt": "a"}]\n[', "x.json:1: more text after the end of the JSON array; expected one array"),
        ("x.json", b'[\n{"prompt": "a"},\n\n{"promt": "a"}]', "x.json:4: needs prompt or messages; did you mean"),
        ("x.csv", b"prompt,id,prompt\n", "x.csv: column 'prompt' stands twice; rename or remove one"),
        ("x.csv", b'prompt,id\n"a\nb",1\nc\n', "x.csv:4: 1 fields; expected 2, as in the first line"),
        ("x.csv", b'prompt,id\n"a" b,1\n', "x.csv:2: not valid CSV: "),
        ("x.csv", b"prompt\na\n\xff\n", "x.csv:3: not valid UTF-8 at byte 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",  # gzip writes the time
)
def test_a_file_that_is_no_rows_is_named_as_what_it_is(tmp_path: Path, name: str, data: bytes, expected: str):
    (tmp_path / name).write_bytes(data)
    message = refusal(FilesDataset(path=name), tmp_path, PromptRow)
    assert message.startswith(expected) and "\n" not in message


def test_columns_of_one_name_are_refused(tmp_path: Path):
    columns = [pyarrow.array(values) for values in (["a"], [1.0], [2.0])]
    table = pyarrow.Table.from_arrays(columns, names=["prompt", "x", "x"])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    expected = "x.parquet: column 'x' stands twice; rename or remove one"
    assert refusal(FilesDataset(path="x.parquet"), tmp_path, PromptRow) == expected


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows_module, "MAX_LINE_BYTES", 10**6)
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 10**6)
    bomb = b'{"prompt": "' + bytes(10**8)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' + bomb))
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(b'[{"prompt": "a"},\n' + bomb))
    for name, what in (("x.jsonl.gz", "a line"), ("x.json.gz", "an element")):
        tracemalloc.start()
        message = refusal(FilesDataset(path=name), tmp_path, PromptRow)
        assert message.startswith(f"{name}:2: {what} of more than 1000000 bytes")
        assert tracemalloc.get_traced_memory()[1] < 10**7
        tracemalloc.stop()


def test_integers_that_nulls_made_floats_are_integers_again(tmp_path: Path):
    def write(name: str, **columns: Any) -> None:
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 3, **columns}), tmp_path / name)

    write("1.parquet", answer=[42.0, 7.0, None], share=[0.5, 1.0, None], sure=[1.0, 2.0, 3.0], huge=[1e300, None, 1.0])
    write("2.parquet", answer=[1, 2, 3], share=[1.0, None, None], sure=[4.0, 5.0, 6.0])
    write("mixed.parquet", answer=[1.5, None, None])
    rows = read_dataset(FilesDataset(path="?.parquet"), PromptRow, base=tmp_path)
    found = [row.extras for row in rows]
    assert [repr(extras.get("answer")) for extras in found] == ["42", "7", "None", "1", "2", "3"]
    assert [repr(extras.get("share")) for extras in found] == ["0.5", "1.0", "None", "1.0", "None", "None"]
    assert [repr(extras["sure"]) for extras in found] == ["1.0", "2.0", "3.0", "4.0", "5.0", "6.0"], "none is missing"
    assert repr(found[0]["huge"]) == "1e+300"
    assert rows.remarks() == (
        "column 'answer' is read as integers: it holds floats and nulls, and all its numbers are whole",
    )
    other = read_dataset(FilesDataset(path="*.parquet"), PromptRow, base=tmp_path)
    assert [repr(row.extras.get("answer")) for row in other][:2] == ["42.0", "7.0"], "the data set decides as a whole"
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "answer": 42.0}\n{"prompt": "b"}\n')
    assert repr(rows_of(tmp_path, "x.jsonl")[0].extras["answer"]) == "42.0", "a file that has types says what it means"
    datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": [42.0, None]}).save_to_disk(tmp_path / "saved")
    saved = read_dataset(HuggingFaceDataset(kind="hugging_face", uri="saved"), PromptRow, base=tmp_path)
    assert repr(next(iter(saved)).extras["answer"]) == "42"


def test_a_uuid_is_its_text_in_own_keys_and_others(tmp_path: Path):
    mark = UUID(int=7)
    column = pyarrow.array([mark.bytes], pyarrow.uuid())
    table = {
        "prompt": ["a"],
        "id": column,
        "request": column,
        "deep": pyarrow.ListArray.from_arrays(pyarrow.array([0, 1]), column),
    }
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    [row] = rows_of(tmp_path, "x.parquet")
    assert row == PromptRow(prompt="a", id=str(mark), extras={"request": str(mark), "deep": [str(mark)]})
    own = {"prompt": [Decimal("1.50")], "id": [date(2026, 1, 2)]}
    pyarrow.parquet.write_table(pyarrow.table(own), tmp_path / "x.parquet")
    assert rows_of(tmp_path, "x.parquet") == [PromptRow(prompt="1.50", id="2026-01-02")]


def test_a_format_is_found_or_given(tmp_path: Path):
    alpaca = [{"instruction": "Add.", "input": "2 2", "output": "4"}, {"instruction": "Say hi.", "output": "hi"}]
    (tmp_path / "a.jsonl").write_bytes(jsonl_bytes(alpaca))
    (tmp_path / "a.parquet").write_bytes(parquet_bytes(alpaca))
    for name in ("a.jsonl", "a.parquet"):
        found = read_dataset(FilesDataset(path=name), SftRow, base=tmp_path)
        assert [row.prompt for row in found] == ["Add.\n\n2 2", "Say hi."]
        assert found.remarks() == ("2 rows are read as Alpaca's (instruction, input, output), by their keys",)
        given = read_dataset(FilesDataset(path=name, format="alpaca"), SftRow, base=tmp_path)
        assert list(given) == list(found) and given.remarks() == ()
    assert refusal(FilesDataset(path="a.jsonl", format="sharegpt"), tmp_path).splitlines()[0] == (
        "a.jsonl:1: has no conversations, as ShareGPT's rows have; keys found: instruction, input, output"
    )
    assert [row.extras for row in rows_of(tmp_path, "a.jsonl", TaskRow)] == alpaca, "an agent's tasks are of any keys"
    renamed = [{"ask": row["instruction"], "input": row.get("input"), "reply": row["output"]} for row in alpaca]
    (tmp_path / "b.jsonl").write_bytes(jsonl_bytes(renamed))
    columns = {"instruction": "ask", "output": "reply"}
    assert rows_of(tmp_path, "b.jsonl", SftRow, columns=columns) == list(found)


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ({"path": "x"}, FilesDataset(path="x")),
        ({"kind": "jsonl_path", "path": "x"}, JsonlDataset(path="x")),
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
        ({"kind": "parquet", "path": "x"}, "algorithm.dataset.kind: Input should be 'files' or 'jsonl_path' or"),
        ("x.jsonl", "algorithm.dataset: Input should be a valid dictionary; got 'x.jsonl'"),
    ],
)
def test_a_wrong_data_set_is_told_in_one_line_of_the_kind_meant(dataset: Any, expected: str):
    with pytest.raises(ConfigError) as caught:
        sft_config(dataset)
    assert [line[: len(expected) + 8] for line in caught.value.violations] == [f"config: {expected}"]

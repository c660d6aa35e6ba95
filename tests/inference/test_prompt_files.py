"""The input of batch inference in every form and place: the same rows, and an identity that follows the content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from places import address_of, use_gcs, use_s3

from rollout_core.base.errors import ConfigError, DataError
from rollout_core.config import InputGlob
from rollout_core.data.dataset_sources import PromptFiles, open_prompts
from rollout_core.inference.shards import import_shards, read_shard, shards_of
from rollout_core.models.locating import Unchecked
from rollout_core.objects import ObjectStore

ROWS: list[dict[str, Any]] = [
    {"prompt": "hi", "id": "x", "tag": 1},
    {"messages": [{"role": "user", "content": "2 + 2?"}], "tag": 2},
    {"prompt": "ü", "id": "y", "tag": 3},
]


class Place:
    """Somewhere files can be written and read."""

    def __init__(self, address: str, options: dict[str, Any]) -> None:
        self.address = address
        self._scheme, separator, _ = address.partition("://")
        self._files = fsspec.filesystem(self._scheme if separator else "file", **options)

    def write(self, name: str, data: bytes) -> None:
        path = f"{self.address}/{name}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(path, data)

    def open(self, pattern: str, **options: Any) -> PromptFiles:
        return open_prompts(InputGlob(glob=f"{self.address}/{pattern}", **options), Path("/nowhere"))


@pytest.fixture(params=["path", "file", "memory", "s3", "gcs"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    options = {}
    if request.param == "s3":
        options = request.getfixturevalue("s3")
        use_s3(monkeypatch, options)
    if request.param == "gcs":
        options = request.getfixturevalue("gcs")
        use_gcs(monkeypatch, request.getfixturevalue("google"))
    return Place(address_of(request.param, tmp_path), options)


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    keys = dict.fromkeys(key for row in rows for key in row)
    table = pyarrow.Table.from_pylist([{key: row.get(key) for key in keys} for row in rows])
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, row_group_size=1)
    return sink.getvalue().to_pybytes()


def documents(prompts: PromptFiles) -> list[dict[str, Any]]:
    return [row.document() for row in prompts.rows()]


def test_rows_come_in_order_of_paths_whatever_the_form(place: Place):
    place.write("b.jsonl", jsonl(ROWS[1:]))
    place.write("a.parquet", parquet(ROWS[:1]))
    place.write("c/d.jsonl", jsonl([{"prompt": "deep"}]))
    place.write("other.txt", b"no rows")
    assert documents(place.open("?.*")) == ROWS
    assert documents(place.open("b.jsonl")) == ROWS[1:]
    assert documents(place.open("**/*.jsonl")) == [*ROWS[1:], {"prompt": "deep"}]


def test_the_form_that_is_asked_for_counts_before_the_name(place: Place):
    place.write("table", parquet(ROWS))
    place.write("lines.parquet", jsonl(ROWS))
    assert documents(place.open("table", format="parquet")) == ROWS
    assert documents(place.open("lines.parquet", format="jsonl")) == ROWS
    with pytest.raises(ConfigError, match=r"lines.parquet: not readable as Parquet"):
        documents(place.open("lines.parquet"))


def test_a_file_of_many_chunks_is_read_whole(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout_core.objects.buckets.READ_BYTES", 1000)
    rows = [{"prompt": f"{number} " + "ü" * (number % 50)} for number in range(500)]
    place.write("many.jsonl", jsonl(rows))
    assert documents(place.open("many.jsonl")) == rows


def test_what_is_not_there_or_malformed_is_named(place: Place):
    for pattern in ("none.jsonl", "*.none"):
        with pytest.raises(ConfigError, match=r"no input rows matched '.*': no such file"):
            documents(place.open(pattern))
    place.write("empty.jsonl", b"\n\n")
    with pytest.raises(ConfigError, match="1 files without a row"):
        documents(place.open("empty.jsonl"))
    place.write("bad.jsonl", b'{"prompt": "a"}\n{"promt": "b"}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:2: needs prompt or messages; did you mean 'prompt' by 'promt'"):
        documents(place.open("bad.jsonl"))
    place.write("bad.parquet", parquet([{"prompt": 3}]))
    with pytest.raises(DataError, match=r"bad.parquet:row 1: prompt: expected a string, got 3"):
        documents(place.open("bad.parquet"))


def test_the_identity_follows_the_content(place: Place):
    place.write("a.jsonl", jsonl(ROWS[:1]))
    first = place.open("*.jsonl").identity()
    if place.address.startswith("memory"):
        assert first is None, "memory tells nothing of a file's content"
        return
    assert place.open("*.jsonl").identity() == first is not None
    place.write("b.jsonl", jsonl(ROWS[1:]))
    second = place.open("*.jsonl").identity()
    place.write("b.jsonl", jsonl(ROWS[2:]))
    third = place.open("*.jsonl").identity()
    assert len({first, second, third, place.open("*.jsonl", format="parquet").identity()}) == 4


def test_what_was_read_once_is_not_read_again(s3: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    use_s3(monkeypatch, s3)
    place = Place(address_of("s3", tmp_path), s3)
    objects = ObjectStore.from_url(str(tmp_path / "objects"))
    place.write("a.jsonl", jsonl(ROWS))

    def imported() -> list[str]:
        prompts = place.open("a.jsonl")
        record = import_shards(objects, prompts.rows(), shard_size=2, source=prompts.identity())
        return [
            row.row.document()["tag"] for shard, _ in shards_of(objects, record) for row in read_shard(objects, shard)
        ]

    assert imported() == [1, 2, 3]
    with monkeypatch.context() as patch:
        patch.setattr(PromptFiles, "rows", lambda self: iter(()))
        assert imported() == [1, 2, 3]
    place.write("a.jsonl", jsonl(ROWS[::-1]))
    assert imported() == [3, 2, 1]


def test_a_file_or_folder_of_the_object_store_is_named_by_its_id(tmp_path: Path):
    objects = ObjectStore.from_url(str(tmp_path / "objects"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_bytes(jsonl(ROWS))
    ids = [objects.put_bytes(jsonl(ROWS)), objects.put_bytes(parquet(ROWS)), objects.put_tree(tmp_path / "data")]
    identities = set()
    for content_id in ids:
        for digits in (content_id, content_id[:12]):
            prompts = open_prompts(InputGlob(glob=digits), tmp_path, objects)
            assert documents(prompts) == ROWS
            identities.add(prompts.identity())
    assert len(identities) == 3 and None not in identities
    for unknown in ("a" * 64, "a" * 10):
        prompts = open_prompts(InputGlob(glob=unknown), tmp_path, objects)
        prompts.identity()
        with pytest.raises(ConfigError, match=f"dataset {unknown} is not in the object store"):
            documents(prompts)
    with pytest.raises(Unchecked):
        documents(open_prompts(InputGlob(glob=ids[0]), tmp_path))
    (tmp_path / ids[0]).write_bytes(jsonl(ROWS[:1]))
    assert documents(open_prompts(InputGlob(glob=ids[0]), tmp_path, objects)) == ROWS[:1], (
        "a file of that name is meant"
    )


@pytest.mark.parametrize(
    ("pattern", "address", "expected"),
    [
        ("*.jsonl", "/base/completions.jsonl", True),
        ("./in/../*.jsonl", "/base/completions.jsonl", True),
        ("out/**/*.jsonl", "/base/out/completions.jsonl", True),
        ("file://./*.jsonl", "/base/completions.jsonl", True),
        ("[ab]/*.jsonl", "/base/a/completions.jsonl", False),  # brackets are no pattern here
        ("*.jsonl", "/base/out/completions.jsonl", False),
        ("prompts.jsonl", "/base/completions.jsonl", False),
        ("s3://bucket/k/*.jsonl", "s3://bucket/k/completions.jsonl", True),
        ("s3://bucket/k/*.jsonl", "s3://bucket/out/completions.jsonl", False),
        ("s3://bucket/*.jsonl", "/bucket/completions.jsonl", False),
        ("**/*.jsonl", "s3://bucket/out/completions.jsonl", False),
        ("out**.jsonl", "/base/out-completions.jsonl", True),  # within a name two stars are one
        ("out/***", "/base/out/completions.jsonl", True),
        ("out/**", "/base/out/deep/completions.jsonl", True),
        ("**/*.jsonl", "/base/.cache/completions.jsonl", False),  # hidden
        (".cache/*.jsonl", "/base/.cache/completions.jsonl", True),
        ("out/completions.json?", "/base/out/completions.jsonl", True),
    ],
)
def test_whether_a_file_would_be_read_is_told_before_it_is_there(pattern: str, address: str, expected: bool):
    assert open_prompts(InputGlob(glob=pattern), Path("/base")).covers(address) is expected


def test_a_file_that_would_be_read_by_way_of_a_link_is_told_too(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    prompts = open_prompts(InputGlob(glob="real/*.jsonl"), tmp_path)
    assert prompts.covers(str(tmp_path / "link" / "completions.jsonl"))
    assert not prompts.covers(str(tmp_path / "completions.jsonl"))


@pytest.mark.parametrize("depth", [150, 240, 300, 900])
def test_rows_come_back_from_their_shard_however_deep_they_are(tmp_path: Path, depth: int):
    objects = ObjectStore.from_url(str(tmp_path / "objects"))
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a", "n": {"[" * depth}{"]" * depth}}}\n')
    rows = open_prompts(InputGlob(glob="p.jsonl"), tmp_path).rows()
    [(shard, _)] = shards_of(objects, import_shards(objects, rows, shard_size=10))
    [row] = read_shard(objects, shard)
    assert str(row.row.extras["n"]) == "[" * depth + "]" * depth

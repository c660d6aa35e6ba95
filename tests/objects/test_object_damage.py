"""Stores in which bytes rotted: a damaged ref is noticed, and what is put over damaged bytes can be read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_core.base.errors import CorruptRef
from rollout_core.base.ids import ContentId
from rollout_core.objects import ObjectStore
from rollout_core.objects.backends import LocalFiles
from rollout_core.objects.object_store import blob_key
from tests.objects.object_files import NOTHING, empty_store, in_pieces, keys, write_tree


@pytest.fixture(params=["local", "memory", "s3", "gcs"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind."""
    return empty_store(request, request.param, tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path}/store")


def damaged_refs(objects: ObjectStore) -> list[bytes]:
    """What may come to stand in the file of ref ``labels/one``."""
    content = objects.files.read("refs/labels/one")
    flipped = bytes([content[0] ^ 1]) + content[1:]
    other = objects.files.read("refs/labels/two")
    return [
        b"",
        b"\n",
        b"not an id",
        content[:40],
        content[:63],
        content[:66],
        content[:-1],
        flipped,
        other,
        NOTHING.encode(),
        b"\xff" * 130,
    ]


def test_a_ref_that_was_cut_changed_or_put_in_anothers_place_says_so(local: ObjectStore) -> None:
    one, two = local.put_bytes(b"1"), local.put_bytes(b"2")
    local.set_ref("labels/one", one)
    local.set_ref("labels/two", two)
    for content in damaged_refs(local):
        local.files.write("refs/labels/one", content)
        with pytest.raises(CorruptRef, match=r"ref labels/one at .* is damaged.*storage verify --repair"):
            local.get_ref("labels/one")
        assert local.cached_ref("labels/one") is local.cached_bytes("labels/one") is None
        assert list(local.list_refs("labels")) == [("labels/two", two)]
    local.set_ref("labels/one", one)
    assert local.get_ref("labels/one") == one


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_ref_of_an_earlier_version_stands_for_what_it_names_while_that_is_there(local: ObjectStore, end: str) -> None:
    """So does a ref that was cut to its first line."""
    one = local.put_bytes(b"1")
    local.files.write("refs/labels/one", f"{one}{end}".encode())
    assert local.get_ref("labels/one") == local.cached_ref("labels/one") == one
    assert list(local.list_refs("labels")) == [("labels/one", one)]
    flipped = f"{int(one[0], 16) ^ 1:x}{one[1:]}{end}"
    local.files.write("refs/labels/one", flipped.encode())
    with pytest.raises(CorruptRef):
        local.get_ref("labels/one")
    local.set_ref("labels/one", one)
    assert len(local.files.read("refs/labels/one")) > 65, "with a check"


def test_files_that_are_nobodys_refs_are_no_refs(local: ObjectStore) -> None:
    one = local.put_bytes(b"1")
    local.set_ref("labels/one", one)
    for name in (".DS_Store", "labels/.DS_Store", "labels/.one.swp", "labels/one (copy)"):
        local.files.write(f"refs/{name}", b"\x00\x00\x00\x01Bud1")
    assert list(local.list_refs("")) == [("labels/one", one)]


def test_what_cannot_be_followed_counts_as_never_kept(local: ObjectStore, caplog: pytest.LogCaptureFixture) -> None:
    kept = local.put_bytes(b"kept")
    local.set_ref("notes/a", kept)
    assert local.cached_bytes("notes/a") == b"kept" and local.cached_bytes("notes/b") is None and not caplog.text
    local.files.write(blob_key(kept), b"kepd")
    assert local.cached_bytes("notes/a") is None
    assert "ref notes/a cannot be followed" in caplog.text and str(kept) in caplog.text


def test_many_at_once_may_empty_a_folder(local: ObjectStore) -> None:
    """Whoever deletes the last file of a folder removes the folder, which another may be about to fsync."""
    one = local.put_bytes(b"1")
    names = [f"labels/{n}" for n in range(8)]
    for _ in range(15):
        for forget in (local.delete_ref, local.set_ref_aside):
            for name in names:
                local.set_ref(name, one)
            local.in_parallel(lambda name, forget=forget: (forget(name), local.delete_ref(name)), names)
            assert local.ref_names("labels") == []


# Puts over what rotted


def rot(objects: ObjectStore, content_id: ContentId) -> None:
    """Change a byte of a blob."""
    data = bytearray(objects.files.read(blob_key(content_id)))
    data[len(data) // 2] ^= 1
    objects.files.write(blob_key(content_id), bytes(data))


@pytest.mark.parametrize("num_bytes", [1, 100_000, 3_000_000])
def test_what_was_put_over_rotted_bytes_can_be_read(objects: ObjectStore, tmp_path: Path, num_bytes: int) -> None:
    objects.files.whole_write_bytes = 1_000_000
    data = random.Random(num_bytes).randbytes(num_bytes)
    source = write_tree(tmp_path / "source", {"file": data})
    content_id = objects.put_bytes(data)
    puts = {
        "bytes": lambda: objects.put_bytes(data),
        "again": lambda: objects.put_bytes(data),
        "stream": lambda: objects.put_stream(in_pieces(data, 99_999)),
        "file": lambda: objects.put_file(source / "file"),
        "tree": lambda: objects.put_tree(source),
    }
    for name, put in puts.items():
        rot(objects, content_id)
        put()
        assert objects.get_bytes(content_id) == data, name
    assert keys(objects, "corrupt") == keys(objects, "tmp") == []


def test_what_is_there_whole_is_read_once_a_process(local: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(1_000_000)
    content_id = local.put_bytes(data)
    read, read_chunks = [], LocalFiles.read_chunks

    def watched(self: LocalFiles, key: str) -> Iterator[bytes]:
        read.append(key)
        return read_chunks(self, key)

    monkeypatch.setattr(LocalFiles, "read_chunks", watched)
    for _ in range(3):
        ObjectStore.from_url(local.url).put_bytes(data)
    assert read == [blob_key(content_id)]

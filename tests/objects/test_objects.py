"""The object store: real folders, memory and a real S3 server; corruption, kills and forged manifests."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from blake3 import blake3
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from rollout_core.base.errors import ConfigError, Conflict, CorruptObject, CorruptRef, MissingObject, Recoverable
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.objects import ObjectStore, TreeFile, TreeManifest
from rollout_core.objects.backends import LocalFiles
from rollout_core.objects.files import TOUCH_AFTER_SECONDS, ref_key
from rollout_core.objects.local_trees import forget_local_tree, keep_local_tree
from rollout_core.objects.object_store import blob_key
from rollout_core.objects.snapshots import SnapshotStore, identify
from rollout_core.objects.trees import file_mark, files_of, hash_file
from tests.objects.object_files import (
    BUCKET,
    NOTHING,
    TREE,
    empty_store,
    in_pieces,
    keys,
    python,
    read_tree,
    write_tree,
)

T = TypeVar("T")


@pytest.fixture(params=["local", "memory", "s3", "gcs"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind."""
    return empty_store(request, request.param, tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path}/store")


# Blobs


@pytest.mark.parametrize("data", [b"", b"x", b"some bytes" * 1000])
def test_bytes_come_back_under_the_blake3_of_their_content(objects: ObjectStore, data: bytes) -> None:
    content_id = objects.put_bytes(data)
    assert content_id == blake3(data).hexdigest()
    assert objects.get_bytes(content_id) == data
    assert b"".join(objects.stream(content_id)) == data
    assert objects.exists(content_id)
    assert objects.size(content_id) == len(data)
    assert list(dict(objects.blobs())) == [content_id]


def test_layout_is_the_same_on_every_provider(objects: ObjectStore) -> None:
    content_id = objects.put_bytes(b"hello")
    objects.set_ref("runs/latest", content_id)
    assert content_id == "ea8f163db38682925e4491c5e58d4bb3506ef8c14eb78a86e908c5624a67200f"
    assert keys(objects, "cas") == [f"cas/ea/8f/{content_id}"]
    assert keys(objects, "refs") == ["refs/runs/latest"]
    assert objects.files.read("refs/runs/latest").splitlines()[0] == content_id.encode()


def test_a_stream_is_stored_as_the_same_blob_as_its_bytes(objects: ObjectStore) -> None:
    objects.files.whole_write_bytes = 1000
    data = random.Random(1).randbytes(5_000_000)
    assert objects.put_stream(in_pieces(data, 999_999)) == hash_bytes(data)
    assert objects.put_stream(iter([])) == hash_bytes(b"")
    assert objects.get_bytes(hash_bytes(data)) == data
    assert keys(objects, "tmp") == []


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_a_stream_of_several_parts_goes_there_and_back(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    objects = empty_store(request, kind, tmp_path)
    data = random.Random(2).randbytes(2**20) * 40
    content_id = objects.put_stream(in_pieces(data, 3_000_000))
    assert content_id == hash_bytes(data)
    objects.get_file(content_id, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    assert keys(objects, "tmp") == []


def put_given(objects: ObjectStore, folder: Path, *names: str) -> ContentId:
    """The folder, whose files ``names`` nobody writes to any more."""
    paths = files_of(folder)
    marks = {name: file_mark(paths[name]) for name in names}
    _, manifest, checks = identify(paths)
    return objects.put_files(manifest, paths, checks, marks)


def test_a_file_that_is_given_is_stored_like_another(objects: ObjectStore, tmp_path: Path) -> None:
    large = random.Random(4).randbytes(3_000_000)
    tree = {"large": large, "other": large[::-1], "small": b"x"}
    objects.files.whole_write_bytes = 1_000_000
    folder = write_tree(tmp_path / "folder", tree)
    tree_id = put_given(objects, folder, "large", "small")
    assert tree_id == put_given(objects, folder, "large") == objects.put_tree(folder)
    shutil.rmtree(folder)
    objects.get_tree(tree_id, tmp_path / "back")
    assert read_tree(tmp_path / "back") == tree and keys(objects, "tmp") == []


def test_a_folder_has_a_given_file_without_a_copy(local: ObjectStore, tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "folder", {"given": bytes(9_000_000), "kept": b"y" * 9_000_000})
    os.utime(folder / "given", (1, 1))
    (folder / "given").chmod(0o600)  # as safetensors writes files
    put_given(local, folder, "given")
    given, kept = (Path(local.files.where(blob_key(hash_file(folder / name).content_id))) for name in ("given", "kept"))
    assert given.samefile(folder / "given") and not kept.samefile(folder / "kept")
    assert stat.S_IMODE(given.stat().st_mode) == stat.S_IMODE(kept.stat().st_mode) & 0o444, "as a copy"
    assert time.time() - given.stat().st_mtime < 600, "nobody takes it for an old one that none names"
    local.delete(hash_file(folder / "given").content_id)
    (tmp_path / "link").symlink_to(folder / "given")
    (folder / "given").chmod(0o640)
    assert not local.files.take(tmp_path / "link", blob_key(hash_bytes(b"of a link")))
    assert stat.S_IMODE((folder / "given").stat().st_mode) == 0o640, "what a link leads to is left alone"
    put_given(local, folder, "given")
    local.files.take(folder / "given", blob_key(hash_file(folder / "given").content_id))  # once more, at the same time
    (folder / "given").unlink()
    assert local.get_bytes(hash_bytes(bytes(9_000_000))) == bytes(9_000_000) and keys(local, "tmp") == []


def test_a_given_file_is_copied_where_a_link_cannot_be(
    local: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: Any) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    folder = write_tree(tmp_path / "folder", {"given": bytes(9_000_000)})
    put_given(local, folder, "given")
    blob = Path(local.files.where(blob_key(hash_bytes(bytes(9_000_000)))))
    assert blob.stat().st_size == 9_000_000 and not blob.samefile(folder / "given") and keys(local, "tmp") == []


def test_a_given_file_that_was_written_to_after_it_was_read_is_not_stored(local: ObjectStore, tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "folder", {"given": bytes(9_000_000)})
    paths = files_of(folder)
    mark = file_mark(paths["given"])
    _, manifest, checks = identify(paths)
    with (folder / "given").open("r+b") as file:
        file.write(b"another beginning")
    with pytest.raises(Conflict, match="given changed while it was being stored"):
        local.put_files(manifest, paths, checks, {"given": mark})
    assert keys(local, "cas") == keys(local, "tmp") == []


def test_a_file_comes_back_as_a_file(objects: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(random.Random(3).randbytes(6_000_000))
    objects.files.whole_write_bytes = 1_000_000
    content_id = objects.put_file(source)
    objects.get_file(content_id, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "store") == ["source", "target"]


def test_json_is_stored_in_canonical_form(objects: ObjectStore) -> None:
    first = objects.put_json({"b": 1.5, "a": ["ü", None]})
    assert first == objects.put_json({"a": ["ü", None], "b": 1.5})
    assert objects.get_json(first) == {"a": ["ü", None], "b": 1.5}
    with pytest.raises(ConfigError, match="is not JSON"):
        objects.get_json(objects.put_bytes(b"\x00"))


def test_what_is_there_is_not_written_again(objects: ObjectStore, tmp_path: Path) -> None:
    data = bytes(100_000)
    (tmp_path / "file").write_bytes(data)
    objects.put_bytes(data)

    def refuse(*_: object) -> None:
        raise AssertionError("written again")

    objects.files.write = refuse  # type: ignore[method-assign]
    assert objects.put_bytes(data) == objects.put_file(tmp_path / "file") == objects.put_stream(in_pieces(data, 30_000))


def test_deleting_twice_is_deleting_once(objects: ObjectStore) -> None:
    content_id = objects.put_bytes(b"gone")
    objects.delete(content_id)
    objects.delete(content_id)
    assert not objects.exists(content_id)
    assert dict(objects.blobs()) == {}


def test_a_missing_blob_is_named_with_its_place_and_the_remedy(objects: ObjectStore, tmp_path: Path) -> None:
    reads = [objects.get_bytes, objects.size, objects.manifest, lambda i: list(objects.stream(i))]
    reads += [lambda i: objects.get_file(i, tmp_path / "f"), lambda i: objects.get_tree(i, tmp_path / "t")]
    for read in reads:
        with pytest.raises(MissingObject, match=rf"no blob {NOTHING} at .*cas/.*run the stage") as caught:
            read(NOTHING)
        assert caught.value.content_id == NOTHING
    assert not objects.exists(NOTHING)
    assert not objects.tree_is_present(NOTHING)
    assert {p.name for p in tmp_path.iterdir()} <= {"store"}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(0, 200))
def test_how_a_stream_is_cut_does_not_change_its_id(chunks: list[bytes], threshold: int) -> None:
    objects = ObjectStore.from_url("memory://cuts")
    objects.files.whole_write_bytes = threshold
    whole = b"".join(chunks)
    assert objects.put_stream(chunks) == hash_bytes(whole)
    assert objects.get_bytes(hash_bytes(whole)) == whole


# Corruption


def flip_bit(data: bytes, place: int = -1) -> bytes:
    damaged = bytearray(data)
    damaged[place] ^= 4
    return bytes(damaged)


@pytest.mark.parametrize("damage", [flip_bit, lambda data: data[:-1], lambda data: b"", lambda data: data + b"x"])
def test_a_damaged_blob_is_set_aside_and_can_be_made_anew(objects: ObjectStore, tmp_path: Path, damage) -> None:
    data = b"precious" * 100
    reads = [objects.get_bytes, lambda i: list(objects.stream(i)), lambda i: objects.get_file(i, tmp_path / "file")]
    for count, read in enumerate(reads, start=1):
        content_id = objects.put_bytes(data)
        objects.files.write(blob_key(content_id), damage(data))
        with pytest.raises(
            CorruptObject, match=rf"blob {content_id} at .* does not match its id; it was moved to"
        ) as e:
            read(content_id)
        assert e.value.content_id == content_id
        assert not objects.exists(content_id)
        assert len(keys(objects, "corrupt")) == count
    assert not (tmp_path / "file").exists()
    assert objects.get_bytes(objects.put_bytes(data)) == data


def test_a_put_replaces_a_blob_of_the_wrong_size(objects: ObjectStore) -> None:
    data = bytes(100_000)
    objects.files.write(blob_key(hash_bytes(data)), data[:-1])
    assert objects.get_bytes(objects.put_bytes(data)) == data


def test_the_last_chunk_of_a_damaged_stream_is_never_handed_out(local: ObjectStore) -> None:
    data = random.Random(4).randbytes(9 * 2**20)
    content_id = local.put_bytes(data)
    local.files.write(blob_key(content_id), flip_bit(data))
    received = b""
    with pytest.raises(CorruptObject):
        for chunk in local.stream(content_id):
            received += chunk
    assert data.startswith(received)
    assert len(received) < len(data)


def test_a_good_blob_that_was_read_wrongly_stays(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    content_id = objects.put_bytes(b"good")
    monkeypatch.setattr(objects.files, "read", lambda key: b"garbled on the way")
    with pytest.raises(Recoverable, match="read it again"):
        objects.get_bytes(content_id)
    assert objects.exists(content_id)


def test_a_good_ref_that_was_read_wrongly_is_read_until_it_is_right_or_wrong_in_the_same_way(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    content_id = objects.put_bytes(b"good")
    objects.set_ref("a", content_id)
    right = objects.files.read(ref_key("a"))
    answers = [flip_bit(right, place) for place in (3, 70, 90)]
    monkeypatch.setattr(objects.files, "read", lambda key: answers.pop(0) if answers else right)
    assert objects.get_ref("a") == content_id and not answers
    read: list[bytes] = []
    for wrong, readings in (([flip_bit(right, 5)] * 9, 2), ([flip_bit(right, place) for place in range(9)], 5)):
        answers[:], read[:] = wrong, []
        monkeypatch.setattr(objects.files, "read", lambda key: read.append(answers.pop(0)) or read[-1])
        with pytest.raises(CorruptRef):
            objects.get_ref("a")
        assert len(read) == readings


# Trees


def test_a_tree_comes_back_whole(objects: ObjectStore, tmp_path: Path) -> None:
    content_id = objects.put_tree(write_tree(tmp_path / "source", TREE))
    objects.get_tree(content_id, tmp_path / "target")
    assert read_tree(tmp_path / "target") == TREE
    assert objects.tree_is_present(content_id)
    manifest = objects.manifest(content_id)
    assert [file.path for file in manifest.files] == sorted(TREE)
    assert manifest.size_bytes == sum(map(len, TREE.values()))
    assert objects.get_bytes(manifest.files[-1].content_id) == TREE[manifest.files[-1].path]


def test_a_tree_has_the_same_id_on_every_provider(objects: ObjectStore, tmp_path: Path) -> None:
    content_id = objects.put_tree(write_tree(tmp_path / "source", {"b/c": b"2", "a": b"1"}))
    one, two = blake3(b"1").hexdigest(), blake3(b"2").hexdigest()
    manifest = (
        f'{{"files":[{{"content_id":"{one}","path":"a","size":1}},{{"content_id":"{two}","path":"b/c","size":1}}]'
    )
    assert content_id == blake3(f'{manifest},"kind":"tree/1"}}'.encode()).hexdigest()
    # Pinned with blake3 1.0: changing it orphans every stored tree.
    assert content_id == "4f1838af9355379491c8a86615a64b62db11271ce8051e7ca97dec095a724c11"


def test_an_empty_folder_is_a_tree(objects: ObjectStore, tmp_path: Path) -> None:
    content_id = objects.put_tree(write_tree(tmp_path / "source", {}))
    objects.get_tree(content_id, tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []
    assert objects.tree_is_present(content_id)


def test_trees_that_share_files_share_blobs(local: ObjectStore, tmp_path: Path) -> None:
    local.put_tree(write_tree(tmp_path / "one", {"a": b"shared", "copy/of/a": b"shared", "b": b"1"}))
    local.put_tree(write_tree(tmp_path / "two", {"renamed": b"shared", "b": b"2"}))
    assert len(dict(local.blobs())) == 3 + 2  # files, manifests


NAMES = st.text(st.characters(exclude_characters="/\x00", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..")
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


def without_clashes(files: dict[str, bytes]) -> dict[str, bytes]:
    folders = {path.rsplit("/", depth)[0] for path in files for depth in (1, 2) if "/" in path}
    return {path: data for path, data in files.items() if path not in folders}


TREES = st.dictionaries(PATHS, st.binary(max_size=30), max_size=6).map(without_clashes)


@settings(max_examples=40, deadline=None)
@given(TREES, st.randoms(use_true_random=False))
def test_a_trees_id_depends_on_names_and_bytes_only(files: dict[str, bytes], shuffle: random.Random) -> None:
    objects = ObjectStore.from_url("memory://trees")
    with tempfile.TemporaryDirectory() as scratch:
        one = write_tree(Path(scratch) / "one", files)
        order = list(files.items())
        shuffle.shuffle(order)
        two = write_tree(Path(scratch) / "two", dict(order))
        for path in files:
            os.utime(two / path, (1, 1))
            os.chmod(two / path, 0o755)
        content_id = objects.put_tree(one)
        assert objects.put_tree(two) == content_id
        objects.get_tree(content_id, Path(scratch) / "back")
        assert read_tree(Path(scratch) / "back") == files


@pytest.mark.parametrize(
    "paths",
    [["../x"], ["/x"], ["a/../../x"], ["a//b"], ["."], [""], ["a\x00b"], ["a", "a"], ["b", "a"], ["a", "a/b"]],
    ids=repr,
)
def test_a_forged_manifest_is_refused(local: ObjectStore, tmp_path: Path, paths: list[str]) -> None:
    blob = local.put_bytes(b"payload")
    files = [{"path": path, "size": 7, "content_id": blob} for path in paths]
    forged = local.put_json({"kind": "tree/1", "files": files})
    with pytest.raises(ConfigError, match="is not a tree manifest"):
        local.get_tree(forged, tmp_path / "deep" / "target")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store"]
    with pytest.raises(ValidationError):
        TreeManifest(files=tuple(TreeFile(path=path, size=7, content_id=blob) for path in paths))


def test_a_blob_that_is_no_manifest_is_refused(local: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="is not a tree manifest"):
        local.manifest(local.put_json({"files": "many"}))


def test_links_within_the_folder_count_as_files_and_all_others_are_refused(local: ObjectStore, tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "folder", {"real/file": b"x"})
    (folder / "link").symlink_to("real/file")
    tree = local.put_tree(folder)
    assert [file.path for file in local.manifest(tree).files] == ["link", "real/file"]

    (tmp_path / "secret").write_bytes(b"outside")
    refused = {"../secret": "leads out of the folder", "real": "not a regular file", "nowhere": "cannot store"}
    for target, reason in refused.items():
        (folder / "bad").symlink_to(target)
        with pytest.raises(ConfigError, match=reason):
            local.put_tree(folder)
        (folder / "bad").unlink()


def test_what_is_no_regular_file_is_refused(local: ObjectStore, tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "folder", {"a": b"x"})
    os.mkfifo(folder / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        local.put_tree(folder)
    with pytest.raises(ConfigError, match="not a folder"):
        local.put_tree(folder / "a")
    with pytest.raises(ConfigError, match=r"cannot read .*absent"):
        local.put_file(folder / "absent")
    assert not (tmp_path / "store").exists()


def test_a_file_name_that_is_not_utf8_is_refused(local: ObjectStore, tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "folder", {})
    os.close(os.open(os.fsencode(folder) + b"/\xff", os.O_CREAT | os.O_WRONLY))
    with pytest.raises(ConfigError, match="not UTF-8"):
        local.put_tree(folder)


def test_a_tree_with_a_lost_or_damaged_file_never_appears(objects: ObjectStore, tmp_path: Path) -> None:
    content_id = objects.put_tree(write_tree(tmp_path / "source", TREE))
    lost = objects.manifest(content_id).files[2]
    objects.files.write(blob_key(lost.content_id), b"damaged")
    assert not objects.tree_is_present(content_id), "the size is wrong"
    with pytest.raises(CorruptObject):
        objects.get_tree(content_id, tmp_path / "target")
    with pytest.raises(MissingObject):
        objects.get_tree(content_id, tmp_path / "target")
    assert not objects.tree_is_present(content_id)
    assert {p.name for p in tmp_path.iterdir()} <= {"source", "store"}


def test_a_tree_is_not_written_over_files(local: ObjectStore, tmp_path: Path) -> None:
    content_id = local.put_tree(write_tree(tmp_path / "source", TREE))
    (tmp_path / "empty").mkdir()
    local.get_tree(content_id, tmp_path / "empty")
    with pytest.raises(Conflict, match="exists and is not empty"):
        local.get_tree(content_id, tmp_path / "empty")
    assert read_tree(tmp_path / "empty") == TREE


def test_a_file_that_changes_while_it_is_stored_is_a_conflict(local: ObjectStore, tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "source", {"a": b"after"})
    before = TreeManifest(files=(TreeFile(path="a", size=6, content_id=hash_bytes(b"before")),))
    for local.files.whole_write_bytes in (0, 100):
        with pytest.raises(Conflict, match="changed while it was being stored"):
            local.put_files(before, {"a": folder / "a"})
    assert dict(local.blobs()) == {}
    assert keys(local, "tmp") == []


def test_a_file_that_is_written_to_after_it_was_hashed_is_a_conflict(
    local: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_tree(tmp_path / "source", {"a": b"before"}) / "a"

    def then_written_to(hashed: Callable[[Any], T]) -> Callable[[Any], T]:
        def call(given: Any) -> T:
            file.write_bytes(b"before")
            found = hashed(given)
            file.write_bytes(b"after!")
            return found

        return call

    monkeypatch.setattr("rollout_core.objects.object_store.hash_file", then_written_to(hash_file))
    monkeypatch.setattr("rollout_core.objects.snapshots.identify", then_written_to(identify))
    save = partial(SnapshotStore(local).save, file.parent, run_id="run", step=1, algorithm="sft")
    for put in (lambda: local.put_file(file), lambda: local.put_tree(file.parent), save):
        for local.files.whole_write_bytes in (0, 100):
            with pytest.raises(Conflict, match="a changed while it was being stored"):
                put()
    assert dict(local.blobs()) == {} and keys(local, "tmp") == []


def test_a_cached_tree_is_fetched_once_and_repaired_when_files_are_lost(local: ObjectStore, tmp_path: Path) -> None:
    content_id = local.put_tree(write_tree(tmp_path / "source", TREE))
    cache = tmp_path / "cache"
    folder = local.local_tree(content_id, cache)
    assert folder == cache / content_id
    before = (folder / "config.json").stat().st_ino
    assert local.local_tree(content_id, cache) == folder
    assert (folder / "config.json").stat().st_ino == before
    (folder / "empty").unlink()
    (cache / f".{content_id}.01ABC.tmp").mkdir()  # left by a killed process
    assert read_tree(local.local_tree(content_id, cache)) == TREE
    kept = [f".{content_id}.lock", f".{content_id}.use"]
    assert sorted(p.name for p in cache.iterdir()) == [*kept, content_id]
    for _ in range(2):
        forget_local_tree(content_id, cache)
    assert sorted(p.name for p in cache.iterdir()) == kept
    assert read_tree(local.local_tree(content_id, cache)) == TREE


def test_a_tree_that_was_put_is_kept_in_the_cache_and_not_fetched_until_it_is_damaged(
    local: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = write_tree(tmp_path / "source", TREE), tmp_path / "cache"
    content_id = local.put_tree(source)
    manifest = local.manifest(content_id)
    keep_local_tree(content_id, manifest, source, cache)
    inode = (source / "config.json").stat().st_ino
    keep_local_tree(content_id, manifest, tmp_path / "nowhere", cache)  # it is there
    with monkeypatch.context() as patch:
        patch.setattr(type(local), "get_tree", lambda *_: pytest.fail("fetched"))
        folder = local.local_tree(content_id, cache)
        shutil.rmtree(source)
        assert read_tree(local.local_tree(content_id, cache)) == TREE
    assert (folder / "config.json").stat().st_ino == inode
    (folder / "config.json").chmod(0o644)
    (folder / "config.json").write_bytes(b"[]")
    assert read_tree(local.local_tree(content_id, cache)) == TREE
    keep_local_tree(hash_bytes(b"other"), manifest, tmp_path / "nowhere", cache)
    assert not (cache / hash_bytes(b"other")).exists(), "what cannot be kept is fetched"


# Refs


def test_refs_are_set_replaced_listed_and_deleted(objects: ObjectStore) -> None:
    one, two = objects.put_bytes(b"1"), objects.put_bytes(b"2")
    assert objects.get_ref("labels/best") is None
    objects.set_ref("labels/best", one)
    objects.set_ref("labels/best", two)
    objects.set_ref("labels/deep/er", one)
    objects.set_ref("labels-of-others/x", one)
    assert objects.get_ref("labels/best") == two
    assert isinstance(objects.get_ref("labels/best"), ContentId)
    assert list(objects.list_refs("labels")) == [("labels/best", two), ("labels/deep/er", one)]
    assert [name for name, _ in objects.list_refs("")] == ["labels-of-others/x", "labels/best", "labels/deep/er"]
    assert list(objects.list_refs("none")) == []
    objects.delete_ref("labels/best")
    objects.delete_ref("labels/best")
    assert objects.get_ref("labels/best") is None
    assert objects.get_ref("labels") is None, "a folder of names is not a name"


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "..", "a/../b", ".", "a b", "ä", "a\n", "a\\b", "x" * 256])
def test_a_ref_name_that_could_leave_the_store_is_refused(local: ObjectStore, name: str) -> None:
    for use in (local.get_ref, local.delete_ref, lambda n: local.set_ref(n, NOTHING)):
        with pytest.raises(ConfigError, match="not a ref name"):
            use(name)


def test_a_ref_below_a_ref_is_refused_on_disk(local: ObjectStore) -> None:
    local.set_ref("a", NOTHING)
    with pytest.raises(ConfigError, match="in its place"):
        local.set_ref("a/b", NOTHING)
    local.set_ref("c/d", NOTHING)
    with pytest.raises(ConfigError, match="in its place"):
        local.set_ref("c", NOTHING)
    assert keys(local, "tmp") == []


# Addresses


def test_nothing_is_created_before_the_first_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in ("file://./data", "data", f"{tmp_path}/data/", "~/data", f"file://{tmp_path}/data"):
        objects = ObjectStore.from_url(url)
        assert objects.url == f"file://{tmp_path}/data"
        assert not objects.exists(NOTHING)
        assert list(objects.blobs()) == list(objects.list_refs("")) == []
        objects.delete(NOTHING)
        objects.delete_ref("x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file://data",
        "ftp://host/x",
        "s3:/bucket/x",
        "s3:bucket",
        "block:content-addressed-storage/mine",
        "s3://",
        "s3:///x",
        "gs://b/../c",
        "memory://",
        "simplecache::s3://b",
        "s3://b//c",
    ],
)
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="storage URL"):
        ObjectStore.from_url(url)


def test_options_for_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no storage options"):
        ObjectStore.from_url(str(tmp_path), storage_options={"key": "x"})


def test_a_store_travels_by_pickle_and_hides_its_options(objects: ObjectStore) -> None:
    content_id = objects.put_bytes(b"travels")
    assert pickle.loads(pickle.dumps(objects)).get_bytes(content_id) == b"travels"  # noqa: S301
    assert repr(objects) == f"ObjectStore({objects.url!r})"


# Durability and concurrency


def test_a_put_is_acknowledged_after_file_and_folders_are_fsynced(
    local: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append(path.removeprefix(f"{tmp_path}/store/") if path != f"{tmp_path}/store" else "root")
        fsync(descriptor)

    def record_rename(source: str, target: str) -> None:
        rename(source, target)
        events.append("rename")

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    content_id = local.put_bytes(b"durable")
    leaf = os.path.dirname(blob_key(content_id))
    assert events[0].startswith("tmp/")
    assert events[1:6] == ["rename", leaf, os.path.dirname(leaf), "cas", "root"]
    assert str(tmp_path) in events, "the entry of the new root"
    events.clear()
    local.put_bytes(b"durable")
    assert events == [leaf], "another process may have renamed it and not yet fsynced the folder"
    local.set_ref("a/b", content_id)
    assert events[2:] == ["rename", "refs/a", "refs", "root"]


def test_putting_again_makes_an_old_blob_young(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(100_000)
    content_id = objects.put_bytes(data)
    now = time.time()
    if isinstance(objects.files, LocalFiles):
        os.utime(f"{objects.files.root}/{blob_key(content_id)}", (1, 1))
        objects.put_bytes(data)
        assert dict(objects.blobs())[content_id].modified > now - 5
    else:
        before = dict(objects.blobs())[content_id].modified
        time.sleep(1.1)  # S3 counts whole seconds
        monkeypatch.setattr(time, "time", lambda: now + TOUCH_AFTER_SECONDS + 60)
        objects.put_bytes(data)
        assert dict(objects.blobs())[content_id].modified > before
        assert keys(objects, "tmp") == []
    assert objects.get_bytes(content_id) == data


def test_threads_may_share_a_store(objects: ObjectStore) -> None:
    blobs = [str(n % 10).encode() * 1000 for n in range(60)]
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(objects.put_bytes, blobs))
        assert list(pool.map(objects.get_bytes, ids)) == blobs
    assert len(dict(objects.blobs())) == 10
    assert keys(objects, "tmp") == []


def test_processes_that_put_and_fetch_the_same_content_agree(local: ObjectStore, tmp_path: Path) -> None:
    source = write_tree(tmp_path / "source", {f"f{n}": str(n).encode() * 10_000 for n in range(20)})
    code = """
import sys
from pathlib import Path
from typing import Any
from rollout_core.objects import ObjectStore
objects = ObjectStore.from_url(sys.argv[1])
tree = objects.put_tree(Path(sys.argv[2]))
folder = objects.local_tree(tree, Path(sys.argv[3]))
print(tree, sum(f.stat().st_size for f in folder.iterdir()))
"""
    writers = [python(code, local.url, str(source), str(tmp_path / "cache")) for _ in range(4)]
    answers = {writer.communicate(timeout=300)[0] for writer in writers}
    tree = local.put_tree(source)
    assert answers == {f"{tree} {sum(map(len, read_tree(source).values()))}\n"}
    assert read_tree(tmp_path / "cache" / tree) == read_tree(source)
    assert keys(local, "tmp") == []


def test_a_writer_killed_in_the_middle_leaves_nothing_visible(local: ObjectStore) -> None:
    code = """
import sys, time
from rollout_core.objects import ObjectStore
def slow():
    for n in range(1000):
        yield bytes([n % 256]) * 2**20
        print(n, flush=True)
        time.sleep(0.001 if n < 10 else 60)
ObjectStore.from_url(sys.argv[1]).put_stream(slow())
"""
    writer = python(code, local.url)
    assert writer.stdout is not None
    while writer.stdout.readline() != "10\n":
        pass
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert len(keys(local, "tmp")) == 1
    assert dict(local.blobs()) == {}
    report = SnapshotStore(local).gc()
    assert report.deleted_leftovers == 0, "it may belong to a running writer"
    (leftover,) = keys(local, "tmp")
    os.utime(local.files.where(leftover), (1, 1))
    report = SnapshotStore(local).gc()
    assert (report.deleted_leftovers, report.deleted_bytes) == (1, 11 * 2**20)
    assert keys(local, "tmp") == []


def test_a_producer_that_fails_leaves_nothing_behind(objects: ObjectStore, request: pytest.FixtureRequest) -> None:
    def failing() -> Iterator[bytes]:
        for _ in range(9):
            yield bytes(5 * 2**20)
        raise RuntimeError("the producer's own error")

    with pytest.raises(RuntimeError, match="the producer's own error"):
        objects.put_stream(failing())
    assert keys(objects, "tmp") == []
    assert dict(objects.blobs()) == {}
    prefix = objects.url.rpartition("/")[2]  # others' uploads may have been cut off
    if objects.url.startswith("gs"):
        assert not [one for one in request.getfixturevalue("google").open_uploads if one.name.startswith(prefix)]
    if objects.url.startswith("s3"):
        uploads = objects.files.fs.call_s3("list_multipart_uploads", Bucket=BUCKET, Prefix=prefix)  # type: ignore[attr-defined]
        assert not uploads.get("Uploads")


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_a_snapshot_saved_to_a_bucket_is_restored_byte_for_byte(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    bucket = SnapshotStore(empty_store(request, kind, tmp_path))
    folder = write_tree(tmp_path / "state", TREE)
    saved = bucket.save(folder, run_id="run", step=3, algorithm="sft", meta={"kl": 0.1})
    assert (
        saved.id
        == SnapshotStore(ObjectStore.from_url("memory://twin"))
        .save(folder, run_id="other", step=1, algorithm="grpo")
        .id
    )
    assert bucket.restore(saved.id, tmp_path / "restored") == saved == bucket.list()[0]
    assert read_tree(tmp_path / "restored") == TREE
    assert blake3(b"".join(bucket.export(saved.id))).hexdigest() == saved.id
    assert json.loads(bucket.get(saved.id).model_dump_json())["meta"] == {"kl": 0.1}
    assert bucket.gc().deleted_blobs == 0
    assert bucket.is_present(saved.id)


def test_a_damaged_local_copy_is_named_and_fetched_again(tmp_path, caplog):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"good" * 100)
    store = ObjectStore.from_url(str(tmp_path / "objects"))
    tree = store.put_tree(tmp_path / "model")
    folder = store.local_tree(tree, tmp_path / "cache")
    copied = folder / "weights"
    assert copied.stat().st_mode & 0o222 == 0, "not to be written by accident"
    copied.chmod(0o644)
    copied.write_bytes(b"evil" * 100)
    with caplog.at_level("WARNING"):
        assert store.local_tree(tree, tmp_path / "cache") == folder
    assert copied.read_bytes() == b"good" * 100
    assert f"{copied} is damaged" in caplog.text


def test_a_whole_local_copy_is_read_once_a_process(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"good" * 100)
    store = ObjectStore.from_url(str(tmp_path / "objects"))
    tree = store.put_tree(tmp_path / "model")
    folder = store.local_tree(tree, tmp_path / "cache")
    store.local_tree(tree, tmp_path / "cache")
    monkeypatch.setattr("rollout_core.objects.local_trees.hash_file", lambda path: 1 / 0)
    assert store.local_tree(tree, tmp_path / "cache") == folder

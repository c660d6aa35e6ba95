"""Snapshots among damaged refs and records: each is named and left out, and nothing that it may need is collected."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import NotFound
from rollout_core.objects import ObjectStore
from rollout_core.objects.backends import LocalFiles
from rollout_core.objects.object_store import blob_key
from rollout_core.objects.retention.garbage import GcReport
from rollout_core.objects.snapshots import Snapshot, SnapshotStore
from rollout_core.objects.verification import repair_store, verify_store
from tests.objects.object_files import NOTHING, write_tree


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(str(tmp_path / "objects"))


@pytest.fixture
def snapshots(objects: ObjectStore) -> SnapshotStore:
    return SnapshotStore(objects)


@pytest.fixture
def saved(snapshots: SnapshotStore, tmp_path: Path) -> list[Snapshot]:
    """Three, newest first."""
    (tmp_path / "state").mkdir()
    made = []
    for step in range(3):
        (tmp_path / "state" / "weights").write_bytes(b"%d" % step * 100_000)
        made.append(snapshots.save(tmp_path / "state", run_id="run", step=step, algorithm="sft"))
    return made[::-1]


def collect(snapshots: SnapshotStore) -> GcReport:
    """A collection that holds even what was written this instant for old."""
    return snapshots.gc(min_age=-timedelta(seconds=5))


def ref_file(objects: ObjectStore, snapshot: Snapshot) -> Path:
    return Path(objects.files.where(f"refs/{snapshot.ref}"))


@pytest.mark.parametrize("content", [b"", b"cut", b"\x00" * 130, NOTHING.encode(), "another's", "another's id"])
def test_a_damaged_ref_is_named_and_the_others_are_listed(
    snapshots: SnapshotStore, objects: ObjectStore, saved: list[Snapshot], caplog: pytest.LogCaptureFixture, content
) -> None:
    new, damaged, old = saved
    other = ref_file(objects, old).read_bytes()
    data: Any = {"another's": other, "another's id": other[:64]}.get(content, content)
    ref_file(objects, damaged).write_bytes(data)
    assert snapshots.list() == [new, old]
    assert caplog.text.count("a snapshot is left out") == 1 and damaged.ref in caplog.text
    with pytest.raises(NotFound, match=r"cannot be read: .*storage verify --repair"):
        snapshots.get(damaged.id)
    assert not snapshots.is_present(damaged.id) and snapshots.is_present(new.id)


def test_a_ref_set_to_the_record_of_another_snapshot_is_named(
    snapshots: SnapshotStore, objects: ObjectStore, saved: list[Snapshot], caplog: pytest.LogCaptureFixture
) -> None:
    new, old = saved[0], saved[2]
    named = objects.get_ref(old.ref)
    assert named is not None
    objects.set_ref(new.ref, named)
    assert snapshots.list() == saved[1:]
    assert f"ref {new.ref} names the record of {old.ref}" in caplog.text
    assert [outcome.is_lost for _, outcome in repair_store(objects, verify_store(objects))] == [False]
    assert snapshots.list() == saved


def test_what_a_file_manager_leaves_behind_stops_nothing(
    snapshots: SnapshotStore, objects: ObjectStore, saved: list[Snapshot]
) -> None:
    root = Path(objects.files.where("refs"))
    for folder in (root, root / "snapshots", root / "snapshots" / saved[0].id, Path(objects.files.where("cas"))):
        (folder / ".DS_Store").write_bytes(b"\x00\x00\x00\x01Bud1")
    assert snapshots.list() == saved
    report = collect(snapshots)
    assert report.unreadable == () and report.deleted_blobs == 0


def damage_ref(objects: ObjectStore, snapshot: Snapshot) -> None:
    ref_file(objects, snapshot).write_bytes(b"")


def damage_record(objects: ObjectStore, snapshot: Snapshot) -> None:
    record = objects.get_ref(snapshot.ref)
    assert record is not None
    Path(objects.files.where(blob_key(record))).write_bytes(b"")


def flip_record(objects: ObjectStore, snapshot: Snapshot) -> None:
    record = objects.get_ref(snapshot.ref)
    assert record is not None
    path = Path(objects.files.where(blob_key(record)))
    path.write_bytes(b"z" + path.read_bytes()[1:])


def lose_record(objects: ObjectStore, snapshot: Snapshot) -> None:
    record = objects.get_ref(snapshot.ref)
    assert record is not None
    objects.delete(record)


def flip_manifest(objects: ObjectStore, snapshot: Snapshot) -> None:
    path = Path(objects.files.where(blob_key(snapshot.files)))
    path.write_bytes(path.read_bytes().replace(b'"', b"'", 1))


@pytest.mark.parametrize("place", [*range(8), -1])
def test_a_damaged_byte_at_either_end_of_a_large_record_stops_collection(
    snapshots: SnapshotStore, objects: ObjectStore, place: int
) -> None:
    named = objects.put_bytes(b"named by a record of more than a mebibyte")
    record = objects.put_json({"rows": [named] * 20_000})
    objects.set_ref("labels/big", objects.put_json([record]))
    path = Path(objects.files.where(blob_key(record)))
    data = bytearray(path.read_bytes())
    assert len(data) > 2**20
    data[place] ^= 1
    path.write_bytes(data)
    report = collect(snapshots)
    assert record in report.unreadable[0] and report.deleted_blobs == 0
    assert objects.exists(named)


@pytest.mark.parametrize("num_bytes", [100_000, 2_000_000])
def test_a_record_that_a_ref_names_is_read_even_if_nothing_of_it_is_left(
    snapshots: SnapshotStore, objects: ObjectStore, num_bytes: int
) -> None:
    named = objects.put_bytes(b"named by the record")
    record = objects.put_json({"result": "x" * num_bytes, "named": named})
    objects.set_ref(f"results/{record}", record)
    Path(objects.files.where(blob_key(record))).write_bytes(bytes(num_bytes))
    report = collect(snapshots)
    assert record in report.unreadable[0] and objects.exists(named)


def test_collection_does_not_read_weights(
    snapshots: SnapshotStore, objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_bytes = random.Random(0)
    weights = {f"{n}.safetensors": random_bytes.randbytes(2_000_000) + end for n, end in enumerate([b"", b"}", b"\n"])}
    model = objects.put_tree(write_tree(tmp_path / "model", weights))
    objects.set_ref("labels/model", model)
    read, read_chunks = [], LocalFiles.read_chunks
    monkeypatch.setattr(LocalFiles, "read_chunks", lambda self, key: read.append(key) or read_chunks(self, key))
    assert collect(snapshots).live_blobs == 4
    assert set(read) == {blob_key(model)}


@pytest.mark.parametrize("damage", [damage_ref, damage_record, flip_record, lose_record, flip_manifest])
def test_nothing_is_collected_while_something_that_may_need_it_is_damaged(
    snapshots: SnapshotStore, objects: ObjectStore, saved: list[Snapshot], caplog: pytest.LogCaptureFixture, damage
) -> None:
    objects.put_bytes(b"garbage")
    before = set(dict(objects.blobs()))
    damage(objects, saved[1])
    report = collect(snapshots)
    assert len(report.unreadable) == 1 and report.deleted_blobs == 0
    assert "no blob is deleted, since it may be what is named by" in caplog.text and report.unreadable[0] in caplog.text
    assert before - set(dict(objects.blobs())) <= {objects.get_ref(saved[1].ref) if damage == lose_record else None}
    list(repair_store(objects, verify_store(objects)))
    report = collect(snapshots)
    assert report.unreadable == () and report.deleted_blobs > 0
    kept = saved if damage == damage_ref else [saved[0], saved[2]]
    assert snapshots.list() == kept and all(snapshots.is_present(snapshot.id) for snapshot in kept)

"""`rollout storage verify`: whatever is damaged is named, with who needs it; and what repair makes of it."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from rollout_core.base.errors import MissingObject
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import Lineage, record_lineage
from rollout_core.objects.object_store import blob_key
from rollout_core.objects.retention.garbage import collect_garbage
from rollout_core.objects.snapshots import Snapshot, SnapshotStore
from rollout_core.objects.verification import Damage, add_checks, repair_store, verify_store
from tests.objects.object_files import NOTHING, TREE, empty_store, keys, write_tree

KEY = hash_bytes(b"key of a stage")


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path}/store")


def file_result(objects: ObjectStore, key: ContentId, result: dict, outputs: tuple[ContentId, ...]) -> ContentId:
    """A cached result as stages file it, with its lineage."""
    now = datetime.now(UTC)
    record_lineage(
        objects,
        Lineage(stage="train", version=1, key=key, inputs={}, outputs=outputs, created_at=now, software={}),
    )
    record = objects.put_json({"metadata": {"storage_key": key}, "result": json.dumps(result)})
    objects.set_ref(f"results/{key}", record)
    return record


class Stored:
    """A store with a bit of everything."""

    def __init__(self, objects: ObjectStore, folder: Path) -> None:
        self.objects = objects
        self.state = write_tree(folder / "state", TREE)
        self.snapshot = SnapshotStore(objects).save(self.state, run_id="run", step=1, algorithm="sft")
        self.model = objects.put_tree(write_tree(folder / "model", {"weights": b"w" * 5000, "config.json": b"{}\n"}))
        self.weights = next(file for file in objects.manifest(self.model).files if file.path == "weights").content_id
        result = {"model": self.model, "train_state": self.snapshot.id}
        self.record = file_result(objects, KEY, result, (self.model, self.snapshot.id))
        objects.set_ref("model-facts/a", objects.put_json({"facts": 1}))
        objects.set_ref(f"progress/{KEY}", self.snapshot.id)
        self.body = objects.put_bytes(b"body of a span")
        objects.set_ref(f"spans/{self.body}", self.body)

    def flip(self, content_id: ContentId) -> None:
        self.damage(blob_key(content_id), flipped=True)

    def damage(self, key: str, data: bytes = b"", *, flipped: bool = False) -> None:
        whole = self.objects.files.read(key)
        self.objects.files.write(key, bytes([whole[0] ^ 1]) + whole[1:] if flipped else data)

    def found(self) -> list[Damage]:
        return verify_store(self.objects).damage


@pytest.fixture
def stored(objects: ObjectStore, tmp_path: Path) -> Stored:
    return Stored(objects, tmp_path)


def test_a_whole_store_is_whole(stored: Stored) -> None:
    told: list[tuple[int, int]] = []
    found = verify_store(stored.objects, lambda done, total: told.append((done, total)))
    assert found.damage == [] and found.num_refs == 7
    assert found.num_blobs == len(dict(stored.objects.blobs()))
    assert told[-1] == (found.num_bytes, found.num_bytes) and found.num_bytes > 5000


def test_every_file_that_is_damaged_in_turn_is_named(stored: Stored) -> None:
    """Each file of the store: flipped, cut, emptied, gone, or changed for another of its kind."""
    files = stored.objects.files
    for folder in ("cas", "refs"):
        names = keys(stored.objects, folder)
        for place, key in enumerate(names):
            whole, other = files.read(key), files.read(names[place - 1])
            flipped = bytes([whole[0] ^ 1]) + whole[1:] if whole else b"x"
            for data in (flipped, whole[:-1], b"", other):
                if data == whole:
                    continue
                files.write(key, data)
                name = key.removeprefix("refs/") if folder == "refs" else key.rpartition("/")[2]
                assert name in [damage.name for damage in stored.found()], (key, data[:80])
            files.write(key, whole)
    assert stored.found() == []


def test_who_needs_a_damaged_blob_is_told(stored: Stored) -> None:
    stored.flip(stored.weights)
    [damage] = stored.found()
    assert (damage.kind, damage.name, damage.holders) == ("damaged blob", stored.weights, (f"results/{KEY}",))
    shared = next(file for file in stored.objects.manifest(stored.snapshot.files).files if file.path == "weights/a.bin")
    stored.objects.delete(shared.content_id)
    missing = next(damage for damage in stored.found() if damage.kind == "missing blob")
    assert missing.name == shared.content_id
    assert set(missing.holders) == {f"progress/{KEY}", f"results/{KEY}", stored.snapshot.ref}


def test_a_result_does_not_need_what_it_was_made_of(stored: Stored) -> None:
    scores = stored.objects.put_bytes(b"[1.0]")
    file_result(stored.objects, NOTHING, {"model": stored.model, "scores": scores}, (scores,))
    stored.flip(stored.weights)
    [damage] = stored.found()
    assert damage.holders == (f"results/{KEY}",)


def test_garbage_may_lack_what_it_names(stored: Stored) -> None:
    stored.objects.put_json({"files": [{"content_id": NOTHING, "path": "a", "size": 1}], "kind": "tree/1"})
    assert stored.found() == []


def repaired(stored: Stored) -> list[tuple[str, str, bool]]:
    found = verify_store(stored.objects)
    return [(damage.name, outcome.text, outcome.is_lost) for damage, outcome in repair_store(stored.objects, found)]


def test_refs_are_restored_from_the_records_that_name_themselves(stored: Stored) -> None:
    stored.objects.delete_ref("model-facts/a")
    renamed = SnapshotStore(stored.objects).set_label(stored.snapshot.id, "gold")
    before = {name: stored.objects.get_ref(name) for name in stored.objects.ref_names("")}
    for place, name in enumerate(before):
        if not name.startswith("progress/"):
            stored.damage(f"refs/{name}", [b"", NOTHING.encode(), b"\xff"][place % 3])
    outcomes = repaired(stored)
    assert len(outcomes) == 5 and not any(lost for _, _, lost in outcomes)
    assert {name: stored.objects.get_ref(name) for name in before} == before
    assert SnapshotStore(stored.objects).list() == [renamed], "with the label it was given last"
    assert stored.found() == []


def test_repair_sets_aside_what_is_damaged_and_what_needs_it(stored: Stored) -> None:
    stored.flip(stored.weights)
    stored.damage("refs/model-facts/a", b"")
    assert [lost for _, _, lost in repaired(stored)] == [False, False]
    assert stored.objects.get_ref(f"results/{KEY}") is None and stored.objects.get_ref("model-facts/a") is None
    assert len(keys(stored.objects, "corrupt")) == 3, "the blob, and two refs"
    with pytest.raises(MissingObject):
        stored.objects.get_bytes(stored.weights)
    assert SnapshotStore(stored.objects).list() == [stored.snapshot]
    assert stored.found() == []


@pytest.mark.parametrize("folder", ["gguf-models", "merged-models", "templated-models"])
def test_a_model_that_a_run_makes_again_is_not_lost(stored: Stored, folder: str) -> None:
    stored.objects.set_ref(f"{folder}/a", stored.model)
    stored.flip(stored.weights)
    assert [lost for _, _, lost in repaired(stored)] == [False]


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_a_bucket_is_verified_and_repaired_like_a_folder(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    objects = empty_store(request, kind, tmp_path)
    stored = Stored(objects, tmp_path)
    assert stored.found() == []
    stored.flip(stored.weights)
    stored.damage(f"refs/{stored.snapshot.ref}", b"x")
    assert [damage.kind for damage in stored.found()] == ["damaged blob", "damaged ref"]
    assert not any(lost for _, _, lost in repaired(stored))
    assert stored.found() == [] and SnapshotStore(objects).list() == [stored.snapshot]


def test_a_snapshot_that_cannot_be_restored_is_told_as_lost(stored: Stored) -> None:
    stored.flip(stored.snapshot.files)
    [(name, text, is_lost)] = repaired(stored)
    assert name == stored.snapshot.files and is_lost and stored.snapshot.ref in text
    assert SnapshotStore(stored.objects).list() == [] and stored.found() == []


def test_strangers_files_among_the_refs_stop_no_repair(stored: Stored) -> None:
    names = [f"{folder}/notes.txt" for folder in ("spans", "lineage", "snapshots", "results", "progress", "labels")]
    for name in names:
        stored.objects.files.write(f"refs/{name}", b"hello")
    stored.damage("refs/model-facts/a", b"")
    assert {name for name, _, _ in repaired(stored)} == {*names, "model-facts/a"}
    assert stored.found() == []


def test_a_blob_that_only_looks_like_a_record_stops_no_verification(stored: Stored) -> None:
    odd = stored.objects.put_json({"stage": "a", "key": 1, "outputs": ["notes.txt", 2]})
    stored.objects.set_ref("lineage/notes.txt", odd)
    snapshot = stored.objects.put_json({"id": "a", "run_id": "b", "files": ["c"], "algorithm": "sft"})
    stored.objects.set_ref("snapshots/a/b", snapshot)
    assert [(damage.kind, damage.name) for damage in stored.found()] == [
        ("misplaced ref", "lineage/notes.txt"),
        ("misplaced ref", "snapshots/a/b"),
    ]
    repaired(stored)
    assert stored.found() == []


def test_what_a_flow_has_mended_meanwhile_is_left_alone(stored: Stored) -> None:
    whole = stored.objects.files.read(blob_key(stored.weights))
    stored.flip(stored.weights)
    stored.damage("refs/model-facts/a", b"")
    found = verify_store(stored.objects)
    stored.objects.put_bytes(whole)
    stored.objects.set_ref("model-facts/a", stored.body)
    assert [outcome.text for _, outcome in repair_store(stored.objects, found)] == ["whole by now"] * 2
    assert stored.objects.get_ref(f"results/{KEY}") == stored.record and stored.found() == []


def drop_checks(stored: Stored) -> None:
    """Write every ref as earlier versions did."""
    for key in keys(stored.objects, "refs"):
        stored.damage(key, stored.objects.files.read(key)[:64])


def test_refs_of_an_earlier_version_are_counted_and_get_a_check(stored: Stored) -> None:
    whole = {key: stored.objects.files.read(key) for key in keys(stored.objects, "refs")}
    drop_checks(stored)
    assert SnapshotStore(stored.objects).list() == [stored.snapshot]
    found = verify_store(stored.objects)
    assert found.damage == [] and len(found.unchecked) == found.num_refs == 7
    assert collect_garbage(stored.objects, min_age=timedelta(0)).unreadable == ()
    assert add_checks(stored.objects, found.unchecked) == 7
    assert {key: stored.objects.files.read(key) for key in whole} == whole
    assert verify_store(stored.objects).unchecked == []


def test_a_record_in_the_place_of_another_is_named_without_a_check_too(stored: Stored) -> None:
    drop_checks(stored)
    stored.damage(f"refs/results/{KEY}", stored.body.encode())
    assert [(damage.kind, damage.name) for damage in stored.found()] == [("misplaced ref", f"results/{KEY}")]


# The command


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["storage", "verify", *arguments])
    return result.exit_code, result.output


def test_the_command_names_damage_and_repairs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_STORAGE", str(tmp_path / "store"))
    assert run() == (0, f"nothing is stored at file://{tmp_path}/store\n")
    stored = Stored(ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"]), tmp_path)
    code, said = run()
    assert code == 0 and "and 7 refs of" in said and said.endswith(": all whole\n")
    stored.flip(stored.weights)
    stored.damage(f"refs/{stored.snapshot.ref}", b"x")
    code, said = run("--storage", stored.objects.url)
    assert code == 1 and said.endswith(": 2 damaged or missing\n")
    assert f"damaged blob {stored.weights} at {tmp_path}" in said and f"needed by results/{KEY} (train)" in said
    assert f"damaged ref {stored.snapshot.ref} at" in said
    code, said = run("--repair")
    assert code == 0 and "restored: it names" in said and "made again by the next run that needs it" in said
    assert run()[0] == 0
    stored.flip(stored.snapshot.files)
    code, said = run("--repair")
    assert code == 1 and f"lost with it: {stored.snapshot.ref}" in said
    assert run()[0] == 0


def test_the_command_counts_refs_without_a_check_and_adds_it(stored: Stored) -> None:
    drop_checks(stored)
    code, said = run("--storage", stored.objects.url)
    assert code == 0 and "7 refs without a check (written by an earlier version); --repair adds it\n" in said
    code, said = run("--repair", "--storage", stored.objects.url)
    assert code == 0 and "7 refs without a check (written by an earlier version): added\n" in said
    assert "without a check" not in run("--storage", stored.objects.url)[1]


def test_a_store_that_is_written_meanwhile_is_not_called_damaged(tmp_path: Path, start_process) -> None:
    code = """
import sys
from pathlib import Path
from rollout_core.objects import ObjectStore
from rollout_core.objects.snapshots import SnapshotStore
snapshots = SnapshotStore(ObjectStore.from_url(sys.argv[1]))
folder = Path(sys.argv[2])
folder.mkdir()
step = 0
while True:
    (folder / "weights").write_bytes(b"%d" % step * 1000)
    snapshots.save(folder, run_id="run", step=step, algorithm="sft")
    snapshots.prune("run", keep_last=2)
    print(step, flush=True)
    step += 1
"""
    url = f"file://{tmp_path}/store"
    writer = start_process("-c", code, url, str(tmp_path / "state"))
    assert writer.stdout.readline() == "0\n"
    for _ in range(10):
        assert verify_store(ObjectStore.from_url(url)).damage == []
    assert writer.poll() is None
    assert isinstance(SnapshotStore(ObjectStore.from_url(url)).list()[0], Snapshot)

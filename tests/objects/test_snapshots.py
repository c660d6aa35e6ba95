"""Snapshots: deterministic tars, verified restores, pruning, and a garbage collection that spares what is live."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import pytest
from blake3 import blake3
from hypothesis import given, settings, strategies as st

from rollout_core.base.errors import ConfigError, Conflict, CorruptObject, MissingObject, NotFound
from rollout_core.base.ids import ContentId, hash_bytes, named_ids
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import Lineage, lineage_of, record_lineage
from rollout_core.objects.object_store import blob_key
from rollout_core.objects.retention.garbage import GcReport
from rollout_core.objects.snapshots import Snapshot, SnapshotStore, find_start
from rollout_core.objects.trees import tar_stream

STATE = {"model/weights.safetensors": bytes(range(256)) * 100, "optimizer.bin": b"moments", "rng.json": b"[1,2]"}
NOTHING = hash_bytes(b"no snapshot has this id")


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"{tmp_path}/store")


@pytest.fixture
def snapshots(objects: ObjectStore) -> SnapshotStore:
    return SnapshotStore(objects)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return write(tmp_path / "state", STATE)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def save_steps(snapshots: SnapshotStore, folder: Path, count: int, run_id: str = "run", **options) -> list[Snapshot]:
    """Snapshots of steps 0, 1, ... of a run, each of other bytes."""
    saved = []
    for step in range(count):
        write(folder, {"step": f"{run_id} {step}".encode()})
        saved.append(snapshots.save(folder, run_id=run_id, step=step, algorithm="sft", **options))
    return saved


def made_at(objects: ObjectStore, snapshot: Snapshot, when: datetime) -> None:
    """Forge the time of a record."""
    record = objects.put_json(snapshot.model_copy(update={"created_at": when}))
    objects.set_ref(f"snapshots/{snapshot.id}/{snapshot.run_id}", record)


# The tar


def tar_of(files: dict[str, bytes]) -> bytes:
    return b"".join(tar_stream([(path, len(data)) for path, data in files.items()], lambda path: [files[path]]))


def tar_by_the_standard_library(files: dict[str, bytes]) -> bytes:
    """The same tar by an independent way: `tarfile` writing a whole archive."""
    buffer = io.BytesIO()
    folders = {str(parent) for path in files for parent in Path(path).parents if str(parent) != "."}
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8") as archive:
        for path in sorted([*files, *folders]):
            entry = tarfile.TarInfo(path)
            entry.mode, entry.type = (0o644, tarfile.REGTYPE) if path in files else (0o755, tarfile.DIRTYPE)
            entry.size = len(files.get(path, b""))
            archive.addfile(entry, io.BytesIO(files.get(path, b"")))
    return buffer.getvalue()


NAMES = st.text(st.characters(exclude_characters="/\x00", exclude_categories=["Cs"]), min_size=1, max_size=60).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 250
)
FILES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=1100), max_size=5
).map(
    lambda files: {
        path: data for path, data in files.items() if not any(other.startswith(path + "/") for other in files)
    }
)


@settings(max_examples=60, deadline=None)
@given(FILES)
def test_the_tar_is_the_one_the_standard_library_would_write(files: dict[str, bytes]) -> None:
    assert tar_of(files) == tar_by_the_standard_library(files)
    assert tar_of(dict(reversed(files.items()))) == tar_of(files)


def test_a_tar_names_owners_times_and_modes_of_nobody() -> None:
    with tarfile.open(fileobj=io.BytesIO(tar_of({"deep/er/file": b"x", "a" * 150: b"y"}))) as archive:
        entries = archive.getmembers()
    assert [entry.name for entry in entries] == ["a" * 150, "deep", "deep/er", "deep/er/file"]
    assert [entry.mode for entry in entries] == [0o644, 0o755, 0o755, 0o644]
    assert {(e.uid, e.gid, e.uname, e.gname, e.mtime) for e in entries} == {(0, 0, "", "", 0)}


def test_a_file_of_another_size_than_said_is_refused() -> None:
    for data in (b"short", b"much too long"):
        with pytest.raises(ValueError, match="is not 8 bytes long"):
            list(tar_stream([("file", 8)], lambda path, data=data: [data]))


def test_the_id_of_a_snapshot_is_pinned(snapshots: SnapshotStore, state: Path) -> None:
    # blake3 1.0 of `tar_by_the_standard_library(STATE)`; a change would orphan every stored snapshot.
    expected = blake3(tar_by_the_standard_library(STATE)).hexdigest()
    assert expected == "94d6db09a95b8a42cccabbce23f83657ff391bf7514b6ca60e3721a134318202"
    assert snapshots.save(state, run_id="run", step=1, algorithm="sft").id == expected


@settings(max_examples=25, deadline=None)
@given(FILES, st.randoms(use_true_random=False))
def test_the_id_ignores_order_times_and_modes(files: dict[str, bytes], shuffle: random.Random) -> None:
    snapshots = SnapshotStore(ObjectStore.from_url("memory://determinism"))
    with tempfile.TemporaryDirectory() as scratch:
        first = snapshots.save(write(Path(scratch) / "1", files), run_id="r", step=0, algorithm="a")
        order = list(files.items())
        shuffle.shuffle(order)
        other = write(Path(scratch) / "2", dict(order))
        for path in files:
            os.utime(other / path, (shuffle.randrange(10**9), 1))
            os.chmod(other / path, 0o700)
        assert snapshots.save(other, run_id="r", step=0, algorithm="a").id == first.id
        snapshots.restore(first.id, Path(scratch) / "3")
        assert read(Path(scratch) / "3") == files


# Save and restore


def test_a_snapshot_is_restored_byte_for_byte(snapshots: SnapshotStore, state: Path, tmp_path: Path) -> None:
    meta = {"kl": 0.25, "cursor": [3, None]}
    saved = snapshots.save(state, kind="buffer", run_id="run", step=7, algorithm="ppo", label="best", meta=meta)
    assert snapshots.restore(saved.id, tmp_path / "deep" / "restored") == saved == snapshots.get(saved.id)
    assert read(tmp_path / "deep" / "restored") == STATE
    assert (saved.kind, saved.step, saved.algorithm, saved.label, saved.meta) == ("buffer", 7, "ppo", "best", meta)
    assert saved.size_bytes == sum(map(len, STATE.values()))
    assert saved.created_at.tzinfo is UTC
    assert snapshots.is_present(saved.id)


def test_an_export_is_the_tar_whose_hash_is_the_id(snapshots: SnapshotStore, state: Path) -> None:
    saved = snapshots.save(state, run_id="run", step=1, algorithm="sft")
    exported = b"".join(snapshots.export(saved.id))
    assert exported == tar_by_the_standard_library(STATE)
    assert blake3(exported).hexdigest() == saved.id


def test_an_empty_folder_is_a_snapshot(snapshots: SnapshotStore, tmp_path: Path) -> None:
    saved = snapshots.save(write(tmp_path / "state", {}), run_id="run", step=0, algorithm="sft")
    snapshots.restore(saved.id, tmp_path / "restored")
    assert read(tmp_path / "restored") == {}


def test_files_shared_by_snapshots_are_stored_once(snapshots: SnapshotStore, objects: ObjectStore, state: Path) -> None:
    save_steps(snapshots, state, 4)
    sizes = [objects.size(blob) for blob in dict(objects.blobs())]
    assert sizes.count(len(STATE["model/weights.safetensors"])) == 1
    assert len(sizes) == 3 + 4 * 3  # shared files; for each snapshot its own file, manifest and record


def test_saving_the_same_bytes_again_keeps_the_label(snapshots: SnapshotStore, state: Path) -> None:
    first = snapshots.save(state, run_id="run", step=1, algorithm="sft", label="best")
    again = snapshots.save(state, run_id="run", step=2, algorithm="sft")
    assert (again.id, again.step, again.label) == (first.id, 2, "best")
    assert snapshots.list() == [again]
    assert snapshots.save(state, run_id="run", step=2, algorithm="sft", label="final").label == "final"


def test_two_runs_that_reach_the_same_state_keep_a_record_each(snapshots: SnapshotStore, state: Path) -> None:
    one = snapshots.save(state, run_id="one", step=1, algorithm="sft", label="mine")
    two = snapshots.save(state, run_id="two", step=9, algorithm="sft")
    assert one.id == two.id
    assert snapshots.get(one.id) == two, "the newest"
    assert snapshots.list(run_id="one") == [one]
    snapshots.prune("two", keep_last=0)
    assert snapshots.get(one.id) == one
    assert snapshots.is_present(one.id)


@pytest.mark.parametrize("path", sorted(STATE))
def test_a_damaged_file_stops_the_restore(
    snapshots: SnapshotStore, objects: ObjectStore, state: Path, tmp_path: Path, path: str
) -> None:
    saved = snapshots.save(state, run_id="run", step=1, algorithm="sft")
    blob = hash_bytes(STATE[path])
    objects.files.write(blob_key(blob), STATE[path][:-1] + b"\xfe")
    assert snapshots.is_present(saved.id), "sizes are right"
    with pytest.raises(CorruptObject, match=blob):
        snapshots.restore(saved.id, tmp_path / "restored")
    with pytest.raises(MissingObject, match=blob):
        list(snapshots.export(saved.id))
    assert not snapshots.is_present(saved.id)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state", "store"]
    snapshots.save(state, run_id="run", step=1, algorithm="sft")
    snapshots.restore(saved.id, tmp_path / "restored")


def test_a_record_that_points_to_other_files_is_found_out(
    snapshots: SnapshotStore, objects: ObjectStore, state: Path, tmp_path: Path
) -> None:
    saved = snapshots.save(state, run_id="run", step=1, algorithm="sft")
    other = objects.put_tree(write(tmp_path / "other", {"a": b"other"}))
    forged = objects.put_json(saved.model_copy(update={"files": other}))
    objects.set_ref(f"snapshots/{saved.id}/run", forged)
    with pytest.raises(CorruptObject, match="its record is wrong"):
        snapshots.restore(saved.id, tmp_path / "restored")
    with pytest.raises(CorruptObject, match="its record is wrong"):
        list(snapshots.export(saved.id))
    assert not (tmp_path / "restored").exists()


def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    snapshots: SnapshotStore, state: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="unknown kind of snapshot: 'weights'; expected one of train_state"):
        snapshots.save(state, kind="weights", run_id="run", step=1, algorithm="sft")  # type: ignore[arg-type]
    for run_id in ("", "a/b", ".."):
        with pytest.raises(ConfigError, match="cannot name a snapshot"):
            snapshots.save(state, run_id=run_id, step=1, algorithm="sft")
    with pytest.raises(ConfigError, match="no canonical JSON"):
        snapshots.save(state, run_id="run", step=1, algorithm="sft", meta={"nan": float("nan")})
    assert snapshots.list() == []
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("kind", ["episodic_memory", "process"])
def test_states_of_other_programs_are_kept_and_no_update_takes_them_for_its_own(
    kind: Literal["episodic_memory", "process"], snapshots: SnapshotStore, objects: ObjectStore, tmp_path: Path
) -> None:
    memory = write(tmp_path / "memory", {"beam.json": b"[]", "notes/1.txt": b"a critic's"})
    saved = snapshots.save(memory, kind=kind, run_id="search", step=2, algorithm="apo", label="kept")
    assert snapshots.list(kind=kind) == [saved] and snapshots.list(kind="train_state") == []
    snapshots.restore(saved.id, tmp_path / "elsewhere")
    assert read(tmp_path / "elsewhere") == read(memory)
    with pytest.raises(ConfigError, match=f"is a {kind} of apo; this run trains sft"):
        find_start(objects, saved.id, algorithm="sft", run_name="search")
    with pytest.raises(NotFound, match="no apo snapshot of a run named 'search'"):
        find_start(objects, "latest", algorithm="apo", run_name="search")


def test_a_label_of_any_run_that_found_the_update_trained_is_no_persons(snapshots: SnapshotStore, state: Path) -> None:
    saved = snapshots.save(state, run_id="1", step=1, algorithm="sft", label="finished", meta={"run": "monday"})
    assert saved.runs == {"monday"} and not saved.is_kept_by_label
    for run in ("monday", "tuesday", "wednesday"):
        labelled = snapshots.set_label(saved.id, f"{run}/sft", by_stage=True)
        assert labelled.label == f"{run}/sft" and not labelled.is_kept_by_label
    assert labelled.runs == {"monday", "tuesday", "wednesday"}
    assert snapshots.set_label(saved.id, "tuesday/sft").is_kept_by_label, "somebody wants it kept"
    kept = snapshots.set_label(saved.id, "thursday/sft", by_stage=True)
    assert kept.label == "tuesday/sft" and kept.is_kept_by_label and "thursday" in kept.runs
    again = snapshots.save(state, run_id="1", step=1, algorithm="sft", label="finished", meta={"run": "monday"})
    assert (again.label, again.runs) == (kept.label, kept.runs), "it is made again where results were lost"
    snapshots.set_label(saved.id, "friday/sft")
    assert snapshots.set_label(saved.id, "friday/sft", by_stage=True).is_kept_by_label, "a person's word stands"
    assert snapshots.set_label(saved.id, None).label is None


def test_any_meta_of_other_programs_is_left_alone(snapshots: SnapshotStore, state: Path) -> None:
    saved = snapshots.save(state, run_id="1", step=1, algorithm="own", label="mine", meta={"stage_labels": 3})
    assert (saved.runs, saved.stage_labels, saved.is_kept_by_label) == (set(), [], True)


def test_an_existing_folder_is_not_restored_over(snapshots: SnapshotStore, state: Path) -> None:
    saved = snapshots.save(state, run_id="run", step=1, algorithm="sft")
    with pytest.raises(Conflict, match="not empty"):
        snapshots.restore(saved.id, state)


def test_an_unknown_snapshot_is_not_found(snapshots: SnapshotStore, tmp_path: Path) -> None:
    for use in (snapshots.get, lambda i: snapshots.restore(i, tmp_path / "x"), lambda i: snapshots.set_label(i, "x")):
        with pytest.raises(NotFound, match=f"^snapshot not found: {NOTHING}$"):
            use(NOTHING)
    assert not snapshots.is_present(NOTHING)
    snapshots.delete(NOTHING)


def test_a_trainer_killed_while_it_saves_leaves_the_last_snapshot(
    snapshots: SnapshotStore, objects: ObjectStore, tmp_path: Path
) -> None:
    code = """
import os, sys
from pathlib import Path
from rollout_core.objects import ObjectStore
from rollout_core.objects.snapshots import SnapshotStore
snapshots, folder = SnapshotStore(ObjectStore.from_url(sys.argv[1])), Path(sys.argv[2])
folder.mkdir()
for step in range(10_000):
    (folder / "weights").write_bytes(os.urandom(2**20))
    print(snapshots.save(folder, run_id="run", step=step, algorithm="sft").id, flush=True)
"""
    arguments = [sys.executable, "-c", code, objects.url, str(tmp_path / "state")]
    trainer = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    acknowledged = [trainer.stdout.readline().strip() for _ in range(5)]
    trainer.kill()
    trainer.wait()
    assert set(acknowledged) <= {snapshot.id for snapshot in snapshots.list(run_id="run")}
    for number, snapshot in enumerate(snapshots.list(run_id="run")):
        assert snapshots.is_present(snapshot.id)
        snapshots.restore(snapshot.id, tmp_path / f"restored-{number}")


# Finding and pruning


def test_the_list_is_newest_first_and_filtered_before_it_is_cut(
    snapshots: SnapshotStore, objects: ObjectStore, state: Path
) -> None:
    a0, a1, a2 = save_steps(snapshots, state, 3, "a")
    (b0,) = save_steps(snapshots, state, 1, "b", kind="buffer", label="best of b")
    a1 = snapshots.set_label(a1.id, "best so far")
    assert snapshots.list() == [b0, a2, a1, a0]
    assert snapshots.list(limit=2) == [b0, a2]
    assert snapshots.list(limit=0) == []
    assert snapshots.list(run_id="a", limit=1) == [a2]
    assert snapshots.list(kind="buffer") == [b0]
    assert snapshots.list(label_contains="best") == [b0, a1]
    assert snapshots.list(label_contains="") == [b0, a1], "an unlabelled one matches no label"
    assert snapshots.list(run_id="none") == []
    made_at(objects, a0, datetime.now(UTC) + timedelta(hours=1))
    assert snapshots.list()[0].id == a0.id


def test_a_lost_record_does_not_hide_the_others(snapshots: SnapshotStore, objects: ObjectStore, state: Path) -> None:
    kept, lost = save_steps(snapshots, state, 2)
    record = objects.get_ref(f"snapshots/{lost.id}/run")
    assert record is not None
    objects.files.write(blob_key(record), b"garbage")
    assert snapshots.list() == [kept]
    with pytest.raises(NotFound):
        snapshots.get(lost.id)


def test_a_label_can_be_given_and_taken_away(snapshots: SnapshotStore, state: Path) -> None:
    saved = snapshots.save(state, run_id="run", step=1, algorithm="sft")
    assert snapshots.set_label(saved.id, "gold").label == "gold"
    assert snapshots.get(saved.id).label == "gold"
    snapshots.set_label(saved.id, None)
    assert snapshots.get(saved.id) == saved


def test_pruning_keeps_the_newest_and_the_labelled(snapshots: SnapshotStore, state: Path) -> None:
    s0, s1, s2, s3, s4 = save_steps(snapshots, state, 5)
    snapshots.set_label(s1.id, "gold")
    assert snapshots.prune("run", keep_last=2) == [s2, s0]
    assert [s.id for s in snapshots.list()] == [s4.id, s3.id, s1.id]
    assert snapshots.prune("run", keep_last=2) == []


def test_labelled_snapshots_count_among_the_newest(snapshots: SnapshotStore, state: Path) -> None:
    s0, s1, s2 = save_steps(snapshots, state, 3)
    snapshots.set_label(s2.id, "gold")
    assert snapshots.prune("run", keep_last=1) == [s1, s0]


def test_pruning_everything_touches_no_other_run(snapshots: SnapshotStore, state: Path) -> None:
    save_steps(snapshots, state, 3, "run", label="gold")
    (other,) = save_steps(snapshots, state, 1, "other")
    assert len(snapshots.prune("run", keep_last=0, keep_labelled=False)) == 3
    assert snapshots.list() == [other]


def test_an_age_protects_the_young_and_condemns_nobody(
    snapshots: SnapshotStore, objects: ObjectStore, state: Path
) -> None:
    saved = save_steps(snapshots, state, 4)
    now = datetime.now(UTC)
    for hours, snapshot in zip((40, 30, 20, 10), saved, strict=True):
        made_at(objects, snapshot, now - timedelta(hours=hours))
    dropped = snapshots.prune("run", keep_last=1, max_age=timedelta(hours=25))
    assert [s.step for s in dropped] == [1, 0]
    assert snapshots.prune("run", keep_last=1, max_age=timedelta(hours=1)) != [], "the newest stays, however old"
    assert [s.step for s in snapshots.list()] == [3]


def test_the_newest_of_each_kind_are_kept(snapshots: SnapshotStore, state: Path, tmp_path: Path) -> None:
    states = save_steps(snapshots, state, 3)
    memory = write(tmp_path / "memory", {"memory.json": b"[]"})
    saved = snapshots.save(memory, kind="episodic_memory", run_id="run", step=3, algorithm="grpo")
    assert [s.id for s in snapshots.prune("run", keep_last=1)] == [states[1].id, states[0].id]
    assert {s.id for s in snapshots.list()} == {states[2].id, saved.id}


def test_a_snapshot_is_forked_into_another_run_and_outlives_the_first(
    snapshots: SnapshotStore, objects: ObjectStore, state: Path, tmp_path: Path
) -> None:
    about = {"run_id": "1", "step": 4, "algorithm": "sft", "meta": {"run": "monday"}}
    saved = snapshots.set_label(snapshots.save(state, **about).id, "monday/sft", by_stage=True)
    forked = snapshots.fork(saved.id, "tuesday")
    assert (forked.id, forked.run_id, forked.runs, forked.label) == (saved.id, "tuesday", {"tuesday"}, "finished")
    assert forked.meta["forked_from"] == "1" and not forked.is_kept_by_label
    assert find_start(objects, "latest", algorithm="sft", run_name="tuesday") == forked
    snapshots.drop_name(saved, "1")
    collect(snapshots)
    assert snapshots.list() == [forked]
    snapshots.restore(saved.id, tmp_path / "restored")
    assert read(tmp_path / "restored") == read(state)
    for run in ("tuesday", "a/b"):
        with pytest.raises(ConfigError, match=r"has snapshot|cannot name a snapshot"):
            snapshots.fork(saved.id, run)
    with pytest.raises(NotFound):
        snapshots.fork(NOTHING, "wednesday")


# Garbage collection


def collect(snapshots: SnapshotStore, **options) -> GcReport:
    """A collection that holds even what was written this instant for old."""
    return snapshots.gc(min_age=-timedelta(seconds=5), **options)


def test_collection_deletes_what_no_snapshot_reaches(
    snapshots: SnapshotStore, objects: ObjectStore, state: Path, tmp_path: Path
) -> None:
    saved = save_steps(snapshots, state, 5)
    kept = snapshots.prune("run", keep_last=2) and snapshots.list()
    preview = collect(snapshots, dry_run=True)
    assert preview.deleted_blobs == 3 * 3
    assert len(dict(objects.blobs())) == 3 + 5 * 3
    report = collect(snapshots)
    assert report == preview.model_copy(update={"dry_run": False})
    assert report.live_blobs == len(dict(objects.blobs())) == 3 + 2 * 3
    for snapshot in kept:
        snapshots.restore(snapshot.id, tmp_path / str(snapshot.step))
    assert not snapshots.is_present(saved[0].id)


def test_collection_spares_the_young(snapshots: SnapshotStore, objects: ObjectStore) -> None:
    orphan = objects.put_bytes(b"its writer has not named it yet")
    assert snapshots.gc().young_blobs == 1
    os.utime(objects.files.where(blob_key(orphan)), (1, 1))
    objects.put_bytes(b"its writer has not named it yet")
    assert snapshots.gc().young_blobs == 1, "putting it again made it young"
    os.utime(objects.files.where(blob_key(orphan)), (1, 1))
    assert snapshots.gc().deleted_blobs == 1
    assert not objects.exists(orphan)


def test_what_is_young_spares_what_it_names(snapshots: SnapshotStore, objects: ObjectStore) -> None:
    old = objects.put_bytes(b"from a stage of yesterday")
    os.utime(objects.files.where(blob_key(old)), (1, 1))
    objects.put_json({"record that is about to get its ref": old})
    assert (snapshots.gc().young_blobs, snapshots.gc().deleted_blobs) == (2, 0)
    assert objects.exists(old)


def test_collection_follows_json_json_lines_and_json_within_json(
    snapshots: SnapshotStore, objects: ObjectStore
) -> None:
    leaves = [objects.put_bytes(bytes([n]) * 100) for n in range(5)]
    lines = objects.put_bytes(b"".join(b'{"blob":"%s"}\n' % leaf.encode() for leaf in leaves[:2]))
    nested = objects.put_json({"result": json.dumps({"deep": json.dumps([leaves[2]])})})
    objects.set_ref("results/a", objects.put_json({"rows": [lines], nested: None}))
    objects.set_ref("labels/b", leaves[3])
    report = collect(snapshots)
    assert set(dict(objects.blobs())) >= set(leaves[:4])
    assert report.deleted_blobs == 1
    assert collect(snapshots, extra_roots=[]).deleted_blobs == 0


def test_collection_spares_what_extra_roots_reach(snapshots: SnapshotStore, objects: ObjectStore) -> None:
    leaf = objects.put_bytes(b"leaf")
    root = objects.put_json([leaf])
    assert collect(snapshots, extra_roots=[root, NOTHING]).live_blobs == 2
    assert collect(snapshots).deleted_blobs == 2


def test_lineage_keeps_the_inputs_of_the_living_and_only_the_record_of_the_dead(
    snapshots: SnapshotStore, objects: ObjectStore, state: Path
) -> None:
    def lineage(inputs: dict, *outputs: ContentId) -> None:
        now = datetime.now(UTC)
        record_lineage(
            objects,
            Lineage(stage="s", version=1, key=NOTHING, inputs=inputs, outputs=outputs, created_at=now, software={}),
        )

    prompts, dead_prompts, dead_model = (objects.put_bytes(text) for text in (b"prompts", b"dead prompts", b"model"))
    alive = snapshots.save(state, run_id="run", step=1, algorithm="sft")
    lineage({"prompts": prompts}, alive.id)
    lineage({"prompts": dead_prompts}, dead_model)
    assert collect(snapshots).deleted_blobs == 2
    assert objects.exists(prompts)
    assert not objects.exists(dead_prompts)
    assert not objects.exists(dead_model)
    assert lineage_of(objects, dead_model) is not None
    snapshots.delete(alive.id)
    collect(snapshots)
    assert not objects.exists(prompts)


def test_collection_clears_corrupt_blobs_that_were_set_aside(snapshots: SnapshotStore, objects: ObjectStore) -> None:
    blob = objects.put_bytes(b"bytes")
    objects.files.write(blob_key(blob), b"bytez")
    with pytest.raises(CorruptObject):
        objects.get_bytes(blob)
    assert snapshots.gc().deleted_leftovers == 0
    report = collect(snapshots)
    assert (report.deleted_leftovers, report.deleted_bytes) == (1, 5)


def test_an_id_that_straddles_two_chunks_is_found() -> None:
    text = b'{"a": "' + NOTHING.encode() + b'"}'

    def pieces(size: int) -> Iterator[bytes]:
        yield from (text[start : start + size] for start in range(0, len(text), size))

    for size in range(1, len(text) + 1):
        assert set(named_ids(pieces(size))) == {NOTHING}
    assert list(named_ids([b'"' + b"0" * 63 + b'" "' + b"0" * 65 + b'" ' + b"0" * 64])) == []


def age(objects: ObjectStore, key: str, days: float) -> None:
    moment = time.time() - days * 86400
    os.utime(objects.files.where(key), (moment, moment))


def test_notes_keep_what_they_name_until_they_are_long_unused(snapshots: SnapshotStore, objects: ObjectStore) -> None:
    names = ("prompt-shards/a", "output-files/a", "runs/a", "work/r/a")
    named = {name: objects.put_bytes(name.encode()) for name in names}
    for name, blob in named.items():
        objects.set_ref(name, objects.put_json([blob]))
    for key, _ in list(objects.files.list("cas")):
        age(objects, key, 29)
    for name in names:
        age(objects, f"refs/{name}", 29)
    report = snapshots.gc()
    assert (report.deleted_blobs, report.deleted_notes, report.live_blobs) == (0, 0, 8)
    for name in names[1:]:
        age(objects, f"refs/{name}", 31)
    preview = snapshots.gc(dry_run=True)
    report = snapshots.gc()
    assert (report.deleted_blobs, report.deleted_notes) == (preview.deleted_blobs, preview.deleted_notes) == (6, 3)
    assert objects.ref_names("") == ["prompt-shards/a"] and objects.exists(named["prompt-shards/a"])


def test_what_is_noted_of_a_blob_lives_as_long_as_the_blob(snapshots: SnapshotStore, objects: ObjectStore) -> None:
    completions, times = objects.put_bytes(b"completions"), objects.put_bytes(b"[1.0]")
    objects.set_ref("results/a", objects.put_json({"completions": completions}))
    objects.set_ref(f"finished/{completions}", times)
    report = collect(snapshots)
    assert (report.deleted_blobs, report.deleted_notes) == (0, 0) and objects.exists(times)
    objects.delete_ref("results/a")
    age(objects, blob_key(completions), 2)
    assert snapshots.gc().deleted_notes == 0, "a note that is young is spared, like a blob"
    report = collect(snapshots, extra_roots=[completions], dry_run=True)
    assert report.deleted_notes == 0 and report.live_blobs == 2, "what is named elsewhere lives, with its note"
    report = collect(snapshots)
    assert report.deleted_notes == 1 and not objects.exists(times) and not objects.ref_names("finished")

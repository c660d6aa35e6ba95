"""What a run gives up goes at once with its bytes, what anybody names stays, and whoever is killed leaves no rest."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_core.base.errors import ConfigError, MissingObject, NotFound
from rollout_core.base.ids import ContentId, content_id, hash_bytes
from rollout_core.config import ModelSource
from rollout_core.models.locating import import_model
from rollout_core.objects import ObjectStore, Snapshot, SnapshotStore
from rollout_core.objects.backends import LocalFiles
from rollout_core.objects.files import GIVEN_UP_REFS
from rollout_core.objects.records import Checkpoint
from rollout_core.objects.retention.garbage import Marking
from rollout_core.objects.retention.pruning import Fate, free, prune_model, prune_state, stand_on
from rollout_core.objects.retention.sweeps import announced
from rollout_core.objects.retention.unstored import check_stored, is_whole, put_model, unstored_model
from rollout_core.objects.snapshots import FINISHED, RUN_NAME, progress_ref
from rollout_core.objects.verification import verify_store
from tests.objects.test_housekeeping import NOW, clean, promote
from tests.objects.test_snapshots import write

WEIGHTS, MOMENTS = "model/model.safetensors", "optimizer.safetensors"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local file system settles sooner than is waited for in earnest."""
    monkeypatch.setattr(LocalFiles, "settle_seconds", 0.02)


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"{tmp_path}/store")


def update(objects: ObjectStore, folder: Path, number: int, run: str = "one", name: str = "night") -> Checkpoint:
    """What the update of an iteration leaves, with its result."""
    weights, moments = (f"{what} {number} ".encode() * 999 for what in ("weights", "moments"))
    files = {WEIGHTS: weights, "model/config.json": b"{}", MOMENTS: moments, "state.json": str(number).encode()}
    at = write(folder / f"{run}-{number}", files)
    saved = SnapshotStore(objects).save(
        at, run_id=run, step=number, algorithm="GRPO", label=FINISHED, meta={RUN_NAME: name}
    )
    model = objects.put_json(objects.manifest(saved.files).below("model"))
    metrics = objects.put_bytes(b"{}\n")
    made = Checkpoint(
        model=model, train_state=saved.id, metrics=metrics, algorithm="GRPO", step=number, summary={}, advantages=None
    )
    key = content_id("key", number)
    document = {"metadata": {"storage_key": key}, "result": made.model_dump_json()}
    objects.set_ref(f"results/{key}", objects.put_json(document))
    return made


def give_up(objects: ObjectStore, made: Checkpoint, run: str = "one") -> None:
    prune_state(objects, made.train_state, run)
    prune_model(objects, made.model, run_id=run, step=made.step, algorithm=made.algorithm)


def has(objects: ObjectStore, made: Checkpoint) -> tuple[bool, bool]:
    """Whether state and model are stored whole."""
    return SnapshotStore(objects).is_present(made.train_state), objects.tree_is_present(made.model)


def under_way(record: Snapshot) -> Fate:
    return "may go"


def test_what_is_given_up_is_deleted_at_once_and_its_result_counts(objects: ObjectStore, tmp_path: Path) -> None:
    first, second = update(objects, tmp_path, 1), update(objects, tmp_path, 2)
    sizes = sum(stat.size for _, stat in objects.blobs())
    give_up(objects, first)
    assert has(objects, first) == (False, True), "names first, bytes then"
    freed = free(objects)
    assert freed == len(b"weights 1 " * 999) + len(b"moments 1 " * 999)
    assert sum(stat.size for _, stat in objects.blobs()) < sizes - freed + 2_000
    assert (has(objects, first), has(objects, second)) == ((False, False), (True, True))
    assert is_whole(first, objects) and is_whole(second, objects)
    assert verify_store(objects).damage == [] and free(objects) == 0
    with pytest.raises(NotFound, match=r"given|pruned by its run, .*run.keep_states.*rollout reproduce"):
        SnapshotStore(objects).get(first.train_state)
    with pytest.raises(ConfigError, match=r"given up for a later one \(run.keep_states\); make it again by"):
        check_stored(first.model, objects)
    with pytest.raises(MissingObject):
        SnapshotStore(objects).restore(first.train_state, tmp_path / "restored")
    assert not is_whole(first, objects), "who needs the state itself has it computed again"
    again = update(objects, tmp_path / "again", 1)
    put_model(objects, objects.manifest(again.model), tmp_path / "again" / "one-1" / "model")
    assert again == first and has(objects, first) == (True, True) and unstored_model(objects, first.model) is None
    give_up(objects, first)
    assert free(objects) == freed and has(objects, first) == (False, False)


def test_without_the_model_only_the_rest_of_the_state_goes(objects: ObjectStore, tmp_path: Path) -> None:
    first = update(objects, tmp_path, 1)
    prune_state(objects, first.train_state, "one")
    assert free(objects) == len(b"moments 1 " * 999)
    assert has(objects, first) == (False, True)


def test_a_run_that_stands_on_a_state_keeps_it(objects: ObjectStore, tmp_path: Path) -> None:
    first = update(objects, tmp_path, 1)
    assert stand_on(objects, first.train_state, "two", "other", under_way)
    give_up(objects, first)
    assert free(objects) == 0 and has(objects, first) == (True, True)
    assert {record.run_id for record in SnapshotStore(objects).named_by(first.train_state)} == {"two"}
    assert SnapshotStore(objects).get(first.train_state).meta[RUN_NAME] == "other"
    give_up(objects, first, "two")
    assert free(objects) > 0 and has(objects, first) == (False, False)
    assert not stand_on(objects, first.train_state, "three", "third", under_way)


def test_a_state_that_a_run_ended_with_needs_no_other_name(objects: ObjectStore, tmp_path: Path) -> None:
    first = update(objects, tmp_path, 1)
    before = dict(objects.blobs())
    assert stand_on(objects, first.train_state, "two", "other", lambda record: "stays")
    assert dict(objects.blobs()).keys() == before.keys()
    assert [record.run_id for record in SnapshotStore(objects).named_by(first.train_state)] == ["one"]


def test_a_run_that_was_killed_leaves_its_state_to_the_one_that_goes_on(objects: ObjectStore, tmp_path: Path) -> None:
    first = update(objects, tmp_path, 1)
    assert stand_on(objects, first.train_state, "two", "night", lambda record: "over")
    assert [record.run_id for record in SnapshotStore(objects).named_by(first.train_state)] == ["two"]


def keep_by_label(objects: ObjectStore, made: Checkpoint) -> None:
    SnapshotStore(objects).set_label(made.train_state, "best so far")


def keep_by_promotion(objects: ObjectStore, made: Checkpoint) -> None:
    promote(objects, made.model, None, 1)


def keep_as_candidate(objects: ObjectStore, made: Checkpoint) -> None:
    objects.set_ref(f"candidates/{hash_bytes(b'c')}", objects.put_json({"model": made.model}))


def keep_as_start(objects: ObjectStore, made: Checkpoint) -> None:
    import_model(ModelSource(uri=made.model), objects, Path())


def keep_by_progress(objects: ObjectStore, made: Checkpoint) -> None:
    objects.set_ref(progress_ref(hash_bytes(b"an unfinished update")), made.train_state)


@pytest.mark.parametrize(
    ("keep", "keeps_state"),
    [
        (keep_by_label, True),
        (keep_by_progress, True),
        (keep_by_promotion, False),
        (keep_as_candidate, False),
        (keep_as_start, False),
    ],
)
def test_what_somebody_named_stays(
    objects: ObjectStore, tmp_path: Path, keep: Callable[[ObjectStore, Checkpoint], None], keeps_state: bool
) -> None:
    first = update(objects, tmp_path, 1)
    keep(objects, first)
    give_up(objects, first)
    free(objects)
    assert has(objects, first) == (keeps_state, True)
    clean(objects, NOW)
    assert has(objects, first)[1], "nor does housekeeping delete it"


def test_a_model_that_is_named_after_it_was_given_up_and_not_yet_deleted_stays(
    objects: ObjectStore, tmp_path: Path
) -> None:
    first = update(objects, tmp_path, 1)
    give_up(objects, first)
    promote(objects, first.model, None, 1)
    assert free(objects) > 0 and has(objects, first) == (False, True)


def test_a_model_that_the_database_names_stays(objects: ObjectStore, tmp_path: Path) -> None:
    first = update(objects, tmp_path, 1)
    give_up(objects, first)
    free(objects, extra_roots={first.model})
    assert has(objects, first) == (False, True)


def test_files_that_others_share_or_put_again_meanwhile_stay(objects: ObjectStore, tmp_path: Path) -> None:
    first = update(objects, tmp_path, 1)
    moments, weights = b"moments 1 " * 999, b"weights 1 " * 999
    other = write(tmp_path / "other", {MOMENTS: moments, "state.json": b"other"})
    SnapshotStore(objects).save(other, run_id="other", step=3, algorithm="SFT")
    exported = write(tmp_path / "exported", {"copy.safetensors": weights})
    manifest = ObjectStore.from_url(f"{tmp_path}/scratch")
    tree = manifest.manifest(manifest.put_tree(exported))
    objects.put_files(tree, {"copy.safetensors": exported / "copy.safetensors"})  # and nobody has named it yet
    give_up(objects, first)
    assert free(objects) == 0
    assert objects.exists(hash_bytes(moments)) and objects.exists(hash_bytes(weights))


def test_a_run_that_is_killed_before_it_deletes_leaves_that_to_the_next(objects: ObjectStore, tmp_path: Path) -> None:
    first, second = update(objects, tmp_path, 1), update(objects, tmp_path, 2, "two")
    give_up(objects, first)
    assert len(objects.ref_names(GIVEN_UP_REFS)) == 2
    assert verify_store(objects).damage == []
    give_up(objects, second, "two")
    free(objects)
    assert (has(objects, first), has(objects, second)) == ((False, False), (False, False))
    assert objects.ref_names(GIVEN_UP_REFS) == []


@pytest.mark.parametrize("moment", ["complaints", "reach_refs"])
def test_a_state_that_a_run_names_while_names_are_looked_at_stays(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    first, snapshots = update(objects, tmp_path, 1), SnapshotStore(objects)
    found = snapshots.get(first.train_state)  # as another run sees it before it is given up
    give_up(objects, first)
    look = getattr(Marking, moment)

    def meanwhile(marking: Marking) -> object:
        snapshots.put_record(found.model_copy(update={"run_id": "two"}))
        return look(marking)

    monkeypatch.setattr(Marking, moment, meanwhile)
    assert free(objects) == 0
    assert has(objects, first) == (True, True)


def test_who_names_a_state_that_is_about_to_be_deleted_waits_and_finds_it_gone(
    objects: ObjectStore, tmp_path: Path
) -> None:
    first = update(objects, tmp_path, 1)
    moments = hash_bytes(b"moments 1 " * 999)
    objects.files.settle_seconds = 0.5
    with announced(objects.files, [moments]):
        threading.Timer(0.1, objects.delete, [moments]).start()
        assert not stand_on(objects, first.train_state, "two", "other", under_way)


def test_a_model_folder_that_somebody_starts_from_is_stored_though_a_run_gave_the_same_up(
    objects: ObjectStore, tmp_path: Path, tiny_model: Path
) -> None:
    model = objects.put_tree(tiny_model)
    assert import_model(ModelSource(uri=str(tiny_model)), objects, Path()) == model
    prune_model(objects, model, run_id="one", step=1, algorithm="GRPO")
    assert free(objects) == 0 and objects.tree_is_present(model), "it was named as a start before"
    for name in objects.ref_names("chosen-models"):
        objects.delete_ref(name)
    prune_model(objects, model, run_id="one", step=1, algorithm="GRPO")
    assert free(objects) > 0 and not objects.tree_is_present(model)
    assert import_model(ModelSource(uri=str(tiny_model)), objects, Path()) == model
    clean(objects, NOW)
    assert objects.tree_is_present(model)


def test_word_of_what_was_given_up_keeps_nothing(objects: ObjectStore, tmp_path: Path) -> None:
    first = update(objects, tmp_path, 1)
    give_up(objects, first)
    clean(objects, NOW)
    assert has(objects, first) == (False, False) and free(objects) == 0
    assert objects.ref_names(GIVEN_UP_REFS) == []


def test_nothing_is_deleted_while_a_ref_is_damaged(objects: ObjectStore, tmp_path: Path) -> None:
    first = update(objects, tmp_path, 1)
    Path(objects.files.where("refs/notes")).write_text("damaged")
    give_up(objects, first)
    assert free(objects) == 0 and has(objects, first) == (False, True)
    Path(objects.files.where("refs/notes")).unlink()
    assert free(objects) > 0 and has(objects, first) == (False, False)


def test_an_update_that_was_killed_at_its_very_end_does_not_keep_its_state(
    objects: ObjectStore, tmp_path: Path
) -> None:
    first = update(objects, tmp_path, 1)
    objects.set_ref(progress_ref(content_id("key", 1)), first.train_state)  # its result is there
    give_up(objects, first)
    assert free(objects) > 0 and has(objects, first) == (False, False)
    assert objects.ref_names("progress") == []


def test_naming_a_state_reads_none_of_its_files(objects: ObjectStore, tmp_path: Path) -> None:
    snapshots, first = SnapshotStore(objects), update(objects, tmp_path, 1)
    moments = hash_bytes(b"moments 1 " * 999)
    path = Path(objects.files.where(f"cas/{moments[:2]}/{moments[2:4]}/{moments}"))
    path.write_bytes(b"x" * path.stat().st_size)
    assert snapshots.present(first.train_state).id == first.train_state
    path.write_bytes(b"cut")
    with pytest.raises(MissingObject) as caught:
        snapshots.present(first.train_state)
    assert caught.value.content_id == ContentId(moments)


def test_a_label_names_the_record_of_the_run_that_stands_on_a_state(objects: ObjectStore, tmp_path: Path) -> None:
    first, snapshots = update(objects, tmp_path, 1), SnapshotStore(objects)
    snapshots.set_label(first.train_state, "night/grpo-1", by_stage=True)
    stand_on(objects, first.train_state, "two", "other", under_way)
    snapshots.set_label(first.train_state, "other/grpo-1", by_stage=True)
    records = {record.run_id: record for record in snapshots.named_by(first.train_state)}
    assert {name: record.label for name, record in records.items()} == {"one": "night/grpo-1", "two": "other/grpo-1"}
    assert not any(record.is_kept_by_label for record in records.values())
    assert json.loads(records["two"].model_dump_json())["meta"]["stage_labels"] == ["night/grpo-1", "other/grpo-1"]

"""When what a run gives up is deleted, beside a large storage and at the run's end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rollout_core.config import RunInfo
from rollout_core.objects import ObjectStore, SnapshotStore
from rollout_core.objects.backends import LocalFiles
from rollout_core.objects.retention.pruning import free, prune_state
from tasks.runtime import kept_states as keeping
from tasks.runtime.kept_states import Keeping
from tests.cli.test_cli import rollout
from tests.objects.test_pruning import update


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setenv("ROLLOUT_STORAGE", f"{tmp_path}/store")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path}/rollout.db")
    monkeypatch.setattr(LocalFiles, "settle_seconds", 0.02)
    return ObjectStore.from_url(f"{tmp_path}/store")


def test_what_is_given_up_while_much_is_looked_at_is_deleted_at_the_end(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended, calls = threading.Event(), threading.Event(), []

    def slow(store: ObjectStore, **options: object) -> int:
        calls.append(options)
        started.set()
        assert ended.wait(30.0)
        return free(store)

    monkeypatch.setattr(keeping, "free", slow)
    kept = Keeping(RunInfo(name="night"), "one")
    made = [update(objects, tmp_path, number) for number in range(4)]
    for checkpoint in made:
        kept.later(checkpoint)
        if checkpoint is made[0]:
            assert started.wait(30.0)
    assert len(calls) == 1, "one at a time, however many states come by meanwhile"
    ended.set()
    kept.close()
    assert len(calls) == 2
    assert [SnapshotStore(objects).is_present(checkpoint.train_state) for checkpoint in made] == [False] * 3 + [True]
    assert not objects.ref_names("given-up")


def test_beside_a_large_storage_a_run_pauses_between_deletions(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(keeping, "free", lambda store, **options: calls.append(options))
    monkeypatch.setattr(keeping, "_PAUSE_PER_SECOND", 1e9)
    monkeypatch.setattr(LocalFiles, "settle_seconds", 0.0)  # a pause is counted from what deleting takes beside it
    kept = Keeping(RunInfo(name="night"), "one")
    for number in range(4):
        kept.later(update(objects, tmp_path, number))
        assert kept._freeing is not None
        kept._freeing.result(timeout=30.0)
    assert len(calls) == 1
    kept.close()
    assert len(calls) == 2


def test_to_ask_for_a_state_that_was_given_up_has_no_run_compute_it_again(objects: ObjectStore, tmp_path: Path) -> None:
    first = update(objects, tmp_path, 1)
    prune_state(objects, first.train_state, "one")
    asked = rollout("snapshot", "restore", first.train_state, str(tmp_path / "restored"))
    assert asked.exit_code != 0 and "rollout reproduce" in asked.stderr
    assert SnapshotStore(objects).counts(first.train_state)

"""Housekeeping: what the rules keep stays, the rest goes, nothing of a run under way is touched, and a kill anywhere
leaves a whole store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from typer.testing import CliRunner

from flows.cli import app
from rollout_core.base.errors import ConfigError, MissingObject, NotFound
from rollout_core.base.ids import ContentId, content_id, hash_bytes
from rollout_core.config.retention import Retention
from rollout_core.objects import ObjectStore, Snapshot, SnapshotStore, local_trees
from rollout_core.objects.backends import LocalFiles
from rollout_core.objects.lineage import Lineage, record_lineage
from rollout_core.objects.object_store import blob_key
from rollout_core.objects.retention import rounds as housekeeping
from rollout_core.objects.retention.garbage import collect_garbage
from rollout_core.objects.retention.rounds import Cleaned
from rollout_core.objects.retention.run_leases import lease, live_leases
from rollout_core.objects.retention.sweeps import announced
from rollout_core.objects.retention.usage import measure
from rollout_core.objects.verification import verify_store
from rollout_core.promotion.history import Entry, histories
from tests.objects.test_snapshots import write

DAY = 86400.0
NOW = Retention(grace_hours=0)
WEIGHTS = 3_000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local file system settles sooner than is waited for in earnest."""
    monkeypatch.setattr(LocalFiles, "settle_seconds", 0.05)


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"{tmp_path}/store")


def weights(name: str) -> bytes:
    return b"\x00" + name.encode() * WEIGHTS


def filed(objects: ObjectStore, stage: str, inputs: dict, result: dict, *outputs: ContentId) -> ContentId:
    """What a stage leaves: lineage of its outputs, and its result under its key."""
    key = content_id("stage", [stage, inputs])
    now = datetime.now(UTC)
    record_lineage(
        objects,
        Lineage(stage=stage, version=1, key=key, inputs=inputs, outputs=outputs, created_at=now, software={}),
    )
    document = {"metadata": {"storage_key": key}, "result": json.dumps(result)}
    objects.set_ref(f"results/{key}", objects.put_json(document))
    return key


def clean(objects: ObjectStore, rules: Retention, **options: Any) -> Cleaned:
    return housekeeping.clean(objects, rules, histories=histories(objects), **options)


class Night:
    """A run of iterations: each has a model, a training state with an optimizer, and a result that names both."""

    def __init__(
        self, objects: ObjectStore, folder: Path, run: str, iterations: int = 4, name: str = "nightly"
    ) -> None:
        self.states: list[Snapshot] = []
        self.models: list[ContentId] = []
        self.keys: list[ContentId] = []
        data = objects.put_bytes(f"prompts of {run}".encode())
        base = objects.put_tree(write(folder / "base", {"weights": weights("base")}))
        filed(objects, "import_model", {"uri": "hub"}, {"model": base}, base)
        before = base
        for number in range(iterations):
            files = {"model/weights": weights(f"{run} {number}"), "optimizer": weights(f"moments {run} {number}")}
            at = write(folder / f"{run}-{number}", files)
            model = objects.put_tree(at / "model")
            state = SnapshotStore(objects).save(
                at, run_id=run, step=number, algorithm="ppo", label="finished", meta={"run": name}
            )
            inputs = {"model": before, "data": data}
            self.keys.append(filed(objects, "ppo_update", inputs, {"model": model, "state": state.id}, model, state.id))
            SnapshotStore(objects).set_label(state.id, f"{name}/ppo-{number + 1}", by_stage=True)
            self.states.append(state)
            self.models.append(model)
            before = model
        self.data, self.base = data, base


def promote(objects: ObjectStore, model: ContentId, previous: ContentId | None, number: int) -> None:
    entry = Entry(
        action="promote",
        resource="policy",
        model=model,
        previous=previous,
        by="test",
        at=datetime.now(UTC),
        reason="better",
    )
    objects.set_ref(f"promotions/of-policy/01J{number:023d}", objects.put_json(entry))


def grow_old(objects: ObjectStore, days: float, folder: str = "") -> None:
    """Everything that lies there was written so long ago."""
    moment = time.time() - days * DAY
    for part in (folder,) if folder else ("cas", "refs"):
        for key, _ in list(objects.files.list(part)):
            os.utime(objects.files.where(key), (moment, moment))


def is_there(objects: ObjectStore, state: Snapshot) -> bool:
    return SnapshotStore(objects).is_present(state.id)


def test_of_a_night_the_last_state_stays_and_every_model(objects: ObjectStore, tmp_path: Path) -> None:
    night = Night(objects, tmp_path, "night")
    before = measure(objects)
    preview = clean(objects, NOW, dry_run=True)
    assert measure(objects) == before, "a dry run changes nothing"
    done = clean(objects, NOW)
    told, freed = preview.garbage, done.garbage
    assert (told.deleted_blobs, preview.states, preview.lines[0]) == (freed.deleted_blobs, done.states, done.lines[0])
    assert told.deleted_bytes == freed.deleted_bytes > 0
    assert (done.states, done.states_kept, done.results) == (3, 1, 0)
    assert [is_there(objects, state) for state in night.states] == [False, False, False, True]
    assert all(objects.tree_is_present(model) for model in [night.base, *night.models])
    assert before.total_bytes - measure(objects).total_bytes > 3 * WEIGHTS * len("moments night 0")
    assert verify_store(objects).damage == [], "nobody misses what was given up"
    assert clean(objects, NOW).states == 0


def test_a_state_that_was_given_up_counts_for_its_result_until_somebody_needs_it(
    objects: ObjectStore, tmp_path: Path
) -> None:
    night = Night(objects, tmp_path, "night")
    clean(objects, NOW)
    snapshots, gone = SnapshotStore(objects), night.states[1].id
    assert snapshots.counts(gone) and not snapshots.is_present(gone)
    with pytest.raises(NotFound, match=r"step 1 of ppo, run night.* pruned by housekeeping"):
        snapshots.get(gone)
    with pytest.raises(MissingObject, match="the stage that made it has to run again") as error:
        snapshots.restore(gone, tmp_path / "restored")
    assert error.value.content_id == gone
    assert not snapshots.counts(gone), "so the stage is computed again"
    saved = snapshots.save(tmp_path / "night-1", run_id="night", step=1, algorithm="ppo")
    assert saved.id == gone and snapshots.restore(gone, tmp_path / "again") == saved


def test_what_stays_labels_promoted_late_and_unfinished(objects: ObjectStore, tmp_path: Path) -> None:
    first, second = Night(objects, tmp_path, "first"), Night(objects, tmp_path, "second", iterations=1)
    snapshots = SnapshotStore(objects)
    snapshots.set_label(first.states[0].id, "the one for the paper")
    snapshots.set_label(first.states[0].id, "nightly/ppo-1", by_stage=True)
    promote(objects, first.models[1], None, 1)
    objects.set_ref(f"progress/{first.keys[0]}", first.states[2].id)
    clean(objects, NOW.model_copy(update={"state_days": 0.0}))
    assert [is_there(objects, state) for state in first.states] == [True, True, True, False]
    assert is_there(objects, second.states[0])
    assert snapshots.get(first.states[0].id).label == "the one for the paper"


def test_a_state_that_another_run_found_trained_is_the_newest_of_that_one_too(
    objects: ObjectStore, tmp_path: Path
) -> None:
    first = Night(objects, tmp_path, "monday", name="monday")
    SnapshotStore(objects).set_label(first.states[0].id, "tuesday/ppo-1", by_stage=True)
    clean(objects, NOW.model_copy(update={"state_days": 0.0}))
    assert [is_there(objects, state) for state in first.states] == [True, False, False, True]


def test_results_that_nobody_used_for_long_go_with_their_models(objects: ObjectStore, tmp_path: Path) -> None:
    old, new = Night(objects, tmp_path, "old"), Night(objects, tmp_path, "new", name="other")
    for state in old.states:
        SnapshotStore(objects).delete(state.id)
    grow_old(objects, 20, "refs/results")
    for key in new.keys:
        os.utime(objects.files.where(f"refs/results/{key}"))
    done = clean(objects, NOW)
    assert done.results == 5, "four updates and the import of the base model"
    assert not any(objects.tree_is_present(model) for model in old.models)
    assert all(objects.tree_is_present(model) for model in new.models)
    assert objects.tree_is_present(new.base), "a first input of what is live"
    assert objects.exists(new.data) and not objects.exists(old.data)


def test_of_the_inputs_of_the_living_data_stays_and_weights_that_can_be_made_again_go(
    objects: ObjectStore, tmp_path: Path
) -> None:
    night = Night(objects, tmp_path, "night")
    promote(objects, night.models[-1], None, 1)
    grow_old(objects, 20)
    clean(objects, NOW.model_copy(update={"weights_of_inputs": True}), dry_run=False)
    assert all(objects.tree_is_present(model) for model in night.models)
    clean(objects, NOW)
    assert [objects.tree_is_present(model) for model in night.models] == [False, False, False, True]
    assert objects.tree_is_present(night.base) and objects.exists(night.data)
    assert verify_store(objects).damage == []


@pytest.mark.parametrize("rounds", [False, True])
def test_of_the_promoted_models_the_newest_stay_and_the_history_is_whole(
    objects: ObjectStore, tmp_path: Path, rounds: bool
) -> None:
    """Also where what is promoted is not the model of a training state, but what was made of it in its base's dtype."""
    nights = [Night(objects, tmp_path, f"night{number}", iterations=1, name=f"n{number}") for number in range(4)]
    for number, night in enumerate(nights):
        promoted = night.models[0]
        if rounds:
            promoted = objects.put_tree(write(tmp_path / f"rounded{number}", {"weights": weights(f"rounded {number}")}))
            inputs = {"model": night.models[0], "base": night.base}
            filed(objects, "round_weights", inputs, {"model": promoted}, promoted)
        promote(objects, promoted, None, number)
    grow_old(objects, 20)
    rules = NOW.model_copy(update={"keep_promoted": 2, "keep_states": 0, "state_days": 0.0})
    done = clean(objects, rules)
    assert done.models == 2
    assert [objects.tree_is_present(night.models[0]) for night in nights] == [False, False, True, True]
    assert [is_there(objects, night.states[0]) for night in nights] == [False, False, True, True]
    assert len(objects.ref_names("promotions")) == 4
    assert verify_store(objects).damage == []
    assert clean(objects, rules).models == 0


def test_a_run_under_way_keeps_what_it_has_used_or_made(objects: ObjectStore, tmp_path: Path) -> None:
    night = Night(objects, tmp_path, "night")
    grow_old(objects, 20)
    rules = Retention()
    with lease(objects, "flow run of tonight"):
        used = f"refs/results/{night.keys[0]}"
        os.utime(objects.files.where(used))  # as a stage does that finds its result
        tonight = Night(objects, tmp_path, "tonight")
        with pytest.raises(ConfigError, match="under way: flow run of tonight"):
            clean(objects, NOW)
        done = clean(objects, rules)
        assert done.runs == ("flow run of tonight",)
        assert (done.results, done.states) == (3, 3)
        assert all(objects.tree_is_present(model) for model in [*night.models, *tonight.models])
        assert all(is_there(objects, state) for state in tonight.states)
        assert objects.ref_names("expired"), "it may have read them before"
    assert live_leases(objects, clear=False) == [] and not objects.ref_names("leases")
    clean(objects, rules)
    assert not objects.ref_names("expired")
    assert [objects.tree_is_present(model) for model in night.models] == [True, False, False, True]
    assert [is_there(objects, state) for state in night.states] == [False, False, False, True], "the last of its run"


def test_a_lease_ends_with_its_process_and_otherwise_after_a_day(objects: ObjectStore, tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from rollout_core.objects import ObjectStore\n"
        "from rollout_core.objects.retention.run_leases import lease\n"
        "with lease(ObjectStore.from_url(sys.argv[1]), 'killed'):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    held = subprocess.Popen(
        [sys.executable, "-c", code, objects.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert held.stdout is not None and held.stdout.readline() == "held\n"
    assert [item.holder for item in live_leases(objects, clear=True)] == ["killed"]
    held.kill()
    held.communicate()
    assert live_leases(objects, clear=True) == [] and not objects.ref_names("leases")
    with lease(objects, "of a machine that is lost"):
        grow_old(objects, 1.1, "refs/leases")
        assert live_leases(objects, clear=False) == []


def test_a_blob_that_is_put_while_it_is_about_to_be_deleted_is_there_afterwards(objects: ObjectStore) -> None:
    data = b"put again"
    blob = objects.put_bytes(data)
    grow_old(objects, 20)
    with announced(objects.files, [hash_bytes(b"another"), blob]):
        stat = objects.files.stat(blob_key(blob))
        assert stat is not None and stat.modified < time.time() - DAY
        # Another process, between the collection's look and its deletion.
        putting = subprocess.Popen(
            [sys.executable, "-c", PUT, objects.url, data.decode()], stdout=subprocess.PIPE, text=True
        )
        assert putting.stdout is not None and putting.stdout.readline() == "waits\n"
        objects.delete(blob)
        putting.wait()
    assert objects.get_bytes(blob) == data


PUT = """
import sys, time
from rollout_core.objects import ObjectStore
from rollout_core.objects.retention import sweeps
def settle(seconds):
    print("waits", flush=True)
    real(1.0)
real, sweeps.time.sleep = time.sleep, settle
ObjectStore.from_url(sys.argv[1]).put_bytes(sys.argv[2].encode())
"""


def test_usage_says_what_is_shared_and_what_is_ones_own(objects: ObjectStore, tmp_path: Path) -> None:
    night = Night(objects, tmp_path, "night", iterations=2)
    promote(objects, night.models[1], None, 1)
    objects.put_bytes(weights("garbage"))
    usage = measure(objects)
    uses = {use.what: use for use in usage.uses}
    moments = len(weights("moments night 0"))
    states = uses["training states of nightly"]
    assert states.names == 2 and states.own_bytes > 2 * moments
    assert states.own_bytes < states.total_bytes, "the models are shared with results"
    assert uses["promoted as policy"].total_bytes > len(weights("night 1")) > uses["promoted as policy"].own_bytes
    assert uses["results of ppo_update"].total_bytes > 2 * len(weights("night 0"))
    assert usage.unneeded_blobs == 3, "and the records that labels replaced"
    assert usage.unneeded_bytes == pytest.approx(len(weights("garbage")), rel=0.05)
    own = sum(use.own_bytes for use in usage.uses)
    assert own + usage.shared_bytes + usage.unneeded_bytes == usage.total_bytes


STEPS = """
import os, sys
from rollout_core.config.retention import Retention
from rollout_core.objects.retention.rounds import clean
from rollout_core.objects import ObjectStore
from rollout_core.objects.backends import LocalFiles
from rollout_core.promotion.history import histories
LocalFiles.settle_seconds = 0.0
left = int(sys.argv[2])
def dying(method):
    def run(*args):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        return method(*args)
    return run
LocalFiles.delete, LocalFiles.write = dying(LocalFiles.delete), dying(LocalFiles.write)
objects = ObjectStore.from_url(sys.argv[1])
clean(objects, Retention(grace_hours=0), histories=histories(objects))
"""


def killed_at(objects: ObjectStore, step: int) -> bool:
    """A round whose process dies before its change number ``step``."""
    done = subprocess.run([sys.executable, "-c", STEPS, objects.url, str(step)], check=False)
    assert done.returncode in (0, -9)
    return done.returncode == -9


def test_a_round_that_is_killed_at_any_change_is_finished_by_the_next(objects: ObjectStore, tmp_path: Path) -> None:
    night = Night(objects, tmp_path, "night")
    promote(objects, night.models[-1], None, 1)
    grow_old(objects, 20)
    was_killed = 0
    for step in (0, 1, 2, 3, 5, 8, 13, 17, 21):
        was_killed += killed_at(objects, step)
        assert verify_store(objects).damage == []
        assert objects.tree_is_present(night.models[-1]) and is_there(objects, night.states[-1])
        states = [SnapshotStore(objects).counts(state.id) for state in night.states]
        assert all(states), "either there, or known to be given up"
    assert was_killed >= 6
    clean(objects, NOW)
    assert [objects.tree_is_present(model) for model in night.models] == [False, False, False, True]
    assert collect_garbage(objects, min_age=timedelta(0), dry_run=True).deleted_blobs == 0


def test_a_grace_that_is_too_short_is_refused(objects: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="grace_hours 2: expected at least 7, or 0"):
        clean(objects, Retention(grace_hours=2))


def test_a_report_for_people(objects: ObjectStore, tmp_path: Path) -> None:
    Night(objects, tmp_path, "night")
    done: Cleaned = clean(objects, NOW, dry_run=True)
    assert done.lines[0] == "given up: 3 training states (1 stay), 0 results, 0 models that were promoted before"
    assert done.lines[2].startswith("would be freed: ")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_the_commands(objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    night = Night(objects, tmp_path, "night")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path}/none.db")
    monkeypatch.setenv("ROLLOUT_STORAGE", str(tmp_path / "another store"))
    at = ("--storage-path", objects.url)
    assert run("storage", "gc", *at).stdout.startswith("given up: 0 training states (4 stay)"), "they are young"
    first, second = night.states[0].id, night.states[1].id
    labelled = run("snapshot", "label", first[:12], "gold", *at)
    assert json.loads(labelled.stdout)["label"] == "gold"
    refused = run("snapshot", "label", second, "nightly/ppo-7", *at)
    assert refused.exit_code == 2 and "choose another" in refused.stderr
    compared = json.loads(run("snapshot", "compare", first, second, *at).stdout)
    assert compared["changed"] == ["model/weights", "optimizer"] and compared["record"]["step"] == [0, 1]
    pruned = run("snapshot", "prune", "--run-id", "night", "--keep-last", "3", "--drop-labelled", "--dry-run", *at)
    assert pruned.stdout == "would prune 1 snapshots\n"
    done = json.loads(
        run("storage", "gc", "--now", "--json", "--set", "keep_states=0", "--set", "state_days=0", *at).stdout
    )
    assert (done["states"], done["states_kept"]) == (3, 1)
    assert run("snapshot", "restore", first, str(tmp_path / "restored"), *at).exit_code == 0
    forked = run("snapshot", "restore", first, "--fork", "other", *at)
    assert forked.exit_code == 0 and json.loads(forked.stdout)["run_id"] == "other"
    assert run("snapshot", "restore", first, *at).exit_code == 2
    assert run("snapshot", "restore", first, str(tmp_path / "both"), "--fork", "another", *at).exit_code == 2
    assert run("snapshot", "prune", "--run-id", "other", "--keep-last", "0", "--drop-labelled", *at).exit_code == 0
    assert (tmp_path / "restored" / "optimizer").read_bytes() == weights("moments night 0")
    assert run("snapshot", "export", first, str(tmp_path / "file.tar"), *at).exit_code == 0
    assert blake3((tmp_path / "file.tar").read_bytes()).hexdigest() == first
    saved = run("snapshot", "save", str(tmp_path / "restored"), "--run-id", "mine", "--step", "3", *at)
    assert json.loads(saved.stdout)["id"] == first
    assert [item["run_id"] for item in json.loads(run("snapshot", "list", *at).stdout)] == ["mine", "night"]
    assert "training states of nightly" in run("storage", "du", *at).stdout
    wrong = run("storage", "gc", "--set", "keep_state=1", *at)
    assert wrong.exit_code == 2 and "keep_states" in wrong.stderr
    assert not (tmp_path / "another store").exists() and not (tmp_path / "none.db").exists()


def model_of(objects: ObjectStore, folder: Path, number: int) -> ContentId:
    return objects.put_tree(write(folder / f"model {number}", {"weights": weights(f"model {number}")}))


USES = """
import sys
from pathlib import Path
from rollout_core.objects import ObjectStore
print(ObjectStore.from_url(sys.argv[1]).local_tree(sys.argv[2], Path(sys.argv[3])), flush=True)
sys.stdin.read()
"""


def test_the_local_cache_evicts_what_was_used_least_recently_and_nothing_in_use(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, cache = [model_of(objects, tmp_path, number) for number in range(5)], tmp_path / "cache"
    size = len(weights("model 0"))
    monkeypatch.setenv("ROLLOUT_CACHE_GIB", str(3.5 * size / 2**30))
    monkeypatch.setattr(local_trees, "HELD", 1)
    using = subprocess.Popen(
        [sys.executable, "-c", USES, objects.url, models[0], str(cache)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert using.stdout is not None and using.stdout.readline().strip() == str(cache / models[0])

    def cached() -> list[int]:
        return [number for number, model in enumerate(models) if (cache / model).exists()]

    for number in (1, 2, 1):
        objects.local_tree(models[number], cache)
    assert cached() == [0, 1, 2]
    objects.local_tree(models[3], cache)
    assert cached() == [0, 1, 3], "the oldest is another process's, so the next oldest went"
    using.kill()
    using.communicate()
    assert (objects.local_tree(models[4], cache) / "weights").read_bytes() == weights("model 4")
    assert cached() == [1, 3, 4]
    assert local_trees.evict_local_trees(cache, 0) == 2 * size and cached() == [4]
    assert sorted(path.name for path in cache.glob(".*.use")) == [f".{models[4]}.use"]


FETCHES = """
import random, sys
from pathlib import Path
from rollout_core.objects import ObjectStore, local_trees
local_trees.HELD = 1
objects, draw = ObjectStore.from_url(sys.argv[1]), random.Random(int(sys.argv[3]))
for _ in range(150):
    model = draw.choice(sys.argv[4:])
    folder = objects.local_tree(model, Path(sys.argv[2]))
    assert objects.put_tree(folder) == model
"""


def test_processes_share_a_cache_that_is_too_small_for_all(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [model_of(objects, tmp_path, number) for number in range(6)]
    monkeypatch.setenv("ROLLOUT_CACHE_GIB", str(2.5 * len(weights("model 0")) / 2**30))
    command = [sys.executable, "-c", FETCHES, objects.url, str(tmp_path / "cache")]
    workers = [subprocess.Popen([*command, str(seed), *models], stderr=subprocess.PIPE, text=True) for seed in range(3)]
    assert [(worker.communicate()[1], worker.returncode) for worker in workers] == [("", 0)] * 3

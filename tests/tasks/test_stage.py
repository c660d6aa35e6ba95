"""The stage contract, on a real Prefect server: caching by content, retries by kind of error, results that count."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import threading
import time
from dataclasses import make_dataclass
from pathlib import Path
from typing import get_args

import pytest

import tasks
from rollout_core.base.errors import ConfigError, CorruptObject, Fatal, Recoverable, RetryHint, StageTimeout
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.base.locks import exclusive
from rollout_core.base.stopping import is_stopping, raise_if_stopping
from rollout_core.config import Run, RunInfo, SnapshotPolicy, StageTimeouts
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import lineage_of, trace_lineage
from rollout_core.objects.records import BlobId, Checkpoint, Record
from tests.support.task_runs import ended_task_runs

pytestmark = pytest.mark.server

CALLS: list[tuple] = []
STUCK = threading.Event()
"""Set when work that heeds nothing is to go on after all."""


class Made(Record):
    """A blob that a stage made."""

    blob: BlobId
    number: int


@pytest.fixture(autouse=True)
def fresh_calls():
    CALLS.clear()


@pytest.fixture(scope="module")
def stages(prefect_server):
    """Stages defined once the server's address is known."""
    from rollout_core.objects.snapshots import progress_ref
    from tasks.runtime.stage import current_stage, stage

    @stage(version=1)
    def make(number: int, settings: SnapshotPolicy | None = None, *, label: str = "") -> Made:
        """Store a number."""
        CALLS.append(("make", number))
        return Made(blob=current_stage().objects.put_bytes(str(number).encode()), number=number)

    @stage(version=1)
    def double(made: Made) -> Made:
        """Read what `make` stored and store its double."""
        CALLS.append(("double", made.number))
        value = 2 * int(current_stage().objects.get_bytes(made.blob))
        return Made(blob=current_stage().objects.put_bytes(str(value).encode()), number=value)

    @stage(version=1)
    def stumble(kind: str, times: int) -> Made:
        """Fail ``times`` times, then work."""
        CALLS.append(("stumble", kind))
        if sum(call == ("stumble", kind) for call in CALLS) <= times:
            raise {
                "recoverable": Recoverable("busy", RetryHint(0.01, 0.01)),
                "os": ConnectionResetError("reset"),
                "fatal": Fatal("no"),
                "config": ConfigError("wrong"),
                "value": ValueError("bug"),
            }[kind]
        return Made(blob=current_stage().objects.put_bytes(b"done"), number=times)

    @stage(version=1, cached=False)
    def effect(number: int) -> Made:
        """Something outside."""
        CALLS.append(("effect", number))
        return Made(blob=hash_bytes(b"outside"), number=number)

    @stage(version=1)
    def last(name: str, *, heeds: bool = True, label: str = "0") -> Made:
        """Store one more number in each try, of which as many as ``label`` says last until they are asked to end."""
        objects, key = current_stage().objects, progress_ref(current_stage().key)
        stored = objects.get_ref(key)
        before = 0 if stored is None else json.loads(objects.get_bytes(stored))
        objects.set_ref(key, objects.put_bytes(json.dumps(before + 1).encode()))
        CALLS.append(("last", before))
        if before < int(label):
            while not is_stopping():
                time.sleep(0.01)
            if not heeds:
                STUCK.wait()
            raise_if_stopping("counting")
        return Made(blob=objects.put_bytes(b"counted"), number=before + 1)

    return {"make": make, "double": double, "stumble": stumble, "effect": effect, "last": last}


@pytest.fixture
def run(prefect_server, monkeypatch):
    """Run a body as a flow, with a journal; returns (result, states of its stages)."""
    from prefect import flow

    from tasks.runtime.flow_run import recompute_missing
    from tasks.runtime.stage import RETRIES

    monkeypatch.setattr("rollout_core.base.errors.RetryHint.delay_for_try", lambda self, retry: 0.0)
    monkeypatch.setattr("tasks.runtime.stage.RETRY_DELAYS_SECONDS", [0.0] * RETRIES)

    def start(body, *, refresh=False, timeouts=None):
        kept = []

        def journaled(journal):
            kept.append(journal)
            return body()

        @flow(name="test", persist_result=False)
        def test_flow():
            return recompute_missing(journaled, Run(run=RunInfo(refresh=refresh), timeouts=timeouts or {}))

        result = test_flow()
        return result, [entry.state for entry in kept[-1].entries]

    return start


@pytest.fixture
def objects():
    return ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])


def blob_path(content_id: ContentId) -> Path:
    root = Path(os.environ["ROLLOUT_STORAGE"].removeprefix("file://"))
    return root / "cas" / content_id[:2] / content_id[2:4] / content_id


def test_the_same_inputs_are_cached_in_any_run(stages, run):
    first, states = run(lambda: stages["make"](1))
    again, states_again = run(lambda: stages["make"](1))
    assert first == again and states == ["Completed"] and states_again == ["Cached"]
    assert CALLS == [("make", 1)]


def test_other_inputs_are_computed(stages, run):
    run(lambda: [stages["make"](1), stages["make"](2)])
    assert CALLS == [("make", 1), ("make", 2)]


def test_arguments_that_travel_together_count_one_by_one(prefect_server):
    from tasks.runtime.arguments import Arguments, spread_arguments

    sides = make_dataclass("Sides", ["left", ("label", str, "")], bases=(Arguments,), frozen=True)
    plain = make_dataclass("Plain", ["left"], frozen=True)
    assert spread_arguments({"sides": sides(1, "x"), "right": 2}) == {"left": 1, "label": "x", "right": 2}
    assert spread_arguments({"first": plain(1), "second": plain(2)}) == {"first": plain(1), "second": plain(2)}
    # Two of one name would share a place in the key, and other work would be taken for this.
    for twice in ({"a": sides(1), "b": sides(3)}, {"left": 2, "a": sides(1)}, {"a": sides(1), "left": 2}):
        with pytest.raises(ConfigError, match=r"brings (label, )?left, which the stage has already"):
            spread_arguments(twice)


def test_labels_and_settings_of_speed_do_not_enter_the_key(stages, run):
    run(lambda: stages["make"](1, SnapshotPolicy(every_steps=1), label="a"))
    _, states = run(lambda: stages["make"](1, SnapshotPolicy(every_steps=9), label="b"))
    assert states == ["Cached"]


def test_a_task_run_is_called_by_stage_and_label_also_when_retried_or_cached(stages, run):
    from prefect.runtime import flow_run

    def body():
        stages["make"](1, label="before")
        stages["make"](1, label="iteration 3\n of many")
        stages["make"](2, label="long " * 100)
        stages["stumble"]("recoverable", 1)
        return flow_run.id

    run_id, states = run(body)
    assert states == ["Completed", "Cached", "Completed", "Completed"]
    found = ended_task_runs(run_id, 4)
    long = "make " + ("long " * 100)[:77] + "..."
    assert {task.name for task in found} == {"make before", "make iteration 3 of many", long, "stumble"}
    assert len({task.dynamic_key for task in found}) == 4
    assert next(task for task in found if task.name == "stumble").run_count == 2


def test_the_key_of_a_call_is_that_of_earlier_versions_whatever_its_task_run_is_called(prefect_server):
    """As `snapshot` had it when task runs were not named yet: what was cached then is cached now."""
    from tasks.checkpoints import snapshot

    content = hash_bytes(b"c")
    made = Checkpoint(model=content, train_state=content, metrics=content, algorithm="ppo", step=1, summary={})
    inputs = {"checkpoint": made, "snapshot_label": "night/ppo-1"}
    keys = {snapshot.key({**inputs, "label": label}) for label in ("", "iteration 1")}
    assert keys == {"e5bdd5ca42c3a563a54a8832855d76bbfd7ee681cfb9ddd7ad83e15a7788f27c"}


def test_refresh_computes_again(stages, run):
    run(lambda: stages["make"](1))
    _, states = run(lambda: stages["make"](1), refresh=True)
    assert states == ["Completed"] and CALLS == [("make", 1)] * 2


def test_a_named_refresh_computes_once_under_its_name(stages, run):
    run(lambda: stages["make"](1))
    for name, expected in (("monday", "Completed"), ("monday", "Cached"), ("tuesday", "Completed")):
        made, states = run(lambda: stages["make"](1), refresh=name)
        assert states == [expected] and made.number == 1
    assert run(lambda: stages["make"](1))[1] == ["Cached"]
    assert len(CALLS) == 3


def test_what_a_refresh_computed_replaces_the_earlier_result(stages, run, monkeypatch):
    def dated(number):
        CALLS.append(("make", number))
        return Made(blob=current_stage().objects.put_bytes(str(len(CALLS)).encode()), number=number)

    from tasks.runtime.stage import current_stage

    monkeypatch.setattr(stages["make"], "_function", lambda number, settings, label: dated(number))
    first, _ = run(lambda: stages["make"](1))
    for refresh in ("monday", True):
        new, states = run(lambda: stages["make"](1), refresh=refresh)
        assert states == ["Completed"] and new != first
        assert run(lambda: stages["make"](1)) == (new, ["Cached"])


@pytest.mark.parametrize("refresh", [True, "monday"])
def test_recomputing_does_not_repeat_what_the_refresh_already_computed(stages, run, refresh):
    run(lambda: stages["make"](30))
    damaged = []

    def body():
        whole, other = stages["make"](31), stages["make"](30)
        if not damaged:
            damaged.append(other)
            path = blob_path(other.blob)
            path.chmod(0o644)
            path.write_bytes(b"3\x00")
        return whole, stages["double"](other)

    (_, doubled), states = run(body, refresh=refresh)
    assert doubled.number == 60 and states == ["Cached", "Completed", "Completed"]
    assert CALLS.count(("make", 31)) == 1


def test_a_retried_flow_run_goes_on_with_its_refresh(stages, prefect_server):
    """A flow's own retry keeps the run's id, as `prefect flow-run retry` does."""
    from prefect import flow

    from tasks.runtime.flow_run import recompute_missing

    tries = []

    def body(journal):
        made = stages["make"](32)
        tries.append(made)
        if len(tries) == 1:
            raise OSError("the machine went away")
        return made

    @flow(name="test", retries=1, persist_result=False)
    def test_flow():
        return recompute_missing(body, Run(run=RunInfo(refresh=True)))

    stages["make"](32)
    test_flow()
    assert len(tries) == 2 and CALLS == [("make", 32)] * 2


def test_a_stage_with_an_effect_outside_is_never_cached(stages, run):
    run(lambda: stages["effect"](1))
    _, states = run(lambda: stages["effect"](1))
    assert states == ["Checked"] and len(CALLS) == 2


def test_passing_faults_are_retried_and_others_are_not(stages, run):
    made, _ = run(lambda: stages["stumble"]("recoverable", 2))
    assert made.number == 2 and len(CALLS) == 3
    CALLS.clear()
    run(lambda: stages["stumble"]("os", 1))
    assert len(CALLS) == 2
    for kind, error in (("fatal", Fatal), ("config", ConfigError), ("value", ValueError)):
        CALLS.clear()
        with pytest.raises(error):
            run(lambda kind=kind: stages["stumble"](kind, 1))
        assert len(CALLS) == 1


def test_retries_end_after_the_third(stages, run):
    with pytest.raises(Recoverable, match="busy"):
        run(lambda: stages["stumble"]("recoverable", 9))
    assert len(CALLS) == 4


def test_a_result_that_cannot_be_written_never_leaves_the_stage_completed(stages, run, objects, monkeypatch):
    def broken(self, name, content_id):
        raise Recoverable("no space left on device", RetryHint(0.0, 0.0))

    with monkeypatch.context() as patch, pytest.raises(Recoverable, match="no space left"):
        patch.setattr(ObjectStore, "set_ref", broken)
        run(lambda: stages["make"](5))
    _, states = run(lambda: stages["make"](5))
    assert states == ["Completed"], "nothing was cached by the failed run"


def test_a_result_that_reads_back_differently_fails_the_stage(stages, run, monkeypatch):
    from blocks import ContentAddressedStorage

    monkeypatch.setattr(ContentAddressedStorage, "write_path", lambda self, path, content, _sync=True: None)
    with pytest.raises(Recoverable, match="could not be read back"):
        run(lambda: stages["make"](6))


def test_storage_that_is_gone_fails_the_stage_with_its_name(stages, run, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{blocked}/objects")
    with pytest.raises((Recoverable, ConfigError), match="file"):
        run(lambda: stages["make"](7))


def test_a_flipped_bit_is_found_named_and_recomputed_in_the_same_run(stages, run, caplog):
    made, _ = run(lambda: stages["make"](21))
    path = blob_path(made.blob)
    path.chmod(0o644)
    path.write_bytes(b"2\x00")
    doubled, states = run(lambda: stages["double"](stages["make"](21)))
    assert doubled.number == 42 and blob_path(made.blob).read_bytes() == b"21"
    assert states == ["Completed", "Completed"], "the stage that made the damaged blob ran again"
    assert made.blob in caplog.text and "corrupt" in caplog.text


def test_a_damaged_record_is_computed_again(stages, run, objects):
    run(lambda: stages["make"](3))
    [(_, record)] = list(objects.list_refs("results"))
    path = blob_path(record)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"3", b"4"))
    made, states = run(lambda: stages["make"](3))
    assert made.number == 3 and states == ["Completed"]


def test_a_record_whose_blob_was_deleted_is_computed_again(stages, run, objects):
    made, _ = run(lambda: stages["make"](4))
    objects.delete(made.blob)
    _, states = run(lambda: stages["make"](4))
    assert states == ["Completed"] and objects.exists(made.blob)


def test_a_cached_result_whose_ref_is_damaged_or_anothers_is_computed_again(stages, run, objects, caplog):
    made, _ = run(lambda: stages["make"](40))
    [(name, record)] = list(objects.list_refs("results"))
    run(lambda: stages["effect"](1))
    run(lambda: stages["stumble"]("fatal", 0))
    [other] = [ref for ref in objects.ref_names("results") if ref != name]
    file = Path(objects.files.where(f"refs/{name}"))
    whole, others = file.read_bytes(), Path(objects.files.where(f"refs/{other}")).read_bytes()

    def point_elsewhere() -> None:
        objects.set_ref(name, objects.get_ref(other))

    def point_at_no_record() -> None:
        objects.set_ref(name, objects.put_json({"metadata": {"storage_key": name.partition("/")[2]}, "result": "{}"}))

    damages = [lambda data=data: file.write_bytes(data) for data in (b"", whole[:40], b"z" + whole[1:], others)]
    for damage in (*damages, point_elsewhere, point_at_no_record):
        damage()
        caplog.clear()
        again, states = run(lambda: stages["make"](40))
        assert again == made and states == ["Completed"]
        assert caplog.text.count("the cached result of make cannot be read") == 1
        assert objects.get_ref(name) == record
    assert run(lambda: stages["make"](40))[1] == ["Cached"]


def test_however_many_objects_are_damaged_one_start_makes_them_again(stages, run, objects):
    numbers = range(50, 55)
    made = run(lambda: [stages["make"](number) for number in numbers])[0]
    for item in made:
        blob_path(item.blob).write_bytes(b"x" * objects.size(item.blob))
    doubled, states = run(lambda: [stages["double"](stages["make"](number)) for number in numbers])
    assert [item.number for item in doubled] == [2 * number for number in numbers]
    assert states == ["Cached", "Cached"] * 4 + ["Completed", "Completed"]


def test_damage_that_comes_back_ends_in_one_clear_error(stages, run, monkeypatch):
    def always_corrupt(self, content_id):
        raise CorruptObject(content_id, f"object {content_id} is corrupt")

    made, _ = run(lambda: stages["make"](8))
    from tasks.runtime import stage as stage_module

    real = ObjectStore.get_bytes
    monkeypatch.setattr(
        ObjectStore, "get_bytes", lambda self, i: always_corrupt(self, i) if i == made.blob else real(self, i)
    )
    with pytest.raises(CorruptObject, match="is corrupt"):
        run(lambda: stages["double"](stages["make"](8)))
    assert stage_module is not None


def test_records_are_plain_json_in_storage(stages, run, objects):
    made, _ = run(lambda: stages["make"](9))
    [(_, record)] = list(objects.list_refs("results"))
    document = json.loads(objects.get_bytes(record))
    assert json.loads(document["result"]) == {"blob": made.blob, "number": 9}


def test_lineage_leads_from_a_result_to_its_inputs(stages, run, objects):
    doubled, _ = run(lambda: stages["double"](stages["make"](10)))
    made_by = lineage_of(objects, doubled.blob)
    assert made_by is not None and made_by.stage == "double"
    assert [item.stage for item in trace_lineage(objects, doubled.blob)] == ["double", "make"]


def test_the_cache_moves_with_the_object_storage(stages, run, tmp_path, monkeypatch):
    run(lambda: stages["make"](11))
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(os.environ["ROLLOUT_STORAGE"].removeprefix("file://"), elsewhere)
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{elsewhere}")
    _, states = run(lambda: stages["make"](11))
    assert states == ["Cached"]


def test_results_can_live_in_memory_or_on_any_url(stages, run, monkeypatch):
    monkeypatch.setenv("ROLLOUT_STORAGE", "memory://stages")
    run(lambda: stages["make"](12))
    _, states = run(lambda: stages["make"](12))
    assert states == ["Cached"]


def test_a_storage_block_of_the_server_can_be_named_in_the_settings(stages, run, tmp_path, monkeypatch):
    from blocks import ContentAddressedStorage

    ContentAddressedStorage(url=f"file://{tmp_path / 'from-block'}").save("test-storage", overwrite=True)
    monkeypatch.setenv("ROLLOUT_STORAGE", "block:content-addressed-storage/test-storage")
    run(lambda: stages["make"](13))
    assert list((tmp_path / "from-block").rglob("results/*"))
    monkeypatch.setenv("ROLLOUT_STORAGE", "block:content-addressed-storage/no-such")
    with pytest.raises(ConfigError, match="names no block"):
        run(lambda: stages["make"](14))


def test_a_stage_whose_time_is_up_keeps_what_it_has_and_the_next_try_goes_on_from_there(stages, run):
    made, states = run(lambda: stages["last"]("a", label="2"), timeouts={"filing": 1.0})
    assert (made.number, states) == (3, ["Completed"])
    assert CALLS == [("last", 0), ("last", 1), ("last", 2)]
    run(lambda: stages["last"]("a"), timeouts={"filing": 9.0})
    assert len(CALLS) == 3, "a time-out is in no key"


def test_a_stage_that_always_takes_too_long_fails_and_says_why(stages, run, objects):
    from tasks.runtime.stage import RETRIES

    reason = r"stage last took longer than 0\.5 s \(timeouts\.filing\); what it stored is kept"
    with pytest.raises(StageTimeout, match=reason):
        run(lambda: stages["last"]("b", label="100"), timeouts={"filing": 0.5})
    assert len(CALLS) == RETRIES + 1
    made, _ = run(lambda: stages["last"]("b"))
    assert made.number == RETRIES + 2, "a run without the limit went on from there"


def test_waiting_for_another_that_computes_the_same_takes_nothing_off_a_stages_time(stages, run):
    from tasks.runtime.connections import lock_folder

    counted, is_held = stages["last"], threading.Event()

    def other() -> None:
        with exclusive(lock_folder() / f"{counted.key({'name': 'd', 'heeds': True, 'label': '0'})}.lock"):
            is_held.set()
            time.sleep(2.0)

    threading.Thread(target=other).start()
    assert is_held.wait(120)
    made, states = run(lambda: counted("d"), timeouts={"filing": 1.0})
    assert (made.number, states, CALLS) == (1, ["Completed"], [("last", 0)])


def test_a_stage_that_does_not_end_when_its_time_is_up_is_left_behind(stages, run, monkeypatch):
    monkeypatch.setattr("tasks.runtime.time_limits.KEEP_SECONDS", 0.5)
    made, states = run(lambda: stages["last"]("c", heeds=False, label="1"), timeouts={"filing": 1.0})
    STUCK.set()
    assert (made.number, states) == (2, ["Completed"])


def test_every_kind_of_stage_has_a_limit_and_there_are_stages_of_every_kind():
    from tasks.runtime.stage import Stage
    from tasks.runtime.time_limits import StageTime

    modules = [importlib.import_module(f"tasks.{path.stem}") for path in Path(tasks.__file__).parent.glob("[a-z]*.py")]
    found = {item.time for module in modules for item in vars(module).values() if isinstance(item, Stage)}
    assert found == set(get_args(StageTime)) == StageTimeouts.model_fields.keys()
    assert StageTimeouts().cache_identity() is None


def test_the_journal_says_which_stages_are_under_way_and_since_when(prefect_server):
    from prefect import flow

    from tasks.runtime.journal import current_journal, keep_journal
    from tasks.runtime.stage import stage

    @stage(version=1, cached=False)
    def outer(number: int, *, label: str = "") -> Made:
        journal = current_journal()
        assert journal is not None
        CALLS.append(tuple(journal.at_work.values()))
        if number:
            raise Fatal("no")
        return Made(blob=hash_bytes(b"0"), number=number)

    @flow
    def run() -> None:
        before = time.time()
        with keep_journal() as journal:
            outer(0, label="first")
            with pytest.raises(Fatal):
                outer(1, label="second")
            assert journal.at_work == {}
        for (call,), title in zip(CALLS, ("outer first", "outer second"), strict=True):
            assert call[0] == title and before <= call[1] <= time.time()

    run()

"""Updates in processes of their own: what they report, how they fail, and that none outlives the work."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout_core.algorithms.context import UpdateContext
from rollout_core.base.errors import (
    ConfigError,
    CorruptObject,
    DataError,
    Fatal,
    Recoverable,
    RetryHint,
    error_message,
    error_of,
)
from rollout_core.base.ids import hash_bytes
from rollout_core.config import DPOSettings, GRPOAlgorithm, GRPOSettings, SFTSettings, TrainGRPOConfig
from rollout_core.data.datasets import SftRow, to_jsonl
from rollout_core.data.tokenized import DataReport
from rollout_core.launch import kept_process, run_update
from rollout_core.launch.launcher import decode_inputs, encode_inputs, outcome_type
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Checkpoint, Scores

SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from test_launcher import update
update(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def settings(**changes: Any) -> SFTSettings:
    fields = {
        "dataset": {"path": "x"},
        "optimizer": {"lr": 1e-3, "schedule": "cosine"},
        "budget": {"max_steps": 120},
        "snapshots": {"every_steps": 4},
        "parallel": {"nproc": 2},
    }
    return SFTSettings.model_validate({**fields, **changes})


def update_context(folder: Path, **hooks: Any) -> UpdateContext:
    return UpdateContext(
        objects=ObjectStore.from_url(str(folder / "objects")),
        cache=folder / "cache",
        key=hash_bytes(b"key"),
        run_id="run",
        seed=1,
        num_threads=1,
        **hooks,
    )


def update(
    folder: Path,
    model: Path,
    on_line: Callable[[str], None] = print,
    on_data: Callable[[DataReport], None] | None = None,
    changes: dict[str, Any] | None = None,
    **hooks: Any,
) -> tuple[Checkpoint, DataReport]:
    place = update_context(folder, **hooks)
    rows = [SftRow(prompt=f"sort {n} 1 =", completion=f" 1 {n}") for n in range(20)]
    return run_update(
        "sft",
        place,
        on_line=on_line,
        on_data=on_data,
        model=place.objects.put_tree(model),
        dataset=place.objects.put_bytes(to_jsonl(rows)),
        settings=settings(**(changes or {})),
    )


def ranks_of(process: psutil.Process) -> dict[int, psutil.Process]:
    """The ranks that ``process`` started, by number."""
    ranks: dict[int, psutil.Process] = {}
    for child in process.children():
        with suppress(psutil.NoSuchProcess):  # ended by now, or a zombie of an earlier test
            if "rollout_core.launch.rank" in child.cmdline():
                ranks[int(child.environ().get("RANK", 0))] = child
    return ranks


@pytest.mark.campaign
def test_a_killed_rank_is_named_nothing_is_left_and_the_next_run_ends_in_the_same_bytes(tiny_model, tmp_path):
    lines: list[str] = []
    steps: list[float] = []
    told: list[DataReport] = []
    quiet = update(
        tmp_path / "quiet", tiny_model, lines.append, told.append, on_step=lambda row: steps.append(row["step"])
    )
    checkpoint, report = quiet
    assert checkpoint.step == 120 and report.num_examples == 20 and told == [report]
    assert steps == list(range(1, 121)), "every step is reported, once"

    started: dict[int, psutil.Process] = {}

    def kill(row: dict[str, float]) -> None:
        if row["step"] == 60:
            started.update(ranks_of(psutil.Process()))
            started[1].kill()

    began = time.monotonic()
    with pytest.raises(Recoverable, match=r"^rank 1 of 2 of the sft update was killed by SIGKILL; .* last snapshot"):
        update(tmp_path / "killed", tiny_model, lines.append, on_step=kill)
    assert sorted(started) == [0, 1] and not any(rank.is_running() for rank in started.values())
    assert time.monotonic() - began < 120, "nobody waited for the dead"

    firsts: list[int] = []
    again = update(tmp_path / "killed", tiny_model, lines.append, on_start=lambda first, last: firsts.append(first))
    assert again == quiet
    assert 0 < firsts[0] < 120, "it went on from a snapshot"
    assert any(line.startswith("rank 0: INFO") and "resumes at step" in line for line in lines)


def test_a_kept_process_computes_one_update_after_the_other_and_each_in_the_bytes_of_a_new_one(
    tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(SFTSettings, "has_own_processes", True)
    short = {"budget": {"max_steps": 6}, "parallel": {"nproc": 1}}
    longer = {"budget": {"max_steps": 8}, "parallel": {"nproc": 1}}
    alone, _ = update(tmp_path / "alone", tiny_model, changes=longer)
    assert not ranks_of(psutil.Process()), "nobody asked for it to stay"
    with kept_process():
        # Its starter is gone before the next update: as with tasks that have a thread each.
        asked = threading.Thread(target=update, args=(tmp_path / "first", tiny_model, print, None, short))
        asked.start()
        asked.join()
        [first] = ranks_of(psutil.Process()).values()
        second, report = update(tmp_path / "second", tiny_model, changes=longer)
        assert list(ranks_of(psutil.Process()).values()) == [first], "the same process"
        assert (second.model, second.train_state, second.step) == (alone.model, alone.train_state, 8)
        assert report.num_examples == 20
        first.kill()
        first.wait(10)
        third, _ = update(tmp_path / "third", tiny_model, changes=longer)
        assert third.model == alone.model
        with pytest.raises(ConfigError, match="none of 20 rows has a token"):
            update(tmp_path / "wrong", tiny_model, changes={**longer, "sequence": {"max_length": 2}})
        assert not ranks_of(psutil.Process()), "an update that fails leaves no process"
        update(tmp_path / "after", tiny_model, changes=short)
    assert not ranks_of(psutil.Process()), "it ends with the block"


def test_ranks_do_not_outlive_a_launcher_that_was_killed(tiny_model, tmp_path, start_process):
    script = SCRIPT.format(folder=str(Path(__file__).parent))
    launcher = start_process("-c", script, str(tmp_path), str(tiny_model))
    parent = psutil.Process(launcher.pid)
    deadline = time.monotonic() + 120
    ranks: dict[int, psutil.Process] = {}
    while len(ranks) < 2 and time.monotonic() < deadline and launcher.poll() is None:
        ranks = ranks_of(parent)
        time.sleep(0.1)
    assert len(ranks) == 2, launcher.communicate()[0]
    os.kill(launcher.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks.values(), timeout=60)
    assert not alive


STOPPED = """
import signal, sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from test_launcher import update

class Told(BaseException):  # as a flow is told of SIGTERM
    pass

def handler(number, frame):
    raise Told

signal.signal(signal.SIGTERM, handler)
try:
    update(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        changes={{"snapshots": {{"every_steps": 1000}}}},
        on_step=lambda row: print("step", int(row["step"]), flush=True),
    )
except Told:
    print("told", flush=True)
"""


@pytest.mark.campaign  # one process does in tests/flows/test_stop_signals.py, and ranks below are told to stop
def test_sigterm_of_the_launcher_keeps_the_step_that_the_ranks_are_in(tiny_model, tmp_path, start_process):
    never = {"snapshots": {"every_steps": 1000}}
    quiet = update(tmp_path / "quiet", tiny_model, changes=never)

    launcher = start_process("-c", STOPPED.format(folder=str(Path(__file__).parent)), tmp_path / "stopped", tiny_model)
    seen = 0
    while seen < 5:
        line = launcher.stdout.readline()
        assert line, "it ended before it was told to"
        seen = int(line.split()[1]) if line.startswith("step") else seen
    ranks = ranks_of(psutil.Process(launcher.pid))
    launcher.terminate()
    output, _ = launcher.communicate(timeout=60)
    assert sorted(ranks) == [0, 1] and not any(rank.is_running() for rank in ranks.values())
    assert "told" in output

    firsts: list[int] = []
    again = update(tmp_path / "stopped", tiny_model, changes=never, on_start=lambda first, last: firsts.append(first))
    assert seen <= firsts[0] < 120, "no snapshot was due: it is that of the stop"
    assert again == quiet


def test_ranks_that_are_told_to_stop_themselves_say_so(tiny_model, tmp_path):
    """Some send SIGTERM to every process of a service."""

    def terminate(row: dict[str, float]) -> None:
        if row["step"] == 5:
            ranks_of(psutil.Process())[1].terminate()

    with pytest.raises(Recoverable, match=r"^rank \d of 2 of the sft update: the sft update was asked to stop and did"):
        update(tmp_path, tiny_model, on_step=terminate)


@pytest.mark.campaign  # of a process alone it comes back above
def test_what_is_wrong_comes_back_as_the_error_it_is(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match=r"^rank \d of 2 of the sft update: none of 20 rows has a token to train"):
        update(tmp_path, tiny_model, changes={"sequence": {"max_length": 2}})


def test_a_store_in_memory_cannot_be_shared(tmp_path):
    place = UpdateContext(ObjectStore.from_url("memory://ranks"), tmp_path, hash_bytes(b"key"), "run", seed=0)
    with pytest.raises(ConfigError, match="need an object store that they reach; memory://ranks exists in this one"):
        run_update("sft", place, model=hash_bytes(b"m"), dataset=hash_bytes(b"d"), settings=settings())


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("wrong", ["one", "two"]),
        DataError("x:3: not JSON"),
        CorruptObject("ab", "bytes differ"),
        Recoverable("throttled", RetryHint(3.0, 9.0)),
        Fatal("loss nan"),
    ],
)
def test_errors_of_this_project_travel_whole(error):
    found = error_of(error_message(error), "rank 1")
    assert type(found) is type(error) and str(found) == f"rank 1: {error}"
    for name in ("violations", "content_id", "hint"):
        assert getattr(found, name, None) == getattr(error, name, None)


def test_lost_connections_are_tried_again_and_mistakes_are_not():
    lost = error_of(error_message(RuntimeError("Connection closed by peer")), "rank 0")
    assert isinstance(lost, Recoverable) and str(lost) == "rank 0: RuntimeError: Connection closed by peer"
    assert isinstance(error_of(error_message(TypeError("no such argument")), "rank 0"), Fatal)


def test_inputs_travel_as_the_update_declares_them():
    whole = {"prompts": {"path": "x"}, "optimizer": {"lr": 0.1}, "base_model": {"uri": "m"}, "loss_type": "dapo"}
    config = TrainGRPOConfig.model_validate({"algorithm": {"kind": "grpo", **whole}})
    assert isinstance(config.algorithm, GRPOAlgorithm)
    ids = {name: hash_bytes(name.encode()) for name in ("model", "reference", "samples")}
    scores = Scores(scores=ids["model"], completions=ids["model"], num_samples=1, mean=0.5, std=0.0)
    inputs = {**ids, "train_state": None, "scores": scores, "settings": config.algorithm}
    found = decode_inputs("grpo", encode_inputs("grpo", inputs))
    assert found == {**inputs, "settings": found["settings"]}
    assert type(found["settings"]) is GRPOSettings and found["settings"].loss_type == "dapo"
    dpo = DPOSettings.model_validate({"dataset": {"path": "x"}, "optimizer": {"lr": 0.1}, "beta": 0.3})
    inputs = {"model": ids["model"], "reference": ids["model"], "dataset": ids["model"], "settings": dpo}
    assert decode_inputs("preference", encode_inputs("preference", inputs)) == inputs


def test_outcomes_travel_with_their_report():
    checkpoint = Checkpoint(
        model=hash_bytes(b"m"),
        train_state=hash_bytes(b"t"),
        metrics=hash_bytes(b"f"),
        algorithm="sft",
        step=3,
        summary={},
    )
    outcome = (
        checkpoint,
        DataReport(num_rows=3, num_examples=2, num_tokens=40, num_trained_tokens=20, num_truncated=1),
    )
    assert outcome_type("sft").validate_json(outcome_type("sft").dump_json(outcome)) == outcome
    assert outcome_type("ppo").validate_json(outcome_type("ppo").dump_json(checkpoint)) == checkpoint

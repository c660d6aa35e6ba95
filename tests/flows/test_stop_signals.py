"""A stop signal ends a command in time: with a last snapshot in training, and at once while an engine starts."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from rollout_core.config import TrainSFTConfig, load_config
from tests.flows.conftest import snapshots_of, wait_for, write_toml

pytestmark = pytest.mark.server

ROLLOUT = ("-c", "from flows.cli import main; main()")
STEPS = 200
STOP_SECONDS = 10.0
SLACK_SECONDS = 20.0
"""For machines under load; a run that does not heed the signal takes minutes."""


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> Path:
    """With heads of 32: vLLM has no CPU kernels for smaller ones."""
    from make_tiny import make_model

    folder = tmp_path_factory.mktemp("models") / "small"
    make_model(folder, hidden_size=128, num_layers=2)
    return folder


def children_of(process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_ends(process, children: list[psutil.Process], asked: float) -> None:
    process.wait(timeout=STOP_SECONDS + SLACK_SECONDS)
    assert time.monotonic() - asked < STOP_SECONDS + SLACK_SECONDS
    assert process.returncode != 0
    _, alive = psutil.wait_procs(children, timeout=SLACK_SECONDS)
    assert not alive


def train(start_process, config: Path, prefect_server: str, log: Path):
    return start_process(
        *ROLLOUT,
        "train",
        "sft",
        "--config",
        str(config),
        stdout=log.open("w"),
        env={"PREFECT_API_URL": prefect_server, "COLUMNS": "200"},
    )


def test_training_in_one_process_keeps_the_step_it_is_in_and_ends_in_the_same_bytes(
    tiny_model, sorting_task, tmp_path, start_process, prefect_server, monkeypatch
):
    from flows.train import train_sft

    config = write_toml(
        tmp_path / "sft.toml",
        {
            "num_threads": 1,
            "run": {"name": "stopped"},
            "algorithm": {
                "kind": "sft",
                "minibatch_size": 16,
                "base_model": {"uri": str(tiny_model)},
                "dataset": {"path": str(sorting_task.sft)},
                "budget": {"max_steps": STEPS},
                "sequence": {"max_length": 64},
                "optimizer": {"lr": 1e-3},
                "snapshots": {"every_steps": 100_000},
            },
        },
    )
    log = tmp_path / "log"
    run = train(start_process, config, prefect_server, log)
    wait_for(lambda: "data: " in log.read_text(), "the report on data", process=run, seconds=240)
    asked = time.monotonic()
    run.send_signal(signal.SIGTERM)
    assert_ends(run, [], asked)
    kept = snapshots_of("sft")[0]
    assert 0 < kept.step < STEPS, log.read_text()[-3000:]

    again = train(start_process, config, prefect_server, log)
    assert again.wait(timeout=500) == 0, log.read_text()[-3000:]
    assert f"resumes at step {kept.step} " in log.read_text()
    resumed = re.findall(r"^train state: (\w+)", log.read_text(), re.MULTILINE)

    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'quiet'}")
    quiet = train_sft(load_config(config, TrainSFTConfig))
    assert [str(quiet["train_state"])] == resumed[-1:]


@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_batch_ends_while_its_engine_starts(
    number, small_model, sorting_task, tmp_path, start_process, prefect_server
):
    config = {
        "model": {"uri": str(small_model)},
        "backend": {"kind": "vllm", "max_model_len": 64, "max_num_seqs": 8},
        "input": {"glob": str(sorting_task.prompts)},
        "output": {"dir": str(tmp_path / "completions")},
        "sampling": {"max_tokens": 8},
    }
    run = start_process(
        *ROLLOUT,
        "infer",
        "batch",
        "--config",
        str(write_toml(tmp_path / "batch.toml", config)),
        stdout=(tmp_path / "log").open("w"),
        env={"PREFECT_API_URL": prefect_server},
    )
    engine = wait_for(lambda: children_of(run), "the engine's start", process=run, seconds=240)
    asked = time.monotonic()
    run.send_signal(number)
    assert_ends(run, engine, asked)


WRAPPED = """
import os
import signal

from prefect import flow

from tasks.runtime.flow_run import recompute_missing
from rollout_core.config import Run


class Named:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGTERM)


def body(journal):
    class Owner:  # as libraries do when they are imported; Python makes a RuntimeError of what is raised there
        named = Named()


@flow(name="wrapped")
def wrapped():
    recompute_missing(body, Run())


wrapped()
"""


def test_a_signal_that_arrives_as_an_error_of_other_code_is_a_stop_all_the_same(start_process, prefect_server):
    run = start_process("-c", WRAPPED, env={"PREFECT_API_URL": prefect_server, "COLUMNS": "200"})
    output, _ = run.communicate(timeout=120)
    assert run.returncode == -signal.SIGTERM, output
    assert "Traceback" not in output, output


def test_an_error_whose_causes_go_in_a_circle_has_an_end():
    from tasks.runtime.flow_run import _interruption_behind

    first, second, interruption = ValueError(), KeyError(), KeyboardInterrupt()
    first.__cause__, second.__context__ = second, first
    assert _interruption_behind(first) is first
    second.__context__ = interruption
    assert _interruption_behind(first) is interruption

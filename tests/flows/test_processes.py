"""`--nproc` from the command to the ranks: a stage whose rank dies goes on from its last snapshot by itself."""

from __future__ import annotations

import re

import psutil
import pytest

from tests.flows.conftest import snapshots_of, wait_for, write_toml

pytestmark = pytest.mark.server


def test_a_rank_that_is_killed_costs_no_run(tiny_model, sorting_task, tmp_path, start_process, prefect_server):
    config = {
        "num_threads": 2,
        "run": {"name": "processes"},
        "algorithm": {
            "kind": "sft",
            "minibatch_size": 16,
            "base_model": {"uri": str(tiny_model)},
            "dataset": {"path": str(sorting_task.sft)},
            "budget": {"max_steps": 120},
            "sequence": {"max_length": 64},
            "optimizer": {"lr": 1e-3},
            "snapshots": {"every_steps": 10},
        },
    }
    run = start_process(
        *("-c", "from flows.cli import main; main()", "train", "sft", "--nproc", "2"),
        *("--config", str(write_toml(tmp_path / "sft.toml", config))),
        env={"PREFECT_API_URL": prefect_server, "COLUMNS": "200"},
    )
    wait_for(lambda: snapshots_of("sft"), "an SFT snapshot", process=run)
    ranks = [child for child in psutil.Process(run.pid).children() if "rollout_core.launch.rank" in child.cmdline()]
    assert len(ranks) == 2
    ranks[1].kill()
    output, _ = run.communicate(timeout=500)
    assert run.returncode == 0, output[-4000:]
    assert re.search(r"rank \d of 2 of the sft update was killed by SIGKILL", output), output[-4000:]
    assert re.search(r"rank 0: INFO sft update resumes at step \d+ from snapshot", output), output[-4000:]
    assert re.search(r"^train state: [0-9a-f]{64} \(step 120\)", output, re.MULTILINE), output[-4000:]
    assert not any(rank.is_running() for rank in ranks)

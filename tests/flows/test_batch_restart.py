"""`rollout infer batch` killed in its midst: the next run makes what is missing, nothing twice, and skips no row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.flows.conftest import write_toml

pytestmark = pytest.mark.server

NUM_PROMPTS = 12


def events_of(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith('{"topic":')]


def test_restart_generates_nothing_twice(tiny_model: Path, tmp_path: Path, start_process: Any, prefect_server: str):
    """Killed twice, taken up once by its id and once by its folder."""
    prompts = [f"sort {number} 1 =" for number in range(NUM_PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    config = write_toml(
        tmp_path / "batch.toml",
        {
            "model": {"uri": str(tiny_model)},
            "sampling": {"max_tokens": 8},
            "input": {"glob": str(tmp_path / "prompts.jsonl")},
            "output": {"dir": str(tmp_path / "out")},
            "workers": {"count": 2, "shard_size": 4},
            "backend": {"kind": "scripted", "delay_seconds": 0.5},
        },
    )

    def start(*more: str) -> subprocess.Popen[str]:
        program = "from flows.cli import main; main()"
        arguments = ("-c", program, "infer", "batch", "--config", str(config), "--events", *more)
        return start_process(*arguments, env={"PREFECT_API_URL": prefect_server})

    def killed_after(num_samples: int, *more: str) -> list[dict[str, Any]]:
        process, seen = start(*more), []
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(line)
            if len(events_of(seen)) >= num_samples:
                break
        assert process.poll() is None, "".join(seen)[-3000:]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "out" / "completions.jsonl").exists()
        return events_of(seen)

    first = killed_after(3)
    run_id = (tmp_path / "out" / "run-id").read_text().strip()
    second = killed_after(2, "--resume", run_id)
    assert 5 <= len(first + second) < NUM_PROMPTS
    last = start()
    output, _ = last.communicate(timeout=500)
    assert last.returncode == 0, output[-3000:]
    events = [*first, *second, *events_of(output.splitlines())]
    assert {event["run_id"] for event in events} == {run_id}
    told = [event["sample"] for event in events]
    assert len(set(told)) == len(told), "no sample was generated again once it was acknowledged"
    rows = [json.loads(line) for line in (tmp_path / "out" / "completions.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    ids = {row["id"] for row in rows}
    assert len(ids) == NUM_PROMPTS and set(told) <= ids

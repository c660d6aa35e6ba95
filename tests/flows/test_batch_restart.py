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


@pytest.mark.parametrize("resume", ["by id", "by folder"])
def test_restart_generates_nothing_twice(
    tiny_model: Path, tmp_path: Path, start_process: Any, prefect_server: str, resume: str
):
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

    first, seen = start(), []
    assert first.stdout is not None
    for line in first.stdout:
        seen.append(line)
        if len(events_of(seen)) >= 3:
            break
    assert first.poll() is None, "".join(seen)[-3000:]
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = events_of(seen)
    run_id = (tmp_path / "out" / "run-id").read_text().strip()
    assert not (tmp_path / "out" / "completions.jsonl").exists()
    assert 3 <= len(before) < NUM_PROMPTS

    second = start(*(("--resume", run_id) if resume == "by id" else ()))
    output, _ = second.communicate(timeout=240)
    assert second.returncode == 0, output[-3000:]
    after = events_of(output.splitlines())
    assert {event["run_id"] for event in before + after} == {run_id}
    told = [event["sample"] for event in before + after]
    assert len(set(told)) == len(told), "no sample was generated again once it was acknowledged"
    rows = [json.loads(line) for line in (tmp_path / "out" / "completions.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    ids = {row["id"] for row in rows}
    assert len(ids) == NUM_PROMPTS and set(told) <= ids

"""Kill server, worker and flow of a served nightly run at random moments, touch nothing, and see it come to its end.

    python -m tests.operations.kills --kills 30 [--seed 1]

A campaign is one nightly run under `python -m deployments.serve` (what `make serve` does) in a copy of this project,
with the automations of `rollout ops install`. A part is killed with SIGKILL at a random moment, two tries of the run at
most (a third is not started a fourth time), the server as often as chance has it. Nobody does anything then. The run
must be Completed under its id, its checkpoint must be that of an undisturbed run, it is promoted once, and nobody is
told of a failure. Prints a table; ends with 1 when something was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from deployments.supervision import MAX_TRIES
from rollout_core.objects import ObjectStore
from rollout_core.promotion.history import history_of
from tests.flows.conftest import nightly_config, wait_for
from tests.flows.kills import free_port
from tests.operations.conftest import PROJECT, Machine, receiving

PARTS = ("server", "worker", "flow")
RUN_SECONDS = 900.0
RUN_ID = "PREFECT__FLOW_RUN_ID"


def config_of(data: Path) -> dict[str, Any]:
    """A nightly run of half a minute, which is promoted whatever its reward."""
    task = {name: str(data / f"{name}.jsonl") for name in ("sft", "prompts", "held-out")}
    config = nightly_config(
        data / "model", sft=task["sft"], prompts=task["prompts"], held_out=task["held-out"], report_dir="data/report"
    )
    config["promotion"] = {"resource": "policy", "tolerance": 1.0}
    config["sft"]["budget"]["max_steps"] = 200
    config["sft"]["snapshots"]["every_steps"] = 5
    return config


class Campaign:
    """One run under `make serve`, in a folder of its own."""

    def __init__(self, folder: Path, project: Path, config: dict[str, Any], told: list[dict[str, Any]], hook: str):
        for name in ("data", "serve.log"):
            with suppress(FileNotFoundError):
                (shutil.rmtree if (project / name).is_dir() else os.remove)(project / name)
        self.project, self.log, self.port = project, project / "serve.log", free_port()
        self.machine = Machine(folder, f"http://127.0.0.1:{self.port}/api", hook, told)
        items = yaml.safe_load((PROJECT / "prefect.yaml").read_text())
        [own] = [item for item in items["deployments"] if item["name"] == "nightly"]
        items["deployments"] = [{**own, "parameters": {"config": config}, "schedules": []}]
        (project / "prefect.yaml").write_text(yaml.safe_dump(items))
        self.told = told
        self.told.clear()

    @contextmanager
    def serving(self) -> Iterator[psutil.Process]:
        """`make serve`, until the end of the block."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "ROLLOUT_"))
        }
        with self.log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "deployments.serve", "--port", str(self.port)],
                cwd=self.project, stdout=output, stderr=output, start_new_session=True,
                env={**environment, "PYTHONPATH": str(self.project)},
            )  # fmt: skip
        try:
            wait_for(lambda: "Prefect UI" in self.log.read_text(), "make serve", seconds=200)
            self.machine.rollout("ops", "install", "--webhook", self.machine.webhook)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(120)

    def run(self, rng: random.Random | None, kills: int) -> tuple[list[str], dict[str, Any]]:
        """The parts that were killed, and the run at its end; none are killed without a generator."""
        done: list[str] = []
        with self.serving() as serve:
            run_id = self.machine.start_run("nightly")
            wait_for(lambda: self._state(run_id) == "Running", "the run's start", seconds=120)
            for part in [] if rng is None else plan_of(rng, kills):
                time.sleep(rng.uniform(1.0, 20.0) if rng is not None else 0.0)
                if self._state(run_id) == "Completed":
                    break
                done += [part] if self._kill(serve, part, run_id) else []
            wait_for(lambda: self._state(run_id) == "Completed", f"the run's end; {self.log}", seconds=RUN_SECONDS)
            run = self.machine.run(run_id)
        assert run["id"] == run_id
        assert run["run_count"] <= MAX_TRIES, run["run_count"]
        assert self.told == [], self.told
        return done, run

    def _state(self, run_id: str) -> str | None:
        with suppress(OSError):
            return self.machine.run(run_id)["state"]["name"]
        return None  # the server is away

    def _kill(self, serve: psutil.Process, part: str, run_id: str) -> bool:
        """SIGKILL; False where there is none of it now."""
        found = [process for process in psutil.process_iter() if _is(process, part, self.project, serve, run_id)]
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return bool(found)

    def promoted(self) -> list[str]:
        """Models that were promoted."""
        objects = ObjectStore.from_url(f"file://{self.project / 'data' / 'objects'}")
        return [entry.model for entry in history_of(objects, "policy")]


def plan_of(rng: random.Random, kills: int) -> list[str]:
    """What to kill, one after the other: of worker and flow no more than leave the run a try."""
    plan = [rng.choice(("worker", "flow")) for _ in range(MAX_TRIES - 1)] + ["server"] * rng.randint(0, 2)
    rng.shuffle(plan)
    return plan[:kills]


def _is(process: psutil.Process, part: str, project: Path, serve: psutil.Process, run_id: str) -> bool:
    with suppress(psutil.Error):
        if part == "server":
            command = process.cmdline()
            return "tasks.runtime.server_process" in command and str(project / "data" / "prefect") in command
        if part == "worker":
            return process.ppid() == serve.pid and "deployments.worker" in process.cmdline()
        return process.environ().get(RUN_ID) == run_id
    return False


def copy_of_project(folder: Path) -> Path:
    """What git has of this project, as it is now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, folder / name)
    return folder


def make_task(folder: Path, hidden_size: int = 64) -> None:
    """Model and rows of the example, few of them."""
    from make_tiny import make_model, make_problems

    make_model(folder / "model", hidden_size=hidden_size, num_layers=2, seed=1)
    problems = make_problems(96, random.Random(3))
    rows = {
        "sft": [{"prompt": prompt, "completion": answer} for prompt, answer in problems[:64]],
        "prompts": [{"prompt": prompt, "answer": answer} for prompt, answer in problems[:64]],
        "held-out": [{"prompt": prompt, "answer": answer} for prompt, answer in problems[64:]],
    }
    for name, of_file in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_file))


def main() -> None:
    sys.path.insert(0, str(PROJECT / "examples"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rollout-operations-"))  # with the logs; it stays if something is wrong
    print(f"working in {folder}", flush=True)
    make_task(folder / "task")
    project, rng = copy_of_project(folder / "project"), random.Random(arguments.seed)
    told: list[dict[str, Any]] = []
    killed: list[str] = []
    tries: Counter[int] = Counter()
    with receiving(told) as hook:
        campaign = Campaign(folder, project, config_of(folder / "task"), told, hook)
        campaign.run(None, 0)
        [expected] = campaign.promoted()
        while len(killed) < arguments.kills:
            campaign = Campaign(folder, project, config_of(folder / "task"), told, hook)
            done, run = campaign.run(rng, arguments.kills - len(killed))
            promoted = campaign.promoted()
            assert promoted == [expected], f"promoted {promoted}, expected once {expected}; {campaign.log}"
            killed += done
            tries[run["run_count"]] += 1
            print(f"killed {', '.join(done) or 'nothing'}: Completed in try {run['run_count']}", flush=True)
    shutil.rmtree(folder)
    print("killed      times")
    for part, count in Counter(killed).most_common():
        print(f"{part:<12}{count:>5}")
    ended = ", ".join(f"{count} in try {number}" for number, count in sorted(tries.items()))
    print(f"{len(killed)} kills in {sum(tries.values())} runs, all Completed ({ended}), each with the checkpoint of an")
    print("undisturbed run, promoted once; nobody was told of a failure, and nobody did anything")


if __name__ == "__main__":
    main()

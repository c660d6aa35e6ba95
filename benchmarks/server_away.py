"""Steps of a training run while the Prefect server is away.

A run of SFT trains under a Prefect server of its own. The server is killed with SIGKILL in the middle, and a minute
later another one is started in its place, on the same database. The table shows the run's steps per second before,
meanwhile and after, the longest time between two steps, and what the server says of the run in the end. A second run
loses its server shortly before its last step, so that its end is what has to wait.

Run: python benchmarks/server_away.py [--quick]
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import PROJECT, Figures, own_place, quick_asked

RUN = """
import time
import tasks.runtime.updates
from tasks.runtime.journal import StepLog

class TimedSteps(StepLog):
    def note(self, row, last_step):
        super().note(row, last_step)
        steps.write(f"{time.time()}\\n")

if __name__ == "__main__":
    steps = open("steps", "w", buffering=1)
    tasks.runtime.updates.StepLog = TimedSteps
    from flows.train import train_sft
    from rollout_core.config import TrainSFTConfig, load_config
    train_sft(load_config("run.toml", TrainSFTConfig))
"""
CONFIG = """
seed = {seed}
num_threads = 1
[run]
name = "server-away-{seed}"
[algorithm]
kind = "sft"
minibatch_size = 16
[algorithm.base_model]
uri = "{data}/model"
[algorithm.dataset]
path = "{data}/sft.jsonl"
[algorithm.optimizer]
lr = 1e-4
[algorithm.budget]
max_steps = {steps}
[algorithm.sequence]
max_length = 64
"""


class Server:
    """A Prefect server that can be killed and started again in its place."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/api"
        self._environment = os.environ | {"PREFECT_HOME": str(folder / "prefect"), "DO_NOT_TRACK": "1"}
        self._log = folder / "server.log"
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self._port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(self._answers, "the Prefect server to answer", 120)

    def kill(self) -> None:
        """SIGKILL, to it and what it has started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=2).status == 200
        except OSError:
            return False

    def runs(self, name: str) -> list[dict[str, Any]]:
        """Its flow runs of that name."""
        body = json.dumps({"flow_runs": {"name": {"any_": [name]}}}).encode()
        request = urllib.request.Request(
            f"{self.url}/flow_runs/filter", body, headers={"Content-Type": "application/json"}
        )
        return json.load(urllib.request.urlopen(request, timeout=10))


def wait_for(condition: Callable[[], object], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.05)


class Run:
    """A run of SFT in a process of its own."""

    def __init__(self, folder: Path, data: Path, server: Server, *, seed: int, steps: int) -> None:
        self.name = f"server-away-{seed}"
        self._folder = folder / self.name
        self._folder.mkdir()
        (self._folder / "run.py").write_text(RUN)
        (self._folder / "run.toml").write_text(CONFIG.format(seed=seed, data=data, steps=steps))
        environment = os.environ | {"PYTHONPATH": str(PROJECT), "PREFECT_API_URL": server.url}
        with (self._folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "run.py"], cwd=self._folder, env=environment, stdout=log, stderr=log
            )

    def steps(self) -> list[float]:
        """When each of its steps so far ended, seconds of the clock."""
        file = self._folder / "steps"
        return [float(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_steps(self, count: int) -> None:
        """Raises RuntimeError if the run ends before."""

        def done() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended: {(self._folder / 'log').read_text()[-3000:]}")
            return len(self.steps()) >= count

        wait_for(done, f"step {count}", 600)

    def end(self, seconds: float) -> str:
        """How its process ended."""
        try:
            return f"exit {self.process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            self.process.kill()
            return f"nothing after {seconds:.0f} s"


def rate(steps: list[float], first: float, last: float) -> float:
    """Steps per second between two moments."""
    return sum(first <= step < last for step in steps) / (last - first)


def told(server: Server, run: Run, ended: str) -> str:
    """What became of a run, as its process and the server have it."""
    return f"{ended}, " + ", ".join(f"{found['state_type']}" for found in server.runs(run.name))


def main() -> None:
    quick = quick_asked(__doc__)
    figures = Figures("A Prefect server that is away for a while")
    before, away, after = (5.0, 20.0, 5.0) if quick else (20.0, 60.0, 20.0)
    with own_place() as folder:
        data = folder / "data" / "example"
        subprocess.run(
            [sys.executable, str(PROJECT / "examples" / "make_tiny.py")], check=True, stdout=subprocess.DEVNULL
        )
        server = Server(folder)
        try:
            probe = Run(folder, data, server, seed=0, steps=100)
            assert probe.end(300) == "exit 0", "the run by which steps are timed"
            each = (probe.steps()[-1] - probe.steps()[10]) / 89

            run = Run(folder, data, server, seed=1, steps=int((before + away + 2 * after) / each))
            run.wait_for_steps(10)
            began = time.time()
            time.sleep(before)
            server.kill()
            killed = time.time()
            time.sleep(away)
            back = time.time()
            server.start()
            ended = run.end(away + 10 * after)
            steps = run.steps()
            normal = rate(steps, began, killed)
            figures.add("steps/s before", f"{normal:.1f}")
            slowed = rate(steps, killed, back)
            figures.add(
                f"steps/s in the {away:.0f} s without a server", f"{slowed:.1f}", f"{normal:.1f}", slowed / normal
            )
            pauses = [later - earlier for earlier, later in pairwise(steps) if later > killed and earlier < back]
            figures.add(
                "longest time between two steps", f"{max(pauses, default=back - killed):.2f} s", f"{each:.2f} s"
            )
            figures.add("the run", told(server, run, ended))

            run = Run(folder, data, server, seed=2, steps=100)
            run.wait_for_steps(80)
            server.kill()
            killed = time.time()
            time.sleep(away)
            server.start()
            ended = run.end(away + 300)
            figures.add(f"server away {away:.0f} s at the run's end: the run", told(server, run, ended))
        finally:
            server.kill()
    figures.show(
        f"SFT on one core, {1 / each:.1f} steps/s alone; the server shares the machine's cores while it lives."
    )


if __name__ == "__main__":
    main()

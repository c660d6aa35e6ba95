"""Kill any part of batch inference at random moments, start it again, and see that nothing was lost or done twice.

    python -m tests.flows.kills --kills 40 --samples 2000 [--backend vllm] [--postgres] [--cluster] [--seed 1]

A campaign is one prompt set, worked on until it is complete: the parts run as processes of their own, `rollout infer
batch` is started, a part is killed with SIGKILL at a random moment of the work, what is dead is started again, and so
on. When the set is complete the output must be that of an undisturbed run, line by line but for the times, and the
store must know one successful attempt of each sample, its last one: whoever was acknowledged was never asked again.
Campaigns follow each other until there were enough kills. Prints a table; ends with 1 when something was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.flows.conftest import write_toml
from tests.store.postgres import PostgresServer

PROJECT = Path(__file__).resolve().parents[2]
READY_SECONDS = 120.0
RUN_SECONDS = 400.0


@dataclass
class Part:
    """A process that a campaign needs beside its driver."""

    name: str
    command: list[str]
    is_ready: Callable[[], bool]
    process: subprocess.Popen[bytes] | None = None

    def ensure(self, environment: dict[str, str], folder: Path) -> None:
        """Start it if it is dead, and wait until it answers."""
        if self.process is None or self.process.poll() is not None:
            with (folder / f"{self.name}.log").open("ab") as log:
                self.process = subprocess.Popen(
                    self.command, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
                )
        deadline = time.monotonic() + READY_SECONDS
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not start; see {folder / self.name}.log")
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class PostgresPart(Part):
    """The database server, which is a family of processes."""

    def __init__(self) -> None:
        super().__init__("postgres", [], lambda: True)
        self._server = PostgresServer()
        self.url = self._server.new_database("rollout")

    def ensure(self, environment: dict[str, str], folder: Path) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.kill()

    def another(self, name: str) -> str:
        """The URL of one more database of this server."""
        return self._server.new_database(name)

    def close(self) -> None:
        """Delete it."""
        self._server.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(url: str) -> bool:
    with suppress(OSError):
        return urllib.request.urlopen(url, timeout=2).status == 200
    return False


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Kill:
    """One kill and what became of the run."""

    part: str
    seconds: float
    """After samples were committed, by this run or since the kill before."""
    done: int
    """Samples complete before."""
    ended_run: bool = False
    """Whether it was the last one before the run ended, and the next one went on."""


@dataclass
class Setting:
    """What all campaigns share."""

    samples: int
    backend: dict[str, Any]
    sampling: dict[str, Any]
    model: Path
    parts: tuple[str, ...]
    """Which are killed: driver, engine, prefect, postgres, and of a cluster scheduler and worker."""
    workers: dict[str, Any] = field(default_factory=dict)

    @property
    def is_cluster(self) -> bool:
        return "scheduler" in self.parts


class Campaign:
    """One prompt set with its own storage, database and servers, in ``folder``."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._setting = setting
        self._folder = folder
        self._prefect, self._scheduler = free_port(), free_port()
        self._postgres = PostgresPart() if "postgres" in setting.parts else None
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(PROJECT),
            "ROLLOUT_STORAGE": f"file://{folder / 'objects'}",
            "ROLLOUT_DATABASE": self._postgres.url if self._postgres else f"sqlite:///{folder / 'rollout.db'}",
            "ROLLOUT_CACHE": str(folder / "cache"),
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": f"http://127.0.0.1:{self._prefect}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_API_KEEPALIVE_TIMEOUT": "60",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        prompts = ({"prompt": f"sort {n % 10} {n // 7 % 10} {n} =", "id": f"row-{n}"} for n in range(setting.samples))
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
        self._run: subprocess.Popen[bytes] | None = None
        self._write_config()
        self.parts = self._make_parts()

    def _write_config(self) -> None:
        workers = {"shard_size": 500, "claim_size": 64, **self._setting.workers}
        if self._setting.is_cluster:
            workers |= {"dask": {"address": f"tcp://127.0.0.1:{self._scheduler}"}}
        write_toml(
            self._folder / "batch.toml",
            {
                "schema_version": 1,
                "model": {"uri": str(self._setting.model)},
                "sampling": self._setting.sampling,
                "input": {"glob": "prompts.jsonl"},
                "output": {"dir": "out"},
                "workers": workers,
                "backend": self._setting.backend,
            },
        )

    def _make_parts(self) -> dict[str, Part]:
        python, api = sys.executable, f"http://127.0.0.1:{self._prefect}/api/health"
        server = [python, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self._prefect)]
        parts = [Part("prefect", server, lambda: answers(api))]
        if self._setting.is_cluster:
            port, dask = self._scheduler, [str(Path(python).with_name("dask"))]
            options = ["--host", "127.0.0.1", "--port", str(port), "--dashboard-address", "127.0.0.1:0"]
            parts.append(Part("scheduler", [*dask, "scheduler", *options], lambda: listens(port)))
            worker = [*dask, "worker", f"tcp://127.0.0.1:{port}", "--nthreads", "2", "--no-nanny", "--no-dashboard"]
            parts += [Part(f"worker-{number}", worker, lambda: True) for number in (1, 2)]
        if self._postgres is not None:
            parts.append(self._postgres)
        return {part.name: part for part in parts}

    def start_parts(self) -> None:
        """Start what is dead."""
        for part in self.parts.values():
            part.ensure(self.environment, self._folder)

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *error: object) -> None:
        if self._run is not None:
            self._run.kill()
        for part in self.parts.values():
            part.kill()
        if self._postgres is not None:
            self._postgres.close()

    def start_run(self) -> subprocess.Popen[bytes]:
        """`rollout infer batch`, as a user types it."""
        command = [Path(sys.executable).with_name("rollout"), "infer", "batch", "--config", "batch.toml"]
        with (self._folder / "run.log").open("ab") as log:
            self._run = subprocess.Popen(
                command, env=self.environment, cwd=self._folder, stdout=log, stderr=log, start_new_session=True
            )
        return self._run

    def output(self) -> list[dict[str, Any]]:
        """Rows of the output without their times."""
        # By line feeds alone: a completion may hold what Python takes for other ends of lines.
        lines = (self._folder / "out" / "completions.jsonl").read_bytes().splitlines()
        return [{key: value for key, value in json.loads(line).items() if key != "generated_at"} for line in lines]

    def num_done(self) -> int:
        """Samples complete now."""
        return asyncio.run(self._count())

    async def _count(self) -> int:
        from rollout_core.store import SqlLightningStore

        if self._postgres is None and not (self._folder / "rollout.db").exists():
            return 0
        async with SqlLightningStore.from_url(self.environment["ROLLOUT_DATABASE"]) as store:
            return (await store.query_rollouts(status_in=["succeeded"], limit=0)).total

    def attempts_after_success(self) -> list[str]:
        """What is wrong in the store, see `attempts_after_success`."""
        return attempts_after_success(self.environment["ROLLOUT_DATABASE"])

    def run_undisturbed(self) -> list[dict[str, Any]]:
        """The output of a run that nobody kills."""
        self.start_parts()
        if self.start_run().wait(RUN_SECONDS):
            raise RuntimeError(f"the undisturbed run failed; see {self._folder / 'run.log'}")
        return self.output()

    def run_killed(self, rng: random.Random, wanted: int, spread: float) -> list[Kill]:
        """Kill up to ``wanted`` times, each within ``spread`` seconds of new work; returns when the set is complete."""
        kills: list[Kill] = []
        while True:
            self.start_parts()
            before = len(kills)
            run = self.start_run()
            while run.poll() is None and len(kills) < wanted:
                if (kill := self._kill_once(run, rng, spread)) is not None:
                    kills.append(kill)
                    print(f"kill {kill.part} after {kill.seconds:.1f} s: {kill.done} done", flush=True)
            code = run.wait(RUN_SECONDS)
            if code == 0:
                return kills
            if len(kills) == before:
                raise RuntimeError(f"a run that nobody killed failed; see {self._folder / 'run.log'}")
            kills[-1].ended_run = True

    def _kill_once(self, run: subprocess.Popen[bytes], rng: random.Random, spread: float) -> Kill | None:
        """Wait for work, kill a part at a random moment, and start it again; None if the run was over before."""
        self._wait_for_work(run, self.num_done())
        moment = rng.uniform(0, spread)
        with suppress(subprocess.TimeoutExpired):
            run.wait(moment)
            return None
        part, done = rng.choice(self._setting.parts), self.num_done()
        if not self._kill(part, run, rng):
            return None
        if part == "driver":
            run.wait(RUN_SECONDS)
        elif part != "engine":
            # As a supervisor would: a run outlives a short absence of its servers, or else the next does.
            time.sleep(rng.uniform(0, 3))
            self.start_parts()
        return Kill(part, moment, done)

    def _wait_for_work(self, process: subprocess.Popen[bytes], before: int) -> None:
        """Until a sample was committed, or the run is over."""
        deadline = time.monotonic() + READY_SECONDS
        while process.poll() is None and time.monotonic() < deadline and self.num_done() <= before:
            time.sleep(0.05)

    def _kill(self, part: str, driver: subprocess.Popen[bytes], rng: random.Random) -> bool:
        """SIGKILL; False where there is none of that name now."""
        if part == "driver":
            driver.kill()
        elif part == "engine":
            engines = [child for child in _children(driver) if child.name().startswith("VLLM")]
            if not engines:
                return False
            rng.choice(engines).send_signal(signal.SIGKILL)
        else:
            names = [name for name in self.parts if name.startswith(part)]
            self.parts[rng.choice(names)].kill()
        return True


def attempts_after_success(database: str) -> list[str]:
    """What is wrong in a store: samples without exactly one successful attempt, or with a later one."""
    return asyncio.run(_find_wrong(database))


async def _find_wrong(database: str) -> list[str]:
    from rollout_core.store import SqlLightningStore

    wrong = []
    async with SqlLightningStore.from_url(database) as store:
        for rollout in await store.query_rollouts():
            attempts = sorted(await store.query_attempts(rollout.rollout_id), key=lambda item: item.sequence_id)
            statuses = [attempt.status for attempt in attempts]
            if statuses.count("succeeded") != 1 or statuses[-1] != "succeeded":
                wrong.append(f"{rollout.rollout_id[:12]}: {statuses}")
    return wrong


def _children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def run_campaigns(setting: Setting, folder: Path, *, kills: int, seed: int, spread: float) -> tuple[list[Kill], int]:
    """Campaigns until there were ``kills``. Returns them and the number of campaigns; raises AssertionError."""
    rng = random.Random(seed)
    with Campaign(setting, folder / "undisturbed") as campaign:
        expected = campaign.run_undisturbed()
    assert [row["id"] for row in expected] == [f"row-{number}" for number in range(setting.samples)]
    done: list[Kill] = []
    campaigns = 0
    while len(done) < kills:
        campaigns += 1
        with Campaign(setting, folder / f"campaign-{campaigns}") as campaign:
            done += campaign.run_killed(rng, kills - len(done), spread)
            assert campaign.output() == expected, f"campaign {campaigns}: the output differs"
            wrong = campaign.attempts_after_success()
            assert not wrong, f"campaign {campaigns}: {wrong[:5]}"
    return done, campaigns


def main() -> None:
    sys.path.insert(0, str(PROJECT / "examples"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--samples", type=int, default=2_000)
    parser.add_argument("--backend", choices=("vllm", "scripted"), default="vllm")
    parser.add_argument("--cluster", action="store_true", help="scheduler and two workers; scripted backend")
    parser.add_argument(
        "--postgres", action="store_true", help="PostgreSQL instead of SQLite; its server is killed, too"
    )
    parser.add_argument("--spread", type=float, default=6.0, help="a kill falls within so many seconds of work")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    from make_tiny import make_model

    folder = Path(tempfile.mkdtemp(prefix="rollout-kills-"))  # with the logs; it stays if something is wrong
    print(f"working in {folder}", flush=True)
    make_model(folder / "model", hidden_size=128, num_layers=2)
    scripted = arguments.backend == "scripted" or arguments.cluster
    parts = ["driver", "prefect"]
    parts += [] if scripted else ["engine"]
    parts += ["postgres"] if arguments.postgres else []
    parts += ["scheduler", "worker"] if arguments.cluster else []
    setting = Setting(
        samples=arguments.samples,
        backend={"kind": "scripted", "delay_seconds": 0.02} if scripted else {"kind": "vllm", "max_model_len": 160},
        sampling={"max_tokens": 128, "temperature": 1.0, "seed": 7},
        model=folder / "model",
        parts=tuple(parts),
    )
    kills, campaigns = run_campaigns(
        setting, folder, kills=arguments.kills, seed=arguments.seed, spread=arguments.spread
    )
    shutil.rmtree(folder)
    print(f"{'killed':<12}{'times':>6}{'run went on':>13}{'the next did':>14}")
    for part, count in Counter(kill.part for kill in kills).most_common():
        survived = sum(kill.part == part and not kill.ended_run for kill in kills)
        print(f"{part:<12}{count:>6}{survived:>13}{count - survived:>14}")
    print(
        f"{len(kills)} kills in {campaigns} campaigns of {arguments.samples} samples: every row once, in order, equal"
    )
    print("to an undisturbed run; no sample asked again after its completion was acknowledged")


if __name__ == "__main__":
    main()

"""Three workers share stages, one is killed and started again, one is stolen from, and each stage has one result.

    python -m tests.operations.smoke                 (make smoke)

Each worker is a process that runs a flow of the same nine stages, from another one on, with a Prefect server, a store
on PostgreSQL and an object store that all share. ``w1`` gets SIGKILL amid its first stage and is started again. ``w2``
gets SIGSTOP amid its first, until its lease has run out and another has computed that stage, and then SIGCONT: it is
told to stop, returns a record of its own all the same, and that must not be written. ``w3`` stays in its first until
another waits for its result. Prints a table; ends with 1 when something was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blocks import ContentAddressedStorage
from rollout_core.base.errors import MissingObject
from rollout_core.objects.records import BlobId, Record
from tasks.runtime.prefect_server import SERVER_SETTINGS, prefect_server
from tests.conftest import PROJECT
from tests.flows.conftest import wait_for
from tests.store.postgres import PostgresServer

NUM_STAGES = 9
WORKERS = ("w1", "w2", "w3")
LEASE_SECONDS = 3.0
FENCED_WITHIN_SECONDS = 5.0
LONG = 300.0
HOLDS = "SMOKE_HOLDS"
"""Environment variable: the file until which a worker stays in its first stage."""
WAITS = "is computing share on the same inputs; waiting for its result"
"""What a worker logs that meets another at a stage."""


class Made(Record):
    """What a stage made, and who did."""

    blob: BlobId
    worker: str


def work(name: str, folder: Path) -> None:
    """A worker's whole life."""
    from prefect import flow

    from rollout_core.base.stopping import is_stopping
    from tasks.runtime.stage import current_stage, stage

    def note(what: str, item: int, **more: Any) -> None:
        line = json.dumps({"worker": name, "pid": os.getpid(), "what": what, "item": item, "at": time.time(), **more})
        with (folder / "log").open("a") as log:
            log.write(line + "\n")

    first = WORKERS.index(name) * NUM_STAGES // len(WORKERS)

    @stage(version=1)
    def share(item: int) -> Made:
        """One of those that all want."""
        note("begun", item, key=current_stage().key)
        end = Path(os.environ[HOLDS]) if HOLDS in os.environ and item == first else None
        until = time.monotonic() + (LONG if end else 0.3)
        while time.monotonic() < until and not (end and end.exists()):
            time.sleep(0.05)
            if is_stopping():
                note("told to stop", item)
                break
        else:
            note("computed", item)
        return Made(blob=current_stage().objects.put_bytes(b"%d" % item), worker=name)

    @flow(name="smoke", persist_result=False)
    def smoke() -> None:
        for number in range(NUM_STAGES):
            item = (first + number) % NUM_STAGES
            note("has", item, of=share(item).worker)

    smoke()


@dataclass
class Outcome:
    """What came of it."""

    lines: list[dict[str, Any]]
    killed: int
    """The stage amid which ``w1`` was killed."""
    stolen: int
    """The one that was taken from ``w2``."""
    fenced_seconds: float
    """From SIGCONT until ``w2`` knew."""
    before: bytes | None
    after: bytes | None
    """The stolen stage's result, before ``w2`` went on and at the end."""
    leases: dict[int, int]
    """Epochs by stage."""
    seconds: float
    logs: str = field(repr=False, default="")

    def of(self, what: str, worker: str | None = None) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["what"] == what and worker in (None, line["worker"])]

    def computed(self) -> Counter[int]:
        """How often each stage was computed to its end."""
        return Counter(line["item"] for line in self.of("computed"))

    def results(self) -> dict[int, set[str]]:
        """By stage: whose results its callers got."""
        found: dict[int, set[str]] = {}
        for line in self.of("has"):
            found.setdefault(line["item"], set()).add(line["of"])
        return found

    def problems(self) -> Iterator[str]:
        """What is not as it should be, in words."""
        for item in range(NUM_STAGES):
            if self.computed()[item] != 1:
                yield f"stage {item} was computed {self.computed()[item]} times"
            if len(self.results().get(item, ())) != 1:
                yield f"stage {item} gave its callers the results of {sorted(self.results().get(item, ()))}"
            begun = sum(line["item"] == item for line in self.of("begun"))
            if begun != 1 + (item in (self.killed, self.stolen)):
                yield f"stage {item} was begun {begun} times"
            if item in (self.killed, self.stolen) and self.leases[item] < 2:
                yield f"the lease of stage {item} was stolen and has epoch {self.leases[item]}"
        if self.fenced_seconds > FENCED_WITHIN_SECONDS:
            yield f"w2 knew after {self.fenced_seconds:.1f} s that its lease was taken"
        if "w2" in self.results().get(self.stolen, ()) or self.before != self.after:
            yield "w2 wrote a result that was no longer its own to write"


class Workers:
    """The three, and what they share."""

    def __init__(self, folder: Path, api: str, database: str) -> None:
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **os.environ,
            **SERVER_SETTINGS,
            "PREFECT_API_URL": api,
            "PREFECT_HOME": str(folder / "home"),
            "ROLLOUT_STORAGE": f"file://{folder}/objects",
            "ROLLOUT_DATABASE": database,
            "ROLLOUT_CACHE": str(folder / "cache"),
            "ROLLOUT_LEASE_SECONDS": str(LEASE_SECONDS),
            "PYTHONPATH": str(PROJECT),
        }

    def start(self, name: str, *, until: Path | None = None) -> None:
        """Start one, which stays in its first stage until there is such a file."""
        with (self._folder / f"{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.operations.smoke", "--worker", name, "--folder", str(self._folder)],
                env={**self._environment, **({HOLDS: str(until)} if until else {})},
                cwd=self._folder, stdout=output, stderr=output,
            )  # fmt: skip

    def lines(self) -> list[dict[str, Any]]:
        path = self._folder / "log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, what: str, worker: str | None = None, item: int | None = None) -> dict[str, Any]:
        """The first line like this, once it is there."""

        def look() -> dict[str, Any] | None:
            ended = [name for name, process in self.processes.items() if process.poll()]
            assert not ended, f"{ended} ended before {what!r}:\n{self.logs()[-4000:]}"
            found = (line for line in self.lines() if line["what"] == what)
            return next((one for one in found if worker in (None, one["worker"]) and item in (None, one["item"])), None)

        return wait_for(look, f"{what!r} of {worker or 'any'}", seconds=LONG)

    def logs(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self._folder.glob("w*.log")))

    def result(self, key: str) -> bytes | None:
        """What is written under a stage's key."""
        try:
            return ContentAddressedStorage(url=self._environment["ROLLOUT_STORAGE"]).read_path(key)
        except MissingObject:
            return None


def run(folder: Path) -> Outcome:
    """All of it, in an empty folder."""
    started = time.monotonic()
    postgres = PostgresServer()
    with ExitStack() as stack:
        stack.callback(postgres.close)
        database = postgres.new_database("smoke")
        api = stack.enter_context(prefect_server(folder / "home"))
        workers = Workers(folder, api, database)
        processes = workers.processes
        stack.callback(lambda: [process.kill() for process in processes.values()])
        met, never = folder / "met", folder / "never"
        for name in WORKERS:
            workers.start(name, until=met if name == "w3" else never)
        killed = workers.wait("begun", "w1")["item"]
        first = processes.pop("w1")
        first.kill()
        first.wait()
        held = workers.wait("begun", "w2")
        processes["w2"].send_signal(signal.SIGSTOP)
        workers.wait("begun", "w3")
        workers.start("w1")
        wait_for(lambda: WAITS in workers.logs(), "one that waits for another", seconds=LONG)
        met.touch()
        workers.wait("computed", item=held["item"])
        before = wait_for(lambda: workers.result(held["key"]), "the stolen stage's result", seconds=LONG)
        resumed = time.time()
        processes["w2"].send_signal(signal.SIGCONT)
        fenced = workers.wait("told to stop", "w2")
        codes = {name: process.wait(LONG) for name, process in processes.items()}
        assert set(codes.values()) == {0}, f"{codes}\n{workers.logs()}"
        keys = {line["key"]: line["item"] for line in workers.lines() if "key" in line}
        rows = postgres.run_sql("SELECT name, epoch FROM leases", "smoke").splitlines()
        leases = {keys[row.split("|")[0].partition("/")[2]]: int(row.split("|")[1]) for row in rows}
        return Outcome(
            workers.lines(), killed, held["item"], fenced["at"] - resumed, before, workers.result(held["key"]), leases,
            time.monotonic() - started, workers.logs(),
        )  # fmt: skip


def show(outcome: Outcome) -> None:
    """The table."""
    print(f"{'worker':8}{'began':>7}{'computed':>10}{'from others':>13}  what happened to it")
    events = {
        "w1": f"killed amid stage {outcome.killed}, started again",
        "w2": f"paused amid stage {outcome.stolen}, stolen from; knew {outcome.fenced_seconds:.1f} s after it went on",
    }
    for name in WORKERS:
        others = sum(line["of"] != name for line in outcome.of("has", name))
        counts = [len(outcome.of("begun", name)), len(outcome.of("computed", name)), others]
        print(f"{name:8}{counts[0]:7}{counts[1]:10}{counts[2]:13}  {events.get(name, '')}")
    stolen = {item: epoch for item, epoch in sorted(outcome.leases.items()) if epoch > 1}
    print(f"{NUM_STAGES} stages, {sum(outcome.computed().values())} computed, in {outcome.seconds:.0f} s")
    print(f"epochs above 1: {', '.join(f'stage {item}: {epoch}' for item, epoch in stolen.items())}")


def main() -> int:
    """Exit code: 0, or 1 when something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.worker, given.folder)
        return 0
    with tempfile.TemporaryDirectory(prefix="rollout-smoke-") as folder:
        outcome = run(Path(folder))
    show(outcome)
    problems = list(outcome.problems())
    print("\n".join(f"WRONG: {problem}" for problem in problems) or "all as it should be")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

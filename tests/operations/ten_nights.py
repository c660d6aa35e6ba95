"""Nights on a schedule of minutes, on two machines, whose parts are killed and away at random moments; nobody helps.

    python -m tests.operations.ten_nights --nights 10 --kills 30 [--seed 1] [--minutes 5] [--engine-every 2]

A Prefect server and the store on PostgreSQL, objects in S3 (moto) behind a proxy, and two machines with a supervised
worker each (`rollout ops worker`): host names, caches, homes and temporary folders of their own. The nightly
deployment has a schedule for each night, with a seed of its own, every ``--minutes``. While nights run, one part after
the other is killed with SIGKILL or is away for a while:

    flow, worker, supervisor, engine (while it starts), engine (at work), server, database, storage

Whatever a service manager starts again after a crash (supervisor, server, database) is started again after seconds;
nothing else is done. Each night must then have the checkpoint of the same night of the same seed that nobody
disturbed, made beforehand in a store of its own, and be promoted once, as that one is. Prints the nights with their
tries, what was done to them, what is left over, and every error in the logs of server, workers and runs by its kind:
those that something that was done explains, and the others. Ends with 1 when something was wrong. Ctrl-C while nights
run ends them early, and the same is printed. The states of the runs are in the folder, in `states.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from deployments.supervision import MAX_TRIES, runs_of
from rollout_core.base.locks import SHARED_MEMORY
from rollout_core.objects import ObjectStore
from rollout_core.objects.verification import verify_store
from rollout_core.promotion.history import history_of
from rollout_core.runs.run_records import RunRecords
from tests.flows.conftest import nightly_config, wait_for, write_toml
from tests.flows.kills import Part, PostgresPart, answers, free_port
from tests.operations.conftest import PROJECT, SETTINGS, receiving
from tests.operations.kills import make_task
from tests.operations.own_server import ROLLOUT
from tests.operations.several import OneOfSeveral, server_settings
from tests.operations.test_nights import nightly
from tests.support.faulty_proxy import OUTAGES, FaultyProxy, faulty_proxy
from tests.support.leftovers import unused
from tests.support.server_logs import ERROR, records
from tests.support.storage_kills import BUCKET, on_s3

FLOW, WORKER, SUPERVISOR, STARTING, WORKING = "flow", "worker", "supervisor", "engine, starting", "engine, at work"
SERVER, DATABASE, STORAGE = "server", "database", "storage"
KINDS = (FLOW, STARTING, SERVER, WORKER, STORAGE, WORKING, DATABASE, SUPERVISOR)
OF_ENGINES = (STARTING, WORKING)
COUNTED = (FLOW, WORKER)
"""Kills after which a run's next start counts as a further try, of three."""
MOST_COUNTED = 2
MACHINES = ("m1", "m2")
MARK = "TEN_NIGHTS"
"""Environment variable of all that the machines start: the folder of this campaign."""
TEMPORARY = "t"
"""A machine's folder for temporary files: short, as vLLM's sockets are below it, whose paths must be."""
READY = "engine ready"
ENGINE_SECONDS = 120.0
"""In which a night that has begun is likely to start an engine, if it starts one more."""
NIGHT_SECONDS = 3600.0
PLANNED_SECONDS = 330.0
"""From planning to the first night. Of runs that begin within five minutes of being planned, as those of a schedule
never do that was there the day before, automations of `prefect server start` know a quarter of an hour late."""
EXPLAINS_SECONDS = 400.0
"""After something was done, in which an error may come of it."""
FINAL = ("COMPLETED", "FAILED", "CANCELLED")


@dataclass(frozen=True)
class Done:
    """What was done to a night."""

    kind: str
    night: str
    began: float
    ended: float
    """Seconds since the epoch."""
    detail: str = ""


@dataclass
class Night:
    """One night of the schedule, and what came of it."""

    name: str
    config: dict[str, Any]
    checkpoint: str = ""
    promoted: bool | None = None
    rewards: tuple[float, ...] = ()
    tries: int = 0
    state: str = "has not begun"
    seconds: float = 0.0

    @property
    def has_engine(self) -> bool:
        return self.config["backend"]["kind"] == "vllm"


@dataclass(frozen=True)
class Expected:
    """Errors that something that was done explains."""

    pattern: str
    by: tuple[str, ...]
    reason: str


EXPLAINED = (
    Expected(
        r"Crash detected|exited with status code|Execution was aborted|Crashed", (FLOW, WORKER, SUPERVISOR), "killed"
    ),
    Expected(r"engine.*(died|killed|ended)|EngineDeadError|EngineCore", OF_ENGINES, "its process was killed"),
    Expected(r"SlowDown|Connect|connection|timed? ?out|Timeout|503|InternalError|storage", (STORAGE,), "it was away"),
    Expected(r"database|psycopg|asyncpg|OperationalError|terminat|connection|recover", (DATABASE,), "it was away"),
    Expected(
        r"EventsWorker|Observer|Connect|connection|websocket|Server|server|httpx|RemoteProtocol",
        (SERVER, DATABASE),
        "it was away",
    ),
)


class World:
    """Server, database, storage and machines."""

    def __init__(self, folder: Path, proxy: FaultyProxy, upstream: dict[str, Any], hook: str, told: list[Any]) -> None:
        self.folder, self.proxy, self.upstream, self.told = folder, proxy, upstream, told
        self.database = PostgresPart()
        self.undisturbed_database = self.database.another("undisturbed")
        port = free_port()
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        self.server = Part("server", command, lambda: answers(f"http://127.0.0.1:{port}/api/health"))
        self.server_environment = {
            **os.environ, **SETTINGS, **server_settings(self.database.another("prefect")),
            "PREFECT_HOME": str(folder / "server"),
        }  # fmt: skip
        settings = {
            "ROLLOUT_STORAGE": f"s3://{BUCKET}/nights",
            "ROLLOUT_DATABASE": self.database.url,
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_ACCESS_KEY_ID": upstream["key"],
            "AWS_SECRET_ACCESS_KEY": upstream["secret"],
            "VLLM_CPU_KVCACHE_SPACE": "1",
            MARK: str(folder),
        }
        api = f"http://127.0.0.1:{port}/api"
        self.machines = [OneOfSeveral(made(folder / name), api, hook, told, settings) for name in MACHINES]
        self.first = self.machines[0]
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.done: list[Done] = []

    def objects(self, name: str) -> ObjectStore:
        """A store of the bucket, not by the proxy."""
        return ObjectStore.from_url(f"s3://{BUCKET}/{name}", storage_options=self.upstream)

    def start_server(self) -> None:
        self.server.ensure(self.server_environment, self.folder)

    def start_worker(self, name: str) -> None:
        """A machine's supervisor, as its service manager starts it."""
        [machine] = [machine for machine in self.machines if machine.folder.name == name]
        temporary = machine.folder / TEMPORARY
        temporary.mkdir(exist_ok=True)
        command = [*ROLLOUT, "ops", "worker", "--pool", "cpu", "--name", name]
        with (machine.folder / "worker.log").open("ab") as output:
            self.workers[name] = subprocess.Popen(
                [*as_machine(machine.folder), sys.executable, *command],
                env={**machine.environment, "TMPDIR": str(temporary)},
                cwd=machine.folder, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def end_workers(self) -> None:
        """As service managers do when machines are shut down."""
        for worker in self.workers.values():
            worker.terminate()
        for worker in self.workers.values():
            worker.wait(180)

    def processes(self) -> list[psutil.Process]:
        """All that machines have started and that runs."""
        return [process for process in psutil.process_iter() if of_environment(process, MARK) == str(self.folder)]

    def close(self) -> None:
        """Kill what is there."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.server.kill()
        self.database.kill()
        self.database.close()

    # What is done to it. Each returns what it did in words, the empty text where there was nothing to do it to.

    def kill_flow(self, run: dict[str, Any]) -> str:
        process = runs_of(psutil.process_iter()).get(run["id"])
        return "" if process is None else killed(process)

    def kill_worker(self, run: dict[str, Any]) -> str:
        supervisor = self.workers[self._machine_of(run)]
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(supervisor.pid).children():
                if "deployments.worker" in child.cmdline():
                    return f"{self._machine_of(run)} {killed(child)}".strip()
        return ""

    def kill_supervisor(self, run: dict[str, Any], away: float) -> str:
        name = self._machine_of(run)
        self.workers[name].kill()
        self.workers[name].wait()
        time.sleep(away)
        self.start_worker(name)
        return f"{name}, away {away:.0f} s"

    def kill_engine(self, run: dict[str, Any], rng: random.Random, *, is_starting: bool) -> str:
        """SIGKILL of one of its processes, at a random moment of its start, or of its work."""
        name = self._machine_of(run)
        deadline = time.monotonic() + ENGINE_SECONDS
        seen: dict[int, int] = {}
        while time.monotonic() < deadline:
            flow = runs_of(psutil.process_iter()).get(run["id"])
            engines = engines_of(flow) if flow is not None else []
            ready = self._told_ready(name)
            for engine in engines:
                seen.setdefault(engine.pid, ready)
            starting = [engine for engine in engines if seen[engine.pid] == ready]
            wanted = starting if is_starting else [engine for engine in engines if engine not in starting]
            if wanted:
                time.sleep(rng.uniform(0.0, 6.0))
                is_still = self._told_ready(name) == ready
                if is_still or not is_starting:
                    return killed(rng.choice(wanted))
            if not self._is_under_way(run["id"]):
                return ""
            time.sleep(0.2)
        return ""

    def kill_server(self, away: float) -> str:
        self.server.kill()
        time.sleep(away)
        self.start_server()
        return f"away {away:.0f} s"

    def kill_database(self, away: float) -> str:
        self.database.kill()
        time.sleep(away)
        self.database.ensure({}, self.folder)
        return f"away {away:.0f} s"

    def spoil_storage(self, how: str, away: float) -> str:
        with self.proxy.away(how):
            time.sleep(away)
        return f"{how}, {away:.0f} s"

    def _machine_of(self, run: dict[str, Any]) -> str:
        return (run["labels"] or {}).get("prefect.worker.name") or MACHINES[0]

    def _told_ready(self, name: str) -> int:
        return (self.folder / name / "worker.log").read_text(errors="replace").count(READY)

    def _is_under_way(self, run_id: str) -> bool:
        with suppress(OSError):
            return not has_ended(self.first.run(run_id))
        return True  # the server is away


class Campaign:
    """Nights in a world, and what is done to them."""

    def __init__(self, world: World, nights: list[Night], rng: random.Random, kills: int) -> None:
        self.world, self.nights, self._rng = world, nights, rng
        self._deck = [KINDS[number % len(KINDS)] for number in range(kills)]
        rng.shuffle(self._deck)
        self._kills = kills
        self._outages = [OUTAGES[number % len(OUTAGES)] for number in range(kills)]

    def schedule(self, minutes: float) -> None:
        """Deploy the nightly flow, with a schedule for each night."""
        machine = self.world.first
        machine.rollout("ops", "install", "--webhook", machine.webhook, "--silent-after", "120")
        machine.deploy(nightly(self.nights[0].config, schedules=[]), folder=PROJECT)
        first = datetime.now(UTC) + timedelta(seconds=PLANNED_SECONDS)
        schedules = []
        for number, night in enumerate(self.nights):
            begin = first + timedelta(minutes=minutes * number)
            # Minutes that follow each other by the interval, of which each night has one: its parameters are its own.
            rule = f"DTSTART:{begin:%Y%m%dT%H%M%S}\nRRULE:FREQ=MINUTELY;INTERVAL={math.ceil(minutes)};COUNT=1"
            schedules.append(
                {
                    "schedule": {"rrule": rule, "timezone": "UTC"},
                    "parameters": {"config": night.config},
                    "slug": night.name,
                }
            )
        deployment = machine.ask("deployments/name/nightly/nightly")["id"]
        machine.ask(f"deployments/{deployment}/schedules", schedules)

    def disturb(self) -> None:
        """Do everything to the nights that is to be done, until all have ended."""
        began: dict[str, float] = {}
        most = math.ceil(self._kills / len(self.nights))
        while True:
            runs = self._runs()
            if runs is None:
                time.sleep(0.5)
                continue
            under_way = [run for run in runs if run["run_count"] and not has_ended(run)]
            for run in under_way:
                began.setdefault(run["id"], time.monotonic())
            if len(runs) >= len(self.nights) and all(map(has_ended, runs)):
                return
            for run in under_way:
                if time.monotonic() - began[run["id"]] > NIGHT_SECONDS:
                    print(f"{run['parameters']['config']['run']['name']} has not ended: {run['state']}", flush=True)
                    return
            at_work = [run for run in under_way if run["state"]["type"] == "RUNNING"] or under_way
            if not at_work or not self._disturb(at_work[0], most):
                time.sleep(1.0)

    def _disturb(self, run: dict[str, Any], most: int) -> bool:
        """Do the next thing to a night; False where there is none, or it came too late."""
        night = next(night for night in self.nights if night.name == run["parameters"]["config"]["run"]["name"])
        before = [done.kind for done in self.world.done if done.night == night.name]
        kind = self._next_kind(night, before) if len(before) < most else None
        if kind is None:
            return False
        if kind not in OF_ENGINES:
            time.sleep(self._rng.uniform(2.0, 25.0))
            try:
                run = self.world.first.run(run["id"])
            except OSError:  # the server is away
                return False
            if has_ended(run):
                return False
        began = time.time()
        detail = self._do(kind, run)
        if not detail:
            if kind in OF_ENGINES:  # it comes too late for this night
                self._deck.remove(kind)
                self._deck.append(kind)
            return False
        self._deck.remove(kind)
        self.world.done.append(Done(kind, night.name, began, time.time(), detail))
        print(f"{datetime.now(UTC):%H:%M:%S} {night.name}: {kind} ({detail})", flush=True)
        return True

    def _next_kind(self, night: Night, before: list[str]) -> str | None:
        """The next that can be done to the night, an engine's first; a try must be left to the night."""
        allowed = [
            kind
            for kind in self._deck
            if (kind not in OF_ENGINES or night.has_engine)
            and (kind not in COUNTED or sum(map(before.count, COUNTED)) < MOST_COUNTED)
        ]
        first = [kind for kind in allowed if kind in OF_ENGINES and kind not in before]
        return next(iter(first or allowed), None)

    def _do(self, kind: str, run: dict[str, Any]) -> str:
        world, rng = self.world, self._rng
        match kind:
            case "flow":
                return world.kill_flow(run)
            case "worker":
                return world.kill_worker(run)
            case "supervisor":
                return world.kill_supervisor(run, rng.uniform(1.0, 10.0))
            case "server":
                return world.kill_server(rng.uniform(1.0, 15.0))
            case "database":
                return world.kill_database(rng.uniform(1.0, 30.0))
            case "storage":
                return world.spoil_storage(self._outages.pop(), rng.uniform(5.0, 40.0))
            case _:
                return world.kill_engine(run, rng, is_starting=kind == STARTING)

    def _runs(self) -> list[dict[str, Any]] | None:
        """Of the schedule, those that are or were due, by their times; None while the server is away."""
        with suppress(OSError):
            found = self.world.first.ask("flow_runs/filter", {"deployments": {"name": {"any_": ["nightly"]}}})
            return sorted(found, key=lambda run: run["expected_start_time"])
        return None

    def outcome(self) -> list[Night]:
        """What came of the nights, each once."""
        runs = {run["parameters"]["config"]["run"]["name"]: run for run in self._runs() or []}
        found = read_nights(self.world.objects("nights"), self.nights)
        for night in found:
            if (run := runs.get(night.name)) is not None:
                night.state, night.tries, night.seconds = run["state"]["name"], run["run_count"], run["total_run_time"]
        states = {
            name: [
                (state["timestamp"], state["name"], state["message"]) for state in self.world.first.states(run["id"])
            ]
            for name, run in runs.items()
        }
        (self.world.folder / "states.json").write_text(json.dumps(states, indent=1))
        return found


@dataclass
class Left:
    """What is left over, by name."""

    found: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def look(self, world: World, segments: set[Path]) -> None:
        """Comes when the workers have ended, and the server and the database are there."""
        for process in world.processes():
            with suppress(psutil.NoSuchProcess):
                self.found["processes"].append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        self.found["segments of shared memory"] += unused(map(str, {*SHARED_MEMORY.iterdir()} - segments))
        for name in MACHINES:
            self.found["temporary files"] += [
                f"{name}/{path.name}" for path in (world.folder / name / TEMPORARY).iterdir()
            ]
        ask = world.first.ask
        active = {"task_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}}}
        self.found["task runs that are under way"] += [run["name"] for run in ask("task_runs/filter", active)]
        self.found["places taken"] += [
            f"{limit['name']} {limit['active_slots']} of {limit['limit']}"
            for limit in ask("v2/concurrency_limits/filter", {})
            if limit["active_slots"]
        ]
        self.found["damaged objects"] += [str(damage) for damage in verify_store(world.objects("nights")).damage]
        self.found["messages"] += [str(message.get("text", message)) for message in world.told]


@dataclass
class Errors:
    """Records at ERROR, by kind."""

    world: World
    explained: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    others: Counter[tuple[str, str]] = field(default_factory=Counter)
    full: dict[tuple[str, str], str] = field(default_factory=dict)

    def read(self) -> None:
        for path in (self.world.folder / "server.log", *(self.world.folder / name / "worker.log" for name in MACHINES)):
            last = 0.0
            for record in records(path.read_text(errors="replace")):
                last = moment_of(record) or last
                if ERROR.search(record):
                    self._add(path.stem, record, last)
        offset = 0
        while True:
            page = self.world.first.ask("logs/filter", {"logs": {"level": {"ge_": 40}}, "limit": 200, "offset": offset})
            for row in page:
                self._add("run", row["message"], datetime.fromisoformat(row["timestamp"]).timestamp())
            offset += len(page)
            if not page:
                return

    def _add(self, where: str, record: str, at: float) -> None:
        kind = kind_of(record)
        for expected in EXPLAINED:
            if re.search(expected.pattern, record, re.IGNORECASE | re.DOTALL):
                for done in self.world.done:
                    if done.kind in expected.by and done.began <= at + 2 and at <= done.ended + EXPLAINS_SECONDS:
                        self.explained[where, kind, f"{done.kind}: {expected.reason}"] += 1
                        self.full.setdefault((where, kind), record)
                        return
        self.others[where, kind] += 1
        self.full.setdefault((where, kind), record)


def kind_of(record: str) -> str:
    """What errors of the same kind have in common: the first line and the last, without times, ids and numbers."""
    lines = [line for line in record.splitlines() if line.strip()]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    text = re.sub(r"^\d\d:\d\d:\d\d\.\d+ \| ", "", text)
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|\b[0-9a-f]{10,64}\b|0x[0-9a-f]+", "ID", text)
    text = re.sub(r"(/[\w.\-]+){3,}", "PATH", text)
    text = re.sub(r"'[\w ]+-\w{3}'|\d+(\.\d+)?", "N", text)
    return text[:240]


def moment_of(record: str) -> float | None:
    """Seconds since the epoch of a record whose line begins with the time of day; the newest such moment."""
    found = re.match(r"(\d\d):(\d\d):(\d\d)", record)
    if found is None:
        return None
    hours, minutes, seconds = map(int, found.groups())
    now = datetime.now()
    at = now.replace(hour=hours, minute=minutes, second=seconds)
    return (at if at <= now else at - timedelta(days=1)).timestamp()


def has_ended(run: dict[str, Any]) -> bool:
    """Whether nothing more comes of a run: a crashed one is tried again by itself, while a try is left."""
    kind = run["state"]["type"]
    return kind in FINAL or (kind == "CRASHED" and run["run_count"] >= MAX_TRIES)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def as_machine(folder: Path) -> list[str]:
    """Begins a command that is to run on a machine of the folder's name, where this user may make one."""
    if os.getuid() != 0:
        return []
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {folder.name}\n")
    script = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
    return ["unshare", "--uts", "--mount", "sh", "-c", script, "sh", folder.name, str(hosts)]


def of_environment(process: psutil.Process, name: str) -> str | None:
    with suppress(psutil.Error):
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.environ().get(name)
    return None


def engines_of(flow: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [child for child in flow.children(recursive=True) if "VLLM" in "".join(child.cmdline()[:1])]
    return []


def killed(process: psutil.Process) -> str:
    """SIGKILL; the process's number, or the empty text where it has just ended."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)
        return f"pid {process.pid}"
    return ""


def nights_of(folder: Path, number: int, engine_every: int, seed: int) -> list[Night]:
    """Nights that differ by their seeds, every so many with vLLM's engine."""
    made_nights = []
    for night in range(number):
        name = f"night-{night + 1}"
        config = nightly_config(
            folder / "task" / "model",
            sft=str(folder / "task" / "sft.jsonl"),
            prompts=str(folder / "task" / "prompts.jsonl"),
            held_out=str(folder / "task" / "held-out.jsonl"),
            report_dir=str(folder / "reports" / name),
        )
        config |= {"seed": 100 * seed + night, "run": {"name": name}, "numerics": "native"}
        config["reward"] = {"kind": "expression", "expression": "num_characters / 20"}  # rises within a minute
        config["promotion"] = {"resource": "policy", "tolerance": 1.0}
        config["sft"]["budget"]["max_steps"] = 60
        config["sft"]["snapshots"]["every_steps"] = 5
        config["ppo"]["prompts_per_iteration"] = 80
        if (night + 1) % engine_every == 0:
            config["backend"] = {"kind": "vllm", "max_model_len": 64, "max_num_seqs": 64, "num_threads": 1}
        made_nights.append(Night(name, config))
    return made_nights


def run_undisturbed(world: World, nights: list[Night]) -> list[Night]:
    """The same nights, one after the other, as commands, in a store of their own."""
    folder = made(world.folder / "undisturbed")
    for night in nights:
        file = write_toml(folder / f"{night.name}.toml", night.config)
        environment = {
            **world.first.environment,
            "ROLLOUT_STORAGE": f"s3://{BUCKET}/undisturbed",
            "ROLLOUT_DATABASE": world.undisturbed_database,
            "AWS_ENDPOINT_URL": world.upstream["endpoint_url"],
        }
        began = time.monotonic()
        with (folder / "log").open("ab") as log:
            subprocess.run(
                [sys.executable, *ROLLOUT, "nightly", "--config", str(file)],
                env=environment, cwd=folder, stdout=log, stderr=log, check=True, timeout=NIGHT_SECONDS,
            )  # fmt: skip
        print(f"{night.name} undisturbed: {time.monotonic() - began:.0f} s", flush=True)
    return read_nights(world.objects("undisturbed"), nights)


def read_nights(objects: ObjectStore, nights: list[Night]) -> list[Night]:
    """What their records say of the nights."""
    records_ = RunRecords(objects)
    heads = {head.name: head for head in records_.heads()}
    found = []
    for night in nights:
        result = Night(night.name, night.config)
        if (head := heads.get(night.name)) is not None:
            result.checkpoint = records_.detail(head)[1].facts.get("checkpoint", "")
            result.promoted, result.rewards = head.promoted, tuple(moment.reward for moment in head.held_out)
        found.append(result)
    return found


@contextmanager
def world_in(folder: Path) -> Iterator[World]:
    told: list[Any] = []
    with ExitStack() as stack:
        _, upstream = stack.enter_context(on_s3(folder))
        proxy = stack.enter_context(faulty_proxy(upstream["endpoint_url"], rate=0.0))
        hook = stack.enter_context(receiving(told))
        world = World(folder, proxy, upstream, hook, told)
        stack.callback(world.close)
        world.start_server()
        yield world


def tell(world: World, expected: list[Night], found: list[Night], left: Left, errors: Errors) -> list[str]:
    """Print everything; what is wrong, in words."""
    wrong = []
    columns = f"{'state':<12}{'tries':>5}{'seconds':>9}  {'checkpoint':<14}{'as undisturbed':<16}done to it"
    print(f"\n{'night':<10}{'engine':<14}{columns}")
    for night, reference in zip(found, expected, strict=True):
        same = (night.checkpoint, night.rewards, night.promoted) == (
            reference.checkpoint, reference.rewards, reference.promoted
        )  # fmt: skip
        done = "; ".join(f"{item.kind} ({item.detail})" for item in world.done if item.night == night.name)
        print(
            f"{night.name:<10}{night.config['backend']['kind']:<14}{night.state:<12}{night.tries:>5}"
            f"{night.seconds:>9.0f}  {night.checkpoint[:12]:<14}{'yes' if same else 'NO':<16}{done}"
        )
        if not same or night.state != "Completed":
            wrong.append(f"{night.name} is {night.state}: {night.checkpoint[:12]} {night.promoted} {night.rewards}, "
                         f"expected {reference.checkpoint[:12]} {reference.promoted} {reference.rewards}")  # fmt: skip
    promoted = Counter(entry.model for entry in history_of(world.objects("nights"), "policy"))
    wanted = Counter(entry.model for entry in history_of(world.objects("undisturbed"), "policy"))
    print(f"promotions: {sum(promoted.values())}, undisturbed {sum(wanted.values())}")
    if promoted != wanted:
        wrong.append(f"promoted {dict(promoted)}, expected {dict(wanted)}")
    print(f"\n{'done':<20}times")
    for kind, count in Counter(done.kind for done in world.done).most_common():
        print(f"{kind:<20}{count:>5}")
    print("\nleft over")
    for name, items in left.found.items():
        print(f"{name:<32}{len(items):>5}  {'; '.join(items[:6])}")
        if items and name != "temporary files":
            wrong.append(f"{name}: {'; '.join(items[:6])}")
    print("\nerrors that something explains")
    for (where, kind, reason), count in errors.explained.most_common():
        print(f"{count:>5}  {where:<8}{reason:<40}{kind}")
    print("\nother errors")
    for (where, kind), count in errors.others.most_common():
        print(f"{count:>5}  {where:<8}{kind}")
    return wrong + [f"an error that nothing explains: {kind}" for _, kind in errors.others]


def main() -> None:
    sys.path.insert(0, str(PROJECT / "examples"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=10)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0, help="between the nights of the schedule")
    parser.add_argument("--engine-every", type=int, default=2, help="every so many nights have vLLM, the others none")
    parser.add_argument("--keep", action="store_true", help="keep the logs also where nothing is wrong")
    given = parser.parse_args()
    # A shell has what it starts in the background ignore the one; the other would leave all of it behind.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="tn-"))  # with the logs; it stays if something is wrong
    folder.chmod(0o711)
    print(f"working in {folder}", flush=True)
    make_task(folder / "task", hidden_size=128)  # vLLM on a CPU has no smaller heads
    nights = nights_of(folder, given.nights, given.engine_every, given.seed)
    segments = {*SHARED_MEMORY.iterdir()}
    with world_in(folder) as world:
        expected = run_undisturbed(world, nights)
        campaign = Campaign(world, nights, random.Random(given.seed), given.kills)
        campaign.schedule(given.minutes)
        for name in MACHINES:
            world.start_worker(name)
        with suppress(KeyboardInterrupt):
            campaign.disturb()
        wait_for(lambda: answers(f"{world.first.api}/health"), "the server")
        found = campaign.outcome()
        world.end_workers()
        left, errors = Left(), Errors(world)
        left.look(world, segments)
        errors.read()
        (folder / "errors.json").write_text(
            json.dumps({f"{w}: {k}": text for (w, k), text in errors.full.items()}, indent=1)
        )
        wrong = tell(world, expected, found, left, errors)
    if wrong:
        print(f"\nwrong; everything is in {folder}:\n" + "\n".join(wrong))
        sys.exit(1)
    if not given.keep:
        shutil.rmtree(folder)
    print(f"\n{len(found)} nights, {len(world.done)} kills and outages: all as if nothing had been done")


if __name__ == "__main__":
    main()

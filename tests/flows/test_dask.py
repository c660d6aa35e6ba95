"""Fan-out over Dask with real schedulers and workers: killed, late, hung, or sharing nothing but S3 and Postgres.

Every test ends with the same questions: is every input answered once and in order, and was nothing generated again
after its completion had been committed?
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.config import DaskConfig, InferBatchConfig, WorkersConfig, parse_config
from rollout_core.plans.batch_plan import plan_batch
from tests.conftest import BUCKET, PROJECT
from tests.flows.conftest import finished_samples, wait_for, write_toml
from tests.store.postgres import PostgresServer

pytestmark = pytest.mark.timeout(1200)
ROLLOUT = ("-c", "from flows.cli import main; main()", "infer", "batch", "--config")
ATTEMPTS = "SELECT rollout_key, sequence_id, status, worker_id FROM attempts ORDER BY rollout_key, sequence_id"


def prompt_of(number: int) -> str:
    return f"sort {number % 10} {number} ="


@dataclass
class Batch:
    """A prompt set and how it is run."""

    folder: Path
    model: Path
    num_prompts: int
    workers: dict[str, Any]
    delay_seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "model": {"uri": str(self.model)},
            "sampling": {"max_tokens": 64},
            "input": {"glob": str(self.folder / "prompts.jsonl")},
            "output": {"dir": str(self.folder / "out")},
            "workers": {"claim_size": 10, "stale_after_seconds": 3, **self.workers},
            "backend": {"kind": "scripted", "text": "{prompt}", "delay_seconds": self.delay_seconds},
        }

    def write(self) -> str:
        rows = (
            {"prompt": f"sort {number % 10} {number} =", "id": f"row-{number}"} for number in range(self.num_prompts)
        )
        (self.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(write_toml(self.folder / "batch.toml", self.document()))

    def check_output(self) -> None:
        """Every input once, in order, with its own completion."""
        rows = [json.loads(line) for line in (self.folder / "out" / "completions.jsonl").read_text().splitlines()]
        assert [row["id"] for row in rows] == [f"row-{number}" for number in range(self.num_prompts)]
        assert [row["completion"] for row in rows] == [prompt_of(number) for number in range(self.num_prompts)]


@dataclass
class Cluster:
    """A scheduler and workers, each a process of its own."""

    start: Callable[..., subprocess.Popen[str]]
    address: str
    log: Path
    environment: dict[str, str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def scheduler(self) -> subprocess.Popen[str]:
        port = self.address.rpartition(":")[2]
        return self._dask("scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard")

    def worker(self, name: str, *options: str, cwd: Path = PROJECT, **environment: str) -> subprocess.Popen[str]:
        common = ("--nthreads", "2", "--no-nanny", "--no-dashboard", "--memory-limit", "0")
        local = ("--name", name, "--local-directory", str(self.log.parent / name))
        return self._dask("worker", self.address, *common, *local, *options, cwd=cwd, **environment)

    def _dask(self, *arguments: str, cwd: Path = PROJECT, **environment: str) -> subprocess.Popen[str]:
        with self.log.open("a") as log:
            return self.start(
                "-m", "dask", *arguments, stdout=log, cwd=cwd, env={**self.environment, **environment}
            )  # fmt: skip


@pytest.fixture
def cluster(start_process, prefect_server, tmp_path, server_logs) -> Cluster:
    from tasks.runtime.prefect_server import _free_port

    server_logs.watch(tmp_path / "cluster.log")
    server_logs.expect(
        "Failed to communicate with scheduler during heartbeat", "tests end schedulers under their workers"
    )

    environment = {"PREFECT_API_URL": prefect_server, "PYTHONPATH": str(PROJECT)}
    return Cluster(start_process, f"tcp://127.0.0.1:{_free_port()}", tmp_path / "cluster.log", environment)


@pytest.fixture
def run(start_process, prefect_server) -> Callable[..., subprocess.Popen[str]]:
    def start(config: str, **environment: str) -> subprocess.Popen[str]:
        environment = {"PREFECT_API_URL": prefect_server, "PYTHONPATH": str(PROJECT), "COLUMNS": "200"} | environment
        return start_process(*ROLLOUT, config, env=environment)

    return start


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=500)
    assert process.returncode == code, output[-5000:]
    return output


def attempts() -> list[tuple[int, int, str, str]]:
    """Sample, number, status and worker of every attempt in the SQLite store."""
    path = os.environ["ROLLOUT_DATABASE"].removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as database:
        return database.execute(ATTEMPTS).fetchall()


def check_attempts(rows: list[tuple[int, int, str, str]], num_samples: int) -> dict[int, int]:
    """One success a sample, and no attempt after it. Gives the number of successes by process id."""
    statuses: dict[int, list[str]] = defaultdict(list)
    winners: dict[int, int] = defaultdict(int)
    for sample, _, status, worker in rows:
        statuses[sample].append(status)
        if status == "succeeded":
            winners[int(worker.split(":")[-2])] += 1
    assert len(statuses) == num_samples
    assert all(of_sample.index("succeeded") == len(of_sample) - 1 for of_sample in statuses.values())
    return dict(winners)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


@pytest.mark.server
def test_a_local_cluster_of_two_processes_shares_the_shards_and_a_second_run_finds_all_of_them(
    tiny_model, tmp_path, run
):
    dask = {"cluster": "distributed.LocalCluster", "options": {"n_workers": 2, "threads_per_worker": 2}}
    batch = Batch(tmp_path, tiny_model, 240, {"shard_size": 30, "dask": dask}, delay_seconds=0.02)
    config = batch.write()
    finish(run(config))
    batch.check_output()
    winners = check_attempts(attempts(), 240)
    assert len(winners) == 2 and min(winners.values()) >= 30, winners
    before = attempts()
    # By threads this time: what a cluster computed is cached for everyone.
    batch.workers.pop("dask")
    (tmp_path / "out" / "completions.jsonl").unlink()
    finish(run(batch.write()))
    batch.check_output()
    assert attempts() == before


def test_workers_have_one_thread_and_the_run_that_starts_them_as_many_as_before(tmp_path: Path):
    import dask.config
    from distributed import Client, LocalCluster

    from tasks.runtime.dask.fleet import cluster_settings

    def threads() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")}

    before = threads()
    here: dict[str, Any] = {"dashboard_address": None, "local_directory": str(tmp_path)}
    with dask.config.set({**cluster_settings(), "temporary-directory": str(tmp_path)}):
        with LocalCluster(n_workers=1, processes=True, **here) as cluster, Client(cluster) as client:
            [found] = client.run(threads).values()
    assert found == dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | before
    assert threads() == before


@pytest.mark.server
def test_a_killed_worker_loses_only_what_it_had_not_committed_and_its_shards_move(tiny_model, tmp_path, run, cluster):
    workers = {"shard_size": 60, "dask": {"address": cluster.address}}
    batch = Batch(tmp_path, tiny_model, 360, workers, delay_seconds=0.03)
    cluster.scheduler()
    victim, other = (cluster.worker(name) for name in ("victim", "other"))
    told = tmp_path / "events.ndjson"
    driver = run(batch.write(), ROLLOUT_EVENTS=str(told))
    wait_for(lambda: winners_so_far().get(victim.pid, 0) >= 20, "samples of the victim", process=driver)
    kill(victim)
    committed = {row[0] for row in attempts() if row[2] == "succeeded"}
    finish(driver)
    batch.check_output()
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    topics = [line["topic"] for line in lines if line["topic"].startswith("worker_")]
    assert sorted(topics) == ["worker_end", "worker_lost", "worker_start", "worker_start"]
    rows = attempts()
    winners = check_attempts(rows, 360)
    assert winners[victim.pid] >= 20 and winners[victim.pid] + winners[other.pid] == 360
    by_sample: dict[int, int] = defaultdict(int)
    for sample, *_ in rows:
        by_sample[sample] += 1
    again = {sample for sample, count in by_sample.items() if count > 1}
    assert not again & committed
    assert 0 < len(again) <= 4 * 10, "two shards, each with the block in work and the one claimed ahead"


def winners_so_far() -> dict[int, int]:
    winners: dict[int, int] = defaultdict(int)
    with contextlib.suppress(sqlite3.OperationalError):
        for _, _, status, worker in attempts():
            if status == "succeeded":
                winners[int(worker.split(":")[-2])] += 1
    return winners


@pytest.mark.campaign
@pytest.mark.server
def test_a_worker_that_joins_late_gets_shards_and_one_without_a_gpu_gets_none(tiny_model, tmp_path, run, cluster):
    workers = {"shard_size": 100, "dask": {"address": cluster.address, "gpus_per_worker": 1}}
    batch = Batch(tmp_path, tiny_model, 500, workers, delay_seconds=0.02)
    cluster.scheduler()
    cluster.worker("without")
    first = cluster.worker("first", "--resources", "GPU=1")
    driver = run(batch.write())
    wait_for(lambda: finished_samples() >= 5, "a sample", process=driver)
    # The first worker has two shards and is stopped, so that what the late one gets does not depend on who is faster.
    with stopped(first.pid):
        assert finished_samples() < 200, "three shards wait"
        late = cluster.worker("late", "--resources", "GPU=1")
        wait_for(lambda: winners_so_far().get(late.pid, 0) >= 250, "samples of more than two shards", process=driver)
    output = finish(driver)
    batch.check_output()
    winners = check_attempts(attempts(), 500)
    assert set(winners) == {first.pid, late.pid}, "the worker that offers no GPU gets nothing"
    assert re.search(r"\b2 Dask workers", output)


@pytest.mark.campaign
@pytest.mark.server
def test_what_a_hung_worker_has_not_done_is_done_by_an_idle_one(tiny_model, tmp_path, run, cluster):
    # A large shard for one worker and a small one for the other.
    workers = {"shard_size": 400, "dask": {"address": cluster.address}}
    batch = Batch(tmp_path, tiny_model, 410, workers, delay_seconds=0.04)
    cluster.scheduler()
    processes = {worker.pid: worker for worker in (cluster.worker("one"), cluster.worker("two"))}
    driver = run(batch.write())
    wait_for(lambda: len(winners_so_far()) == 2, "samples of both", process=driver)
    wait_for(lambda: min(winners_so_far().values()) > 10, "help with the large shard", process=driver)
    owner = max(winners_so_far(), key=winners_so_far().__getitem__)
    with stopped(processes[owner].pid):
        # What the owner had claimed goes stale, which is the last of it.
        wait_for(lambda: finished_samples() == 410, "the whole shard", process=driver)
        assert driver.poll() is None, "the shard's own task ends with its worker's return"
    finish(driver)
    batch.check_output()
    winners = check_attempts(attempts(), 410)
    assert len(winners) == 2 and winners[owner] < 400, winners


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, at a moment when it holds no lock of the SQLite store."""
    process = psutil.Process(pid)
    path = os.environ["ROLLOUT_DATABASE"].removeprefix("sqlite:///")
    for _ in range(50):
        process.suspend()
        with contextlib.closing(sqlite3.connect(path, timeout=1)) as database:
            try:
                database.execute("BEGIN IMMEDIATE")
                database.rollback()
                break
            except sqlite3.OperationalError:
                process.resume()
                time.sleep(0.05)
    try:
        yield
    finally:
        process.resume()


@pytest.mark.campaign
@pytest.mark.server
def test_machines_that_share_only_postgres_and_s3_survive_the_scheduler(tiny_model, tmp_path, run, cluster, s3):
    postgres = PostgresServer()
    try:
        url = postgres.new_database("cluster")
        shared = {
            "ROLLOUT_STORAGE": f"s3://{BUCKET}/{tmp_path.name}",
            "ROLLOUT_DATABASE": url,
            "AWS_ENDPOINT_URL": s3["endpoint_url"],
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

        def rows() -> list[tuple[int, int, str, str]]:
            lines = postgres.run_sql(ATTEMPTS, "cluster").splitlines()
            return [(int(a), int(b), c, d) for a, b, c, d in (line.split("|") for line in lines)]

        def count() -> int:
            with contextlib.suppress(AssertionError):
                return sum(row[2] == "succeeded" for row in rows())
            return 0

        def worker(name: str) -> subprocess.Popen[str]:
            folder = tmp_path / f"machine-{name}"
            folder.mkdir()
            return cluster.worker(name, cwd=folder, ROLLOUT_CACHE=str(folder / "cache"), **shared)

        workers = {"shard_size": 40, "dask": {"address": cluster.address}}
        batch = Batch(tmp_path, tiny_model, 320, workers, delay_seconds=0.02)
        scheduler = cluster.scheduler()
        before = [worker("a"), worker("b")]
        driver = run(batch.write(), **shared)
        wait_for(lambda: count() >= 60, "samples", process=driver)
        kill(scheduler)
        output = finish(driver, code=1)
        assert "the Dask scheduler is gone; what is complete is kept" in output.splitlines()[-1]
        assert "Traceback" not in output.splitlines()[-1]
        for process in before:
            kill(process)
        kept = count()
        assert 60 <= kept < 320

        cluster.scheduler()
        after = [worker("c"), worker("d")]
        finish(run(batch.write(), **shared))
        batch.check_output()
        winners = check_attempts(rows(), 320)
        assert sum(winners.get(process.pid, 0) for process in before) == kept
        assert all(winners.get(process.pid, 0) >= 40 for process in after), winners
        # Weights came from the object store, once to each machine.
        for name in ("c", "d"):
            assert len(list((tmp_path / f"machine-{name}" / "cache").rglob("model.safetensors"))) == 1
    finally:
        postgres.close()


@pytest.mark.server
def test_a_worker_with_another_database_is_one_clear_error(tiny_model, tmp_path, run, cluster, server_logs):
    server_logs.expect("(?s)Compute Failed.*has another database", "the worker says what it refuses")
    batch = Batch(tmp_path, tiny_model, 4, {"dask": {"address": cluster.address}})
    cluster.scheduler()
    cluster.worker("stranger", ROLLOUT_DATABASE=f"sqlite:///{tmp_path / 'other.db'}")
    last = finish(run(batch.write()), code=2).splitlines()[-1]
    assert re.search(r"worker tcp://\S+ has another database than the driver", last), last
    assert "other.db" in last and "rollout.db" in last


def test_nothing_that_answers_at_the_address_is_found_before_the_run(tiny_model, tmp_path):
    batch = Batch(tmp_path, tiny_model, 4, {"dask": {"address": "tcp://127.0.0.1:9"}})
    batch.write()
    config = parse_config(batch.document(), InferBatchConfig)
    with pytest.raises(ConfigError, match=r"workers\.dask: address: no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        plan_batch(config, tmp_path)


@pytest.mark.parametrize(
    ("dask", "message"),
    [
        ({}, "give either address, of a running scheduler, or cluster, a class; got neither"),
        ({"address": "tcp://a:1", "cluster": "a.B"}, "got both"),
        ({"address": "tcp://a:1", "options": {"n_workers": 2}}, "options and adapt are for a cluster class"),
        ({"address": "scheduler:8786"}, "address"),
        ({"cluster": "a.B", "adapt": {"minimum": 3, "maximum": 2}}, "minimum is 3 and maximum 2"),
        ({"cluster": "a.B", "gpus": 1}, "gpus"),
    ],
)
def test_a_cluster_is_given_in_one_way(dask, message):
    with pytest.raises(ValueError, match=message):
        DaskConfig.model_validate(dask)


def test_threads_are_not_counted_for_a_cluster():
    with pytest.raises(ValueError, match="count is 4, but it is for threads of one machine"):
        WorkersConfig.model_validate({"count": 4, "dask": {"cluster": "distributed.LocalCluster"}})


@pytest.mark.parametrize(
    ("path", "message"), [("distributed.NoCluster", "cannot be imported"), ("os.sep", "is str, not a class")]
)
def test_a_cluster_class_that_is_none_is_found_before_the_run(path, message):
    from rollout_core.plans.cluster import check_cluster

    with pytest.raises(ConfigError, match=message):
        check_cluster(DaskConfig(cluster=path))


def test_a_driver_waits_for_a_database_that_is_away_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tasks.runtime import connections, stage
    from tasks.runtime.dask import fleet as dask_fleet

    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'objects'}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / 'rollout.db'}")
    monkeypatch.setattr(stage, "RETRY_DELAYS_SECONDS", [0.01, 0.01])
    opened, calls = connections.open_store, 0

    def open_store():
        nonlocal calls
        calls += 1
        if calls < 3:
            raise Recoverable("the database is away")
        return opened()

    monkeypatch.setattr(connections, "open_store", open_store)
    driver = dask_fleet.introduce("run")
    assert calls == 3 and connections.objects().get_ref(driver.mark) is not None
    calls = -1
    with pytest.raises(Recoverable, match="the database is away"):
        dask_fleet.introduce("run")

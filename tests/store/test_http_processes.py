"""The server as a program: what survives its death, how it starts and stops, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from typer.testing import CliRunner

from deployments.cli import app
from rollout_core.base.errors import Recoverable
from rollout_core.base.locks import SCRATCH_PREFIX, sweep
from rollout_core.store import AttemptedRollout, LightningStoreClient, SqlLightningStore
from tests.store.patience import FOREVER, LONG, until, wait_until
from tests.store.ports import own_port
from tests.support import forked
from tests.support.alive import lives

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("http_child.py")
NUM_WORKERS = 8
NUM_KILLS = 10
PATIENT = (0.05,) * int(LONG / 0.05)
"""Waits of a client whose server is started again."""
MAIN = "from deployments.cli import main; main()"


STARTED: list[subprocess.Popen[str]] = []


LOGS: list[Path] = []
"""Of the servers that the present test started; read in the end."""


@pytest.fixture(autouse=True)
def _leave_nothing_running(server_logs, tmp_path):
    LOGS.append(server_logs.watch(tmp_path / "servers.log"))
    yield
    LOGS.clear()
    while STARTED:
        process = STARTED.pop()
        workers: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for worker in workers:  # left alone they end by themselves, a little later
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        wait_until(lambda: not any(map(lives, workers)))  # noqa: B023 - called at once
    sweep(Path(tempfile.gettempdir()), f"{SCRATCH_PREFIX}*")  # of servers that were killed, as the next server does


def start(*command: str, stderr: int = subprocess.PIPE, **environment: str) -> subprocess.Popen[str]:
    process = forked.Process(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    STARTED.append(process)
    return process


def serve(url: str, *options: str, program: str = MAIN, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """A server process and its address."""
    command = ["-c", program, "store", "serve", "--database", url, *options]
    with LOGS[-1].open("a") as log:
        process = start(*command, stderr=log.fileno(), **environment)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("serving at http://"):
            return process, line.split()[-1]
    raise AssertionError(LOGS[-1].read_text())


@pytest.fixture
def port():
    with own_port() as port:
        yield str(port)


@pytest.fixture(params=["sqlite", "postgres"])
def database(request, url, tmp_path) -> str:
    """What the servers of these tests serve."""
    return url if request.param == "sqlite" else request.getfixturevalue("postgres").database_of(tmp_path)


class Crew:
    """Worker processes, and what was acknowledged to them."""

    def __init__(self, address: str) -> None:
        self.acknowledged: list[list[str]] = []
        self._workers = [start(str(CHILD), address, f"w{n}") for n in range(NUM_WORKERS)]
        self._readers = [threading.Thread(target=self._read, args=(worker,), daemon=True) for worker in self._workers]
        for reader in self._readers:
            reader.start()

    def _read(self, worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            self.acknowledged.append(line.split())

    async def finish(self) -> None:
        """Have them finish what they have begun."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write("stop\n")
            worker.stdin.flush()
        for worker, reader in zip(self._workers, self._readers, strict=True):
            await asyncio.to_thread(reader.join, LONG)
            assert worker.wait(LONG) == 0

    async def check(self, client: LightningStoreClient, at_least: int) -> None:
        """Nothing that was acknowledged is lost or was done twice, and nothing is held by nobody."""
        assert list(await client.query_rollouts(status_in=["preparing", "running"])) == []
        stored = {rollout.rollout_id: rollout for rollout in await client.query_rollouts()}
        spans = {span.span_id for span in await client.query_many_spans(list(stored))}
        counts = dict.fromkeys(("enqueued", "claimed", "span", "succeeded"), 0)
        for kind, rollout_id, *details in self.acknowledged:
            counts[kind] += 1
            rollout = stored[rollout_id]
            if kind == "claimed":
                assert isinstance(rollout, AttemptedRollout)
                assert (rollout.attempt.attempt_id, rollout.attempt.sequence_id) == (details[0], 1)
            elif kind == "span":
                assert details[0] in spans
            elif kind == "succeeded":
                assert rollout.status == "succeeded"
        assert min(counts.values()) >= at_least, counts
        for kind in ("claimed", "enqueued"):
            ids = [rollout_id for what, rollout_id, *_ in self.acknowledged if what == kind]
            assert len(ids) == len(set(ids)), f"a rollout was {kind} twice"
        assert len(stored) == counts["enqueued"], "nothing was enqueued twice"


async def wait_until_succeeded(client: LightningStoreClient, count: int) -> None:
    while (await client.query_rollouts(status_in=["succeeded"], limit=1)).total < count:
        await asyncio.sleep(0.02)


async def test_nothing_acknowledged_is_lost_when_servers_are_killed(database, port):
    server, address = serve(database, "--port", port)
    crew = Crew(address)
    async with LightningStoreClient(address, retry_delays=PATIENT, health_retry_delays=()) as client:
        num_done = 0
        for _ in range(NUM_KILLS):
            # Let some work be done between any two kills, then strike in the midst of it.
            num_done += 20
            await wait_until_succeeded(client, num_done)
            server.send_signal(signal.SIGKILL)
            await asyncio.to_thread(server.communicate)
            num_done = max(num_done, await _count_succeeded(database))
            server, _ = await asyncio.to_thread(serve, database, "--port", port)
        await crew.finish()
        await crew.check(client, 20 * NUM_KILLS)
    server.send_signal(signal.SIGTERM)
    assert server.wait(LONG) == 0


async def _count_succeeded(database: str) -> int:
    async with SqlLightningStore.from_url(database) as store:
        return (await store.query_rollouts(status_in=["succeeded"], limit=0)).total


async def test_nothing_acknowledged_is_lost_when_postgres_is_killed_under_a_server(postgres, tmp_path, server_logs):
    server_logs.expect("", "the test kills the server's database")
    server, address = serve(postgres.database_of(tmp_path), "--port", "0")
    crew = Crew(address)
    async with LightningStoreClient(address, retry_delays=PATIENT, health_retry_delays=()) as client:
        num_done = 0
        for _ in range(NUM_KILLS):
            num_done += 20
            await wait_until_succeeded(client, num_done)
            postgres.stop(at_once=True)
            async with LightningStoreClient(address, retry_delays=()) as hasty:
                assert await hasty.is_healthy(), "the server is there, its database is not"
                with pytest.raises(Recoverable, match="could not do this now"):
                    await hasty.query_rollouts()
                with pytest.raises(Recoverable):
                    await hasty.start_rollout("refused")
            postgres.start()  # not in a thread: it would end with it
            num_done = max(num_done, (await client.query_rollouts(status_in=["succeeded"], limit=1)).total)
        await crew.finish()
        await crew.check(client, 20 * NUM_KILLS)
    assert server.poll() is None, "it was never started again"


async def test_two_servers_on_one_postgres_serve_one_queue(postgres, tmp_path):
    database = postgres.database_of(tmp_path)
    addresses = [serve(database, "--port", "0")[1] for _ in range(2)]
    async with LightningStoreClient(addresses[0]) as one, LightningStoreClient(addresses[1]) as other:
        clients = [one, other]
        rollouts = await asyncio.gather(*[clients[n % 2].enqueue_rollout(n) for n in range(200)])
        claims = await asyncio.gather(*[clients[n % 2].dequeue_many_rollouts(limit=3) for n in range(100)])
        claimed = [rollout for claim in claims for rollout in claim]
        assert sorted(item.rollout_id for item in claimed) == sorted(item.rollout_id for item in rollouts)
        waiting = asyncio.create_task(one.wait_for_rollouts(rollout_ids=[claimed[0].rollout_id]))
        await asyncio.sleep(0.1)
        await other.update_attempt(claimed[0].rollout_id, claimed[0].attempt.attempt_id, status="succeeded")
        assert [item.status for item in await asyncio.wait_for(waiting, LONG)] == ["succeeded"]


async def test_workers_share_a_database_and_add_up_their_metrics(url):
    server, address = serve(url, "--port", "0", "--workers", "2", "--api-key-env", "KEY", KEY="k")
    async with LightningStoreClient(address, api_key="k") as client:
        await asyncio.gather(*[client.enqueue_rollout(n) for n in range(100)])
        claims = await asyncio.gather(*[client.dequeue_many_rollouts(limit=3) for _ in range(50)])
        claimed = [rollout.rollout_id for claim in claims for rollout in claim]
        assert len(claimed) == len(set(claimed)) == 100
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer k"}) as web:
        async with web.get(f"{address}/metrics") as reply:
            text = await reply.text()
    assert 'rollout_store_requests_total{operation="dequeue_rollouts",status="200"} 50.0' in text
    server.send_signal(signal.SIGTERM)
    assert server.wait(LONG) == 0


SLOW_START = """
import os, sys, time
from pathlib import Path
from tests.support import forked
if "--multiprocessing-fork" in sys.orig_argv:
    Path(os.environ["STARTS"], str(os.getpid())).touch()
    time.sleep(float(os.environ["SLOW"]))
"""


@pytest.fixture
def slow_starts(tmp_path, monkeypatch) -> Path:
    """Workers take long to start, as on a busy machine; the folder gets a file for each that was started."""
    folder = tmp_path / "starts"
    folder.mkdir()
    (tmp_path / "site" / "sitecustomize.py").parent.mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLOW_START)
    monkeypatch.setenv("STARTS", str(folder))
    return folder


def start_workers(url: str, tmp_path: Path, slow: float) -> subprocess.Popen[str]:
    command = ["store", "serve", "--database", url, "--port", "0", "--workers", "2"]
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    with LOGS[-1].open("a") as log:
        return start(
            "-c", MAIN, *command,
            stderr=log.fileno(), PYTHONPATH=path, SLOW=str(slow),
        )  # fmt: skip


def test_workers_that_are_slow_to_start_are_waited_for_and_serving_is_said_when_they_serve(url, tmp_path, slow_starts):
    # Twice as long as uvicorn itself would wait.
    server = start_workers(url, tmp_path, slow=10.0)
    lines = [server.stdout.readline() for _ in range(3)]
    assert lines[0] == "starting 2 worker processes ...\n"
    assert lines[1].startswith("ready in ") and float(lines[1].split()[2]) > 10
    assert len(list(slow_starts.iterdir())) == 2, "none was killed for being slow"
    address = lines[2].removeprefix("serving at ").strip()
    assert urllib.request.urlopen(f"{address}/v1/agl/health", timeout=LONG).status == 200
    server.send_signal(signal.SIGTERM)
    assert server.wait(LONG) == 0 and LOGS[-1].read_text() == ""


def test_sigterm_ends_a_server_whose_workers_are_still_starting(url, tmp_path, slow_starts):
    server = start_workers(url, tmp_path, slow=FOREVER)
    wait_until(lambda: len(list(slow_starts.iterdir())) == 2)
    server.send_signal(signal.SIGTERM)
    assert server.wait(LONG) == 0


def test_a_killed_worker_is_named_and_replaced(url):
    server, address = serve(url, "--port", "0", "--workers", "2")
    [victim, _] = [
        child for child in psutil.Process(server.pid).children() if "spawn_main" in " ".join(child.cmdline())
    ]
    victim.kill()
    told = f"worker process {victim.pid} was killed by SIGKILL; another is started"
    wait_until(lambda: told in LOGS[-1].read_text())
    assert urllib.request.urlopen(f"{address}/v1/agl/health", timeout=LONG).status == 200


def test_workers_that_cannot_start_end_the_server_with_a_reason(url, tmp_path, server_logs):
    server_logs.expect("cannot be served", "the test has workers fail")
    (tmp_path / "site").mkdir()
    broken = "import sys\nif '--multiprocessing-fork' in sys.orig_argv:\n    sys.exit('cannot be served')\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(broken)
    server = start_workers(url, tmp_path, slow=0)
    assert server.wait(LONG) == 1
    last = LOGS[-1].read_text().splitlines()[-1]
    assert re.fullmatch(r"rollout: worker process \d+ ended with exit code 1 before it served; .*", last), last


async def test_orphaned_workers_give_the_port_back(url, port):
    def is_free() -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", int(port)))
                return True
        return False

    server, address = serve(url, "--port", port, "--workers", "2")
    async with LightningStoreClient(address) as client:
        await client.enqueue_rollout(1)
    server.kill()
    server.communicate()
    await until(is_free)


TELLS_OF_WAITS = f"""
from rollout_core.store import SqlLightningStore
from rollout_core.web import listening

listening.GRACE_SECONDS = {LONG}
wait = SqlLightningStore.wait_for_rollouts

async def told(self, **options):
    print("waited for", flush=True)
    return await wait(self, **options)

SqlLightningStore.wait_for_rollouts = told
{MAIN}
"""


async def test_sigterm_lets_requests_finish(url):
    server, address = serve(url, "--port", "0", program=TELLS_OF_WAITS)
    async with LightningStoreClient(address, retry_delays=(), request_timeout=2 * LONG) as client:
        rollout = await client.start_rollout(1)
        waiting = asyncio.create_task(client.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))
        assert await asyncio.to_thread(server.stdout.readline) == "waited for\n"
        server.send_signal(signal.SIGTERM)
        while await _is_let_in(address):
            await asyncio.sleep(0.01)
        assert not waiting.done()
        async with SqlLightningStore.from_url(url) as store:
            await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
        assert len(await waiting) == 1
    assert server.wait(LONG) == 0
    assert LOGS[-1].read_text() == "", "nothing to complain about"


async def _is_let_in(address: str) -> bool:
    """Whether the server takes connections."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--database", "mysql:///x"], "database URL is"),
        (["--database", "sqlite:///{folder}/notes.txt"], "not a database"),
        (["--database", "sqlite:///{folder}/s.db", "--host", "0.0.0.0"], "no API key"),
        (["--database", "sqlite:///{folder}/s.db", "--host", "192.0.2.1", "--api-key-env", "PATH"], "cannot listen on"),
        (["--database", "sqlite:///{folder}/s.db", "--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        (["--database", "sqlite:///{folder}/s.db", "--port", "70000"], "65535"),
        (["--database", "sqlite:///{folder}/s.db", "--workers", "0"], "greater than or equal to 1"),
        ([], "--database"),
    ],
)
def test_bad_arguments_end_with_2_and_a_reason(tmp_path, options, reason):
    (tmp_path / "notes.txt").write_text("not a database, but long enough to be looked at " * 10)
    given = [option.replace("{folder}", str(tmp_path)) for option in options]
    result = CliRunner().invoke(app, ["store", "serve", *given], env={"COLUMNS": "200"})
    assert (result.exit_code, reason in result.output) == (2, True), result.output


def test_a_database_that_is_away_ends_the_server_with_one_line(tmp_path):
    command = ["-c", MAIN, "store", "serve", "--port", "0", "--database"]
    for address in ("postgresql://user:secret@127.0.0.1:1/store", f"postgresql://user:secret@/store?host={tmp_path}"):
        process = start(*command, address)
        output, errors = process.communicate(timeout=LONG)
        assert (process.returncode, output) == (1, "")
        [line] = errors.splitlines()
        assert "could not do this now" in line and "secret" not in line

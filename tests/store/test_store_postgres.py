"""Promises of the PostgreSQL store that only real processes and a real server can show."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
from psycopg import pq

from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.store import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    RolloutConfig,
    Span,
    SqlLightningStore,
)
from rollout_core.store.sql import group_commit, postgres as postgres_sessions, postgres_server, sql_store
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.postgres_server import connect, is_lost
from tests.store.forking import leave
from tests.store.patience import FOREVER, LONG, until
from tests.store.postgres import DATABASE, PostgresServer
from tests.support import forked

pytestmark = pytest.mark.asyncio

CHILD = Path(__file__).with_name("postgres_child.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def url(postgres, tmp_path) -> str:
    return postgres.database_of(tmp_path)


def start_child(task: str, *arguments: str) -> subprocess.Popen[str]:
    child = forked.Process(
        [sys.executable, str(CHILD), task, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return child


def start_together(task: str, url: str, arguments: list[str]) -> list[subprocess.Popen[str]]:
    """Children that begin at the same time."""
    children = [start_child(task, url, argument) for argument in arguments]
    go_on_together(children, "ready")
    return children


def go_on_together(children: list[subprocess.Popen[str]], word: str) -> None:
    """Let children go on that stop at this word, once all have come to it."""
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == f"{word}\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()


async def someone_waits(store: SqlLightningStore) -> None:
    """Until a caller of the store has looked for its rollouts, and waits to hear of those that are open."""
    await until(lambda: any(one._open for those in [*store._waiters._by_rollout.values()] for one in [*those]))


def output_of(child: subprocess.Popen[str]) -> list[list[str]]:
    output, _ = child.communicate(timeout=LONG)
    assert child.returncode == 0, output
    return [line.split() for line in output.splitlines()]


async def assert_counts_are_exact(postgres: PostgresServer, store: SqlLightningStore) -> None:
    """The kept counts are those of the tables."""
    counted = await store.statistics()
    for name in ("rollouts", "attempts", "spans"):
        [count] = (postgres.run_sql(f"TABLE {name}", DATABASE).count("\n"),)
        assert counted[f"total_{name}"] == count, name
    for line in postgres.run_sql("SELECT status, COUNT(*) FROM rollouts GROUP BY status", DATABASE).split():
        status, count = line.split("|")
        assert (await store.query_rollouts(status_in=[status], limit=0)).total == int(count)


# Several processes on one database


async def test_processes_share_one_queue_without_double_claims(postgres, url):
    ids = [f"r{n}" for n in range(400)]
    async with SqlLightningStore.from_url(url) as store:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=id, rollout_id=id) for id in ids])
        children = start_together("drain", url, ["1", "1", "7"])
        go_on_together(children, "claimed")
        shares = [[id for (id,) in await asyncio.to_thread(output_of, child)] for child in children]
        assert sorted(id for share in shares for id in share) == sorted(ids)
        assert sum(bool(share) for share in shares) >= 2
        rollouts = await store.query_rollouts()
        assert {(rollout.status, rollout.attempt.sequence_id) for rollout in rollouts} == {("succeeded", 1)}
        await assert_counts_are_exact(postgres, store)


async def test_one_id_enqueued_by_many_processes_at_once_is_one_rollout(postgres, url):
    children = start_together("enqueue_in_batches", url, ["a", "b", "c"])
    for child in children:
        assert await asyncio.to_thread(output_of, child) == [[f"shared-{n}"] for n in range(100)]
    async with SqlLightningStore.from_url(url) as store:
        assert len(await store.query_rollouts()) == 100
        await assert_counts_are_exact(postgres, store)


async def test_everything_acknowledged_survives_crashes_of_the_server(postgres, url):
    names = [f"w{n}" for n in range(8)]
    children = start_together("work_through_restarts", url, names)
    outputs = [asyncio.create_task(asyncio.to_thread(output_of, child)) for child in children]
    for _ in range(3):
        await asyncio.sleep(0.5)
        postgres.stop(at_once=True)
        await asyncio.sleep(0.2)
        postgres.start()
    async with SqlLightningStore.from_url(url) as store:
        # A claim whose answer was lost in a crash has no worker, and these rollouts no timeout: queue them again.
        while not all(output.done() for output in outputs):
            await asyncio.sleep(0.5)
            for rollout in await store.query_rollouts(status_in=["preparing"]):
                if isinstance(rollout, AttemptedRollout) and time.time() - rollout.attempt.start_time > 3:
                    await store.update_rollout(rollout.rollout_id, status="requeuing")
        acknowledged = [line for output in outputs for line in await output]
        stored = {rollout.rollout_id: rollout for rollout in await store.query_rollouts()}
        spans = {span.span_id for id in stored for span in await store.query_spans(id)}
        await assert_counts_are_exact(postgres, store)
    assert set(stored) == {f"{name}-{n}" for name in names for n in range(40)}
    assert {rollout.status for rollout in stored.values()} == {"succeeded"}, "none is stuck"
    assert {line[2] for line in acknowledged if line[0] == "span"} <= spans
    claims = [tuple(line[1:]) for line in acknowledged if line[0] == "claimed"]
    assert len(claims) == len(set(claims)), "no attempt has two owners"
    assert {id for id, _ in claims} == set(stored)


@pytest.fixture
def no_second_look(monkeypatch):
    """Who waits hears of an end, or of none before the test has failed."""
    monkeypatch.setattr(sql_store, "LOOK_SECONDS", FOREVER)


@pytest.mark.usefixtures("no_second_look")
async def test_a_waiter_hears_of_what_another_process_finished(url):
    async with SqlLightningStore.from_url(url) as store:
        rollout = await store.start_rollout(1)
        waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))
        await someone_waits(store)
        await asyncio.to_thread(output_of, start_child("finish", url, rollout.rollout_id))
        [finished] = await asyncio.wait_for(waiting, LONG)
        assert finished.status == "succeeded"


@pytest.mark.usefixtures("no_second_look")
async def test_notices_of_other_programs_are_passed_over(postgres, url, caplog):
    async with SqlLightningStore.from_url(url) as store, SqlLightningStore.from_url(url) as other:
        rollout = await store.enqueue_rollout(1)
        waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))
        await someone_waits(store)
        listener = store._database._listener
        for payload in ("hello", "3", "[[]]", "null"):
            postgres.run_sql(f"NOTIFY rollout_public, '{payload}'", DATABASE)
        await other.update_rollout(rollout.rollout_id, status="cancelled")
        assert len(await asyncio.wait_for(waiting, LONG)) == 1
        assert store._database._listener is listener and listener.is_alive
    assert "is not of this store: 'hello'" in caplog.text


@pytest.mark.usefixtures("no_second_look")
@pytest.mark.parametrize("length", [55, 56, 63])
async def test_a_schema_of_any_name_has_its_waiters_told(postgres, url, length):
    schema = f"s{length:0>{length - 1}}"
    postgres.run_sql(f"CREATE SCHEMA {schema}", DATABASE)
    url = f"{url}&search_path={schema}"
    try:
        async with SqlLightningStore.from_url(url) as store, SqlLightningStore.from_url(url) as other:
            rollout = await store.start_rollout(1)
            waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))
            await someone_waits(store)
            await other.update_attempt(rollout.rollout_id, "latest", status="succeeded")
            assert len(await asyncio.wait_for(waiting, LONG)) == 1
    finally:
        postgres.run_sql(f"DROP SCHEMA {schema} CASCADE", DATABASE)


@pytest.mark.usefixtures("no_second_look")
async def test_waiting_asks_the_server_nothing(url):
    async with (
        SqlLightningStore.from_url(url, scan_debounce_seconds=60) as store,
        SqlLightningStore.from_url(url) as other,
    ):
        rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="x" * 50) for _ in range(300)])
        ids = [rollout.rollout_id for rollout in rollouts]
        waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids))
        await someone_waits(store)
        reads = 0
        read = store._database.read

        async def counting_read(operation):
            nonlocal reads
            reads += 1
            return await read(operation)

        store._database.read = counting_read
        await asyncio.sleep(1.5)
        assert reads == 0
        for id in ids:
            await other.update_rollout(id, status="cancelled")
        assert len(await asyncio.wait_for(waiting, LONG)) == 300


async def test_a_waiter_looks_again_when_the_notice_was_lost(url, monkeypatch):
    monkeypatch.setattr(sql_store, "LOOK_SECONDS", 1.5)
    async with SqlLightningStore.from_url(url) as store, SqlLightningStore.from_url(url) as other:
        rollout = await store.start_rollout(1)
        waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))
        await someone_waits(store)
        other._database._channel = "nobody_listens"
        await other.update_attempt(rollout.rollout_id, "latest", status="succeeded")
        assert len(await asyncio.wait_for(waiting, LONG)) == 1


async def test_a_process_knows_its_own_notices_by_no_number_that_another_may_get(url):
    async with SqlLightningStore.from_url(url) as store, SqlLightningStore.from_url(url) as other:
        mine, others = [await store.start_rollout(n) for n in range(2)]
        await store.wait_for_rollouts(rollout_ids=[mine.rollout_id], timeout=0.1)
        heard: list[str] = []
        store._database._hooks = store._database._hooks._replace(on_finished=heard.extend)
        await store.update_attempt(mine.rollout_id, "latest", status="succeeded")
        await other.update_attempt(others.rollout_id, "latest", status="succeeded")
        await until(lambda: heard)  # what was said before has been heard before
        assert others.rollout_id in heard and mine.rollout_id not in heard
        # A server that was started again gives out the numbers of sessions from the beginning.
        pids = [writer._connection.info.backend_pid for writer in store._database._writers if writer._connection]
        store._database._hear(psycopg.Notify("channel", '["another"]', pids[0]))
        assert heard[-1] == "another"


async def test_the_end_of_the_databases_machine_is_noticed(url):
    for given, idle in ((url, "30"), (f"{url}&keepalives_idle=7", "7")):
        with connect(given, 30) as connection:
            settings = {option.keyword.decode(): (option.val or b"").decode() for option in connection.pgconn.info}
        assert settings["keepalives_idle"] == idle
        assert (settings["keepalives_interval"], settings["keepalives_count"]) == ("10", "3")
        assert settings["tcp_user_timeout"] == "30000"


# Fork and pickle


def _enqueue_and_count(store: SqlLightningStore, name: str) -> int:
    async def run() -> int:
        await store.enqueue_rollout(name, rollout_id=name)
        return len(await store.query_rollouts())

    return asyncio.run(run())


def _child_of_fork(store: SqlLightningStore, name: str) -> None:
    _enqueue_and_count(store, name)
    leave()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_forked_child_and_its_parent_both_go_on(url):
    context = multiprocessing.get_context("fork")
    async with SqlLightningStore.from_url(url) as store:
        await store.enqueue_rollout(0, rollout_id="before")
        busy = [asyncio.create_task(store.enqueue_rollout(n, rollout_id=f"parent-{n}")) for n in range(50)]
        await asyncio.sleep(0)
        children = [context.Process(target=_child_of_fork, args=(store, f"child-{n}")) for n in range(3)]
        for child in children:
            child.start()
        await asyncio.gather(*busy)
        for child in children:
            await asyncio.to_thread(child.join, LONG)
        assert [child.exitcode for child in children] == [0, 0, 0]
        stored = {rollout.rollout_id for rollout in await store.query_rollouts()}
        assert stored == {"before", *(f"parent-{n}" for n in range(50)), *(f"child-{n}" for n in range(3))}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_store_that_has_waited_is_closed_while_a_forked_child_lives(url):
    store = SqlLightningStore.from_url(url)
    rollout = await store.enqueue_rollout(1)
    await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=0.1)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(FOREVER,))
    child.start()
    try:
        await asyncio.wait_for(store.close(), LONG)
        assert child.is_alive()
    finally:
        child.kill()
        child.join()


async def test_a_fork_waits_for_no_transaction_and_the_child_leaves_its_parents_connections_alone(url):
    lines = {name: values for name, *values in await asyncio.to_thread(output_of, start_child("fork", url))}
    assert lines["beside"] == ["True"]
    status, *sessions_before = lines["child"]
    assert status == "0"
    assert set(sessions_before) <= set(lines["after"]), "none was ended"
    assert set(lines["own"]).isdisjoint(sessions_before)


async def test_a_pickled_store_opens_the_same_database(url):
    async with SqlLightningStore.from_url(url, scan_debounce_seconds=3) as store:
        await store.enqueue_rollout(1, rollout_id="a")
        async with pickle.loads(pickle.dumps(store)) as copy:  # noqa: S301 - our own
            assert [rollout.rollout_id for rollout in await copy.query_rollouts()] == ["a"]


# Trouble with the server


async def test_a_server_that_is_away_is_recoverable(tmp_path):
    with pytest.raises(Recoverable, match="could not do this now"):
        SqlLightningStore.from_url("postgresql://somebody:secret@127.0.0.1:1/nothing")
    with pytest.raises(Recoverable) as error:
        SqlLightningStore.from_url(f"postgresql://somebody:secret@/nothing?host={tmp_path}")
    assert "secret" not in str(error.value)


def _error(state: str, message: str) -> bytes:
    """The server's word that it gives no connection."""
    body = b"".join(field.encode() + b"\0" for field in ("SFATAL", "VFATAL", f"C{state}", f"M{message}")) + b"\0"
    return b"E" + struct.pack("!i", 4 + len(body)) + body


UP = b"R" + struct.pack("!ii", 8, 0)
COMING_UP = _error("57P03", "the database system is starting up")
REFUSAL = _error("28000", "role is not permitted to log in")

ANSWERING = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    for answer in sys.argv[1:]:
        with listening.accept()[0] as connection, connection.makefile("rb") as asked:
            asked.read(int.from_bytes(asked.read(4), "big") - 4)
            connection.sendall(bytes.fromhex(answer))
"""
"""A server that gives one answer to each connection, whether that is to be used or to ask if it is up, and ends it.
After the last one it is away. A process: the driver asks whether a server is up without letting other threads run."""


@contextmanager
def _server_of(*answers: bytes) -> Iterator[str]:
    """The URL of a server that gives these answers."""
    command = [sys.executable, "-I", "-S", "-c", ANSWERING, *(answer.hex() for answer in answers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = server.stdout.readline().strip()
            yield f"postgresql://postgres@127.0.0.1:{port}/x?sslmode=disable&gssencmode=disable"
        finally:
            server.kill()


@pytest.mark.parametrize(
    "answers", [[COMING_UP, COMING_UP, UP], [COMING_UP, UP, COMING_UP, COMING_UP, UP]], ids=["once", "twice"]
)
async def test_a_server_that_comes_up_while_it_is_asked_why_it_gave_no_connection_is_recoverable(answers):
    with _server_of(*answers) as url, pytest.raises(Recoverable, match="starting up"):
        SqlLightningStore.from_url(url)


async def test_what_a_server_refuses_once_it_is_known_to_be_up_is_a_configuration_error():
    with _server_of(COMING_UP, UP, REFUSAL, UP) as url, pytest.raises(ConfigError, match="not permitted to log in"):
        SqlLightningStore.from_url(url)


@pytest.mark.parametrize(
    "address", ["postgresql://postgres@/absent?host=HOST", "postgresql://nobody@/contract?host=HOST"]
)
async def test_a_database_or_user_that_does_not_exist_is_a_configuration_error(url, address):
    host = url.partition("host=")[2]
    with pytest.raises(ConfigError, match="refuses the store"):
        SqlLightningStore.from_url(address.replace("HOST", host))


async def test_a_server_whose_name_is_not_found_is_not_asked_whether_it_is_up(monkeypatch):
    """That would look for the name again, and no other thread would run meanwhile, however long it takes."""

    def look_up(*_, **__):
        raise socket.gaierror(socket.EAI_AGAIN, "no answer to this name")

    driver = SimpleNamespace(Conninfo=pq.Conninfo, PGconn=None)
    monkeypatch.setattr(postgres_server, "pq", driver)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(Recoverable, match="no answer to this name"):
        SqlLightningStore.from_url("postgresql://postgres@database.example/x")


@pytest.mark.parametrize("address", ["me:se%cret@here/x", "me:secret@127.0.0.1/x?sslmode=no", "me:secret@here/%00"])
async def test_an_address_that_is_none_is_a_configuration_error_without_its_password(address):
    with pytest.raises(ConfigError) as error:
        SqlLightningStore.from_url(f"postgresql://{address}")
    assert "cret" not in f"{error.value!r}"


async def test_the_query_of_an_address_may_hold_settings_of_the_server(url):
    async with SqlLightningStore.from_url(f"{url}&work_mem=5MB&DateStyle=SQL%2C%20DMY&synchronous_commit=off") as store:
        assert await store._database.read(lambda tx: tx.rows("SHOW work_mem")) == [("5MB",)]
        assert await store._database.write(lambda tx: tx.rows("SHOW DateStyle")) == [("SQL, DMY",)]
        assert await store._database.write(lambda tx: tx.rows("SHOW synchronous_commit")) == [("on",)]


async def test_rows_to_change_are_found_by_index_however_small_the_tables_are(url):
    async with SqlLightningStore.from_url(url) as store:
        for table, key in (("rollouts", "key"), ("attempts", "rollout_key, sequence_id")):
            statement = postgres_sessions._update(table, "status", key).of_json.decode().replace("$1", "?")
            plan = await store._database.write(lambda tx, sql=statement: tx.rows(f"EXPLAIN {sql}", "[]"))
            assert f"Index Scan using {table}_pkey" in f"{plan}"


async def test_large_batches_go_in_parts(url, monkeypatch):
    monkeypatch.setattr(postgres_sessions, "MAX_STATEMENT_BYTES", 1_000)
    async with SqlLightningStore.from_url(url) as store:
        inputs = ["x" * 400, "y" * 3_000, '"\\\u2028\U0001f600', None, 1e300, 12345678901234567890123, "z"]
        rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=input) for input in inputs])
        assert [rollout.input for rollout in await store.query_rollouts()] == inputs
        claimed = await store.dequeue_many_rollouts(limit=10)
        assert [one.rollout_id for one in claimed] == [one.rollout_id for one in rollouts]


async def test_the_store_goes_on_after_a_restart_of_the_server(postgres, url):
    async with SqlLightningStore.from_url(url) as store:
        await store.enqueue_rollout(1, rollout_id="before")
        assert len(await store.query_rollouts()) == 1
        for at_once in (False, True):
            postgres.stop(at_once=at_once)
            calls = [store.enqueue_rollout(2, rollout_id="lost") for _ in range(5)]
            calls += [store.query_rollouts(), store.wait_for_rollouts(rollout_ids=["before"])]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [Recoverable] * 7
            postgres.start()
            assert [rollout.rollout_id for rollout in await store.query_rollouts()] == ["before"]
            assert (await store.enqueue_rollout(1, rollout_id="before")).rollout_id == "before"


async def test_a_store_that_was_connected_once_may_repeat_what_the_server_refuses(postgres, url):
    # A limit of connections, for example, is reported in the server's language.
    async with SqlLightningStore.from_url(url) as store:
        postgres.run_sql(f"ALTER DATABASE {DATABASE} ALLOW_CONNECTIONS false")
        try:
            with pytest.raises(Recoverable, match="could not do this now"):
                await store.enqueue_rollout(1)
            with pytest.raises(ConfigError, match="refuses the store"):
                SqlLightningStore.from_url(url)
        finally:
            postgres.run_sql(f"ALTER DATABASE {DATABASE} ALLOW_CONNECTIONS true")
        await store.enqueue_rollout(1)


async def test_connections_cut_while_idle_are_replaced_unnoticed(postgres, url):
    async with SqlLightningStore.from_url(url) as store:
        await store.enqueue_rollout(1, rollout_id="a")
        await store.query_rollouts()
        postgres.run_sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'rollout'")
        await store.enqueue_rollout(2, rollout_id="b")
        assert len(await store.query_rollouts()) == 2


async def test_connections_that_the_server_finds_idle_for_too_long_are_replaced_unnoticed(postgres, url):
    sessions = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'rollout'"
    async with SqlLightningStore.from_url(f"{url}&idle_session_timeout=1000") as store:
        for n in range(2):
            await store.enqueue_rollout(n)
            assert len(await store.query_rollouts()) == n + 1
            await until(lambda: not postgres.run_sql(sessions))


@pytest.mark.parametrize("state", ["57P04", "57P05", "25P03", "25P04"])
async def test_a_connection_that_the_server_ends_is_lost(state):
    assert is_lost(psycopg.errors.lookup(state)("ended"))


@pytest.mark.usefixtures("no_second_look")
async def test_a_waiter_outlives_its_connection(postgres, url):
    async with SqlLightningStore.from_url(url) as store, SqlLightningStore.from_url(url) as other:
        rollout = await store.start_rollout(1)
        waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))
        await someone_waits(store)
        postgres.run_sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'rollout'")
        await other.update_attempt(rollout.rollout_id, "latest", status="succeeded")
        assert len(await asyncio.wait_for(waiting, LONG)) == 1


def sleep_at_server(seconds: float) -> Callable[[Transaction], object]:
    return lambda tx: tx.rows("SELECT 1 FROM pg_sleep(?)", seconds)


async def test_reads_whose_callers_gave_up_hold_up_no_others(url):
    async with SqlLightningStore.from_url(url) as store:
        for _ in range(8):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(store._database.read(sleep_at_server(FOREVER)), 0.05)
        for _ in range(8):
            assert len(await asyncio.wait_for(store.query_rollouts(), LONG)) == 0


async def test_a_long_read_does_not_hold_up_the_end_of_the_store(url, monkeypatch):
    monkeypatch.setattr(group_commit, "CLOSE_SECONDS", 0.5)
    store = SqlLightningStore.from_url(url)
    times = (0.1, *[FOREVER] * 6)
    reads = [asyncio.create_task(store._database.read(sleep_at_server(seconds))) for seconds in times]
    await reads[0]
    await asyncio.wait_for(store.close(), LONG)
    outcomes = await asyncio.gather(*reads, return_exceptions=True)
    assert outcomes[0] == [(1,)]
    assert [type(outcome) for outcome in outcomes[1:]] == [Fatal] * 6


async def test_rows_that_another_program_holds_are_recoverable(url):
    async with SqlLightningStore.from_url(url, busy_timeout_seconds=0.2) as store:
        rollout = await store.start_rollout(1)
        other = SqlLightningStore.from_url(url)

        held, released = threading.Event(), threading.Event()

        def hold(tx) -> None:
            tx.rows("SELECT key FROM rollouts r WHERE rollout_id = ? {lock}", rollout.rollout_id)
            held.set()
            released.wait(LONG)

        holding = asyncio.create_task(other._database.write(hold))
        try:
            assert await asyncio.to_thread(held.wait, LONG)
            with pytest.raises(Recoverable, match="lock timeout"):
                await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
            await store.enqueue_rollout(2)
        finally:
            released.set()
        await holding
        await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
        await other.close()


async def test_values_that_postgresql_cannot_hold_are_refused(url):
    async with SqlLightningStore.from_url(url) as store:
        rollout = await store.start_rollout("a\0b")
        assert (await store.get_rollout_by_id(rollout.rollout_id)).input == "a\0b", "JSON escapes it"
        for bad in ("a\0b", "\ud800", "x" * 20_000_000):
            with pytest.raises(ConfigError):
                await store.enqueue_rollout(1, rollout_id=bad)
        for bad in ("\ud800", ["a"], object()):
            with pytest.raises(ConfigError):
                await store.get_rollout_by_id(bad)
        span = Span.from_attributes(
            rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, attributes={}, name="a\0b"
        )
        good = span.model_copy(update={"name": "good", "span_id": "1"})
        outcomes = await asyncio.gather(store.add_span(span), store.add_span(good), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ConfigError, Span]
        assert len(await store.query_rollouts()) == 1


@pytest.mark.parametrize("number", [math.inf, math.nan])
async def test_batches_turn_no_number_into_nothing(url, number):
    rows = [("a", "idle", 1.0), ("b", "idle", number)]
    async with SqlLightningStore.from_url(url) as store:
        with pytest.raises(ConfigError, match="last_busy_time is"):
            await store._database.write(lambda tx: tx.insert("workers", "worker_id, status, last_busy_time", rows))


async def test_an_input_of_a_hundred_megabytes_is_stored(url):
    async with SqlLightningStore.from_url(url) as store:
        text = "x" * 100_000_000
        rollout = await store.enqueue_rollout(text)
        assert (await store.get_rollout_by_id(rollout.rollout_id)).input == text


async def test_a_closed_store_says_so(url):
    store = SqlLightningStore.from_url(url)
    pending = [asyncio.create_task(store.enqueue_rollout(n)) for n in range(20)]
    await asyncio.sleep(0)
    await store.close()
    await store.close()
    assert len(await asyncio.gather(*pending)) == 20, "calls under way are finished"
    for call in (store.enqueue_rollout(1), store.query_rollouts()):
        with pytest.raises(Fatal, match="is closed; open it again"):
            await call


async def test_commits_are_on_disk(url):
    async with SqlLightningStore.from_url(url) as store:
        assert await store._database.write(lambda tx: tx.rows("SHOW synchronous_commit")) == [("on",)]


async def test_lost_attempts_are_found_once_by_many_processes(url, clock):
    stores = [SqlLightningStore.from_url(url, clock=clock, scan_debounce_seconds=0) for _ in range(3)]
    config = RolloutConfig(timeout_seconds=10, max_attempts=2, retry_condition=["timeout"])
    await stores[0].enqueue_many_rollouts([EnqueueRolloutRequest(input=n, config=config) for n in range(200)])
    await stores[0].dequeue_many_rollouts(limit=200)
    clock.advance(11)
    pages = await asyncio.gather(*[store.query_rollouts() for store in stores])
    assert {rollout.status for rollout in pages[0]} <= {"requeuing", "preparing"}
    again = await asyncio.gather(*[store.dequeue_many_rollouts(limit=100) for store in stores])
    claimed = [(rollout.rollout_id, rollout.attempt.sequence_id) for share in again for rollout in share]
    assert len(claimed) == len(set(claimed)) == 200
    for store in stores:
        await store.close()

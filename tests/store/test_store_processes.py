"""Promises of the SQLite store that only real processes can show: durability, sharing a file, fork, and bad disks."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollout_core.base.errors import ConfigError, Conflict, Fatal, Recoverable
from rollout_core.store import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig, SqlLightningStore
from rollout_core.store.sql import sql_store
from rollout_core.store.sql.database import REVISIONS
from tests.store.forking import leave
from tests.store.patience import FOREVER, LONG
from tests.support import forked

pytestmark = pytest.mark.asyncio

CHILD = Path(__file__).with_name("sqlite_child.py")
ROOT = Path(__file__).parents[2]


def start_child(task: str, *arguments: str) -> subprocess.Popen[str]:
    return forked.Process(
        [sys.executable, str(CHILD), task, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def run_child(task: str, *arguments: str) -> list[list[str]]:
    child = start_child(task, *arguments)
    output, _ = child.communicate(timeout=LONG)
    assert child.returncode == 0, output
    return [line.split() for line in output.splitlines()]


def next_write(store: SqlLightningStore) -> threading.Event:
    """Set when the store begins its next transaction that writes: what it holds can no longer be withdrawn."""
    [writer] = store._database._writers
    begin, began = writer.begin, threading.Event()

    def told() -> None:
        began.set()
        begin()

    writer.begin = told
    return began


# Durability


async def test_everything_acknowledged_survives_sigkill(url):
    acknowledged: list[list[str]] = []
    for turn in range(3):
        child = start_child("write_until_killed", url, f"turn{turn}")
        assert child.stdout is not None
        acknowledged += [child.stdout.readline().split() for _ in range(500)]
        time.sleep(0.01 * turn)
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read()  # ``communicate`` would lose what ``readline`` has read ahead
        child.communicate(timeout=LONG)
        # The kill may cut the last line short; only whole lines were acknowledged.
        acknowledged += [line.split() for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    async with SqlLightningStore.from_url(url) as store:
        stored = {rollout.rollout_id: rollout for rollout in await store.query_rollouts()}
        spans = {span.span_id for span in await store.query_many_spans(list(stored))}
    counts = dict.fromkeys(("enqueued", "claimed", "span", "succeeded"), 0)
    for kind, rollout_id, *details in acknowledged:
        counts[kind] += 1
        rollout = stored[rollout_id]
        if kind == "claimed":
            assert isinstance(rollout, AttemptedRollout) and rollout.attempt.attempt_id == details[0]
        elif kind == "span":
            assert details[0] in spans
        elif kind == "succeeded":
            assert rollout.status == "succeeded"
    assert min(counts.values()) > 20, counts
    claimed = [rollout_id for kind, rollout_id, *_ in acknowledged if kind == "claimed"]
    assert len(claimed) == len(set(claimed))


async def test_commits_sync_the_log(url):
    async with SqlLightningStore.from_url(url) as store:
        settings = await store._database.write(
            lambda tx: (tx.number("PRAGMA synchronous"), tx.rows("PRAGMA journal_mode")), watched=False
        )
    assert settings == (2, [("wal",)]), "2 is FULL: the log is synced at every commit"


async def test_the_schema_and_its_revision_are_in_the_file(url, tmp_path):
    await SqlLightningStore.from_url(url).close()
    connection = sqlite3.connect(tmp_path / "store.db")
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    assert {"rollouts", "rollout_payloads", "attempts", "spans", "resources", "workers"} <= tables
    assert connection.execute("SELECT * FROM alembic_version").fetchall() == [(REVISIONS[-1],)]
    connection.close()


# Several processes, threads and loops on one file


async def test_processes_share_one_queue_without_double_claims(url):
    ids = [f"r{n}" for n in range(600)]
    async with SqlLightningStore.from_url(url) as store:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=id, rollout_id=id) for id in ids])
        children = [start_child("drain", url, limit) for limit in ("1", "1", "7")]
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        for child in children:
            assert child.stdout.readline() == "claimed\n"
        for child in children:
            child.stdin.write("go on\n")
            child.stdin.flush()
        mine = []
        while (claimed := await store.dequeue_rollout("parent")) is not None:
            mine.append(claimed.rollout_id)
            await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded", fenced=True)
        shares = [mine] + [child.communicate(timeout=LONG)[0].split() for child in children]
        assert all(child.returncode == 0 for child in children)
        assert sorted(id for share in shares for id in share) == sorted(ids)
        assert sum(bool(share) for share in shares) >= 2
        rollouts = await store.query_rollouts()
        assert {(rollout.status, rollout.attempt.sequence_id) for rollout in rollouts} == {("succeeded", 1)}


async def test_a_waiter_sees_what_another_process_finished(url):
    async with SqlLightningStore.from_url(url) as store:
        rollout = await store.start_rollout(1)
        waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))
        await asyncio.to_thread(run_child, "finish", url, rollout.rollout_id)
        [finished] = await asyncio.wait_for(waiting, LONG)
        assert finished.status == "succeeded"


async def test_processes_may_open_a_new_file_at_the_same_time(url):
    children = [start_child("drain", url, "1") for _ in range(4)]
    for child in children:
        child.communicate("go\n", timeout=LONG)
    assert [child.returncode for child in children] == [0] * 4


async def test_threads_with_loops_of_their_own_share_a_store(url):
    async with SqlLightningStore.from_url(url) as store:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(120)])
        shares: list[list[int]] = []

        async def drain() -> list[int]:
            mine = []
            while (claimed := await store.dequeue_rollout()) is not None:
                mine.append(claimed.input)
                await store.get_rollout_by_id(claimed.rollout_id)
            return mine

        threads = [threading.Thread(target=lambda: shares.append(asyncio.run(drain()))) for _ in range(4)]
        for thread in threads:
            thread.start()
        shares.append(await drain())
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert sorted(n for share in shares for n in share) == list(range(120))


def _enqueue_and_count(store: SqlLightningStore, name: str) -> int:
    async def run() -> int:
        await store.enqueue_rollout(name, rollout_id=name)
        return len(await store.query_rollouts())

    return asyncio.run(run())


def _child_of_fork(store: SqlLightningStore, name: str, results: multiprocessing.SimpleQueue[int]) -> None:
    results.put(_enqueue_and_count(store, name))
    leave()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_forked_child_and_its_parent_both_go_on(url):
    context = multiprocessing.get_context("fork")
    async with SqlLightningStore.from_url(url) as store:
        results = context.SimpleQueue()
        await store.enqueue_rollout(0, rollout_id="before")
        # Forked in the midst of writes and reads: nothing of them may be lost or done twice.
        busy = [asyncio.create_task(store.enqueue_rollout(n, rollout_id=f"parent-{n}")) for n in range(50)]
        busy += [asyncio.create_task(store.query_rollouts()) for _ in range(10)]
        await asyncio.sleep(0.002)
        children = [context.Process(target=_child_of_fork, args=(store, f"child-{n}", results)) for n in range(3)]
        for child in children:
            child.start()
        await asyncio.gather(*busy)
        for child in children:
            await asyncio.to_thread(child.join, LONG)
        assert [child.exitcode for child in children] == [0, 0, 0]
        stored = {rollout.rollout_id for rollout in await store.query_rollouts()}
        assert stored == {"before", *(f"parent-{n}" for n in range(50)), *(f"child-{n}" for n in range(3))}
        assert sqlite3.connect(store._database.path).execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def _fork_in_threads(url: str) -> None:
    """Fork, from two threads, a process whose store is written to and waited for."""

    async def run() -> None:
        async with SqlLightningStore.from_url(url) as store:
            rollout = await store.enqueue_rollout(0)
            is_over = False

            async def write() -> None:
                while not is_over:
                    await asyncio.gather(*[store.enqueue_rollout(n) for n in range(64)])

            def fork() -> None:
                for _ in range(10):
                    child = os.fork()
                    if child == 0:
                        leave()
                    os.waitpid(child, 0)
                    time.sleep(0.05)

            tasks = [asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])) for _ in range(16)]
            tasks += [asyncio.create_task(write()) for _ in range(2)]
            await asyncio.gather(*[asyncio.to_thread(fork) for _ in range(2)])
            is_over = True
            await tasks.pop()
            await tasks.pop()
            await store.update_rollout(rollout.rollout_id, status="cancelled")
            await asyncio.gather(*tasks)

    asyncio.run(run())
    leave()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_process_that_writes_and_waits_can_be_forked_by_any_of_its_threads(url):
    program = multiprocessing.get_context("fork").Process(target=_fork_in_threads, args=(url,))
    program.start()
    await asyncio.to_thread(program.join, LONG)
    program.kill()
    assert program.exitcode == 0


async def test_a_pickled_store_opens_the_same_file(url):
    async with SqlLightningStore.from_url(url, scan_debounce_seconds=3) as store:
        await store.enqueue_rollout(1, rollout_id="a")
        async with pickle.loads(pickle.dumps(store)) as copy:  # noqa: S301 - our own
            assert [rollout.rollout_id for rollout in await copy.query_rollouts()] == ["a"]
            assert copy._scan_debounce_seconds == 3


# Group commit


@pytest.mark.parametrize("num_cancels", [1, 3])
async def test_a_dequeue_gives_its_claim_back_however_often_it_is_cancelled(url, tmp_path, num_cancels):
    async with SqlLightningStore.from_url(url) as store:
        await store.enqueue_rollout(1, rollout_id="a")
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        began = next_write(store)
        task = asyncio.create_task(store.dequeue_rollout("w"))
        assert await asyncio.to_thread(began.wait, LONG)
        for _ in range(num_cancels):
            task.cancel()
            await asyncio.sleep(0.02)
        assert not task.done()
        other.execute("ROLLBACK")
        other.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await store.get_rollout_by_id("a")).status == "queuing"


async def test_a_program_that_ends_waits_until_a_cancelled_dequeue_has_given_its_claim_back(url, tmp_path):
    async def program() -> None:
        await store.enqueue_rollout(1, rollout_id="a")
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        began = next_write(store)
        task = asyncio.create_task(store.dequeue_rollout("w"))
        assert await asyncio.to_thread(began.wait, LONG)
        task.cancel()
        await asyncio.sleep(0)  # next, ``asyncio.run`` cancels all that is left
        threading.Timer(0.3, let_go, [other]).start()

    def let_go(other: sqlite3.Connection) -> None:
        released.set()
        other.close()

    released, store = threading.Event(), SqlLightningStore.from_url(url, busy_timeout_seconds=LONG)
    await asyncio.to_thread(asyncio.run, program())
    await store.close()
    assert released.is_set(), "the program waited"
    async with SqlLightningStore.from_url(url) as store:
        assert (await store.get_rollout_by_id("a")).status == "queuing"


async def test_a_failing_call_spoils_nothing_it_shares_a_transaction_with(url):
    async with SqlLightningStore.from_url(url) as store:
        await store.enqueue_rollout(1, rollout_id="taken")
        outcomes = await asyncio.gather(
            *[store.enqueue_rollout(n, rollout_id="taken" if n % 3 == 0 else f"n{n}") for n in range(30)],
            return_exceptions=True,
        )
        refused = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Conflict)]
        assert refused == list(range(0, 30, 3))
        assert len(await store.query_rollouts()) == 21


async def test_concurrent_calls_share_commits(url):
    async with SqlLightningStore.from_url(url) as store:
        commits = 0

        def count(statement: str) -> None:
            nonlocal commits
            commits += statement == "COMMIT"

        await store.enqueue_rollout(0)
        [writer] = store._database._writers
        with writer.lock:
            writer._connected().set_trace_callback(count)
            calls = [asyncio.create_task(store.enqueue_rollout(n)) for n in range(200)]
            await asyncio.sleep(0)  # all are handed over, however fast the writer's thread is
        await asyncio.gather(*calls)
        assert 1 <= commits < 50


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


async def test_reads_whose_callers_gave_up_hold_up_no_others(url):
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT 1 FROM n) SELECT COUNT(*) FROM n"
    async with SqlLightningStore.from_url(url) as store:
        for _ in range(4):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(store._database.read(lambda tx: tx.rows(endless)), 0.1)
        for _ in range(4):
            assert len(await asyncio.wait_for(store.query_rollouts(), LONG)) == 0


async def test_a_thread_that_cannot_be_started_breaks_nothing(url, monkeypatch):
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with SqlLightningStore.from_url(url) as store:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            for call in (store.enqueue_rollout(1), store.get_rollout_by_id("a")):
                with pytest.raises(Recoverable, match="no thread"):
                    await call
        await asyncio.wait_for(store.enqueue_rollout(1), LONG)
        assert len(await asyncio.wait_for(store.query_rollouts(), LONG)) == 1


# Trouble with the file


async def test_a_full_disk_refuses_loses_nothing_and_passes(url):
    lines = run_child("fill_the_disk", url, str(2_000_000))
    acknowledged = {line[1] for line in lines if line[0] == "enqueued"}
    assert "after" in acknowledged and len(acknowledged) > 10
    [refused] = [" ".join(line[1:]) for line in lines if line[0] == "refused"]
    assert "nothing of this call was stored" in refused
    [together] = [line[1:] for line in lines if line[0] == "together"]
    assert together == ["Rollout", "Recoverable", "Rollout"]
    async with SqlLightningStore.from_url(url) as store:
        stored = {rollout.rollout_id for rollout in await store.query_rollouts()}
        assert stored == acknowledged | {"small-1", "small-2"}
    assert sqlite3.connect(url.removeprefix("sqlite:///")).execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_a_file_held_by_another_process_is_recoverable(url, tmp_path):
    async with SqlLightningStore.from_url(url, busy_timeout_seconds=0.1) as store:
        await store.enqueue_rollout(1, rollout_id="a")
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Recoverable, match="held by another process"):
            await store.enqueue_rollout(2, rollout_id="b")
        assert len(await store.query_rollouts()) == 1, "readers do not wait for writers"
        other.execute("ROLLBACK")
        await store.enqueue_rollout(2, rollout_id="b")
        assert len(await store.query_rollouts()) == 2
        other.close()


async def test_calls_that_wait_hold_up_no_reads_while_another_process_holds_the_file(url, tmp_path, monkeypatch):
    monkeypatch.setattr(sql_store, "WATCH_SECONDS", FOREVER)
    async with SqlLightningStore.from_url(url, busy_timeout_seconds=FOREVER) as store:
        rollouts = [await store.enqueue_rollout(n) for n in range(4)]
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        writing = asyncio.create_task(store.enqueue_rollout(4))
        waiting = [asyncio.create_task(store.wait_for_rollouts(rollout_ids=[one.rollout_id])) for one in rollouts]
        await asyncio.sleep(0.3)
        for _ in range(5):  # who waits for the file waits longer than that
            assert await asyncio.wait_for(store.get_rollout_by_id(rollouts[0].rollout_id), LONG) is not None
        other.execute("ROLLBACK")
        other.close()
        await writing
        for one in rollouts:
            await store.update_rollout(one.rollout_id, status="cancelled")
        await asyncio.gather(*waiting)


@pytest.mark.parametrize("busy_timeout_seconds", [0.1, 30.0])
async def test_reads_do_without_the_watchdog_while_another_process_holds_the_file(url, tmp_path, busy_timeout_seconds):
    now = [1000.0]
    settings = {"busy_timeout_seconds": busy_timeout_seconds, "clock": lambda: now[0]}
    async with SqlLightningStore.from_url(url, **settings) as store:
        await store.enqueue_rollout(1, rollout_id="a", config=RolloutConfig(timeout_seconds=10))
        await store.dequeue_rollout()
        now[0] += 11
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        write, looks = store._write, []

        def counted(operation):
            looks.append(operation)
            return write(operation)

        store._write = counted
        for _ in range(20):
            assert (await store.get_rollout_by_id("a")).status == "preparing"
        assert len(looks) == 1, "one look of the watchdog was waited for"
        other.execute("ROLLBACK")
        other.close()
        now[0] += 11
        assert (await store.get_rollout_by_id("a")).status == "failed"


async def test_a_waiter_of_a_process_that_always_writes_sees_what_another_finished(url):
    async with SqlLightningStore.from_url(url) as store:
        rollout = await store.start_rollout(1)
        waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))

        async def write() -> None:
            while not waiting.done():
                await asyncio.gather(*[store.enqueue_rollout(n) for n in range(64)])

        writing = [asyncio.create_task(write()) for _ in range(3)]
        await asyncio.to_thread(run_child, "finish", url, rollout.rollout_id)
        await asyncio.wait_for(waiting, LONG)
        await asyncio.gather(*writing)


async def test_files_that_are_no_store_are_refused_untouched(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be looked at " * 10)
    foreign = tmp_path / "foreign.db"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()
    folder = tmp_path / "folder"
    folder.mkdir()
    for path, message in [
        (text, "not a database of this store, or is damaged"),
        (foreign, "database of another program"),
        (folder, "cannot be opened"),
        (text / "below", "cannot be created"),
    ]:
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(ConfigError, match=message):
            SqlLightningStore.from_url(f"sqlite:///{path}")
        assert before is None or path.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "foreign.db", "notes.txt"]


async def test_a_file_of_a_newer_version_is_refused(url, tmp_path):
    await SqlLightningStore.from_url(url).close()
    connection = sqlite3.connect(tmp_path / "store.db")
    connection.execute("UPDATE alembic_version SET version_num = '0099'")
    connection.commit()
    connection.close()
    with pytest.raises(ConfigError, match=r"revision 0099.*newer version"):
        SqlLightningStore.from_url(url)


async def test_a_truncated_file_is_refused(url, tmp_path):
    async with SqlLightningStore.from_url(url) as store:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="x" * 100) for _ in range(500)])
    path = tmp_path / "store.db"
    path.write_bytes(path.read_bytes()[:6000])
    with pytest.raises(ConfigError, match="damaged"):
        SqlLightningStore.from_url(url)


async def test_damage_that_shows_later_is_fatal(url, tmp_path):
    async with SqlLightningStore.from_url(url) as store:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="x" * 3000) for _ in range(500)])
    path = tmp_path / "store.db"
    data = bytearray(path.read_bytes())
    data[200_000:] = b"\xff" * (len(data) - 200_000)
    path.write_bytes(data)
    async with SqlLightningStore.from_url(url) as store:
        with pytest.raises(Fatal, match="damaged"):
            await store.query_rollouts()


async def test_a_file_that_may_not_be_written_is_refused(url, tmp_path):
    async with SqlLightningStore.from_url(url):
        pass
    # Every folder above must be open to the child, which gives up its rights.
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o005:
            folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "store.db").chmod(0o444)
    [line] = run_child("open_as_nobody", url)
    assert "is read-only" in " ".join(line)


@pytest.mark.parametrize(
    "url",
    ["", "store.db", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:///a.db?mode=ro", "mysql:///a", "SQLITE"],
)
async def test_urls_that_name_no_file_are_refused(url):
    with pytest.raises(ConfigError, match="database URL is"):
        SqlLightningStore.from_url(url)


async def test_the_folder_of_a_new_file_is_created(tmp_path):
    async with SqlLightningStore.from_url(f"sqlite:///{tmp_path}/a/b/c.db") as store:
        await store.enqueue_rollout(1)
    assert (tmp_path / "a/b/c.db").exists()


async def test_an_input_of_a_hundred_megabytes_is_stored(url):
    async with SqlLightningStore.from_url(url) as store:
        text = "x" * 100_000_000
        rollout = await store.enqueue_rollout(text)
        assert (await store.get_rollout_by_id(rollout.rollout_id)).input == text


async def test_ids_that_are_not_text_are_refused(url):
    async with SqlLightningStore.from_url(url) as store:
        with pytest.raises(ConfigError):
            await store.enqueue_rollout(1, rollout_id="\ud800")
        for bad in ("\ud800", ["a"], object()):
            with pytest.raises(ConfigError):
                await store.get_rollout_by_id(bad)
        for bad in ("r1", ["\ud800"], [object()]):
            with pytest.raises(ConfigError):
                await store.query_rollouts(rollout_id_in=bad)
            with pytest.raises(ConfigError):
                await store.start_many_attempts(bad)
        with pytest.raises(ConfigError):
            await store.update_worker(["w"])
        assert len(await store.query_rollouts()) == 0

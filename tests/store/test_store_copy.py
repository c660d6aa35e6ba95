"""A store copied into another database: every row, resumed after a kill, and never over what is there."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typer.testing import CliRunner

from flows.cli import app
from rollout_core.base.errors import ConfigError
from rollout_core.store import LLM, Span, SqlLightningStore
from rollout_core.store.sql import copying
from rollout_core.store.sql.by_url import count_all
from rollout_core.store.sql.copying import copy_store
from tests.store.postgres import PostgresServer

T = TypeVar("T")

KILLED = """
import os, signal, sys
from rollout_core.store.sql import copying

copying.PART_ROWS = 5
parts = 0

def die(table, rows):
    global parts
    parts += 1
    if parts == 9:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    copying.copy_store(*sys.argv[1:], die)
"""


def in_store(url: str, work: Callable[[SqlLightningStore], Awaitable[T]]) -> T:
    async def run() -> T:
        async with SqlLightningStore.from_url(url) as store:
            return await work(store)

    return asyncio.run(run())


@pytest.fixture(params=["to postgres", "to sqlite", "sqlite to sqlite"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Where the store is, and an empty database."""
    files = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "other")]
    if request.param == "sqlite to sqlite":
        return files[0], files[1]
    server: PostgresServer = request.getfixturevalue("postgres")
    name = "copy_" + re.sub(r"\W", "_", tmp_path.name)[-40:].lower()
    url = server.new_database(name)
    request.addfinalizer(lambda: server.run_sql(f"DROP DATABASE {name} WITH (FORCE)"))
    return (files[0], url) if request.param == "to postgres" else (url, files[0])


@pytest.fixture(autouse=True)
def in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PART_ROWS", 5)


async def fill(store: SqlLightningStore) -> None:
    """Twelve rollouts in the queue, two of which were worked on, with text that databases write in their own ways."""
    policy = LLM(endpoint="", model="0" * 64, sampling_parameters={"temperature": 0.1 + 0.2})
    for number in range(3):
        await store.add_resources({"policy": policy, "other": LLM(endpoint=f"http://{number}", model="m")})
    for number in range(12):
        await store.enqueue_rollout(input={"text": f"{number} \x00 ä \U0001f600", "n": 1e-300}, metadata={"a": number})
    for status in ("succeeded", "failed"):
        taken = await store.dequeue_rollout(worker_id="worker")
        assert taken is not None
        ids: dict[str, Any] = {"rollout_id": taken.rollout_id, "attempt_id": taken.attempt.attempt_id}
        attributes = {"text": "é\x00", "big": 2**70 + 1, "reward": 0.1 + 0.2}
        spans = [Span.from_attributes(**ids, sequence_id=number, attributes=attributes) for number in range(1, 9)]
        await store.add_many_spans(spans)
        await store.update_attempt(*ids.values(), status=status)


async def seen(store: SqlLightningStore) -> list[Any]:
    """Everything in it, as its users see it."""
    rollouts = await store.query_rollouts()
    return [
        [rollout.model_dump() for rollout in rollouts],
        [[a.model_dump() for a in await store.query_attempts(rollout.rollout_id)] for rollout in rollouts],
        [[span.model_dump() for span in await store.query_spans(rollout.rollout_id)] for rollout in rollouts],
        [update.model_dump() for update in await store.query_resources()],
        [worker.model_dump() for worker in await store.query_workers()],
        await store.get_latest_resources(),
    ]


def test_a_copy_has_all_of_it_and_is_gone_on_with(urls: tuple[str, str]) -> None:
    source, target = urls
    in_store(source, fill)
    parts: list[tuple[str, int]] = []
    copied = copy_store(source, target, lambda table, rows: parts.append((table, rows)))
    assert copied.rows["rollouts"] == 12 and copied.written == sum(copied.rows.values()) == sum(n for _, n in parts)
    assert max(rows for _, rows in parts) == 5
    assert in_store(target, seen) == in_store(source, seen)
    assert count_all(target, 30.0) == count_all(source, 30.0)
    again = copy_store(source, target)
    assert again.rows == copied.rows and again.written == 0

    async def go_on(store: SqlLightningStore) -> tuple[list[str], int]:
        new = await store.enqueue_rollout(input="new")
        await store.add_resources({"policy": LLM(endpoint="", model="1" * 64)})
        order = []
        while (taken := await store.dequeue_rollout()) is not None:
            order.append(taken.rollout_id)
        assert order[-1] == new.rollout_id
        latest = await store.get_latest_resources()
        assert latest is not None and latest.resources["policy"] == LLM(endpoint="", model="1" * 64)
        return order[:-1], len(await store.query_rollouts())

    assert in_store(target, go_on) == in_store(source, go_on)


def test_killed_it_goes_on_where_it_was(urls: tuple[str, str]) -> None:
    source, target = urls
    in_store(source, fill)
    killed = subprocess.run([sys.executable, "-c", KILLED, source, target], timeout=300)
    assert killed.returncode == -signal.SIGKILL
    copied = copy_store(source, target)
    assert 0 < copied.written < sum(copied.rows.values())
    assert in_store(target, seen) == in_store(source, seen)


def test_nothing_is_written_over(urls: tuple[str, str]) -> None:
    """A row of another store under the same key ends the copy, and stays."""
    source, target = urls
    in_store(source, fill)
    in_store(target, lambda store: store.enqueue_rollout(input="of another store"))
    with pytest.raises(ConfigError, match=r"has another row 1 of .*; it is in use already"):
        copy_store(source, target)
    rollouts = in_store(target, lambda store: store.query_rollouts())
    assert [rollout.input for rollout in rollouts] == ["of another store"]


def test_what_is_changed_meanwhile_or_in_use_is_refused(urls: tuple[str, str]) -> None:
    source, target = urls
    in_store(source, fill)
    copy_store(source, target)
    in_store(source, lambda store: store.dequeue_rollout())
    with pytest.raises(ConfigError, match="or what was being copied has changed since; give an empty database"):
        copy_store(source, target)
    in_store(source, lambda store: store.leases.take("a run", "owner", seconds=300.0))
    with pytest.raises(ConfigError, match="is in use: a run; let runs, servers and workers end first"):
        copy_store(source, target)
    with pytest.raises(ConfigError, match="is both where the store is and where it is to go"):
        copy_store(source, source)


def test_rows_that_come_meanwhile_are_copied_or_named(urls: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = urls
    in_store(source, fill)
    added = 0

    def add(table: str, rows: int) -> None:
        nonlocal added
        if table == "attempts" and added < limit:
            added += 1
            in_store(source, lambda store: store.add_resources({"policy": LLM(endpoint="", model=str(added))}))

    limit = 1
    assert copy_store(source, target, add).rows["resources"] == 4
    limit = 100
    with pytest.raises(ConfigError, match="is being written to; end what uses it"):
        copy_store(source, target, add)
    copy_store(source, target)
    assert in_store(target, seen) == in_store(source, seen)


def test_the_command_says_what_both_have(tmp_path: Path) -> None:
    source, target = (f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "other"))
    missing = CliRunner().invoke(app, ["store", "copy", source, target])
    assert missing.exit_code == 2 and "has no store of this version" in missing.output
    assert not list(tmp_path.iterdir())
    in_store(source, fill)
    done = CliRunner().invoke(app, ["store", "copy", source, target])
    assert done.exit_code == 0, done.output
    assert re.search(r"^rollouts +12$", done.output, re.M) and "both have the same rows; " in done.output

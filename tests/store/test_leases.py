"""Leases of both databases. Those of PostgreSQL are the ones that machines share."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections import Counter

import pytest
import pytest_asyncio

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.store import SqlLightningStore
from rollout_core.store.sql.row_leases import FORGET_SECONDS, Holding, Lease
from tests.store import patience

pytestmark = pytest.mark.asyncio

SHORT = 0.4
LONG = 600.0


@pytest_asyncio.fixture(params=["sqlite", "postgres"])
async def stores(request, postgres, tmp_path):
    """Two stores of one database, as two machines have them, whose own clocks are an hour apart."""
    url = f"sqlite:///{tmp_path}/leases.db" if request.param == "sqlite" else postgres.database_of(tmp_path)
    async with (
        SqlLightningStore.from_url(url) as one,
        SqlLightningStore.from_url(url, clock=lambda: time.time() + 3600) as other,
    ):
        yield one, other


async def test_a_lease_has_one_holder_and_says_who(stores):
    one, other = (store.leases for store in stores)
    assert await one.holding("x") is None
    assert await one.take("x", "a", seconds=LONG) == Lease("x", "a", 1)
    for held in (await other.take("x", "b", seconds=LONG), await other.holding("x")):
        assert isinstance(held, Holding) and (held.owner, held.epoch) == ("a", 1)
        assert 0 < held.seconds_left <= LONG
    assert await other.take("y", "b", seconds=LONG) == Lease("y", "b", 1)
    assert await one.take("x", "a", seconds=LONG) == Lease("x", "a", 1), "asked again, as after a lost answer"


async def test_a_steal_raises_the_epoch_and_fences_the_earlier_holder(stores):
    one, other = (store.leases for store in stores)
    first = await one.take("x", "a", seconds=0.001)
    assert isinstance(first, Lease)
    await asyncio.sleep(0.05)
    assert await one.renew(first, seconds=0.001), "one that ran out, and that nobody took"
    await asyncio.sleep(0.05)
    assert await other.take("x", "b", seconds=LONG) == Lease("x", "b", 2)
    assert not await one.renew(first, seconds=LONG)
    assert not await one.release(first)
    assert (await one.holding("x")).owner == "b"
    assert isinstance(await one.take("x", "a", seconds=LONG), Holding)
    assert await other.release(Lease("x", "b", 2))
    assert await one.take("x", "a", seconds=LONG) == Lease("x", "a", 3)
    assert not await one.renew(first, seconds=LONG), "of an earlier epoch"


async def test_nothing_is_stolen_before_its_time_since_the_last_renewal(stores):
    """By the database's clock: of this machine, so that a test can read it."""
    one, other = (store.leases for store in stores)
    held = await one.take("x", "a", seconds=SHORT)
    assert await one.renew(held, seconds=LONG)
    await asyncio.sleep(1.25 * SHORT)
    assert isinstance(await other.take("x", "b", seconds=SHORT), Holding), "of an earlier time nothing is left"
    renewed = time.time()
    assert await one.renew(held, seconds=SHORT)
    while isinstance(await other.take("x", "b", seconds=SHORT), Holding):
        await asyncio.sleep(0.005)
    assert time.time() - renewed >= SHORT


async def test_of_many_that_try_one_wins(stores):
    """In threads of two stores; processes are in `tests.operations.test_guarantees`."""
    names = [f"n{number}" for number in range(20)]
    tries = [(name, f"{name}-{number}", store.leases) for name in names for number in range(4) for store in stores]
    owners = [f"{owner}-{place}" for place, (_, owner, _) in enumerate(tries)]
    found = await asyncio.gather(
        *(book.take(name, owner, seconds=LONG) for (name, _, book), owner in zip(tries, owners, strict=True))
    )
    won = Counter(lease.name for lease in found if isinstance(lease, Lease))
    assert won == dict.fromkeys(names, 1)
    by_name = {lease.name: lease.owner for lease in found if isinstance(lease, Lease)}
    for (name, *_), lease in zip(tries, found, strict=True):
        assert lease.owner == by_name[name]


async def test_a_lease_that_was_asked_for_in_vain_is_given_back(stores):
    one, other = (store.leases for store in stores)
    asked = asyncio.ensure_future(one.take("x", "a", seconds=LONG))
    await asyncio.sleep(0)  # it has been handed over
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert isinstance(await other.take("x", "b", seconds=LONG), Lease)


async def test_a_lease_that_was_asked_for_in_vain_of_a_database_that_is_away_leaves_no_error(stores, monkeypatch):
    """Nobody hears it, so asyncio would put it into the log."""

    def begin(session) -> None:
        raise Recoverable("away")

    unheard = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    store = SqlLightningStore.from_url(stores[0].url)
    writers = store._database._commits.threads.sessions
    for session in writers:
        monkeypatch.setattr(type(session), "begin", begin)
        session.lock.acquire()  # so that what is asked for does not begin
    asked = asyncio.ensure_future(store.leases.take("x", "a", seconds=LONG))
    await asyncio.sleep(0)  # it has been handed over
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    for session in writers:
        session.lock.release()
    await store.close()  # what was handed over has come to nothing
    await asyncio.sleep(0)
    del asked
    gc.collect()
    assert unheard == []


async def test_what_nobody_renews_for_long_leaves_no_row(stores):
    one, other = (store.leases for store in stores)
    for name in ("x", "y"):
        await one.take(name, "a", seconds=LONG)
    past = "UPDATE leases SET expires_at = {clock} - ? WHERE name = ?"
    await stores[0]._database.write(lambda tx: tx.run(past, FORGET_SECONDS + 10, "x"))
    await other.take("z", "b", seconds=LONG)
    assert await one.holding("x") is None and await one.holding("y") is not None


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
async def test_a_lease_has_a_length(stores, seconds):
    with pytest.raises(ConfigError, match="expected a positive number"):
        await stores[0].leases.take("x", "a", seconds=seconds)


RACE = """
import asyncio, sys
from rollout_core.store import SqlLightningStore
from rollout_core.store.sql.row_leases import Lease
async def main(url, owner):
    async with SqlLightningStore.from_url(url) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        found = [await store.leases.take(f"n{number}", owner, seconds=600) for number in range(100)]
        print(*(lease.name for lease in found if isinstance(lease, Lease)))
asyncio.run(main(*sys.argv[1:]))
"""


async def test_of_processes_that_race_for_a_lease_one_wins(postgres, tmp_path):
    url = postgres.database_of(tmp_path)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, url, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in "abcd"
    ]
    try:
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            racer.stdin.write("\n")
            racer.stdin.flush()
        won = [name for racer in racers for name in racer.communicate(timeout=patience.LONG)[0].split()]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    assert sorted(won) == sorted(f"n{number}" for number in range(100))

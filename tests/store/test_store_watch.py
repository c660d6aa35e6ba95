"""Watching a store: what was committed comes once, in order, also after a cut and from other processes."""

from __future__ import annotations

import asyncio
import json
import threading

import aiohttp
import pytest

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.store import InMemoryLightningStore, LightningStoreServer, changes
from rollout_core.store.sql.postgres_server import connect
from rollout_core.store.types import AttemptUpdate
from tests.store.conftest import SERVER, SHARED, SWITCH
from tests.store.patience import LONG, until

pytestmark = pytest.mark.asyncio


async def now(store) -> str:
    return (await store.wait_for_changes()).position


async def seen(store, after, count, **options):
    """So many changes after a position, as tuples without ids and times."""
    found = []
    watch = store.watch(after=after, **options)
    async with asyncio.timeout(LONG):
        async for change in watch:
            found.append(change)
            if len(found) == count:
                break
    await watch.aclose()
    return found


def shown(change):
    return tuple(
        part for part in (change.kind, change.rollout_id, change.attempt_id, change.resources_id, change.status) if part
    )


async def test_a_rollouts_life_is_seen_in_order(store, make):
    start = await now(store)
    rollout = await make.claimed(store, "w")
    name, attempt = rollout.rollout_id, rollout.attempt.attempt_id
    await store.add_span(make.span(rollout))
    await store.add_span(make.span(rollout, 2, name="another"))
    await store.update_attempt(name, attempt, status="succeeded")
    found = [shown(change) for change in await seen(store, start, 9)]
    assert found == [
        ("rollout", name, "queuing"),
        ("queue", name, "joined"),
        ("rollout", name, "preparing"),
        ("queue", name, "left"),
        ("attempt", name, attempt, "preparing"),
        ("rollout", name, "running"),
        ("attempt", name, attempt, "running"),
        ("rollout", name, "succeeded"),
        ("attempt", name, attempt, "succeeded"),
    ]
    page = await store.wait_for_changes((await seen(store, start, 9))[-1].id)
    assert page.items == [], "spans and heartbeats are no changes"


async def test_every_change_leads_to_the_next(store, make):
    start = await now(store)
    for number in range(3):
        await store.enqueue_rollout({"n": number})
        await store.add_resources({})
    every = await seen(store, start, 9)
    assert len({change.id for change in every}) == 9
    for place, change in enumerate(every[:-1]):
        assert await seen(store, change.id, 8 - place) == every[place + 1 :]


async def test_pages_hold_about_as_many_as_asked_for_and_lose_none(store):
    start = await now(store)
    await asyncio.gather(*[store.enqueue_rollout({"n": number}) for number in range(30)])
    position, found = start, []
    while page := await store.wait_for_changes(position, kinds=["rollout"], limit=7):
        if not page.items:
            break
        found += [change.rollout_id for change in page.items]
        position = page.position
    assert len(found) == len(set(found)) == 30


@pytest.mark.parametrize("kind", ["rollout", "attempt", "queue", "resources"])
async def test_kinds_are_those_asked_for(store, make, kind):
    start = await now(store)
    await store.add_resources({})
    await make.claimed(store)
    [change] = await seen(store, start, 1, kinds=[kind])
    assert change.kind == kind


async def test_a_large_batch_is_seen_whole(store):
    start = await now(store)
    count = 2 * changes.GROUP_ENTRIES + 1
    await store.enqueue_many_rollouts([{"input": number} for number in range(count)])
    found = await seen(store, start, count, kinds=["queue"])
    assert len({change.rollout_id for change in found}) == count


async def test_who_waits_is_woken_by_a_change(store):
    start = await now(store)
    waiting = asyncio.create_task(store.wait_for_changes(start, kinds=["resources"], timeout=LONG))
    await store.enqueue_rollout({})
    added = await store.add_resources({})
    page = await asyncio.wait_for(waiting, LONG)
    assert [change.resources_id for change in page.items] == [added.resources_id]


async def test_without_a_change_the_position_stays(store):
    await store.enqueue_rollout({})
    start = await now(store)
    page = await store.wait_for_changes(start, timeout=0.05)
    assert page.items == [] and await now(store) == start


async def test_a_call_that_fails_is_no_change(store, make):
    await store.enqueue_rollout({"n": 1}, rollout_id="one")
    start = await now(store)
    with pytest.raises(NotFound):
        await store.update_many_attempts([AttemptUpdate(rollout_id="none", attempt_id="x", status="failed")])
    with pytest.raises(ValueError):
        await store.enqueue_many_rollouts([{"input": 1}, {"input": 2, "rollout_id": "one"}])
    assert (await store.wait_for_changes(start)).items == []


async def test_a_lost_attempt_is_seen_by_who_waits(store, make, clock):
    rollout = await make.claimed(store, timeout_seconds=5.0)
    start = await now(store)
    clock.advance(10)
    found = await seen(store, start, 2, kinds=["rollout", "attempt"])
    assert {change.status for change in found} == {"timeout", "failed"} or "timeout" in {c.status for c in found}
    assert {change.rollout_id for change in found} == {rollout.rollout_id}


async def test_claims_that_are_given_back_join_the_queue_again(store, make):
    rollout = await make.claimed(store)
    start = await now(store)
    await store.release_rollouts([rollout])
    found = [shown(change) for change in await seen(store, start, 3)]
    assert ("queue", rollout.rollout_id, "joined") in found
    assert ("attempt", rollout.rollout_id, rollout.attempt.attempt_id) in found, "it was taken back"


async def test_changes_that_are_not_kept_any_more_are_told(make_store, monkeypatch):
    store = await make_store()
    start = await now(store)
    monkeypatch.setattr(changes, "KEPT_GROUPS", 5)
    monkeypatch.setattr("rollout_core.store.sql.change_rows.KEPT_GROUPS", 5)
    monkeypatch.setattr("rollout_core.store.sql.change_rows._PRUNED_EVERY", 1)
    for _ in range(10):
        await store.add_resources({})
    with pytest.raises(NotFound, match="not kept any more"):
        await store.wait_for_changes(start)
    page = await store.wait_for_changes()
    await store.add_resources({})
    assert len((await store.wait_for_changes(page.position)).items) == 1


@pytest.mark.parametrize("position", ["", "x", "1.2.3", "1.2.3.4.5", "-1.0.0.0", "٣.0.0.0"])
async def test_other_texts_are_no_positions(store, position):
    with pytest.raises(ConfigError, match="position"):
        await store.wait_for_changes(position)


async def test_other_kinds_are_refused(store):
    with pytest.raises(ConfigError, match="kinds is"):
        await store.wait_for_changes(kinds=["span"])


@pytest.mark.parametrize("make_store", SHARED, indirect=True)
async def test_changes_by_another_store_of_the_same_data_are_seen(make_store):
    here, there = await make_store(), await make_store()
    start = await now(here)
    waiting = asyncio.create_task(here.wait_for_changes(start, kinds=["queue"], timeout=LONG))
    rollout = await there.enqueue_rollout({})
    page = await asyncio.wait_for(waiting, LONG)
    assert [change.rollout_id for change in page.items] == [rollout.rollout_id]


async def events(response, count):
    """So many server-sent events that show something, each as its fields; then the reader goes away."""
    found, fields = [], {}
    async with asyncio.timeout(LONG):
        async for line in response.content:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "data" in fields:
                found.append(fields)
                fields = {}
                if len(found) == count:
                    return found
    raise AssertionError(f"the stream ended after {found}")


@pytest.mark.parametrize("make_store", ["http"], indirect=True)
async def test_a_reader_of_events_that_was_cut_off_gets_what_it_missed(make_store):
    store = await make_store()
    place = f"{SERVER.endpoint}/v1/agl/watch"
    async with aiohttp.ClientSession() as session:
        async with session.get(place, params={"kind": "rollout"}) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            assert (await response.content.readline()).startswith(b"retry: ")
            first = (await response.content.readline()).decode().split()[1]
            one = await store.enqueue_rollout({"n": 1})
            [event] = await events(response, 1)
        assert json.loads(event["data"]) == {**json.loads(event["data"]), "kind": "rollout", "status": "queuing"}
        assert (event["event"], json.loads(event["data"])["rollout_id"]) == ("rollout", one.rollout_id)
        assert json.loads(event["data"])["id"] == event["id"]
        two = await store.enqueue_rollout({"n": 2})
        for last, expected in ((event["id"], [two]), (first, [one, two])):
            headers = {"last-event-id": last}
            async with session.get(place, params={"kind": "rollout"}, headers=headers) as response:
                found = await events(response, len(expected))
            assert [json.loads(event["data"])["rollout_id"] for event in found] == [r.rollout_id for r in expected]


@pytest.mark.parametrize("make_store", ["http"], indirect=True)
async def test_a_reader_of_events_hears_that_the_server_lives(make_store, monkeypatch):
    await make_store()
    monkeypatch.setattr("rollout_core.store.http.event_stream.HEARTBEAT_SECONDS", 0.05)
    async with aiohttp.ClientSession() as session, session.get(f"{SERVER.endpoint}/v1/agl/watch") as response:
        async with asyncio.timeout(LONG):
            async for line in response.content:
                if line.startswith(b":"):
                    return
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("make_store", ["http"], indirect=True)
async def test_what_is_wrong_with_a_watch_is_answered_by_a_status(make_store):
    await make_store()
    place = f"{SERVER.endpoint}/v1/agl/watch"
    async with aiohttp.ClientSession() as session:
        for params, headers, status in (
            ({"kind": "span"}, {}, 400),
            ({}, {"last-event-id": "x"}, 400),
            ({"after": "0.123456.7.8"}, {}, 404),
        ):
            async with session.get(place, params=params, headers=headers) as response:
                assert response.status == status
                assert (await response.json())["detail"]


@pytest.mark.parametrize("make_store", ["http"], indirect=True)
async def test_a_reader_that_falls_behind_all_that_is_kept_is_named_and_cut_off(make_store, monkeypatch, caplog):
    store = await make_store()
    monkeypatch.setattr("rollout_core.store.http.event_stream.HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr("rollout_core.store.sql.change_rows.KEPT_GROUPS", 1)
    monkeypatch.setattr("rollout_core.store.sql.change_rows._PRUNED_EVERY", 1)
    asked, goes_on = threading.Event(), threading.Event()

    async def slow(*arguments, **options):
        asked.set()
        await until(goes_on.is_set)
        return await find(*arguments, **options)

    async with aiohttp.ClientSession() as session, session.get(f"{SERVER.endpoint}/v1/agl/watch") as response:
        backend = SWITCH.backend()
        find = backend.wait_for_changes
        monkeypatch.setattr(backend, "wait_for_changes", slow)
        await until(asked.is_set)
        for _ in range(5):
            await store.add_resources({})
        goes_on.set()
        fields = {}
        async with asyncio.timeout(LONG):
            async for line in response.content:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                fields[name] = value
    goes_on.set()
    assert fields["event"] == "error" and "not kept any more" in json.loads(fields["data"])["detail"]
    assert "is too slow for the changes of this store" in caplog.text


async def test_a_watch_needs_the_key_of_the_store_and_ends_with_its_server():
    server = LightningStoreServer(InMemoryLightningStore(), api_key="a-key")
    await server.start()
    place = f"{server.endpoint}/v1/agl/watch"
    async with aiohttp.ClientSession() as session:
        async with session.get(place) as refused:
            assert refused.status == 401
        async with session.get(place, headers={"authorization": "Bearer a-key"}) as response:
            assert (await response.content.readline()).startswith(b"retry: ")
            await asyncio.wait_for(server.stop(), LONG)
            async with asyncio.timeout(LONG):
                rest = await response.content.read()
    assert b"data:" not in rest


async def test_a_position_of_another_history_is_told(store):
    """As of a store in memory that was started again, or of a database that was put back from an earlier copy."""
    await store.add_resources({})
    *place, microseconds = (await now(store)).split(".")
    await store.add_resources({})
    with pytest.raises(NotFound, match="is not kept any more, or is of another store"):
        await store.wait_for_changes(".".join([*place, str(int(microseconds) - 1)]))


async def test_a_store_in_memory_that_began_anew_knows_no_earlier_position():
    first, second = InMemoryLightningStore(), InMemoryLightningStore()
    for store in (first, second, second):
        await store.add_resources({})
    with pytest.raises(NotFound, match="is of another store"):
        await second.wait_for_changes(await now(first))


@pytest.mark.parametrize("make_store", ["postgres"], indirect=True)
async def test_a_database_that_was_restored_on_another_server_is_watched_anew(make_store):
    store = await make_store()
    await store.add_resources({})
    start = await now(store)
    with connect(store.url, LONG) as other:  # whose transactions have larger numbers
        other.execute("UPDATE changes SET transaction_id = transaction_id + 1000000000 WHERE number > 0")
        other.execute("DELETE FROM changes WHERE number = 0")
    opened = await make_store()
    page = await opened.wait_for_changes()
    assert page.items == []
    with pytest.raises(NotFound, match="not kept any more"):
        await opened.wait_for_changes(start)
    added = await opened.add_resources({})
    [change] = (await opened.wait_for_changes(page.position)).items
    assert change.resources_id == added.resources_id


@pytest.mark.parametrize("make_store", ["postgres"], indirect=True)
async def test_a_change_of_a_transaction_that_commits_late_is_not_passed_over(make_store):
    store = await make_store()
    start = await now(store)
    with connect(store.url, LONG) as older:
        older.execute("BEGIN")
        older.execute(
            "INSERT INTO changes VALUES (pg_current_xact_id()::text::bigint, nextval('change_numbers'), 0,"
            """ '[["s", "older"]]')"""
        )
        added = await store.add_resources({})
        assert (await store.wait_for_changes(start)).items == [], "one before it may still come"
        older.execute("COMMIT")
    assert [change.resources_id for change in await seen(store, start, 2)] == ["older", added.resources_id]

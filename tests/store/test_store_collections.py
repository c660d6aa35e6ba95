"""The contract of collections, queues and key-value maps, and the collections in memory against plain lists."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel

from rollout_core.base.errors import ConfigError, Conflict, NotFound
from rollout_core.store import (
    Attempt,
    Collection,
    DequeBasedQueue,
    DictBasedKeyValue,
    InMemoryLightningCollections,
    ListBasedCollection,
    Rollout,
    Worker,
)

pytestmark = pytest.mark.asyncio


def attempt(rollout_id: str, number: int, **fields) -> Attempt:
    return Attempt(
        rollout_id=rollout_id, attempt_id=f"a{number}", sequence_id=number, start_time=float(number), **fields
    )


@pytest.fixture
def attempts() -> ListBasedCollection[Attempt]:
    items = [attempt("r1", 1), attempt("r2", 1, end_time=5.0), attempt("r1", 2, worker_id="w"), attempt("r2", 2)]
    return ListBasedCollection(items, Attempt, ["rollout_id", "attempt_id"], indexed=["status"])


async def found(collection, *query, **options) -> list[str]:
    return [f"{item.rollout_id}{item.attempt_id}" for item in await collection.query(*query, **options)]


async def test_a_collection_knows_its_model_keys_and_size(attempts):
    assert attempts.item_type() is Attempt
    assert list(attempts.primary_keys()) == ["rollout_id", "attempt_id"]
    assert await attempts.size() == 4


async def test_items_come_in_order_of_insertion_however_they_are_found(attempts):
    assert await found(attempts) == ["r1a1", "r2a1", "r1a2", "r2a2"]
    assert await found(attempts, {"rollout_id": {"within": ["r2", "r1"]}}) == ["r1a1", "r2a1", "r1a2", "r2a2"]
    assert await found(attempts, {"rollout_id": {"exact": "r2"}}) == ["r2a1", "r2a2"]
    assert await found(attempts, {"rollout_id": {"exact": "r2"}, "attempt_id": {"exact": "a2"}}) == ["r2a2"]
    assert await found(attempts, {"attempt_id": {"exact": "a2"}}) == ["r1a2", "r2a2"]
    assert await found(attempts, {"worker_id": {"exact": "w"}}) == ["r1a2"]
    assert await found(attempts, {"worker_id": {"contains": "w"}}) == ["r1a2"]
    assert await found(attempts, {"status": {"within": []}}) == []


async def test_must_conditions_hold_whatever_joins_the_others(attempts):
    either = {"_aggregate": "or", "worker_id": {"exact": "w"}, "end_time": {"exact": 5.0}}
    assert await found(attempts, either) == ["r2a1", "r1a2"]
    assert await found(attempts, {**either, "_must": {"rollout_id": {"exact": "r1"}}}) == ["r1a2"]


async def test_must_conditions_may_be_a_list(attempts):
    must = [{"rollout_id": {"exact": "r1"}}, {"attempt_id": {"exact": "a2"}}]
    either = {"_aggregate": "or", "status": {"exact": "failed"}, "worker_id": {"contains": "w"}}
    assert await found(attempts, {**either, "_must": must}) == ["r1a2"]
    assert await found(attempts, {"_must": [must[0], {"attempt_id": {"exact": "none"}}]}) == []


async def test_a_list_contains_its_items_and_no_parts_of_them():
    class Tagged(BaseModel):
        name: str
        tags: list[str] | None = None
        numbers: tuple[int, ...] = ()

    collection = ListBasedCollection(
        [Tagged(name="a", tags=["core", "x"], numbers=(1, 2)), Tagged(name="b", tags=["encore"]), Tagged(name="c")],
        Tagged,
        ["name"],
    )
    for filter, names in (
        ({"tags": {"contains": "core"}}, ["a"]),
        ({"numbers": {"contains": 2}}, ["a"]),
        ({"name": {"contains": "b"}}, ["b"]),
    ):
        assert [item.name for item in await collection.query(filter=filter)] == names


async def test_missing_values_sort_by_the_kind_of_field(attempts):
    by_end = {"name": "end_time", "order": "asc"}
    assert await found(attempts, None, by_end) == ["r2a1", "r1a1", "r1a2", "r2a2"]
    by_worker = {"name": "worker_id", "order": "desc"}
    assert await found(attempts, None, by_worker, limit=2) == ["r1a2", "r1a1"]
    by_both = {"name": "sequence_id", "order": "desc", "then": ["end_time"]}
    assert await found(attempts, None, by_both) == ["r1a2", "r2a2", "r2a1", "r1a1"]


async def test_get_is_the_first_of_query(attempts):
    last = await attempts.get({"rollout_id": {"exact": "r1"}}, {"name": "sequence_id", "order": "desc"})
    assert last is not None and last.attempt_id == "a2"
    assert await attempts.get({"rollout_id": {"exact": "nope"}}) is None


async def test_items_are_found_by_the_first_key(attempts):
    for items_of in (
        attempts.items_of,
        partial(Collection.items_of, attempts),
    ):  # its own way, and the one of any other
        items = await items_of(["r2", "r3", "r2"])
        assert sorted(f"{item.rollout_id}{item.attempt_id}" for item in items) == ["r2a1", "r2a2"]
        assert not await items_of([])


async def test_changes_are_all_or_nothing(attempts):
    with pytest.raises(Conflict, match="'attempt_id': 'a1'"):
        await attempts.insert([attempt("r3", 1), attempt("r1", 1)])
    with pytest.raises(Conflict):
        await attempts.insert([attempt("r3", 1), attempt("r3", 1)])
    with pytest.raises(NotFound):
        await attempts.update([attempt("r1", 1, worker_id="x"), attempt("r3", 1)])
    with pytest.raises(ValueError):
        await attempts.delete([attempt("r1", 1), attempt("r3", 1)])
    assert await found(attempts) == ["r1a1", "r2a1", "r1a2", "r2a2"]
    first = await attempts.get()
    assert first is not None and first.worker_id is None


async def test_an_update_moves_an_item_between_the_buckets_of_an_index(attempts):
    await attempts.upsert([attempt("r1", 2, status="failed"), attempt("r3", 1, status="failed")])
    assert await found(attempts, {"status": {"exact": "failed"}}) == ["r1a2", "r3a1"]
    assert await found(attempts, {"status": {"exact": "preparing"}}) == ["r1a1", "r2a1", "r2a2"]
    await attempts.delete([attempt("r3", 1)])
    assert await found(attempts, {"status": {"within": ["failed", "preparing"]}}) == ["r1a1", "r2a1", "r1a2", "r2a2"]


@pytest.mark.parametrize(
    "query",
    [
        {"filter": {"nope": {"exact": 1}}},
        {"filter": {"status": {"like": "a"}}},
        {"filter": {"status": {"within": 5}}},
        {"filter": {"status": {"within": "failed"}}},
        {"filter": {"worker_id": {"contains": None}}},
        {"filter": {"worker_id": {"contains": 5}}},
        {"filter": {"status": "failed"}},
        {"filter": {"_must": "failed"}},
        {"filter": {"_must": ["failed"]}},
        {"filter": [{"status": {"exact": "failed"}}]},
        {"sort": {"name": "status"}},
        {"sort": {"order": "asc"}},
        {"filter": {"_aggregate": "xor"}},
        {"sort": {"name": "metadata", "order": "asc"}},
        {"sort": {"name": "status", "order": "up"}},
        {"limit": -2},
        {"offset": -1},
    ],
)
async def test_queries_that_mean_nothing_are_refused(attempts, query):
    with pytest.raises(ConfigError):
        await attempts.query(**query)


async def test_an_item_of_another_model_is_refused(attempts):
    with pytest.raises(ConfigError, match="item is a Worker; this is a collection of Attempt"):
        await attempts.upsert([Worker(worker_id="w")])


STATUSES = ["queuing", "running", "failed"]
rollouts = st.builds(
    Rollout,
    rollout_id=st.sampled_from([f"r{n}" for n in range(8)]),
    input=st.none(),
    start_time=st.integers(0, 3),
    end_time=st.none() | st.integers(0, 3),
    mode=st.sampled_from([None, "train", "val"]),
    status=st.sampled_from(STATUSES),
)
conditions = st.fixed_dictionaries(
    {},
    optional={
        "rollout_id": st.sampled_from([{"within": ["r3", "r1", "x"]}, {"contains": "1"}, {"exact": "r2"}]),
        "status": st.sampled_from([{"within": ["failed", "queuing"]}, {"exact": "running"}]),
        "mode": st.sampled_from([{"exact": "train"}]),
        "_aggregate": st.sampled_from(["and", "or"]),
    },
)
sorts = st.none() | st.builds(
    lambda name, order: {"name": name, "order": order},
    st.sampled_from(["status", "start_time", "end_time", "mode"]),
    st.sampled_from(["asc", "desc"]),
)


def expected_page(stored: dict[str, Rollout], filter: dict, sort: dict | None) -> list[Rollout]:
    """The query as a scan of a plain list."""

    def holds(rollout: Rollout) -> bool:
        results = []
        for name, field in filter.items():
            if name != "_aggregate":
                [(operator, operand)] = field.items()
                value = getattr(rollout, name)
                results.append(
                    value in operand
                    if operator == "within"
                    else value == operand
                    if operator == "exact"
                    else operand in value
                )
        return not results or (all if filter.get("_aggregate", "and") == "and" else any)(results)

    matching = [rollout for rollout in stored.values() if holds(rollout)]
    if sort is not None:
        missing = float("inf") if sort["name"].endswith("_time") else ""
        values = {id(rollout): getattr(rollout, sort["name"]) for rollout in matching}
        matching.sort(
            key=lambda rollout: missing if values[id(rollout)] is None else values[id(rollout)],
            reverse=sort["order"] == "desc",
        )
    return matching


@settings(max_examples=150, deadline=None)
@given(
    changes=st.lists(st.tuples(st.sampled_from(["upsert", "delete"]), rollouts), max_size=25),
    filter=conditions,
    sort=sorts,
    limit=st.integers(-1, 4),
    offset=st.integers(0, 3),
)
async def test_a_collection_answers_like_a_list(changes, filter, sort, limit, offset):
    collection = ListBasedCollection([], Rollout, ["rollout_id"], indexed=["status", "start_time"])
    stored: dict[str, Rollout] = {}
    for change, rollout in changes:
        if change == "upsert":
            await collection.upsert([rollout])
            stored[rollout.rollout_id] = rollout
        elif stored.pop(rollout.rollout_id, None) is not None:
            await collection.delete([rollout])
    page = await collection.query(filter, sort, limit, offset)
    expected = expected_page(stored, filter, sort)
    assert page.total == len(expected)
    assert page.items == expected[offset : None if limit == -1 else offset + limit]
    assert await collection.size() == len(stored)


queue_calls = st.tuples(
    st.sampled_from(["enqueue", "dequeue", "remove", "peek"]), st.lists(st.sampled_from("abcd"), max_size=3)
)


@settings(max_examples=150, deadline=None)
@given(calls=st.lists(queue_calls, max_size=40))
async def test_a_queue_is_a_list_that_is_taken_from_the_front(calls):
    queue = DequeBasedQueue(str)
    model: list[str] = []
    for call, items in calls:
        if call == "enqueue":
            assert await queue.enqueue(items) == items
            model += items
        elif call == "dequeue":
            assert list(await queue.dequeue(len(items))) == model[: len(items)]
            del model[: len(items)]
        elif call == "remove":
            await queue.remove(items)
            model = [item for item in model if item not in items]
        assert list(await queue.peek(2)) == model[:2]
        assert await queue.size() == len(model)
        assert [await queue.has(item) for item in "abcd"] == [item in model for item in "abcd"]


@pytest.mark.parametrize("items", [[{"n": 1}, {"n": 2}, {"n": 1}], [[1], [2], [1]], [attempt("r", 1), attempt("r", 2)]])
async def test_a_queue_takes_items_that_cannot_be_hashed(items):
    queue = DequeBasedQueue(object, items)
    assert await queue.has(items[1]) and not await queue.has({"n": 3})
    await queue.remove([items[1]])
    left = [item for item in items if item != items[1]]
    assert (await queue.size(), await queue.peek(9)) == (len(left), left)
    await queue.enqueue([items[1]])
    assert await queue.dequeue(9) == [*left, items[1]]


async def test_what_is_put_back_comes_first_also_when_it_was_removed_before():
    queue = DequeBasedQueue(str, "abc")
    await queue.remove(["b", "c"])
    await queue.put_back(["c", "b"])
    assert await queue.dequeue(9) == ["c", "b", "a"]


async def test_removed_items_do_not_pile_up_in_a_queue():
    queue = DequeBasedQueue(str, ["first"])
    for n in range(10_000):
        await queue.enqueue([f"r{n}"])
        await queue.remove([f"r{n}"])
    assert len(queue._items) < 200
    assert await queue.dequeue(2) == ["first"]


async def test_a_key_value_map_is_a_dict():
    counters = DictBasedKeyValue({"a": 1})
    await counters.set("b", 2)
    assert (await counters.get("a"), await counters.get("c"), await counters.get("c", 7)) == (1, None, 7)
    assert (await counters.pop("a"), await counters.pop("a", 0), await counters.has("a")) == (1, 0, False)
    assert await counters.size() == 1


async def test_atomic_blocks_of_threads_exclude_each_other():
    collections = InMemoryLightningCollections()

    async def count_up(collections: InMemoryLightningCollections) -> None:
        number = await collections.span_sequence_ids.get("n", 0)
        threading.Event().wait(0.0001)  # lets other threads run
        await collections.span_sequence_ids.set("n", (number or 0) + 1)

    async def many() -> None:
        for _ in range(50):
            await collections.execute(count_up)

    threads = [threading.Thread(target=asyncio.run, args=(many(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert await collections.span_sequence_ids.get("n") == 200

"""The contract of queries: filters, sorting and pages of rollouts, attempts, resources and workers."""

from __future__ import annotations

from functools import partial

import pytest
import pytest_asyncio

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.store import LLM, AttemptedRollout, PaginatedResult, PromptTemplate, ProxyLLM, Rollout

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def five(store, clock):
    """r0 queued, r1 running, r2 succeeded, r3 cancelled without an attempt, r4 queued; one second apart."""
    for n, mode in enumerate(["train", None, "val", "test", None]):
        await store.enqueue_rollout(n, mode=mode, rollout_id=f"r{n}")
        clock.advance(1)
    await store.start_many_attempts(["r1", "r2"])
    await store.update_attempt("r1", "latest", status="running")
    await store.update_attempt("r2", "latest", status="succeeded")
    clock.advance(1)
    await store.update_rollout("r3", status="cancelled")


async def _ids(store, **query) -> list[str]:
    return [rollout.rollout_id for rollout in await store.query_rollouts(**query)]


async def test_rollouts_come_in_order_of_insertion_with_their_latest_attempt(store, five):
    result = await store.query_rollouts()
    assert isinstance(result, PaginatedResult)
    assert [rollout.rollout_id for rollout in result] == ["r0", "r1", "r2", "r3", "r4"]
    assert [type(rollout) for rollout in result] == [Rollout, AttemptedRollout, AttemptedRollout, Rollout, Rollout]
    assert (result.limit, result.offset, result.total, len(result)) == (-1, 0, 5, 5)
    assert [rollout.rollout_id for rollout in result[1:3]] == ["r1", "r2"]


async def test_rollout_filters(store, five):
    assert await _ids(store, status_in=["queuing", "cancelled"]) == ["r0", "r3", "r4"]
    assert await _ids(store, status=["running"]) == ["r1"]
    assert await _ids(store, status_in=["succeeded"], status=["running"]) == ["r2"], "the newer name wins"
    assert await _ids(store, rollout_id_in=["r4", "nope", "r1"]) == ["r1", "r4"]
    assert await _ids(store, rollout_ids=["r0"]) == ["r0"]
    assert await _ids(store, rollout_id_contains="4") == ["r4"]
    assert await _ids(store, rollout_id_contains="_") == []
    assert await _ids(store, status_in=[]) == []
    assert await _ids(store, rollout_id_in=[]) == []
    assert await _ids(store, rollout_id_in=[None]) == []
    assert await _ids(store, rollout_id_in=("r2", "r0")) == ["r0", "r2"]
    assert await _ids(store, status_in=["queuing"], rollout_id_in=["r0", "r1"]) == ["r0"]
    assert await _ids(store, status_in=["queuing"], rollout_id_in=["r1"], filter_logic="or") == ["r0", "r1", "r4"]
    assert await _ids(store, filter_logic="or") == ["r0", "r1", "r2", "r3", "r4"]


async def test_missing_times_sort_last_and_other_missing_values_first(store, five):
    assert await _ids(store, sort_by="end_time") == ["r2", "r3", "r0", "r1", "r4"]
    assert await _ids(store, sort_by="end_time", sort_order="desc") == ["r0", "r1", "r4", "r3", "r2"]
    assert await _ids(store, sort_by="mode") == ["r1", "r4", "r3", "r0", "r2"]
    assert await _ids(store, sort_by="start_time", sort_order="desc") == ["r4", "r3", "r2", "r1", "r0"]
    assert await _ids(store, sort_by="status", limit=2) == ["r3", "r0"]


async def test_pages_add_up_to_the_whole(store, five):
    pages = [await store.query_rollouts(limit=2, offset=offset) for offset in (0, 2, 4, 6)]
    assert [[rollout.rollout_id for rollout in page] for page in pages] == [["r0", "r1"], ["r2", "r3"], ["r4"], []]
    assert {page.total for page in pages} == {5}
    nothing = await store.query_rollouts(status_in=["queuing"], limit=0)
    assert (len(nothing), nothing.total) == (0, 2)
    rest = await store.query_rollouts(offset=3)
    assert ([rollout.rollout_id for rollout in rest], rest.total, rest.limit) == (["r3", "r4"], 5, -1)


async def _browse(store, **query) -> tuple[list[str], str | None]:
    page = await store.browse_rollouts(**query)
    return [rollout.rollout_id for rollout in page.items], page.next


async def test_rollouts_are_browsed_from_the_last_one_back(store, five):
    assert await _browse(store) == (["r4", "r3", "r2", "r1", "r0"], None)
    assert [type(each) for each in (await store.browse_rollouts()).items[1:3]] == [Rollout, AttemptedRollout]
    assert await _browse(store, limit=2) == (["r4", "r3"], "r3")
    await store.enqueue_rollout("later", rollout_id="r5")
    assert await _browse(store, limit=2, before="r3") == (["r2", "r1"], "r1"), "what came meanwhile shifts nothing"
    assert await _browse(store, limit=2, before="r1") == (["r0"], None)
    assert await _browse(store, limit=1, before="r1") == (["r0"], None)
    assert await _browse(store, before="r0") == ([], None)
    assert await _browse(store, status_in=["queuing"], before="r5") == (["r4", "r0"], None)
    assert await _browse(store, status_in=["queuing"], limit=2) == (["r5", "r4"], "r4")
    assert await _browse(store, status_in=["queuing", "running"], before="r5") == (["r4", "r1", "r0"], None)
    assert await _browse(store, status_in=[]) == ([], None)
    with pytest.raises(NotFound, match="no rollout 'gone'"):
        await store.browse_rollouts(before="gone")


async def test_browsed_rollouts_are_searched_a_part_at_a_time(store, five):
    """By id and by input, which is written as JSON; a page says how far it looked."""
    await store.enqueue_rollout({"prompt": 'say "H\u00e4"%_'}, rollout_id="r5")
    assert await _browse(store, text="r3") == (["r3"], None)
    assert await _browse(store, text='\\"H\u00e4') == (["r5"], None)
    assert await _browse(store, text="h\u00e4") == ([], None), "case counts"
    assert await _browse(store, text="%") == (["r5"], None) and await _browse(store, text="' OR 1=1 --") == ([], None)
    assert await _browse(store, text="r1", within=2) == ([], "r4")
    assert await _browse(store, text="r1", within=2, before="r4") == ([], "r2")
    assert await _browse(store, text="r1", within=2, before="r2") == (["r1"], None)
    assert await _browse(store, text="r", within=3, limit=2) == (["r5", "r4"], "r4")


@pytest.mark.parametrize("bad", [{"limit": 0}, {"within": 0}, {"limit": -1}, {"status_in": ["no"]}, {"text": "\0"}])
async def test_browsing_refuses_what_means_nothing(store, bad):
    with pytest.raises(ConfigError):
        await store.browse_rollouts(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"sort_by": "input"},
        {"sort_by": "nope; DROP TABLE rollouts"},
        {"sort_order": "up"},
        {"filter_logic": "xor"},
        {"limit": -2},
        {"limit": 1.5},
        {"limit": 2**63},
        {"limit": 10**20},
        {"offset": -1},
        {"offset": 2**63},
        {"status_in": ["done"]},
        {"status_in": "queuing"},
    ],
)
async def test_meaningless_queries_are_refused(store, five, bad):
    with pytest.raises(ConfigError):
        await store.query_rollouts(**bad)
    assert len(await store.query_rollouts()) == 5


async def test_the_largest_page_is_a_page(store, make, five):
    largest = 2**63 - 1
    rollout = await store.start_attempt("r0")
    await store.add_span(make.span(rollout))
    for query in (
        store.query_rollouts,
        partial(store.query_attempts, "r0"),
        partial(store.query_spans, "r0"),
        store.query_workers,
        store.query_resources,
    ):
        whole = await query()
        for limit, offset in ((largest, 0), (largest, 1), (largest, largest), (5, largest), (-1, largest)):
            page = await query(limit=limit, offset=offset)
            assert page.items == whole.items[offset:]
            assert (page.limit, page.offset, page.total) == (limit, offset, whole.total)
        for meaningless in ({"limit": largest + 1}, {"offset": largest + 1}, {"limit": 10**20}):
            with pytest.raises(ConfigError):
                await query(**meaningless)


async def test_get_of_an_unknown_id_is_none(store):
    assert await store.get_rollout_by_id("nope") is None
    assert await store.get_latest_attempt("nope") is None
    assert await store.get_resources_by_id("nope") is None
    assert await store.get_worker_by_id("nope") is None
    assert await store.get_latest_resources() is None
    assert len(await store.query_attempts("nope")) == 0


async def test_attempts_are_sorted_and_paged(store, clock):
    first = await store.start_rollout(1)
    for worker in ("b", "a"):
        clock.advance(1)
        await store.start_attempt(first.rollout_id, worker)
    attempts = await store.query_attempts(first.rollout_id)
    assert [attempt.sequence_id for attempt in attempts] == [1, 2, 3]
    by_worker = await store.query_attempts(first.rollout_id, sort_by="worker_id", sort_order="desc", limit=2)
    assert [attempt.worker_id for attempt in by_worker] == ["b", "a"]
    assert by_worker.total == 3
    with pytest.raises(ConfigError, match="cannot sort by 'metadata'"):
        await store.query_attempts(first.rollout_id, sort_by="metadata")


async def test_resources_are_versioned_and_the_last_change_is_the_latest(store, clock):
    one = await store.add_resources({"llm": LLM(endpoint="http://a", model="m", sampling_parameters={"t": 0.5})})
    assert one.resources_id.startswith("rs-") and len(one.resources_id) == 15
    assert (one.version, one.create_time, one.update_time) == (1, clock.now, clock.now)
    clock.advance(1)
    two = await store.update_resources("mine", {"p": PromptTemplate(template="{x}", engine="f-string")})
    assert (two.resources_id, two.version) == ("mine", 1)
    assert await store.get_latest_resources() == two
    clock.advance(1)
    three = await store.update_resources(one.resources_id, {"proxy": ProxyLLM(endpoint="http://p", model="m")})
    assert (three.version, three.create_time, three.update_time) == (2, one.create_time, clock.now)
    assert isinstance(three.resources["proxy"], ProxyLLM)
    assert await store.get_latest_resources() == three == await store.get_resources_by_id(one.resources_id)
    found = await store.query_resources()
    assert [update.resources_id for update in found] == [one.resources_id, "mine"]
    assert [update.resources_id for update in await store.query_resources(resources_id_contains="ine")] == ["mine"]
    newest = await store.query_resources(sort_by="update_time", sort_order="desc", limit=1)
    assert [update.resources_id for update in newest] == [one.resources_id]
    with pytest.raises(ConfigError, match="cannot sort by"):
        await store.query_resources(sort_by="resources")


async def test_things_that_are_not_resources_are_refused(store):
    for bad in (
        {"x": {"resource_type": "car"}},
        {"x": 1},
        [1],
        {"x": LLM(endpoint="e", model="m", sampling_parameters={"t": float("inf")})},
    ):
        with pytest.raises(ConfigError, match="resources"):
            await store.add_resources(bad)
    assert await store.get_latest_resources() is None


async def test_workers_are_filtered_and_sorted(store, make, clock):
    await make.claimed(store, worker_id="gpu-1")
    clock.advance(1)
    await store.dequeue_rollout("cpu-1")
    await store.update_worker("cpu-2")

    async def ids(**query) -> list[str]:
        return [worker.worker_id for worker in await store.query_workers(**query)]

    assert await ids() == ["gpu-1", "cpu-1", "cpu-2"]
    assert await ids(status_in=["busy", "idle"]) == ["gpu-1", "cpu-1"]
    assert await ids(worker_id_contains="cpu", status_in=["busy"]) == []
    assert await ids(worker_id_contains="cpu", status_in=["busy"], filter_logic="or") == ["gpu-1", "cpu-1", "cpu-2"]
    assert await ids(sort_by="last_dequeue_time") == ["gpu-1", "cpu-1", "cpu-2"]
    assert await ids(sort_by="worker_id", limit=1, offset=1) == ["cpu-2"]


async def test_statistics_count_everything(store, make, clock):
    rollout = await make.claimed(store, worker_id="w")
    await store.add_span(make.span(rollout))
    await store.add_resources({})
    clock.advance(5)
    statistics = await store.statistics()
    assert isinstance(statistics.pop("name"), str)
    assert (
        statistics.items()
        >= {
            "total_rollouts": 1,
            "total_attempts": 1,
            "total_spans": 1,
            "total_resources": 1,
            "total_workers": 1,
            "uptime": 5,
        }.items()
    )

"""The contract of ids and filters: what no store takes, in whichever call, and that such a call changes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from rollout_core.base.errors import ConfigError
from rollout_core.store import AttemptedRollout, EnqueueRolloutRequest, LightningStore

pytestmark = pytest.mark.asyncio

NO_TEXTS = {"NUL": "a\0b", "lone surrogate": "\ud800"}
NO_IDS = {**NO_TEXTS, "empty": ""}

Call = Callable[[LightningStore, AttemptedRollout, str], Awaitable[Any]]


def _renamed(rollout: AttemptedRollout, rollout_id: str) -> AttemptedRollout:
    attempt = rollout.attempt.model_copy(update={"rollout_id": rollout_id})
    return rollout.model_copy(update={"rollout_id": rollout_id, "attempt": attempt})


def _request(**ids: str) -> EnqueueRolloutRequest:
    """A request whose ids pydantic has not looked at."""
    return EnqueueRolloutRequest(input="new").model_copy(update=ids)


CALLS_WITH_AN_ID: dict[str, Call] = {
    "enqueue": lambda store, _, bad: store.enqueue_many_rollouts([_request(), _request(rollout_id=bad)]),
    "enqueue single": lambda store, _, bad: store.enqueue_rollout("new", rollout_id=bad),
    "enqueue for resources": lambda store, _, bad: store.enqueue_many_rollouts([_request(resources_id=bad)]),
    "dequeue": lambda store, _, bad: store.dequeue_rollout(bad),
    "dequeue none": lambda store, _, bad: store.dequeue_many_rollouts(limit=0, worker_id=bad),
    "release": lambda store, rollout, bad: store.release_rollouts([rollout, _renamed(rollout, bad)]),
    "start": lambda store, _, bad: store.start_rollout("new", worker_id=bad),
    "start many": lambda store, _, bad: store.start_many_rollouts([_request()], worker_id=bad),
    "start many by id": lambda store, _, bad: store.start_many_rollouts([_request(), _request(rollout_id=bad)]),
    "attempt": lambda store, rollout, bad: store.start_many_attempts([rollout.rollout_id, bad]),
    "attempt by": lambda store, rollout, bad: store.start_attempt(rollout.rollout_id, bad),
    "attempt none by": lambda store, _, bad: store.start_many_attempts([], worker_id=bad),
    "update rollout": lambda store, _, bad: store.update_rollout(bad, status="running"),
    "update resources of": lambda store, rollout, bad: store.update_rollout(rollout.rollout_id, resources_id=bad),
    "update latest attempt": lambda store, _, bad: store.update_attempt(bad, "latest", status="failed"),
    "update attempt": lambda store, rollout, bad: store.update_attempt(rollout.rollout_id, bad, status="failed"),
    "update worker of": lambda store, rollout, bad: store.update_attempt(rollout.rollout_id, "latest", worker_id=bad),
    "number": lambda store, rollout, bad: store.get_many_span_sequence_ids([(rollout.rollout_id, "at"), (bad, "at")]),
    "number attempt": lambda store, rollout, bad: store.get_next_span_sequence_id(rollout.rollout_id, bad),
    "get rollout": lambda store, _, bad: store.get_rollout_by_id(bad),
    "query rollouts": lambda store, rollout, bad: store.query_rollouts(rollout_id_in=[rollout.rollout_id, bad]),
    "query rollout": lambda store, _, bad: store.query_rollouts(rollout_id_in=[bad]),
    "query attempts": lambda store, _, bad: store.query_attempts(bad),
    "latest attempt": lambda store, _, bad: store.get_latest_attempt(bad),
    "query spans": lambda store, _, bad: store.query_spans(bad),
    "query spans of": lambda store, rollout, bad: store.query_spans(rollout.rollout_id, bad),
    "query span": lambda store, rollout, bad: store.query_spans(rollout.rollout_id, span_id=bad),
    "query many spans": lambda store, _, bad: store.query_many_spans([bad]),
    "wait": lambda store, _, bad: store.wait_for_rollouts(rollout_ids=[bad], timeout=0),
    "update resources": lambda store, _, bad: store.update_resources(bad, {}),
    "get resources": lambda store, _, bad: store.get_resources_by_id(bad),
    "query resources": lambda store, _, bad: store.query_resources(resources_id=bad),
    "update worker": lambda store, _, bad: store.update_worker(bad),
    "get worker": lambda store, _, bad: store.get_worker_by_id(bad),
}
CALLS_WITH_A_TEXT: dict[str, Call] = {
    "rollouts": lambda store, _, bad: store.query_rollouts(rollout_id_contains=bad),
    "many spans": lambda store, rollout, bad: store.query_many_spans([rollout.rollout_id], name=bad),
    "resources": lambda store, _, bad: store.query_resources(resources_id_contains=bad),
    "workers": lambda store, _, bad: store.query_workers(worker_id_contains=bad),
}


async def _everything(store: LightningStore, rollout: AttemptedRollout) -> list[Any]:
    """All that a store knows."""
    counts = {name: count for name, count in (await store.statistics()).items() if name.startswith("total_")}
    rollouts = (await store.query_rollouts()).items
    spans = (await store.query_spans(rollout.rollout_id)).items
    attempts = (await store.query_attempts(rollout.rollout_id)).items
    return [counts, rollouts, spans, attempts, (await store.query_workers()).items, await store.query_resources()]


@pytest_asyncio.fixture
async def rollout(store, make) -> AttemptedRollout:
    """One that a worker works on, beside a span, a snapshot of resources and a rollout in the queue."""
    await store.add_resources({})
    claimed = await make.claimed(store, "worker")
    await store.add_span(make.span(claimed))
    await store.enqueue_rollout("waiting")
    return claimed


@pytest.mark.parametrize("bad", NO_IDS.values(), ids=NO_IDS)
async def test_what_is_no_id_is_refused_by_every_call_and_changes_nothing(store, rollout, bad):
    rollout = await store.get_rollout_by_id(rollout.rollout_id)
    before = await _everything(store, rollout)
    for name, call in CALLS_WITH_AN_ID.items():
        if not bad and name == "update worker of":
            continue  # it takes the attempt from its worker
        with pytest.raises(ConfigError):
            raise AssertionError(f"{name} took {bad!r}: {await call(store, rollout, bad)}")
    assert await _everything(store, rollout) == before
    assert await store.get_next_span_sequence_id(rollout.rollout_id, "at") == 2
    assert (await store.dequeue_rollout("worker")).input == "waiting"


@pytest.mark.parametrize("field", ["rollout_id", "attempt_id", "span_id"])
@pytest.mark.parametrize("bad", NO_IDS.values(), ids=NO_IDS)
async def test_a_span_without_proper_ids_is_refused_with_its_batch(store, rollout, make, field, bad):
    before = await _everything(store, rollout)
    with pytest.raises(ConfigError):
        await store.add_many_spans([make.span(rollout), make.span(rollout).model_copy(update={field: bad})])
    assert await _everything(store, rollout) == before


@pytest.mark.parametrize("bad", NO_TEXTS.values(), ids=NO_TEXTS)
async def test_what_is_no_text_is_refused_in_filters_and_spans(store, rollout, make, bad):
    before = await _everything(store, rollout)
    for name, call in CALLS_WITH_A_TEXT.items():
        with pytest.raises(ConfigError):
            raise AssertionError(f"{name} took {bad!r}: {await call(store, rollout, bad)}")
    for field in ("trace_id", "span_id", "parent_id", "name"):
        for filter in (field, f"{field}_contains"):
            with pytest.raises(ConfigError):
                await store.query_spans(rollout.rollout_id, **{filter: bad})
        with pytest.raises(ConfigError):
            await store.add_span(make.span(rollout).model_copy(update={field: bad}))
    assert await _everything(store, rollout) == before


async def test_every_text_holds_the_empty_one(store, rollout, make):
    nameless = make.span(rollout, 2).model_copy(update={"name": "", "parent_id": ""})
    await store.add_span(nameless)
    assert len(await store.query_rollouts(rollout_id_contains="")) == 2
    assert len(await store.query_workers(worker_id_contains="")) == 1
    assert len(await store.query_resources(resources_id_contains="")) == 1
    assert len(await store.query_spans(rollout.rollout_id, name_contains="")) == 2
    assert [span.name for span in await store.query_spans(rollout.rollout_id, parent_id_contains="")] == [""]
    assert [span.name for span in await store.query_spans(rollout.rollout_id, name="")] == [""]


async def test_ids_may_be_any_other_text(store, make):
    strange = "a/b ?#%00 \x01\n é 模型 \U0001f600 ../latest"
    rollout = await store.enqueue_rollout(1, rollout_id=strange)
    claimed = await store.dequeue_rollout(strange)
    await store.add_span(make.span(claimed, span_id=strange))
    assert (claimed.rollout_id, claimed.attempt.worker_id) == (rollout.rollout_id, strange) == (strange, strange)
    assert [span.span_id for span in await store.query_spans(strange, span_id=strange)] == [strange]
    assert (await store.update_resources(strange, {})).resources_id == strange
    assert (await store.get_worker_by_id(strange)).current_rollout_id == strange

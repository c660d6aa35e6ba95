"""Stores of users' own: what they define is enough, and what they leave out says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, Conflict, NotFound
from rollout_core.store import (
    AttemptedRollout,
    AttemptUpdate,
    EnqueueRolloutRequest,
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
)

pytestmark = pytest.mark.asyncio


class Singles(LightningStore):
    """Defines the single forms alone, with the arguments that Agent-lightning's have."""

    def __init__(self) -> None:
        self.kept = InMemoryLightningStore()

    async def enqueue_rollout(self, input, mode=None, resources_id=None, config=None, metadata=None):
        return await self.kept.enqueue_rollout(input, mode, resources_id, config, metadata)

    async def dequeue_rollout(self, worker_id=None):
        return await self.kept.dequeue_rollout(worker_id)

    async def start_rollout(
        self, input, mode=None, resources_id=None, config=None, metadata=None, worker_id=None
    ) -> AttemptedRollout:
        return await self.kept.start_rollout(input, mode, resources_id, config, metadata, worker_id)

    async def start_attempt(self, rollout_id, worker_id=None):
        return await self.kept.start_attempt(rollout_id, worker_id)

    async def update_rollout(self, rollout_id, **changes: Any):
        return await self.kept.update_rollout(rollout_id, **changes)

    async def update_attempt(self, rollout_id, attempt_id, **changes: Any):
        assert "fenced" not in changes
        return await self.kept.update_attempt(rollout_id, attempt_id, **changes)

    async def add_span(self, span):
        return await self.kept.add_span(span)

    async def get_next_span_sequence_id(self, rollout_id, attempt_id):
        return await self.kept.get_next_span_sequence_id(rollout_id, attempt_id)

    async def query_rollouts(self, **query: Any):
        return await self.kept.query_rollouts(**query)

    async def query_attempts(self, rollout_id, **query: Any):
        return await self.kept.query_attempts(rollout_id, **query)

    async def query_spans(self, rollout_id, attempt_id=None, **query: Any):
        return await self.kept.query_spans(rollout_id, attempt_id, **query)


class Batches(LightningStore):
    """Defines the batch forms alone."""

    def __init__(self) -> None:
        self.kept = InMemoryLightningStore()

    async def enqueue_many_rollouts(self, rollouts):
        return await self.kept.enqueue_many_rollouts(rollouts)

    async def dequeue_many_rollouts(self, *, limit=1, worker_id=None):
        return await self.kept.dequeue_many_rollouts(limit=limit, worker_id=worker_id)

    async def start_many_rollouts(self, rollouts, *, worker_id=None):
        return await self.kept.start_many_rollouts(rollouts, worker_id=worker_id)

    async def start_many_attempts(self, rollout_ids, *, worker_id=None):
        return await self.kept.start_many_attempts(rollout_ids, worker_id=worker_id)

    async def update_many_attempts(self, updates, *, fenced=False):
        return await self.kept.update_many_attempts(updates, fenced=fenced)

    async def add_many_spans(self, spans):
        return await self.kept.add_many_spans(spans)

    async def get_many_span_sequence_ids(self, rollout_attempt_ids):
        return await self.kept.get_many_span_sequence_ids(rollout_attempt_ids)


async def test_batch_forms_are_made_of_single_ones(make):
    store = Singles()
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
    claimed = await store.dequeue_many_rollouts(limit=9, worker_id="w")
    assert [rollout.input for rollout in claimed] == [0, 1, 2]
    assert list(await store.dequeue_many_rollouts(limit=9)) == []
    first, second, third = claimed
    spans = [make.span(first, 1), make.span(first, 2), make.span(second, 3)]
    assert list(await store.add_many_spans([*spans, spans[0]])) == spans
    assert list(await store.query_many_spans([second.rollout_id, first.rollout_id])) == [spans[2], *spans[:2]]
    pairs = [(first.rollout_id, first.attempt.attempt_id)] * 2
    assert list(await store.get_many_span_sequence_ids(pairs)) == [3, 4]
    [again] = await store.start_many_attempts([third.rollout_id], worker_id="w2")
    assert again.attempt.sequence_id == 2
    [started] = await store.start_many_rollouts([EnqueueRolloutRequest(input=9)], worker_id="w")
    assert started.attempt.worker_id == "w"
    assert (await store.get_rollout_by_id(started.rollout_id)) == started
    assert (await store.get_latest_attempt(third.rollout_id)) == again.attempt


async def test_a_store_of_single_forms_fences_updates():
    store = Singles()
    [rollout] = await store.start_many_rollouts([EnqueueRolloutRequest(input=1)])
    [newer] = await store.start_many_attempts([rollout.rollout_id])
    old, new = [
        AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id=one.attempt.attempt_id, status="succeeded")
        for one in (rollout, newer)
    ]
    refused, applied, repeated = await store.update_many_attempts([old, new, new], fenced=True)
    assert isinstance(refused, Conflict) and "superseded" in str(refused)
    assert applied.status == "succeeded" and repeated == applied


async def test_a_store_of_single_forms_cancels_what_has_not_finished():
    store = Singles()
    one, other = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(2)])
    await store.update_rollout(one.rollout_id, status="succeeded")
    found = await store.cancel_rollouts([other.rollout_id, one.rollout_id])
    assert [rollout.status for rollout in found] == ["cancelled", "succeeded"]
    with pytest.raises(NotFound, match="nope"):
        await store.cancel_rollouts(["nope"])


async def test_a_store_of_single_forms_gives_claims_back(make):
    store = Singles()
    await store.enqueue_rollout(1)
    claimed = await store.dequeue_many_rollouts(limit=1)
    await store.release_rollouts(claimed)
    assert await make.status(store, claimed[0].rollout_id) == "requeuing"


async def test_single_forms_are_made_of_batch_ones(make):
    store = Batches()
    queued = await store.enqueue_rollout(1, rollout_id="a")
    rollout = await store.dequeue_rollout("w")
    assert rollout is not None and (rollout.rollout_id, await store.dequeue_rollout()) == (queued.rollout_id, None)
    span = make.span(rollout)
    assert (await store.add_span(span), await store.add_span(span)) == (span, None)
    assert await store.get_next_span_sequence_id("a", rollout.attempt.attempt_id) == 2
    assert (await store.start_attempt("a")).attempt.sequence_id == 2
    assert (await store.update_attempt("a", "latest", status="failed")).status == "failed"
    assert (await store.start_rollout("task", worker_id="w")).attempt.worker_id == "w"


CALLS = {
    "enqueue_rollout": lambda store: store.enqueue_rollout(1),
    "enqueue_many_rollouts": lambda store: store.enqueue_many_rollouts([{"input": 1}]),
    "dequeue_rollout": lambda store: store.dequeue_rollout(),
    "dequeue_many_rollouts": lambda store: store.dequeue_many_rollouts(),
    "claim_rollouts": lambda store: store.claim_rollouts("c"),
    "start_rollout": lambda store: store.start_rollout(1),
    "start_many_rollouts": lambda store: store.start_many_rollouts([{"input": 1}]),
    "start_attempt": lambda store: store.start_attempt("a"),
    "start_many_attempts": lambda store: store.start_many_attempts(["a"]),
    "update_rollout": lambda store: store.update_rollout("a", status="cancelled"),
    "cancel_rollouts": lambda store: store.cancel_rollouts(["a"]),
    "update_attempt": lambda store: store.update_attempt("a", "latest"),
    "update_many_attempts": lambda store: store.update_many_attempts([{"rollout_id": "a", "attempt_id": "latest"}]),
    "get_next_span_sequence_id": lambda store: store.get_next_span_sequence_id("a", "b"),
    "get_many_span_sequence_ids": lambda store: store.get_many_span_sequence_ids([("a", "b")]),
    "query_rollouts": lambda store: store.query_rollouts(),
    "get_rollout_by_id": lambda store: store.get_rollout_by_id("a"),
    "query_attempts": lambda store: store.query_attempts("a"),
    "get_latest_attempt": lambda store: store.get_latest_attempt("a"),
    "query_spans": lambda store: store.query_spans("a"),
    "query_many_spans": lambda store: store.query_many_spans(["a"]),
    "wait_for_rollouts": lambda store: store.wait_for_rollouts(rollout_ids=["a"]),
    "add_resources": lambda store: store.add_resources({}),
    "update_resources": lambda store: store.update_resources("r", {}),
    "query_resources": lambda store: store.query_resources(),
    "get_resources_by_id": lambda store: store.get_resources_by_id("r"),
    "get_latest_resources": lambda store: store.get_latest_resources(),
    "update_worker": lambda store: store.update_worker("w"),
    "query_workers": lambda store: store.query_workers(),
    "get_worker_by_id": lambda store: store.get_worker_by_id("w"),
}


@pytest.mark.parametrize("name", CALLS)
async def test_what_a_store_leaves_out_says_so(name):
    with pytest.raises(NotImplementedError, match="LightningStore does not define"):
        await CALLS[name](LightningStore())


async def test_a_span_of_a_store_without_spans_says_so(make):
    rollout = await InMemoryLightningStore().start_rollout(1)
    for call in (lambda store, span: store.add_span(span), lambda store, span: store.add_many_spans([span])):
        with pytest.raises(NotImplementedError, match="does not define"):
            await call(LightningStore(), make.span(rollout))


class CallsTheBase(LightningStore):
    """An override that asks the base for the rest."""

    async def enqueue_rollout(self, *args: Any, **kwargs: Any):
        return await super().enqueue_rollout(*args, **kwargs)


async def test_an_override_that_asks_the_base_does_not_go_round_in_circles():
    with pytest.raises(NotImplementedError, match="CallsTheBase does not define"):
        await CallsTheBase().enqueue_rollout(1)


async def test_a_store_that_takes_no_ids_says_what_clients_need():
    store = Singles()
    with pytest.raises(
        ConfigError, match=r"Singles\.enqueue_rollout takes no rollout_id, but the caller names .* ro-1"
    ):
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, rollout_id="ro-1")])
    async with served(store) as client:
        with pytest.raises(ConfigError, match="give it a parameter rollout_id=None"):
            await client.enqueue_rollout(1)
    assert not list(await store.kept.query_rollouts())


class Named(Singles):
    async def enqueue_rollout(
        self, input, mode=None, resources_id=None, config=None, metadata=None, *, rollout_id=None
    ):
        return await self.kept.enqueue_rollout(input, mode, resources_id, config, metadata, rollout_id=rollout_id)


async def test_a_store_of_single_forms_that_takes_ids_can_be_served():
    async with served(Named()) as client:
        rollout = await client.enqueue_rollout({"task": 1})
        claimed = await client.dequeue_rollout()
        assert claimed is not None and claimed.rollout_id == rollout.rollout_id


@asynccontextmanager
async def served(store: LightningStore) -> AsyncIterator[LightningStoreClient]:
    server = LightningStoreServer(store)
    await server.start()
    try:
        async with LightningStoreClient(server.endpoint) as client:
            yield client
    finally:
        await server.close()

"""Large spans keep their bodies in the object store, and nobody who reads them can tell."""

from __future__ import annotations

import asyncio
import pickle
from datetime import timedelta

import orjson
import pytest

from rollout_core.base.errors import ConfigError, MissingObject
from rollout_core.objects.gc import collect_garbage
from rollout_core.objects.store import ObjectStore, blob_key
from rollout_core.store import Event, Span, SqlLightningStore

pytestmark = pytest.mark.asyncio

TEXT = "tokens " * 2_000


@pytest.fixture
def objects(tmp_path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path}/objects")


@pytest.fixture(params=["sqlite", "postgres"])
def any_url(request, postgres, tmp_path) -> str:
    return f"sqlite:///{tmp_path}/store.db" if request.param == "sqlite" else postgres.database_of(tmp_path)


async def test_large_spans_come_back_as_they_went_in(any_url, objects, make):
    async with SqlLightningStore.from_url(any_url, objects=objects, offload_bytes=1_000) as store:
        rollout = await make.claimed(store)
        large = make.span(rollout, 1, attributes={"text": TEXT, "deep": {"a": [1, None, "ü"]}})
        large.events = [Event(name="e", attributes={"text": TEXT}, timestamp=1.0)]
        small = make.span(rollout, 2)
        twin = make.span(rollout, 3, attributes=large.attributes)
        twin.events = large.events
        assert list(await store.add_many_spans([large, small, twin])) == [large, small, twin]
        assert list(await store.query_spans(rollout.rollout_id)) == [large, small, twin]
        assert list(await store.query_many_spans([rollout.rollout_id])) == [large, small, twin]
        page = await store.query_spans(rollout.rollout_id, limit=1)
        assert (page[0], page.total) == (large, 3)
        answer = orjson.loads(await store.query_spans_json(rollout.rollout_id, limit=2))
        assert ([Span.model_validate(item) for item in answer["items"]], answer["total"]) == ([large, small], 3)
        assert await store.add_span(large) is None, "a duplicate"

        def sizes(tx):
            return [length for (length,) in tx.rows("SELECT LENGTH(body) FROM spans ORDER BY key")]

        lengths = await store._database.read(sizes)
        assert lengths[0] == lengths[2] == 0 < lengths[1]


async def test_garbage_collection_spares_what_spans_need(any_url, objects, make):
    async with SqlLightningStore.from_url(any_url, objects=objects, offload_bytes=1_000) as store:
        rollout = await make.claimed(store)
        span = make.span(rollout, attributes={"text": TEXT})
        await store.add_span(span)
        objects.put_bytes(b"nobody's")
        report = await asyncio.to_thread(collect_garbage, objects, min_age=timedelta(0))
        assert report.deleted_blobs == 1
        assert list(await store.query_spans(rollout.rollout_id)) == [span]


async def test_a_store_opened_without_the_objects_says_what_it_lacks(any_url, objects, make):
    async with SqlLightningStore.from_url(any_url, objects=objects, offload_bytes=1_000) as store:
        rollout = await make.claimed(store)
        span = make.span(rollout, attributes={"text": TEXT})
        await store.add_span(span)
        async with pickle.loads(pickle.dumps(store)) as copy:  # noqa: S301 - our own
            assert list(await copy.query_spans(rollout.rollout_id)) == [span]
    async with SqlLightningStore.from_url(any_url) as store:
        with pytest.raises(ConfigError, match="open this store with objects="):
            await store.query_spans(rollout.rollout_id)
        assert len(await store.query_rollouts()) == 1


async def test_a_lost_body_is_named(any_url, objects, make):
    async with SqlLightningStore.from_url(any_url, objects=objects, offload_bytes=1_000) as store:
        rollout = await make.claimed(store)
        await store.add_span(make.span(rollout, attributes={"text": TEXT}))
        [(content_id, _)] = objects.blobs()
        objects.files.delete(blob_key(content_id))
        with pytest.raises(MissingObject, match=content_id):
            await store.query_spans(rollout.rollout_id)


async def test_a_span_whose_body_cannot_be_kept_is_not_stored(any_url, objects, make, tmp_path):
    async with SqlLightningStore.from_url(any_url, objects=objects, offload_bytes=1_000) as store:
        rollout = await make.claimed(store)
        (tmp_path / "objects").write_text("in the way of the folder")
        with pytest.raises((ConfigError, OSError, RuntimeError)):
            await store.add_span(make.span(rollout, attributes={"text": TEXT}))
        assert len(await store.query_spans(rollout.rollout_id)) == 0

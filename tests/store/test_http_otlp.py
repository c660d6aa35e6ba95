"""OTLP/HTTP: spans of OpenTelemetry's own exporter and of requests written by hand end up in the store."""

from __future__ import annotations

import gzip
import json

import aiohttp
import pytest
import pytest_asyncio
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link as OtelLink, SpanKind, Status as OtelStatus, StatusCode

from rollout_core.base.errors import Recoverable
from rollout_core.store import LightningStoreServer, SqlLightningStore
from tests.store.conftest import FailingStore

pytestmark = pytest.mark.asyncio

PROTOBUF = {"Content-Type": "application/x-protobuf"}
JSON = {"Content-Type": "application/json"}


@pytest_asyncio.fixture
async def server(url):
    server = LightningStoreServer(SqlLightningStore.from_url(url), api_key="k", max_body_bytes=1_000_000)
    await server.start()
    yield server
    await server.close()


@pytest_asyncio.fixture
async def rollout(server):
    return await server.start_rollout("traced")


@pytest_asyncio.fixture
async def web(server):
    async with aiohttp.ClientSession(server.endpoint, headers={"Authorization": "Bearer k"}) as session:
        yield session


def named(rollout, **further) -> dict:
    return {
        "agentlightning.rollout_id": rollout.rollout_id,
        "agentlightning.attempt_id": rollout.attempt.attempt_id,
        **further,
    }


def pairs(attributes: dict) -> list:
    kinds = {str: "stringValue", bool: "boolValue", int: "intValue", float: "doubleValue"}
    return [{"key": key, "value": {kinds[type(value)]: value}} for key, value in attributes.items()]


def by_hand(resource: dict, *spans: dict) -> dict:
    filled = [
        {"traceId": "ab" * 16, "spanId": f"{n + 1:016x}", "name": f"span-{n}", **span} for n, span in enumerate(spans)
    ]
    return {"resourceSpans": [{"resource": {"attributes": pairs(resource)}, "scopeSpans": [{"spans": filled}]}]}


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
async def test_the_exporter_of_opentelemetry_delivers(server, rollout, compression):
    exporter = OTLPSpanExporter(
        endpoint=server.otlp_traces_endpoint(), headers={"Authorization": "Bearer k"}, compression=compression
    )
    provider = TracerProvider(resource=Resource.create(named(rollout, **{"service.name": "agent"})))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("my.scope", "1.2")
    made = []
    with tracer.start_as_current_span("parent", kind=SpanKind.CLIENT) as parent:
        with tracer.start_as_current_span("child", links=[OtelLink(parent.get_span_context(), {"why": "x"})]) as child:
            child.set_attributes({"text": "é", "n": 3, "x": 0.5, "ok": True, "list": ["a", "b"]})
            child.add_event("happened", {"k": 1})
            child.set_status(OtelStatus(StatusCode.ERROR, "boom"))
        made = [child, parent]
    provider.shutdown()
    found = await server.query_spans(rollout.rollout_id)
    assert [span.name for span in found] == ["child", "parent"]
    assert [span.sequence_id for span in found] == [1, 2]
    for span, original in zip(found, made, strict=True):
        direct = type(span).from_opentelemetry(
            original, rollout.rollout_id, rollout.attempt.attempt_id, span.sequence_id
        )
        for field in ("trace_id", "span_id", "parent_id", "status", "attributes", "links", "resource", "kind"):
            assert getattr(span, field) == getattr(direct, field), field
        assert span.start_time == pytest.approx(direct.start_time, abs=1e-6)
        assert [(event.name, event.attributes) for event in span.events] == [
            (event.name, event.attributes) for event in direct.events
        ]
    assert found[0].instrumentation_scope == {"name": "my.scope", "version": "1.2"}
    assert (await server.get_rollout_by_id(rollout.rollout_id)).status == "running", "a span is a heartbeat"


async def test_ids_of_a_span_win_over_those_of_its_resource(server, rollout, web):
    other = await server.start_rollout("other")
    number = {"agentlightning.span_sequence_id": "7"}
    request = by_hand(named(rollout), {"attributes": pairs(named(other, **number))}, {"name": "mine"})
    async with web.post("/v1/traces", json=request) as reply:
        assert (reply.status, await reply.json()) == (200, {})
    [span] = await server.query_spans(other.rollout_id)
    assert (span.sequence_id, span.attempt_id) == (7, other.attempt.attempt_id)
    assert [span.name for span in await server.query_spans(rollout.rollout_id)] == ["mine"]


@pytest.mark.parametrize("packed", [False, True])
async def test_both_encodings_say_the_same(server, rollout, web, packed):
    values = {"int": "12345678901", "text": "t"}
    span = {
        "parentSpanId": "cd" * 8,
        "kind": 3,
        "startTimeUnixNano": "1500000000000000000",
        "attributes": [
            *pairs({"flag": True, "half": 0.5}),
            {"key": "none", "value": {}},
            {"key": "deep", "value": {"kvlistValue": {"values": pairs(values)}}},
            {"key": "nan", "value": {"doubleValue": "NaN"}},
            {"key": "raw", "value": {"bytesValue": "AQI="}},
        ],
        "status": {"code": 2, "message": "no"},
        "unknownField": 1,
    }
    data = json.dumps(by_hand(named(rollout), span)).encode()
    headers = {**JSON, **({"Content-Encoding": "gzip", "Accept-Encoding": "gzip"} if packed else {})}
    async with web.post("/v1/traces", data=gzip.compress(data) if packed else data, headers=headers) as reply:
        assert reply.status == 200
    [found] = await server.query_spans(rollout.rollout_id)
    assert (found.trace_id, found.span_id, found.parent_id) == ("ab" * 16, f"{1:016x}", "cd" * 8)
    assert (found.start_time, found.end_time, found.kind) == (1.5e9, None, "CLIENT")
    assert found.attributes == {
        "flag": True,
        "half": 0.5,
        "none": None,
        "deep": {"int": "12345678901", "text": "t"},
        "nan": "NaN",
        "raw": "AQI=",
    }
    assert (found.status.status_code, found.status.description) == ("ERROR", "no")


async def test_what_cannot_be_filed_is_rejected_alone_and_said(server, rollout, web):
    request = by_hand(
        named(rollout),
        {"name": "kept"},
        {"name": "lost", "attributes": pairs({"agentlightning.rollout_id": "nope"})},
        {"name": "nameless", "attributes": pairs({"agentlightning.attempt_id": ""})},
    )
    async with web.post("/v1/traces", json=request) as reply:
        answer = await reply.json()
    assert reply.status == 200
    assert answer["partialSuccess"]["rejectedSpans"] == "2"
    assert "rollout nope does not exist" in answer["partialSuccess"]["errorMessage"]
    assert [span.name for span in await server.query_spans(rollout.rollout_id)] == ["kept"]


async def test_a_span_with_a_bad_id_is_rejected_alone(server, rollout, web):
    request = by_hand(
        named(rollout),
        {"name": "kept\0"},
        {"spanId": ""},
        {"attributes": pairs({"agentlightning.rollout_id": "a\0b"})},
        {"attributes": pairs({"agentlightning.attempt_id": "a\0b"})},
    )
    async with web.post("/v1/traces", json=request) as reply:
        answer = await reply.json()
    assert reply.status == 200
    assert answer["partialSuccess"]["rejectedSpans"] == "3"
    assert "an id is empty" in answer["partialSuccess"]["errorMessage"]
    assert [span.name for span in await server.query_spans(rollout.rollout_id)] == ["kept\ufffd"]


async def test_spans_of_older_attempts_are_kept_beside_those_of_unknown_ones(server, rollout, web):
    newer = await server.start_attempt(rollout.rollout_id)
    fields = [{"attributes": pairs({"agentlightning.attempt_id": "at-nope"})} for _ in range(3)]
    request = by_hand(named(rollout), {"name": "old"}, {"attributes": pairs(named(newer)), "name": "new"}, *fields)
    async with web.post("/v1/traces", json=request) as reply:
        answer = await reply.json()
    assert answer["partialSuccess"]["rejectedSpans"] == "3"
    assert answer["partialSuccess"]["errorMessage"] == f"3 spans: rollout {rollout.rollout_id} has no attempt at-nope"
    found = await server.query_spans(rollout.rollout_id)
    assert {span.name: span.attempt_id for span in found} == {
        "old": rollout.attempt.attempt_id,
        "new": newer.attempt.attempt_id,
    }


async def test_duplicates_and_empty_requests_are_successes(server, rollout, web):
    request = by_hand(named(rollout), {})
    for _ in range(2):
        async with web.post("/v1/traces", json=request) as reply:
            assert (reply.status, await reply.json()) == (200, {})
    assert len(await server.query_spans(rollout.rollout_id)) == 1
    async with web.post("/v1/traces", data=b"", headers=PROTOBUF) as reply:
        assert (reply.status, await reply.read()) == (200, b"")
        assert reply.headers["Content-Type"] == "application/x-protobuf"


@pytest.mark.parametrize(
    ("headers", "data", "status"),
    [
        (PROTOBUF, b"\xff\xff\xff", 400),
        (JSON, b"{", 400),
        (JSON, b"[]", 400),
        (JSON, b"\xff", 400),
        (JSON, b'{"resourceSpans": 3}', 400),
        (JSON, b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}', 400),
        (JSON, b'{"a": ' * 3000 + b"1" + b"}" * 3000, 400),
        ({**JSON, "Content-Encoding": "gzip"}, b"not gzip", 400),
        ({"Content-Type": "text/plain"}, b"", 415),
        ({}, b"", 415),
        ({**PROTOBUF, "Content-Encoding": "gzip"}, gzip.compress(b"\0" * 10_000_000), 413),
    ],
)
async def test_bad_requests_are_said_in_the_protocol(web, headers, data, status):
    skip = () if headers else ("Content-Type",)
    async with web.post("/v1/traces", data=data, headers=headers, skip_auto_headers=skip) as reply:
        assert reply.status == status
        body = await reply.read()
    is_json = headers.get("Content-Type") == "application/json"
    assert json.loads(body)["message"] if is_json else Status.FromString(body).message


@pytest.mark.usefixtures("requests_fail_on_purpose")
async def test_a_store_in_trouble_asks_the_exporter_to_try_again():
    server = LightningStoreServer(FailingStore(Recoverable("disk is full")))
    await server.start()
    request = by_hand({"agentlightning.rollout_id": "r", "agentlightning.attempt_id": "a"}, {})
    async with aiohttp.ClientSession(server.endpoint) as web, web.post("/v1/traces", json=request) as reply:
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert (await reply.json())["message"] == "disk is full"
    await server.close()


async def test_protobuf_answers_can_be_packed(server, web):
    request = ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.add(name="nameless", trace_id=b"t" * 16, span_id=b"s" * 8)
    async with web.post(
        "/v1/traces", data=request.SerializeToString(), headers={**PROTOBUF, "Accept-Encoding": "gzip"}
    ) as reply:
        answer = ExportTraceServiceResponse.FromString(await reply.read())
    assert reply.headers["Content-Encoding"] == "gzip"
    assert answer.partial_success.rejected_spans == 1

"""What the server refuses before it looks closer: endless headers, web pages of others, and keys used twice."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket

import aiohttp
import pytest
import pytest_asyncio

from rollout_core.store import InMemoryLightningStore, LightningStoreServer
from rollout_core.store.forwarding_store import ForwardingLightningStore
from rollout_core.store.http import wire
from rollout_core.store.http.requests import MAX_GZIP_MEMBERS, BodyLimits, unpack_gzip
from rollout_core.web.listening import MAX_HEADER_BYTES, MAX_HEADERS, _is_local
from tests.store.patience import LONG

AGL = "/v1/agl"
JSON = {"Content-Type": "application/json"}
ENQUEUE = f"{AGL}/queues/rollouts/enqueue"
ONE = b'{"rollouts": [{"input": 1}]}'


@pytest_asyncio.fixture
async def make_server():
    servers: list[LightningStoreServer] = []

    async def make(store=None, **settings) -> LightningStoreServer:
        servers.append(LightningStoreServer(store or InMemoryLightningStore(), **settings))
        await servers[-1].start()
        return servers[-1]

    yield make
    for server in servers:
        await server.close()


@pytest_asyncio.fixture
async def server(make_server):
    return await make_server()


async def post(server, path=ENQUEUE, data=ONE, **headers) -> tuple[int, str]:
    given = {**JSON, **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with aiohttp.ClientSession(server.endpoint) as web, web.post(path, data=data, headers=given) as reply:
        return reply.status, await reply.text()


async def num_rollouts(server) -> int:
    return (await server.query_rollouts()).total


# Headers


def pour(server, start: bytes, more: bytes, most_bytes: int) -> tuple[int, bytes]:
    """Send ``start`` and then ``more``, again and again, until the server no longer listens; what it took and said."""
    num_bytes = 0
    said = b""
    with socket.create_connection((server.host, server.port), timeout=LONG) as connection:
        connection.sendall(start)
        connection.setblocking(False)
        while num_bytes < most_bytes and b"\r\n\r\n" not in said:
            try:
                num_bytes += connection.send(more)
            except BlockingIOError:
                pass
            except OSError:
                break
            try:
                said += connection.recv(4096)
            except BlockingIOError:
                pass
            except OSError:
                break
    return num_bytes, said


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET /v1/agl/rollouts HTTP/1.1\r\nHost: localhost\r\nX: ", b"a" * 65536),
        (b"GET /v1/agl/rollouts HTTP/1.1\r\nHost: localhost\r\n", b"a: b\r\n" * 1000),
        (b"GET /", b"a" * 65536),
        (b"GET / HTTP/1.1\r\n", b"a" * 65536),
        (
            b"POST /v1/agl/workers/w HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
            b"a" * 65536,
        ),
    ],
    ids=["a header", "many headers", "a path", "a header's name", "a trailer"],
)
async def test_a_header_without_an_end_is_refused_early(make_server, start, more, key):
    server = await make_server(api_key=key)
    num_bytes, said = await asyncio.to_thread(pour, server, start, more, 64 << 20)
    assert num_bytes < 16 << 20, "what fits into buffers on the way"
    assert said.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 401 ")) or not said
    if b"431" in said[:20]:
        assert b"the header is larger than" in said or b"more than 100 headers" in said
    assert (await post(server, Authorization="Bearer k"))[0] == 201, "others are served"


async def test_a_header_within_the_limits_is_taken(server):
    headers = {f"x-{n}": "a" * ((MAX_HEADER_BYTES // 2) // MAX_HEADERS) for n in range(MAX_HEADERS - 10)}
    assert (await post(server, **headers))[0] == 201
    assert (await post(server, **{**headers, **{f"y-{n}": "" for n in range(20)}}))[0] == 431


async def test_large_bodies_are_no_headers(server):
    # Read from the socket in pieces larger than a header may be.
    assert (await post(server, data=b'{"rollouts": [{"input": "%b"}]}' % (b"x" * 1_000_000)))[0] == 201


# Web pages of others


@pytest.mark.parametrize("path", [ENQUEUE, f"{AGL}/queues/rollouts/dequeue", "/v1/traces"])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1"])
async def test_without_a_key_requests_of_foreign_pages_are_refused(server, path, origin):
    status, said = await post(server, path, Origin=origin)
    assert status == 403 and "web page" in said
    assert await num_rollouts(server) == 0


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "0.0.0.0:{port}", ""]
)
async def test_without_a_key_other_names_of_this_machine_are_refused(server, host):
    status, said = await post(server, Host=host.format(port=server.port))
    assert status == 403 and "answers only to localhost" in said
    status, _ = await post(server, Host="evil.example", Origin="http://evil.example")
    assert status == 403, "a page whose name leads here"
    assert await num_rollouts(server) == 0


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:{port}", "127.0.0.1:{port}", "127.9.9.9", "[::1]:{port}"])
async def test_without_a_key_programs_and_own_pages_are_served(server, host):
    host = host.format(port=server.port)
    assert (await post(server, Host=host))[0] == 201
    assert (await post(server, Host=host, Origin=f"http://{host}"))[0] == 201


def test_what_counts_as_local():
    for host in ("localhost", "localhost:80", "127.0.0.1", "[::1]", "[::1]:8080"):
        assert _is_local(host.encode()), host
    for host in ("localhost.evil", "me@localhost", "localhost/x", "[::1", "::1", "[::2]", "10.0.0.1", "a b", "é"):
        assert not _is_local(host.encode()), host


async def test_with_a_key_names_and_pages_do_not_matter(make_server):
    server = await make_server(api_key="k")
    key = {"Authorization": "Bearer k"}
    assert (await post(server, Host="store.example", Origin="http://ui.example", **key))[0] == 201
    assert (await post(server, Host="store.example", Origin="http://ui.example"))[0] == 401


@pytest.mark.parametrize("allowed", ["http://ui.example", "*"])
async def test_pages_that_the_server_was_told_of_are_served(make_server, allowed):
    server = await make_server(cors_allow_origins=allowed)
    assert (await post(server, Origin="http://ui.example"))[0] == 201
    assert (await post(server, Origin="http://evil.example"))[0] == (201 if allowed == "*" else 403)
    assert (await post(server, Host="evil.example", Origin="http://ui.example"))[0] == 403


async def test_health_is_for_everybody(server):
    async with aiohttp.ClientSession(server.endpoint) as web:
        async with web.get(f"{AGL}/health", headers={"Host": "pod", "Origin": "http://x"}) as reply:
            assert reply.status == 200


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "application/octet-stream", "multipart/form-data"]
)
async def test_what_pages_send_without_asking_is_no_json(make_server, media_type):
    for key in (None, "k"):
        server = await make_server(api_key=key)
        status, said = await post(server, **{"Content-Type": media_type, "Authorization": "Bearer k"})
        assert status == 415 and "expected application/json" in said
        assert await num_rollouts(server) == 0
        assert (await post(server, **{"Content-Type": "Application/JSON; charset=utf-8", "Authorization": "Bearer k"}))[
            0
        ] == 201


# Idempotency keys


async def test_a_key_stands_for_one_request(server):
    key = {wire.KEY_HEADER: "k1"}
    first = await post(server, **key)
    assert first[0] == 201 and await post(server, **key) == first
    for path, data in [
        (ENQUEUE, b'{"rollouts": [{"input": 2}]}'),
        (f"{AGL}/rollouts", b'{"input": 1}'),
        (f"{AGL}/rollouts", ONE),
        (f"{AGL}/workers/a", b""),
    ]:
        status, said = await post(server, path, data, **key)
        assert status == 422 and ("another request before" in said or "Field required" in said), said
    assert await num_rollouts(server) == 1
    assert await post(server, **key) == first, "the first request keeps its key"
    assert (await post(server, **{wire.KEY_HEADER: "k" * 300}))[0] == 422


async def test_a_repeated_final_request_of_another_body_is_refused_too(server):
    key = {wire.KEY_HEADER: "k1"}
    await post(server, f"{AGL}/rollouts", b'{"input": 1}', **key)
    status, said = await post(server, f"{AGL}/rollouts", b'{"input": 2}', **{**key, wire.REPEATED_HEADER: "final"})
    assert status == 422 and "another request" in said


class Slow(ForwardingLightningStore):
    """A store whose calls wait until they may go on."""

    def __init__(self) -> None:
        self.store = InMemoryLightningStore()
        self.may_go_on = asyncio.Event()
        self.num_calls = 0

    def backend(self):
        return self.store

    async def forward(self, name, /, *args, **kwargs):
        self.num_calls += 1
        if name == "start_rollout":
            await self.may_go_on.wait()
        return await super().forward(name, *args, **kwargs)

    async def close(self) -> None:
        await self.store.close()


async def test_of_two_requests_at_once_with_one_key_the_other_one_is_refused(make_server):
    store = Slow()
    server = await make_server(store, launch_mode="asyncio")
    key = {wire.KEY_HEADER: "k1"}
    path = f"{AGL}/rollouts"
    first, same = [asyncio.create_task(post(server, path, b'{"input": 1}', **key)) for _ in range(2)]
    while not store.num_calls:
        await asyncio.sleep(0.01)
    status, said = await post(server, path, b'{"input": 2}', **key)
    assert status == 422 and "another request" in said
    assert not first.done()
    store.may_go_on.set()
    assert await first == await same and (await first)[0] == 201
    assert [rollout.input for rollout in await store.store.query_rollouts()] == [1]


async def test_the_same_body_in_pieces_or_packed_is_the_same_request(server):
    async def pieces():
        for start in range(0, len(ONE), 5):
            yield ONE[start : start + 5]

    key = {wire.KEY_HEADER: "k1"}
    first = await post(server, **key)
    assert await post(server, data=pieces(), **key) == first
    assert await post(server, data=gzip.compress(ONE), Content_Encoding="gzip", **key) == first


async def test_a_claim_is_bound_to_its_request_in_the_database_too(server):
    """What a server that did not make the claim, or forgot it, finds by the key."""
    for n in range(4):
        await server.enqueue_rollout(n)
    path = f"{AGL}/queues/rollouts/dequeue"
    repeated = {wire.KEY_HEADER: "k1", wire.REPEATED_HEADER: "true"}
    first = json.loads((await post(server, path, b'{"limit": 2}', **{wire.KEY_HEADER: "k1"}))[1])
    assert len(first) == 2
    status, said = await post(server, path, b'{"limit": 1, "worker_id": "thief"}', **repeated)
    assert status == 422 and "another request" in said


# Packed bodies


def test_gzip_of_several_members_is_unpacked_and_of_too_many_refused():
    limits = BodyLimits(1_000_000)
    parts = [b"a" * 100_000, b"", b"b" * 70_000]
    assert unpack_gzip(b"".join(map(gzip.compress, parts)), limits) == b"".join(parts)
    assert unpack_gzip(gzip.compress(b"x", 0) * MAX_GZIP_MEMBERS, limits) == b"x" * MAX_GZIP_MEMBERS
    with pytest.raises(ValueError, match="more than 1000 gzip members"):
        unpack_gzip(gzip.compress(b"") * (MAX_GZIP_MEMBERS + 1), limits)
    with pytest.raises(ValueError, match="not: "):
        unpack_gzip(gzip.compress(b"x") + b"rubbish", limits)

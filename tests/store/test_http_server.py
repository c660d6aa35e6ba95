"""The server by itself: errors, keys, limits, slow clients, and what its objects become in other processes."""

from __future__ import annotations

import asyncio
import gzip
import html
import json
import multiprocessing
import pickle
import socket
import struct

import aiohttp
import pytest
import pytest_asyncio

from rollout_core.base.errors import (
    ConfigError,
    Conflict,
    CorruptObject,
    Fatal,
    MissingObject,
    NotFound,
    Recoverable,
    UnknownOutcome,
)
from rollout_core.store import (
    AttemptUpdate,
    EnqueueRolloutRequest,
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    SqlLightningStore,
)
from rollout_core.store.forwarding_store import ForwardingLightningStore
from rollout_core.store.http import wire
from rollout_core.store.http.routes import ROUTES
from rollout_core.store.http.transport import path_part
from rollout_core.web import listening
from tests.store.conftest import FailingStore
from tests.store.forking import leave
from tests.store.patience import LONG, until

pytestmark = pytest.mark.asyncio

AGL = "/v1/agl"
JSON = {"Content-Type": "application/json"}


@pytest_asyncio.fixture
async def make_server(url):
    servers: list[LightningStoreServer] = []

    async def make(store=None, **settings) -> LightningStoreServer:
        server = LightningStoreServer(store or SqlLightningStore.from_url(url), **settings)
        servers.append(server)
        await server.start()
        return server

    yield make
    for server in servers:
        await server.close()


@pytest_asyncio.fixture
async def server(make_server):
    return await make_server(prometheus=True, cors_allow_origins="http://ui.example", max_body_bytes=100_000)


@pytest_asyncio.fixture
async def web(server):
    async with aiohttp.ClientSession(server.endpoint) as session:
        yield session


async def ask(web, method: str, path: str, **request) -> tuple[int, dict]:
    async with web.request(method, path, **request) as reply:
        return reply.status, json.loads(await reply.read())


# Requests as users of Agent-lightning send them


async def test_requests_of_agent_lightning_are_understood(web):
    rollouts = {"rollouts": [{"input": 1}, {"input": 2, "mode": "train"}]}
    status, queued = await ask(web, "POST", f"{AGL}/queues/rollouts/enqueue", json=rollouts)
    assert status == 201 and [rollout["input"] for rollout in queued] == [1, 2]
    status, [claimed] = await ask(web, "POST", f"{AGL}/queues/rollouts/dequeue")
    assert (status, claimed["input"], claimed["attempt"]["sequence_id"]) == (200, 1, 1)
    assert await ask(web, "POST", f"{AGL}/queues/rollouts/dequeue", json={"limit": 0}) == (200, [])
    rollout_id, attempt_id = claimed["rollout_id"], claimed["attempt"]["attempt_id"]
    status, attempt = await ask(
        web, "POST", f"{AGL}/rollouts/{rollout_id}/attempts/{attempt_id}", json={"status": "succeeded"}
    )
    assert (status, attempt["status"]) == (200, "succeeded")
    by_get = await ask(web, "GET", f"{AGL}/rollouts?status_in=succeeded&status_in=failed&limit=5")
    by_post = await ask(web, "POST", f"{AGL}/rollouts/search", json={"status_in": ["succeeded", "failed"], "limit": 5})
    assert by_get == by_post
    assert (by_get[1]["total"], by_get[1]["limit"], by_get[1]["items"][0]["rollout_id"]) == (1, 5, rollout_id)
    assert await ask(web, "GET", f"{AGL}/rollouts/nope") == (200, None)
    assert (await ask(web, "POST", f"{AGL}/rollouts", json={"input": None}))[0] == 201
    assert (await ask(web, "POST", f"{AGL}/workers/w"))[1]["status"] == "unknown"
    ids = {"rollout_id": rollout_id, "attempt_id": attempt_id}
    assert await ask(web, "POST", f"{AGL}/spans/next", json=ids) == (200, {"sequence_id": 1})


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error"),
    [
        ("POST", "/rollouts/nope", b'{"mode": null}', 404, "NotFound"),
        ("POST", "/rollouts/nope/attempts", b"", 404, "NotFound"),
        ("POST", "/rollouts/nope/attempts/latest", b'{"status": "running"}', 404, "NotFound"),
        ("POST", "/spans/next", b'{"rollout_id": "nope", "attempt_id": "a"}', 404, "NotFound"),
        ("POST", "/nothing", b"{}", 404, "NotFound"),
        ("PUT", "/rollouts", b"{}", 405, "NotFound"),
        ("POST", "/rollouts/search", b'{"limit": 0}', 400, "ConfigError"),
        ("POST", "/rollouts/search", b'{"limit": -2}', 400, "ConfigError"),
        ("POST", "/rollouts/search", b'{"offset": -1}', 400, "ConfigError"),
        ("POST", "/rollouts/search", b'{"sort_by": "nope"}', 400, "ConfigError"),
        ("POST", "/rollouts/search", b'{"limit": 99999999999999999999}', 400, "ConfigError"),
        ("GET", "/rollouts?limit=99999999999999999999", b"", 400, "ConfigError"),
        ("GET", "/rollouts?limit=5&offset=9223372036854775808", b"", 400, "ConfigError"),
        ("GET", "/rollouts/a%00b", b"", 400, "ConfigError"),
        ("POST", "/rollouts/search", b'{"status_in": ["done"]}', 422, "ConfigError"),
        ("GET", "/rollouts?limit=many", b"", 422, "ConfigError"),
        ("GET", "/spans", b"", 422, "ConfigError"),
        ("POST", "/queues/rollouts/enqueue", b"{}", 422, "ConfigError"),
        ("POST", "/queues/rollouts/enqueue", b'{"rollouts": [{"input": NaN}]}', 400, "ConfigError"),
        ("POST", "/queues/rollouts/enqueue", b'{"rollouts": [{"input": "\xff"}]}', 400, "ConfigError"),
        ("POST", "/queues/rollouts/enqueue", b'{"rollouts": [{"input": "\\ud800"}]}', 400, "ConfigError"),
        ("POST", "/queues/rollouts/enqueue", b"[" * 50_000, 400, "ConfigError"),
        ("POST", "/queues/rollouts/enqueue", b"", 400, "ConfigError"),
        ("POST", "/queues/rollouts/dequeue", b'{"limit": 9e99}', 422, "ConfigError"),
        ("POST", "/waits/rollouts", b'{"rollout_ids": [], "timeout": NaN}', 422, "ConfigError"),
        ("POST", "/rollouts/%ff", b'{"mode": null}', 400, "ConfigError"),
        ("POST", "/workers/w", b'{"heartbeat_stats": null}', 400, "ConfigError"),
    ],
)
async def test_bad_requests_are_refused_with_their_kind(web, method, path, body, status, error):
    got, answer = await ask(web, method, AGL + path, data=body, headers=JSON if body else None)
    assert (got, answer["error"]) == (status, error)
    assert answer["detail"]


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("bad", ["one", "two"]),
        NotFound("no such thing"),
        Conflict("changed"),
        Recoverable("later"),
        UnknownOutcome("perhaps"),
        Fatal("broken"),
        MissingObject("ab" * 32, "gone"),
        CorruptObject("ab" * 32, "damaged"),
        RuntimeError("evicted"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.usefixtures("requests_fail_on_purpose")
async def test_errors_of_the_store_are_raised_by_the_client(make_server, error):
    server = await make_server(FailingStore(error))
    async with LightningStoreClient(server.endpoint, retry_delays=()) as client:
        with pytest.raises(type(error)) as raised:
            await client.query_rollouts()
    assert type(raised.value) is type(error) and str(raised.value) == str(error)
    assert getattr(raised.value, "violations", None) == getattr(error, "violations", None)
    assert getattr(raised.value, "content_id", None) == getattr(error, "content_id", None)


@pytest.mark.usefixtures("requests_fail_on_purpose")
async def test_what_nobody_foresaw_is_500_and_keeps_its_details(make_server, caplog):
    server = await make_server(FailingStore(AttributeError("secret detail")))
    async with aiohttp.ClientSession(server.endpoint) as web:
        status, answer = await ask(web, "GET", f"{AGL}/rollouts")
    assert status == 500 and "secret" not in json.dumps(answer)
    assert "secret detail" in caplog.text, "the log says what happened"


@pytest.mark.parametrize("rollout_id", ["a/b", "search", "attempts", "..", "a b?c#d", "é%2F", "latest"])
async def test_any_text_is_an_id(server, rollout_id):
    async with LightningStoreClient(server.endpoint) as client:
        await client.enqueue_rollout(1, rollout_id=rollout_id)
        await client.update_rollout(rollout_id, metadata={"seen": True})
        assert (await client.get_rollout_by_id(rollout_id)).metadata == {"seen": True}
        await client.start_attempt(rollout_id)
        assert (await client.get_latest_attempt(rollout_id)).sequence_id == 1
        assert (await client.update_worker(rollout_id)).worker_id == rollout_id
    with pytest.raises(ConfigError, match="not empty"):
        path_part("", "rollout_id")


# Keys and pages of others


async def test_a_key_is_asked_for_compared_and_never_shown(make_server, caplog):
    server = await make_server(api_key="s3cret-key")
    assert "s3cret" not in repr(server.__getstate__())
    async with LightningStoreClient(server.endpoint, api_key="s3cret-key") as client:
        assert (await client.enqueue_rollout(1)).input == 1
    for key in (None, "s3cret-kez", "s3cret-key-and-more", ""):
        async with LightningStoreClient(server.endpoint, api_key=key) as client:
            with pytest.raises(ConfigError, match="no valid API key"):
                await client.enqueue_rollout(1)
    async with aiohttp.ClientSession(server.endpoint) as web:
        assert (await ask(web, "GET", f"{AGL}/health"))[0] == 200, "probes need no key"
        assert (await ask(web, "GET", "/openapi.json"))[0] == 401
        async with web.post("/v1/traces", data=b"") as reply:
            assert reply.status == 401
    assert "s3cret" not in caplog.text


async def test_the_page_of_the_api_names_every_request_and_loads_nothing(make_server):
    server = await make_server()
    async with aiohttp.ClientSession(server.endpoint) as web, web.get("/docs") as reply:
        page = await reply.text()
    for route in ROUTES:
        assert f"<td>{route.method}<td><code>{route.path}</code><td>{html.escape(route.summary)}" in page
    assert "src=" not in page and "://" not in page


async def test_beyond_loopback_a_key_is_required(url):
    async with SqlLightningStore.from_url(url) as store:
        for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
            with pytest.raises(ConfigError, match="no API key"):
                LightningStoreServer(store, host=host)
        LightningStoreServer(store, host="0.0.0.0", api_key="k")
        for key in ("", " k", "k\n", "ké"):
            with pytest.raises(ConfigError, match="API key is empty"):
                LightningStoreServer(store, api_key=key)


async def test_cors_lets_the_named_origins_in(web):
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with web.options(f"{AGL}/rollouts", headers={"Origin": "http://ui.example", **wanted}) as reply:
        assert reply.status == 200 and reply.headers["Access-Control-Allow-Origin"] == "http://ui.example"
    async with web.options(f"{AGL}/rollouts", headers={"Origin": "http://evil.example", **wanted}) as reply:
        assert "Access-Control-Allow-Origin" not in reply.headers


@pytest.mark.parametrize("allowed", ["http://ui.example", "*"])
async def test_cors_takes_credentials_and_says_the_origin_of_the_page(make_server, allowed):
    server = await make_server(cors_allow_origins=allowed)
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with aiohttp.ClientSession(server.endpoint) as web:
        for method, further in (("OPTIONS", asked), ("GET", {}), ("GET", {"Cookie": "a=b"})):
            headers = {"Origin": "http://ui.example", **further}
            async with web.request(method, f"{AGL}/statistics", headers=headers) as reply:
                assert reply.status == 200
                # A browser lets no page read an answer to a request with credentials that says "*".
                assert reply.headers["Access-Control-Allow-Origin"] == "http://ui.example"
                assert reply.headers["Access-Control-Allow-Credentials"] == "true"
                assert "Origin" in reply.headers["Vary"]
        async with web.get(f"{AGL}/statistics", headers={"Origin": "http://evil.example"}) as reply:
            is_let_in = allowed == "*"
            assert reply.status == (200 if is_let_in else 403)
            expected = "http://evil.example" if is_let_in else None
            assert reply.headers.get("Access-Control-Allow-Origin") == expected


async def test_a_client_names_the_address_of_the_routes_and_that_of_the_server(server):
    for given in (server.endpoint, f"{server.endpoint}/", f"{server.endpoint}/v1/agl", f"{server.endpoint}/v1/agl/"):
        async with LightningStoreClient(given) as client:
            assert client.server_address == f"{server.endpoint}/v1/agl"
            assert client.server_address_root == server.endpoint
            assert client.otlp_traces_endpoint() == f"{server.endpoint}/v1/traces"
            assert (await client.enqueue_rollout(1)).input == 1
            copy = pickle.loads(pickle.dumps(client))  # noqa: S301 - just made
            assert (copy.server_address, copy.server_address_root) == (client.server_address, server.endpoint)
            await copy.close()


async def test_metrics_count_requests_by_operation(web):
    await ask(web, "POST", f"{AGL}/queues/rollouts/enqueue", json={"rollouts": [{"input": 1}]})
    await ask(web, "POST", f"{AGL}/rollouts/some-id", json={"mode": None})
    async with web.get("/metrics") as reply:
        text = await reply.text()
    assert 'rollout_store_requests_total{operation="enqueue_rollouts",status="201"} 1.0' in text
    assert 'rollout_store_requests_total{operation="update_rollout",status="404"} 1.0' in text
    assert 'rollout_store_records{kind="rollouts"} 1.0' in text
    assert "some-id" not in text


@pytest.mark.parametrize("error", [Recoverable("away"), Fatal("damaged")])
async def test_metrics_are_shown_while_the_store_cannot_be_asked(server, web, monkeypatch, error):
    async def fail():
        raise error

    async with web.get("/metrics") as reply:
        assert 'rollout_store_records{kind="rollouts"} 0.0' in await reply.text()
    monkeypatch.setattr(server.store, "statistics", fail)
    await ask(web, "GET", f"{AGL}/health")
    async with web.get("/metrics") as reply:
        text = await reply.text()
    assert reply.status == 200
    assert "rollout_store_requests_total" in text and "rollout_store_records" not in text


# Limits


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
async def test_large_bodies_are_refused_packed_or_not(web, packed, chunked):
    body = b'{"rollouts": [{"input": "%b"}]}' % (b"x" * 5_000_000)
    data = gzip.compress(body) if packed else body

    async def pieces():
        for start in range(0, len(data), 65536):
            yield data[start : start + 65536]

    headers = {"Content-Encoding": "gzip"} if packed else {}
    status, answer = await ask(
        web, "POST", f"{AGL}/queues/rollouts/enqueue", data=pieces() if chunked else data, headers=headers
    )
    assert status == 413 and "larger than the 100000 bytes" in answer["detail"]
    assert (await ask(web, "GET", f"{AGL}/rollouts"))[1]["total"] == 0


async def test_a_client_is_told_that_its_batch_is_too_large(server):
    async with LightningStoreClient(server.endpoint, retry_delays=()) as client:
        with pytest.raises(ConfigError, match="larger than the 100000 bytes"):
            await client.enqueue_rollout("x" * 100_000_000)
        assert (await client.enqueue_rollout("small")).input == "small"


@pytest.mark.parametrize(
    "data", [b"not gzip", gzip.compress(b"{}" * 1000)[:-9], b"\x1f\x8b"], ids=["not gzip", "cut off", "a head alone"]
)
async def test_broken_gzip_is_a_bad_request(web, data):
    headers = {"Content-Encoding": "gzip"}
    status, answer = await ask(web, "POST", f"{AGL}/queues/rollouts/enqueue", data=data, headers=headers)
    assert status == 400 and "gzip" in answer["detail"]
    status, answer = await ask(web, "POST", f"{AGL}/rollouts", data=b"{}", headers={"Content-Encoding": "br"})
    assert status == 415


async def test_slow_clients_block_nobody_and_are_cut_off(make_server, monkeypatch):
    monkeypatch.setattr(listening, "UNREAD_SECONDS", 3)
    server = await make_server()
    store = server.store
    rollout = await store.enqueue_rollout("x" * 30_000_000, rollout_id="big")
    address = (server.host, server.port)
    request = f"GET {AGL}/rollouts/big HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    async with LightningStoreClient(server.endpoint, request_timeout=LONG, retry_delays=()) as client:
        await client.enqueue_rollout("first")  # its connection stays, and has no header to wait for any more
        monkeypatch.setattr(listening, "HEADER_SECONDS", 0.5)
        half = [socket.create_connection(address) for _ in range(50)]
        unread = []
        for connection in half:
            connection.sendall(request[:20])
        for _ in range(5):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(address)
            connection.sendall(request)
            unread.append(connection)
        for n in range(50):
            await client.enqueue_rollout(n)
        for connection in half:
            connection.settimeout(LONG)
            assert await asyncio.to_thread(connection.recv, 1) == b"", "half a request is not waited for"
        states = [_tcp_state(connection) for connection in unread]
        assert states == [1] * 5, "established"
        # The kernel gives up on them; nothing else shows it to a client that does not read.
        await until(lambda: not any(_is_held(server.port, connection) for connection in unread))
        await client.update_worker("w")
        assert (await client.get_rollout_by_id("big")).rollout_id == rollout.rollout_id
    for connection in half + unread:
        connection.close()


async def test_replies_are_sent_at_once_on_any_event_loop():
    """asyncio leaves small packets to wait for each other on a socket that does not say it is TCP."""
    nodelay = asyncio.get_running_loop().create_future()

    class Look(asyncio.Protocol):
        def connection_made(self, transport):
            connection = transport.get_extra_info("socket")
            nodelay.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    listener = listening.listen("127.0.0.1", 0)
    server = await asyncio.get_running_loop().create_server(Look, sock=listener)
    async with server:
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await nodelay
        writer.close()


def _tcp_state(connection: socket.socket) -> int:
    return struct.unpack("B", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1))[0]


def _is_held(server_port: int, connection: socket.socket) -> bool:
    """Whether the server's end of a connection is still there, by the kernel's table."""
    ours = f"{server_port:04X}", f"{connection.getsockname()[1]:04X}"
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table]
    return any((row[1].split(":")[-1], row[2].split(":")[-1]) == ours for row in rows[1:] if row[3] == "01")


# Asking again


class Cutter:
    """A proxy that cuts the connection instead of passing on the first answers, with ``words`` of its own if it has
    any; then it may turn to another server."""

    def __init__(self, port: int, port_after_cut: int | None = None) -> None:
        self._port = port
        self.port_after_cut = port_after_cut or port
        self.words = b""
        self.num_to_cut = 0
        self.num_cut = 0

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader, writer) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        is_probe = False

        async def upward() -> None:
            nonlocal is_probe
            while data := await reader.read(65536):
                is_probe = b"/health" in data
                up_writer.write(data)
            up_writer.close()

        task = asyncio.create_task(upward())
        while data := await up_reader.read(65536):
            if self.num_to_cut and not is_probe:
                self.num_to_cut -= 1
                self.num_cut += 1
                self._port = self.port_after_cut
                writer.write(self.words)
                break
            writer.write(data)
        writer.close()
        task.cancel()
        up_writer.close()


@pytest_asyncio.fixture
async def cut(make_server):
    """A client whose answers get lost, by ``cutter``; the server remembers."""
    server = await make_server()
    cutter = Cutter(server.port)
    client = LightningStoreClient(await cutter.start(), retry_delays=(0.01,) * 5)
    yield client, cutter, server
    await client.close()
    await cutter.stop()


async def test_writes_whose_answers_are_lost_are_done_once(cut, make):
    client, cutter, server = cut
    store = server.store
    cutter.num_to_cut = 2
    queued = await client.enqueue_rollout({"n": 1})
    assert [rollout.rollout_id for rollout in await store.query_rollouts()] == [queued.rollout_id]
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(5)])
    cutter.num_to_cut = 2
    claimed = await client.dequeue_many_rollouts(limit=2, worker_id="w")
    assert len(claimed) == 2 and claimed[0].rollout_id == queued.rollout_id
    assert len(await store.query_rollouts(status_in=["preparing"])) == 2
    cutter.num_to_cut = 1
    started = await client.start_attempt(queued.rollout_id)
    assert started.attempt.sequence_id == 2
    cutter.num_to_cut = 1
    span = make.span(started)
    assert await client.add_span(span) == span, "it was new when it was stored"
    cutter.num_to_cut = 1
    assert (await client.add_resources({})).version == 1
    assert len(await store.query_resources()) == 1
    cutter.num_to_cut = 1
    updated = await client.update_attempt(queued.rollout_id, "latest", status="succeeded")
    assert updated.attempt_id == started.attempt.attempt_id
    cutter.num_to_cut = 1
    assert (await client.start_rollout("x")).input == "x"
    assert len(await store.query_rollouts()) == 7
    assert cutter.num_cut == 9


GATEWAY_TIMEOUT = b"HTTP/1.1 504 Gateway Time-out\r\ncontent-type: text/html\r\ncontent-length: 13\r\n\r\n<html></html>"


@pytest.mark.usefixtures("requests_fail_on_purpose")
async def test_a_gateway_that_fails_does_not_say_that_nothing_was_done(make_server):
    one, other = [await make_server() for _ in range(2)]
    cutter = Cutter(one.port, other.port)
    cutter.words = GATEWAY_TIMEOUT
    await one.store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
    async with LightningStoreClient(await cutter.start(), retry_delays=(0.01,)) as client:
        cutter.num_to_cut = 1
        assert len(await client.dequeue_many_rollouts(limit=1, worker_id="w")) == 1
        assert len(await one.store.query_rollouts(status_in=["preparing"])) == 1
        cutter.num_to_cut, cutter.port_after_cut = 1, one.port
        with pytest.raises(UnknownOutcome):
            await client.start_rollout("once")
        assert len(await one.store.query_rollouts()) == 4
        cutter.num_to_cut = 2
        with pytest.raises(Recoverable, match=r"GET .*/statistics: the server answered 504: <html>"):
            await client.statistics()
    await cutter.stop()


class LosingStore(ForwardingLightningStore):
    """A store that loses its database just as writes are committed, ``num_to_lose`` times."""

    def __init__(self, store: LightningStore) -> None:
        self.store = store
        self.num_to_lose = 0

    def backend(self) -> LightningStore:
        return self.store

    async def forward(self, name: str, /, *args, **kwargs):
        result = await super().forward(name, *args, **kwargs)
        if self.num_to_lose:
            self.num_to_lose -= 1
            raise UnknownOutcome("the database was lost")
        return result

    async def close(self) -> None:
        await self.store.close()


@pytest.mark.usefixtures("requests_fail_on_purpose")
async def test_writes_that_the_store_is_unsure_of_are_done_once(make_server, url, make):
    losing = LosingStore(SqlLightningStore.from_url(url))
    server = await make_server(losing)
    store = losing.store
    async with LightningStoreClient(server.endpoint, retry_delays=(0.01,) * 5) as client:
        losing.num_to_lose = 2
        queued = await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
        losing.num_to_lose = 2
        claimed = await client.dequeue_many_rollouts(limit=2)
        assert [item.rollout_id for item in claimed] == [item.rollout_id for item in queued[:2]]
        assert len(await store.query_rollouts(status_in=["preparing"])) == 2
        losing.num_to_lose = 1
        await client.add_many_spans([make.span(claimed[0])])
        assert len(await store.query_spans(claimed[0].rollout_id)) == 1
        losing.num_to_lose = 1
        ids = claimed[0].rollout_id, claimed[0].attempt.attempt_id
        assert (await client.update_attempt(*ids, status="succeeded", fenced=True)).status == "succeeded"
        for call in (client.start_rollout("x"), client.start_attempt(queued[2].rollout_id), client.add_resources({})):
            losing.num_to_lose = 1
            with pytest.raises(UnknownOutcome, match="the database was lost"):
                await call
        assert len(await store.query_rollouts()) == 4
        assert (await store.get_latest_attempt(queued[2].rollout_id)).sequence_id == 1
        assert len(await store.query_resources()) == 1


async def test_a_claim_survives_the_server_that_made_it(server):
    await server.store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
    # What another server would see: the claim is in the database, and nobody remembers its answer.
    claimed = await server.store.claim_rollouts("key", limit=2, worker_id="w")
    again = await server.store.claim_rollouts("key", limit=2, worker_id="w", repeated=True)
    assert list(again) == list(claimed)
    await server.store.update_attempt(claimed[0].rollout_id, "latest", status="succeeded")
    [left] = await server.store.claim_rollouts("key", limit=2, repeated=True)
    assert left == claimed[1]
    assert len(await server.store.claim_rollouts("other", limit=2, repeated=True)) == 1


async def test_a_claim_whose_tries_ran_out_is_what_the_next_dequeue_of_the_worker_gets(make_server):
    one, other = [await make_server() for _ in range(2)]
    cutter = Cutter(one.port, other.port)
    await one.store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(4)])
    async with LightningStoreClient(await cutter.start(), retry_delays=(0.01,)) as client:
        cutter.num_to_cut = 2 * 2
        assert await asyncio.gather(*[client.dequeue_rollout("w") for _ in range(2)]) == [None, None]
        [lost, lost_too] = await one.store.query_rollouts(status_in=["preparing"])
        [fresh] = await client.dequeue_many_rollouts(limit=1, worker_id="another")
        found = [await client.dequeue_rollout("w") for _ in range(3)]
        assert {rollout.rollout_id for rollout in found[:2]} == {lost.rollout_id, lost_too.rollout_id}
        assert len({rollout.rollout_id for rollout in [*found, fresh]}) == 4
    await cutter.stop()


async def test_a_lost_answer_that_nothing_was_queued_is_not_taken_for_news(cut):
    client, cutter, server = cut
    cutter.num_to_cut = 6
    assert await client.dequeue_rollout("w") is None
    await server.store.enqueue_rollout(1, rollout_id="a")
    assert (await client.dequeue_rollout("w")).rollout_id == "a"


async def test_a_claim_repeated_after_its_rollout_was_queued_again_is_another_attempt(server):
    await server.store.enqueue_rollout(1, rollout_id="a")
    [first] = await server.store.claim_rollouts("key")
    await server.store.update_rollout("a", status="requeuing")
    [second] = await server.store.claim_rollouts("key", repeated=True)
    assert second.attempt.attempt_id != first.attempt.attempt_id
    assert list(await server.store.claim_rollouts("key", repeated=True)) == [second]
    await server.store.update_rollout("a", status="requeuing")
    [third] = await server.store.claim_rollouts("key", repeated=True)
    assert len({claimed.attempt.attempt_id for claimed in (first, second, third)}) == 3


async def test_a_lost_claim_that_cannot_be_given_back_is_asked_for_again(cut, monkeypatch):
    client, cutter, server = cut
    await server.store.enqueue_rollout(1, rollout_id="a")
    cutter.num_to_cut = 6
    assert await client.dequeue_rollout("w") is None

    async def away(claimed) -> None:
        raise Recoverable("the server is away again")

    with monkeypatch.context() as patch:
        patch.setattr(client, "release_rollouts", away)
        assert await client.dequeue_rollout("w") is None
    assert (await client.dequeue_rollout("w")).rollout_id == "a"
    assert client._transport._unanswered == {}


async def test_what_another_worker_took_over_is_not_claimed_by_an_answer_that_was_lost(cut):
    client, cutter, server = cut
    await server.store.enqueue_rollout(1, rollout_id="a")
    cutter.num_to_cut = 6
    assert await client.dequeue_rollout("w") is None
    [lost] = await server.store.query_rollouts(status_in=["preparing"])
    await server.store.update_rollout("a", status="requeuing")
    taken = await server.store.dequeue_rollout("another")
    assert taken is not None and taken.attempt.attempt_id != lost.attempt.attempt_id
    assert await client.dequeue_rollout("w") is None
    await server.store.update_attempt("a", taken.attempt.attempt_id, status="succeeded")
    assert (await server.store.get_rollout_by_id("a")).status == "succeeded"
    await server.store.enqueue_rollout(1, rollout_id="b")
    assert (await client.dequeue_rollout("w")).rollout_id == "b"


@pytest.mark.usefixtures("requests_fail_on_purpose")
async def test_a_write_that_must_not_be_repeated_is_refused_by_a_server_that_does_not_know(server, web):
    headers = {wire.KEY_HEADER: "k", wire.REPEATED_HEADER: "final"}
    status, answer = await ask(web, "POST", f"{AGL}/rollouts", json={"input": 1}, headers=headers)
    assert (status, answer["error"]) == (503, "UnknownOutcome") and "look before you repeat" in answer["detail"]
    assert (await ask(web, "GET", f"{AGL}/rollouts"))[1]["total"] == 0


async def test_without_a_server_calls_say_so_or_yield_nothing(caplog):
    async with LightningStoreClient("http://127.0.0.1:9", retry_delays=(0.01,), health_retry_delays=()) as client:
        with pytest.raises(Recoverable, match=r"no answer from http://127.0.0.1:9"):
            await client.enqueue_rollout(1)
        assert await client.dequeue_rollout() is None
        assert await client.get_rollout_by_id("r") is None
    assert "nothing could be claimed" in caplog.text
    for address in ("127.0.0.1:9", "ftp://h", "http://", ""):
        with pytest.raises(ConfigError, match="server address"):
            LightningStoreClient(address)


async def test_a_client_waits_a_tenth_of_a_second_or_as_long_as_it_takes(server, monkeypatch):
    monkeypatch.setattr(wire, "LONGEST_WAIT_SECONDS", 0.05)
    async with LightningStoreClient(server.endpoint) as client:
        with pytest.raises(ValueError, match=r"at most 0.1 s"):
            await client.wait_for_rollouts(rollout_ids=["a"], timeout=0.2)
        rollouts = [await client.start_rollout(n) for n in range(2)]
        ids = [rollout.rollout_id for rollout in rollouts]
        waiting = asyncio.create_task(client.wait_for_rollouts(rollout_ids=ids))
        await client.update_attempt(ids[1], "latest", status="succeeded")
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await client.update_attempt(ids[0], "latest", status="failed")
        assert [rollout.rollout_id for rollout in await asyncio.wait_for(waiting, LONG)] == ids


@pytest.mark.parametrize("timeout", [None, 1e9])
async def test_no_request_waits_for_ever(server, web, monkeypatch, timeout):
    monkeypatch.setattr(wire, "LONGEST_WAIT_SECONDS", 0.05)
    done, open_ = [await server.store.start_rollout(n) for n in range(2)]
    await server.store.update_attempt(done.rollout_id, "latest", status="succeeded")
    body = {"rollout_ids": [done.rollout_id, open_.rollout_id], "timeout": timeout}
    async with asyncio.timeout(LONG), web.post(f"{AGL}/waits/rollouts", json=body) as reply:
        assert [rollout["rollout_id"] for rollout in await reply.json()] == [done.rollout_id]
        assert reply.headers[wire.UNFINISHED_HEADER] == "true"


async def test_a_claim_is_remembered_however_many_spans_come(make_server, make):
    server = await make_server(InMemoryLightningStore())
    await server.store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
    span = make.span(await server.store.start_rollout("spans")).model_dump()
    async with aiohttp.ClientSession(server.endpoint) as web:
        _, claimed = await ask(web, "POST", f"{AGL}/queues/rollouts/dequeue", json={}, headers={wire.KEY_HEADER: "k"})
        for n in range(2_010):
            headers = {wire.KEY_HEADER: f"spans-{n}"}
            assert (await ask(web, "POST", f"{AGL}/spans/batch", json={"spans": [span]}, headers=headers))[0] == 201
        headers = {wire.KEY_HEADER: "k", wire.REPEATED_HEADER: "true"}
        assert (await ask(web, "POST", f"{AGL}/queues/rollouts/dequeue", json={}, headers=headers))[1] == claimed
        headers = {wire.KEY_HEADER: "spans-2009"}
        assert (await ask(web, "POST", f"{AGL}/queues/rollouts/dequeue", json={}, headers=headers))[0] == 422


# Other processes, threads and loops


async def _in_child(store) -> tuple:
    rollout = await store.enqueue_rollout("child")
    is_client = isinstance(store.backend(), LightningStoreClient) if isinstance(store, LightningStoreServer) else None
    found = (rollout.rollout_id, is_client, getattr(store, "store", None) is None, store.capabilities["zero_copy"])
    await store.close()
    return found


def _child(store, results) -> None:
    results.put(asyncio.run(_in_child(store)))
    results.close()
    results.join_thread()
    leave()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["server", "client"])
async def test_children_use_the_one_store_over_http(make_server, method, kind):
    server = await make_server(api_key="k")
    held = server if kind == "server" else LightningStoreClient(server.endpoint, api_key="k")
    await held.enqueue_rollout("parent")
    context = multiprocessing.get_context(method)
    results = context.Queue()
    process = context.Process(target=_child, args=(held, results))
    process.start()
    try:
        rollout_id, is_client, has_no_store, zero_copy = await asyncio.to_thread(results.get, timeout=LONG)
        await asyncio.to_thread(process.join, LONG)
    finally:
        process.kill()
        results.close()
    assert process.exitcode == 0 and zero_copy
    assert is_client is (True if kind == "server" else None)
    assert has_no_store or method == "fork"
    assert (await server.store.get_rollout_by_id(rollout_id)).input == "child"
    await held.enqueue_rollout("parent still works")
    if kind == "client":
        await held.close()


async def test_a_pickled_server_is_a_client_with_no_server_in_it(server):
    copy = pickle.loads(pickle.dumps(server))  # noqa: S301 - our own
    assert (copy.app, copy.store, copy.endpoint) == (None, None, server.endpoint)
    assert copy.otlp_traces_endpoint() == f"{server.endpoint}/v1/traces"
    assert (await copy.enqueue_rollout(1)).input == 1
    for call in (copy.start, copy.stop):
        with pytest.raises(Fatal, match="only the process that made a server"):
            await call()
    await copy.close()
    assert (await server.enqueue_rollout(2)).input == 2


def _in_a_loop_of_its_own(client) -> object:
    return asyncio.run(client.enqueue_rollout("thread"))


async def test_a_client_works_from_many_threads_and_loops(server):
    async with LightningStoreClient(server.endpoint) as client:
        await asyncio.gather(*[asyncio.to_thread(_in_a_loop_of_its_own, client) for _ in range(5)])
        assert (await client.query_rollouts(limit=1)).total == 5


@pytest.mark.parametrize("mode", ["asyncio", "mp"])
async def test_other_launch_modes_serve_too(make_server, mode, monkeypatch):
    monkeypatch.setattr("rollout_core.store.http.server.START_SECONDS", LONG)  # a process imports everything anew
    server = await make_server(launch_mode=mode, n_workers=2 if mode == "mp" else 1)
    async with LightningStoreClient(server.endpoint) as client:
        rollouts = await asyncio.gather(*[client.enqueue_rollout(n) for n in range(20)])
        assert len({rollout.rollout_id for rollout in await server.query_rollouts()}) == len(rollouts)
    await server.stop()
    await server.start()
    async with LightningStoreClient(server.endpoint) as client:
        assert (await client.query_rollouts()).total == 20


async def test_a_store_in_memory_is_shared_by_the_servers_thread_and_this_one(make_server):
    server = await make_server(InMemoryLightningStore())
    async with LightningStoreClient(server.endpoint) as client:
        await asyncio.gather(*[store.enqueue_rollout(n) for n in range(100) for store in (server, client)])
        shares = await asyncio.gather(*[store.dequeue_many_rollouts(limit=40) for store in (server, client) * 3])
        claimed = [rollout.rollout_id for share in shares for rollout in share]
        assert len(claimed) == len(set(claimed)) == 200
    with pytest.raises(ConfigError, match="cannot be shared by processes"):
        LightningStoreServer(InMemoryLightningStore(), launch_mode="mp")


async def test_a_port_that_is_taken_is_said(server, url):
    other = LightningStoreServer(SqlLightningStore.from_url(url), port=server.port)
    with pytest.raises(ConfigError, match="cannot listen on"):
        await other.start()
    await other.close()


@pytest.mark.parametrize("settings", [{"launch_mode": "fork"}, {"n_workers": 2}, {"n_workers": 0}])
async def test_settings_that_make_no_sense_are_refused(url, settings):
    async with SqlLightningStore.from_url(url) as store:
        with pytest.raises(ConfigError):
            LightningStoreServer(store, **settings)


async def test_fenced_conflicts_keep_their_places_over_http(server):
    async with LightningStoreClient(server.endpoint) as client:
        rollout = await client.start_rollout(1)
        await client.start_attempt(rollout.rollout_id)
        update = AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, status="succeeded")
        [outcome] = await client.update_many_attempts([update], fenced=True)
        assert isinstance(outcome, Conflict) and "superseded" in str(outcome)

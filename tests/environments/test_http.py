"""Requests to real servers of this machine, by names that lead where the tests say."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollout_core.config.tools import HttpTool
from rollout_core.environments.tools.http import Http, is_public, resolved
from rollout_core.environments.tools.results import ToolError
from tests.store.patience import LONG

Answer = Callable[[str, str], bytes]
"""From method and path to all that is sent."""


@dataclass
class Server:
    """A server, and what it was asked."""

    port: int
    heads: list[str] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    """By which TLS was begun."""


@asynccontextmanager
async def serving(answer: Answer, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(0)
    if tls is not None:
        tls.sni_callback = lambda _, name, __: server.names.append(name)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            sizes = [int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")]
            server.heads.append(head)
            server.bodies.append((await reader.readexactly(sum(sizes))).decode())
            method, path, _ = head.split("\r\n")[0].split(" ")
            writer.write(answer(method, path))
            await writer.drain()
            if path == "/slow":
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    made = await asyncio.start_server(serve, host, 0, ssl=tls)
    server.port = made.sockets[0].getsockname()[1]
    async with made:
        yield server


def reply(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *lines])
    return f"{head}\r\n\r\n".encode() + body


class Names:
    """A name server whose answers change."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self._answers = {name.replace("_", "."): [list(one) for one in given] for name, given in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host not in self._answers:
            raise OSError("no such name")
        given = self._answers[host]
        return given.pop(0) if len(given) > 1 else given[0]


LOCAL = [["127.0.0.1"]]


def tool(server: Server, names: Callable[[str, int], Awaitable[Sequence[str]]] = resolved, **options: Any) -> Http:
    tls = options.pop("tls", None)
    given = {"hosts": ("example.test",), "ports": (server.port,), "allow_private": True, "seconds": 60.0} | options
    return Http(HttpTool(**given), names, tls)


async def refused(http: Http, **arguments: Any) -> str:
    with pytest.raises(ToolError) as raised:
        await http.call(arguments)
    return str(raised.value)


async def test_a_page_comes_with_status_and_type():
    async with serving(lambda *_: reply("grüße".encode(), Content_Type="text/plain; charset=utf-8")) as server:
        http = tool(server, Names(example_test=LOCAL))
        found = await http.call({"url": f"http://example.test:{server.port}/a?b=c"})
        assert found == "HTTP 200 OK\nContent-Type: text/plain; charset=utf-8\n\ngrüße"
        assert server.heads[0].startswith("GET /a?b=c HTTP/1.1\r\n")
        assert f"Host: example.test:{server.port}\r\n" in server.heads[0]


async def test_a_page_that_is_not_there_is_an_answer():
    async with serving(lambda *_: reply(b"none", "404 Not Found")) as server:
        found = await tool(server, Names(example_test=LOCAL)).call({"url": f"http://example.test:{server.port}/"})
        assert found == "HTTP 404 Not Found\n\nnone"


async def test_a_body_is_sent_as_it_is_given():
    async with serving(lambda *_: reply(b"ok")) as server:
        http = tool(server, Names(example_test=LOCAL), methods=("GET", "POST"))
        url = f"http://example.test:{server.port}/"
        await http.call({"url": url, "method": "POST", "body": '{"a": 1}'})
        await http.call({"url": url, "method": "POST", "body": "hi", "content_type": "text/plain"})
        assert server.bodies == ['{"a": 1}', "hi"]
        assert "Content-Type: application/json\r\n" in server.heads[0]
        assert "Content-Type: text/plain\r\n" in server.heads[1]
        assert "a request by GET has no body" in await refused(http, url=url, body="x")
        assert "method DELETE may not be used; use GET or POST" in await refused(http, url=url, method="DELETE")
        assert "at most 65,536 may be sent" in await refused(http, url=url, method="POST", body="x" * 70_000)
        assert "content_type" in await refused(http, url=url, method="POST", body="x", content_type="a\r\nX: y")
        assert len(server.heads) == 2


@pytest.mark.parametrize(
    ("status", "method", "then", "body"),
    [
        ("301 Moved", "POST", "GET", ""),
        ("302 Found", "POST", "GET", ""),
        ("303 See Other", "POST", "GET", ""),
        ("303 See Other", "PUT", "GET", ""),
        ("301 Moved", "PUT", "PUT", "text"),
        ("307 Temporary Redirect", "POST", "POST", "text"),
        ("308 Permanent Redirect", "POST", "POST", "text"),
        ("303 See Other", "HEAD", "HEAD", ""),
        ("301 Moved", "GET", "GET", ""),
    ],
)
async def test_redirects_keep_what_they_have_to(status: str, method: str, then: str, body: str):
    def answer(method: str, path: str) -> bytes:
        return reply(status=status, Location="b?c=d") if path == "/a/" else reply(b"" if method == "HEAD" else b"end")

    async with serving(answer) as server:
        http = tool(server, Names(example_test=LOCAL), methods=("GET", "HEAD", "POST", "PUT"))
        given = "text" if method in ("POST", "PUT") else ""
        found = await http.call({"url": f"http://example.test:{server.port}/a/", "method": method, "body": given})
        assert found.startswith(f"Address: http://example.test:{server.port}/a/b?c=d\nHTTP 200 OK")
        assert server.heads[1].startswith(f"{then} /a/b?c=d ")
        assert server.bodies[1] == body


async def test_a_redirect_to_a_method_that_may_not_be_used_is_not_followed():
    async with serving(lambda *_: reply(status="303 See Other", Location="/")) as server:
        http = tool(server, Names(example_test=LOCAL), methods=("POST",))
        text = await refused(http, url=f"http://example.test:{server.port}/", method="POST", body="x")
        assert "redirects to a GET" in text
        assert len(server.heads) == 1


async def test_redirects_have_an_end():
    async with serving(lambda *_: reply(status="302 Found", Location="/again")) as server:
        http = tool(server, Names(example_test=LOCAL), redirects=3)
        assert "redirects more than 3 times" in await refused(http, url=f"http://example.test:{server.port}/")
        assert len(server.heads) == 4


@pytest.mark.parametrize(
    "location",
    ["http://127.0.0.1:{port}/x", "http://[::1]:{port}/x", "http://inside.test:{port}/x", "//inside.test:{port}/"],
)
async def test_a_redirect_to_a_private_address_is_refused(location: str):
    """The server stands on loopback, and the first name is taken for public, so that only the redirect is refused."""
    async with serving(lambda *_: reply(status="302 Found", Location=location.format(port=server.port))) as server:
        names = Names(example_test=LOCAL, inside_test=[["10.0.0.1"]])
        http = tool(server, names, hosts=("example.test", "inside.test", "127.0.0.1", "::1"), allow_private=False)
        http_first = http._checked

        async def checked(url: Any) -> Sequence[str]:
            return ["127.0.0.1"] if url.host == "example.test" else await http_first(url)

        http._checked = checked  # type: ignore[method-assign]
        text = await refused(http, url=f"http://example.test:{server.port}/")
        assert "is in a private network, or is this machine, and may not be asked" in text
        assert len(server.heads) == 1


async def test_a_redirect_to_another_host_or_port_or_scheme_is_refused():
    where = [
        "http://other.test:{port}/",
        "http://example.test:1/",
        "file:///etc/passwd",
        "http://a:b@example.test:{port}/",
        "http://[",
    ]
    async with serving(lambda _, path: reply(status="302 Found", Location=where[int(path[1:])])) as server:
        where[:] = [location.replace("{port}", str(server.port)) for location in where]
        http = tool(server, Names(example_test=LOCAL, other_test=LOCAL))
        for number, reason in enumerate(["host other.test", "port 1 ", "no address of HTTP", "user name", "no URL"]):
            assert reason in await refused(http, url=f"http://example.test:{server.port}/{number}")
        assert len(server.heads) == len(where)


async def test_a_name_is_resolved_once_for_a_request():
    """A second answer, which would lead elsewhere, is never asked for."""
    async with serving(lambda *_: reply(b"right")) as server:
        names = Names(example_test=[["127.0.0.1"], ["127.0.0.2"]])
        found = await tool(server, names).call({"url": f"http://example.test:{server.port}/"})
        assert found.endswith("right")
        assert names.asked == ["example.test"]


async def test_a_name_that_turns_private_is_refused_at_the_next_request():
    async with serving(lambda *_: reply(b"secret")) as server:
        for answers in ([["10.1.2.3"]], [["8.8.8.8", "127.0.0.1"]], [["::ffff:127.0.0.1"]], [["fe80::1%lo"]], [[]]):
            names = Names(example_test=answers)
            text = await refused(tool(server, names, allow_private=False), url=f"http://example.test:{server.port}/")
            assert "private network" in text or "has no address" in text
        names = Names(example_test=[["127.0.0.1"]])
        http = tool(server, names, allow_private=True)
        await http.call({"url": f"http://example.test:{server.port}/"})
        assert len(server.heads) == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/",
        "http://127.1:{port}/",
        "http://2130706433:{port}/",
        "http://0x7f000001:{port}/",
        "http://0177.0.0.1:{port}/",
        "http://0:{port}/",
        "http://[::1]:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "http://localhost:{port}/",
        "http://example.test@127.0.0.1:{port}/",
        "http://127.0.0.1:{port}#@example.test/",
        "http://127.0.0.1:{port}\\@example.test/",
        "http://evil.test:{port}/",
        "http://example.test.evil.test:{port}/",
        "http://notexample.test:{port}/",
        "ftp://example.test:{port}/",
        "file:///etc/passwd",
        "example.test",
        "http://",
        "http://exa mple.test/",
        "http://example.test:99999/",
        "http://example.test:{port}/\r\nX: y",
        "",
    ],
)
async def test_what_the_list_does_not_name_is_refused(url: str):
    async with serving(lambda *_: reply(b"secret")) as server:
        names = Names(example_test=LOCAL, evil_test=LOCAL, notexample_test=LOCAL, example_test_evil_test=LOCAL)
        http = tool(server, names)
        await refused(http, url=url.format(port=server.port))
        assert server.heads == []


async def test_names_below_one_are_listed_by_a_star():
    async with serving(lambda *_: reply(b"ok")) as server:
        names = Names(a_example_test=LOCAL, b_a_example_test=LOCAL, example_test=LOCAL, aexample_test=LOCAL)
        http = tool(server, names, hosts=("*.example.test",))
        for host in ("a.example.test", "b.a.example.test", "A.Example.TEST"):
            assert (await http.call({"url": f"http://{host}:{server.port}/"})).endswith("ok")
        for host in ("example.test", "aexample.test"):
            assert "may not be asked" in await refused(http, url=f"http://{host}:{server.port}/")


async def test_a_long_body_is_not_read_to_its_end():
    size = 10**9

    def answer(method: str, path: str) -> bytes:
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nContent-Type: text/plain\r\n\r\n"
        return head.encode() + b"x" * 2_000_000

    async with serving(answer) as server:
        http = tool(server, Names(example_test=LOCAL), response_bytes=1000)
        found = await http.call({"url": f"http://example.test:{server.port}/"})
        assert found.endswith("more than 1,000 bytes, of which these are the first:\n\n" + "x" * 1000)


async def test_what_is_no_text_is_said_to_be_none():
    answers = {
        "/a": reply(bytes(range(256))),
        "/b": reply(b"x", Content_Encoding="gzip"),
        "/c": reply(b"x", Content_Type="a; charset=none"),
    }
    async with serving(lambda _, path: answers[path]) as server:
        http = tool(server, Names(example_test=LOCAL))
        for path, end in (
            ("/a", "(256 bytes that are no text)"),
            ("/b", "compressed although this was not asked for)"),
            ("/c", "\n\nx"),
        ):
            assert (await http.call({"url": f"http://example.test:{server.port}{path}"})).endswith(end)


async def test_a_request_has_one_time_limit_for_all_of_it():
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(LONG)
        return []

    async with serving(lambda *_: b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab") as server:
        url = f"http://example.test:{server.port}/slow"
        for names in (Names(example_test=LOCAL), never):
            text = await refused(tool(server, names, seconds=0.3), url=url)
            assert text == "the request took longer than 0.3 s, and was given up"


async def test_a_server_that_does_not_speak_is_told_to_the_model():
    async with serving(lambda *_: b"what?\r\n\r\n") as server:
        http = tool(server, Names(example_test=LOCAL))
        assert "does not answer" in await refused(http, url=f"http://example.test:{server.port}/")
        assert "is not found" in await refused(tool(server, Names()), url=f"http://example.test:{server.port}/")
    assert "does not answer" in await refused(http, url=f"http://example.test:{server.port}/")


async def test_cookies_and_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    async with serving(lambda *_: reply(b"ok", Set_Cookie="a=b")) as server:
        http = tool(server, Names(example_test=LOCAL))
        for _ in range(2):
            await http.call({"url": f"http://example.test:{server.port}/"})
        assert not any("cookie" in head.lower() for head in server.heads)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of example.test, with its key."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    subject = ["-subj", "/CN=example.test", "-addext", "subjectAltName=DNS:example.test"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path]
    command = ["openssl", "req", "-x509", "-days", "2", *key, *subject, "-out", f"{path}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


async def test_tls_goes_by_the_name_although_the_address_is_pinned(certificate: Path):
    serves = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serves.load_cert_chain(certificate)
    async with serving(lambda *_: reply(b"ok"), tls=serves) as server:
        names = Names(example_test=LOCAL, other_test=LOCAL)
        trusts = ssl.create_default_context(cafile=f"{certificate}.crt")
        http = tool(server, names, hosts=("example.test", "other.test"), tls=trusts)
        found = await http.call({"url": f"https://example.test:{server.port}/"})
        assert found.endswith("ok")
        assert server.names == ["example.test"]
        assert f"Host: example.test:{server.port}\r\n" in server.heads[0]
        assert "does not answer" in await refused(http, url=f"https://other.test:{server.port}/")
        assert "does not answer" in await refused(tool(server, names), url=f"https://example.test:{server.port}/")
        assert len(server.heads) == 1


def test_which_addresses_are_of_the_open_internet():
    public = ("8.8.8.8", "1.1.1.1", "2606:4700::1111", "2a00:1450::1")
    private = [
        "127.0.0.1",
        "127.255.255.254",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "100.127.255.255",
        "0.0.0.0",
        "0.1.2.3",
        "224.0.0.1",
        "239.1.1.1",
        "255.255.255.255",
        "240.0.0.1",
        "192.0.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "::1",
        "::",
        "::ffff:8.8.8.8",
        "::ffff:127.0.0.1",
        "::127.0.0.1",
        "::8.8.8.8",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd12::1",
        "fec0::1",
        "ff02::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:808:808::",
        "2001:0:1::1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::1",
        "100::1",
        "127.1",
        "localhost",
        "0x7f000001",
    ]
    assert [address for address in public if not is_public(address)] == []
    assert [address for address in private if is_public(address)] == []


@pytest.mark.parametrize(
    "host", ["*", "*.*.test", "a*.test", "http://example.test", "Example.test", "a b", "", "*.", "a/b"]
)
def test_a_host_that_is_none_is_refused(host: str):
    with pytest.raises(ValidationError, match="hosts"):
        HttpTool(hosts=(host,))

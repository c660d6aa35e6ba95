"""The tool that asks servers over HTTP, of hosts on a list, and never of a private network's.

A name is resolved once for a request, every address that it has is checked, and the connection is made to one of
those that were checked: a second answer of the name's server changes nothing. Each redirect is a new request, held to
the same rules. TLS and the header Host go by the name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from rollout_core.config.tools import HttpTool
from rollout_core.environments.schemas import function_schema
from rollout_core.environments.tools.results import ToolError

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses that a name has, as texts. Raises OSError where it has none."""
Method = Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
MOST_URL = 8_000
READ_BYTES = 2**16
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_REDIRECTS = (301, 302, 303, 307, 308)


async def resolved(host: str, port: int) -> list[str]:
    """By the resolver of this machine."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_public(address: str) -> bool:
    """Whether it is one of the open internet: none of this machine, of a private or shared network, of a link, of many
    (multicast), and none that stands for another within it, such as an IPv4 address mapped into IPv6."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # such as one with a zone, which is of a link
        return False
    if not parsed.is_global or parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        return parsed in _GLOBAL_UNICAST and parsed.sixtofour is None and parsed.teredo is None
    return True


@dataclass(frozen=True)
class _Asked:
    """One request on its way through redirects."""

    method: str
    url: URL
    body: bytes | None
    content_type: str

    def redirected(self, status: int, location: str) -> _Asked:
        """What is asked next: 303 is answered by GET, and 301 and 302 after POST are, as browsers do; 307 and 308 keep
        method and body. Raises ToolError for a location that is none."""
        try:
            url = self.url.join(URL(location))
        except ValueError:
            raise ToolError(f"the server redirects to {location[:100]!r}, which is no URL") from None
        becomes_get = (status == 303 and self.method != "HEAD") or (status in (301, 302) and self.method == "POST")
        return _Asked("GET", url, None, "") if becomes_get else _Asked(self.method, url, self.body, self.content_type)


class _Pinned(AbstractResolver):
    """Answers with addresses that were checked, whatever the name's server says by now."""

    def __init__(self, host: str, addresses: Sequence[str]) -> None:
        self._host = host
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        if host != self._host:
            raise OSError(f"{host} was not checked")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Nothing is held."""


class Http:
    """Requests over HTTP. Nothing is kept between them, cookies neither."""

    def __init__(self, spec: HttpTool, resolve: Resolve = resolved, tls: ssl.SSLContext | None = None) -> None:
        """``resolve``: what finds the addresses of a name. ``tls``: which certificates are trusted; None: those that
        this machine trusts."""
        self.name = spec.name
        self.output_characters = spec.output_characters
        self._spec = spec
        self._resolve = resolve
        self._tls = tls
        self._function = function_schema(Http.fetch if spec.methods == ("GET",) else Http.request)
        limits = f"Hosts that may be asked: {', '.join(spec.hosts)}. Methods: {', '.join(spec.methods)}."
        self.schema: Mapping[str, Any] = self._function.schema(spec.name, f"{self._function.description} {limits}")

    async def fetch(self, url: str) -> str:
        """Get a page or a file over HTTP and return its status, type and text.

        Args:
            url: Address that begins with http:// or https://.
        """
        return await self.request(url)

    async def request(
        self, url: str, method: Method = "GET", body: str = "", content_type: str = "application/json"
    ) -> str:
        """Send a request over HTTP and return the answer's status, type and text.

        Args:
            url: Address that begins with http:// or https://.
            method: Method of the request.
            body: Text to send.
            content_type: What the text is; without one it does not count.
        """
        if method not in self._spec.methods:
            raise ToolError(f"method {method} may not be used; use {' or '.join(self._spec.methods)}")
        content = body.encode(errors="replace") if body else None
        if content is not None and method in ("GET", "HEAD"):
            raise ToolError(f"a request by {method} has no body; leave it out")
        if content is not None and len(content) > self._spec.request_bytes:
            raise ToolError(f"the body has {len(content):,} bytes; at most {self._spec.request_bytes:,} may be sent")
        if not (content_type.isascii() and content_type.isprintable() and len(content_type) <= 200):
            raise ToolError(f"content_type {content_type[:50]!r} is none; give one such as text/plain")
        asked = _Asked(method, _parsed(url), content, content_type)
        try:
            async with asyncio.timeout(self._spec.seconds):
                return await self._answer(asked)
        except TimeoutError:
            raise ToolError(f"the request took longer than {self._spec.seconds:g} s, and was given up") from None

    async def _answer(self, asked: _Asked) -> str:
        first = asked.url
        for _ in range(self._spec.redirects + 1):
            addresses = await self._checked(asked.url)
            found = await self._ask(asked, addresses)
            if isinstance(found, str):
                return found if asked.url == first else f"Address: {asked.url}\n{found}"
            asked = found
            if asked.method not in self._spec.methods:
                raise ToolError(f"the server redirects to a {asked.method} of {asked.url}, which may not be used")
        raise ToolError(f"the server redirects more than {self._spec.redirects} times, last to {asked.url}")

    async def _checked(self, url: URL) -> Sequence[str]:
        """The addresses that may be connected to. Raises ToolError where a rule forbids it."""
        spec = self._spec
        host = url.raw_host or ""
        if url.scheme not in ("http", "https") or not host:
            raise ToolError(f"{_shown(url)} is no address of HTTP; give one that begins with http:// or https://")
        if url.user is not None or url.password is not None:
            raise ToolError("the address holds a user name or a password; leave them out")
        if url.port not in spec.ports:
            raise ToolError(f"port {url.port} may not be asked; ports: {', '.join(map(str, spec.ports))}")
        if not _is_listed(host, spec.hosts):
            raise ToolError(f"host {host} may not be asked; hosts: {', '.join(spec.hosts)}")
        addresses: Sequence[str]
        try:
            addresses = [str(ipaddress.ip_address(host))]
        except ValueError:
            try:
                addresses = await self._resolve(host, url.port or 0)
            except (OSError, UnicodeError) as error:
                raise ToolError(f"host {host} is not found: {error}") from None
        if not addresses:
            raise ToolError(f"host {host} has no address")
        if not spec.allow_private and not all(map(is_public, addresses)):
            raise ToolError(f"host {host} is in a private network, or is this machine, and may not be asked")
        return addresses

    async def _ask(self, asked: _Asked, addresses: Sequence[str]) -> str | _Asked:
        """What the server says, or what is to be asked next."""
        # Without compression, so that as many bytes come as are counted.
        headers = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "rollout"}
        if asked.body is not None:
            headers["Content-Type"] = asked.content_type
        connector = aiohttp.TCPConnector(
            resolver=_Pinned(asked.url.raw_host or "", addresses),
            use_dns_cache=False,
            force_close=True,
            ssl=True if self._tls is None else self._tls,
        )
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )
        try:
            async with (
                session,
                session.request(
                    asked.method, asked.url, data=asked.body, headers=headers, allow_redirects=False
                ) as response,
            ):
                location = response.headers.get("Location")
                if response.status in _REDIRECTS and location is not None:
                    return asked.redirected(response.status, location)
                return await self._read(response)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise ToolError(f"{_shown(asked.url)} does not answer: {_reason(error)}") from None

    async def _read(self, response: aiohttp.ClientResponse) -> str:
        most, body = self._spec.response_bytes, bytearray()
        while len(body) <= most and (chunk := await response.content.read(min(READ_BYTES, most + 1 - len(body)))):
            body += chunk
        lines = [f"HTTP {response.status} {response.reason or ''}".rstrip()]
        if kind := response.headers.get("Content-Type"):
            lines.append(f"Content-Type: {kind}")
        text = _text(response, bytes(body[:most]))
        if len(body) > most:
            lines.append(f"The body has more than {most:,} bytes, of which these are the first:")
        return "\n".join(lines) + f"\n\n{text}"

    async def call(self, arguments: Mapping[str, Any]) -> str:
        values = self._function.checked(arguments)
        return await (self.fetch(**values) if self._spec.methods == ("GET",) else self.request(**values))

    async def close(self) -> None:
        """Nothing is held."""


def _parsed(url: str) -> URL:
    try:
        if len(url) > MOST_URL or any(ord(character) <= 32 for character in url):
            raise ValueError
        parsed = URL(url)
        _ = parsed.port, parsed.raw_host
    except ValueError:
        raise ToolError(f"{url[:100]!r} is no URL; give one such as https://example.org/page") from None
    return parsed


def _is_listed(host: str, hosts: Sequence[str]) -> bool:
    name = host.lower().rstrip(".")
    return any(name.endswith(listed[1:]) if listed.startswith("*.") else name == listed.strip("[]") for listed in hosts)


def _text(response: aiohttp.ClientResponse, body: bytes) -> str:
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        return f"({len(body):,} bytes, compressed although this was not asked for)"
    try:
        text = body.decode(response.charset or "utf-8", errors="replace")
    except LookupError:
        text = body.decode(errors="replace")
    if "\0" in text or text.count("\ufffd") > len(text) / 10:
        return f"({len(body):,} bytes that are no text)"
    return text


def _shown(url: URL) -> str:
    text = str(url.with_user(None)) if url.absolute else str(url)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _reason(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text[:300]

"""One pool of connections to a store's server, and the rules for sending again what got no answer.

A request that got no answer is sent again after a while, once the server says that it is well. That is safe because of
what a request is: a query changes nothing; a repeatable write does no more when it is done twice; any other carries an
idempotency key, by which a server that did it before answers from memory, and one that cannot know refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote, urlsplit

import aiohttp
from yarl import URL

from rollout_core.base.errors import ConfigError, Recoverable, UnknownOutcome
from rollout_core.base.settings import without_password
from rollout_core.store.http import wire
from rollout_core.web.certificates import AUTHORITY, TLSFiles
from rollout_core.web.http_errors import FromBetween, error_from

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
_RESERVED_WORDS = frozenset({"search", "latest", "attempts", "next", "batch", "update", "enqueue", "dequeue"})


class Repeat(Enum):
    """What happens when a request is done twice."""

    HARMLESS = "harmless"
    """The same as when it is done once."""
    KNOWN = "known"
    """The store itself recognises the key of a repeated request."""
    MATTERS = "matters"
    """It must not be; only a server that remembers the key may answer."""


@dataclass(frozen=True)
class TransportSettings:
    """Where the server is, and how patient the client is. All times in seconds."""

    server_address: str
    retry_delays: Sequence[float] = (1.0, 2.0, 5.0)
    health_retry_delays: Sequence[float] = (0.1, 0.2, 0.5)
    request_timeout: float = 30.0
    connection_timeout: float = 5.0
    api_key: str | None = None
    tls: TLSFiles | None = None
    """By which both ends know each other; only with https."""

    def __repr__(self) -> str:
        # Settings end up in logs and tracebacks; the key must not.
        return (
            f"TransportSettings({without_password(self.server_address)!r}, api_key={'...' if self.api_key else None})"
        )

    def __post_init__(self) -> None:
        parts = urlsplit(self.server_address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"server address is {without_password(self.server_address)!r}; expected http://host:port")
        if self.tls is not None and parts.scheme != "https":
            raise ConfigError(
                f"server address is {without_password(self.server_address)!r}; with certificates it is https://host:port"
            )


class _Key:
    """Names a write in all its tries."""

    __slots__ = ("may_be_done", "text")

    def __init__(self) -> None:
        self.text = secrets.token_hex(16)
        self.may_be_done = False

    def headers(self, repeat: Repeat) -> dict[str, str]:
        if repeat is Repeat.HARMLESS:
            return {}
        repeated = "final" if repeat is Repeat.MATTERS else "true"
        return {wire.KEY_HEADER: self.text, **({wire.REPEATED_HEADER: repeated} if self.may_be_done else {})}


class Reply:
    """A success: its body and headers."""

    __slots__ = ("data", "headers")

    def __init__(self, data: bytes, headers: Mapping[str, str]) -> None:
        self.data = data
        self.headers = headers


class _NoAnswer(Exception):
    """Nothing came back; ``sent`` says whether the server may have got the request all the same."""

    def __init__(self, cause: Exception, sent: bool) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}".rstrip(": "))
        self.cause = cause
        self.sent = sent


def path_part(text: str, what: str) -> str:
    """An id as one part of a path, so that it can be any text. Raises ConfigError if it is empty or no text."""
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{what} is {text!r:.80}; expected a text that is not empty")
    try:
        quoted = quote(text, safe="")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is not valid Unicode: {error.reason}; remove the lone surrogate") from error
    # Words that mean something in a path, and dots that would be resolved, are written so that they do not.
    if text in _RESERVED_WORDS or set(text) == {"."}:
        quoted = f"%{ord(text[0]):02X}{quoted[1:]}"
    return quoted


class Transport:
    """Sends requests. It may be used from any number of tasks, threads and event loops; each loop has its own pool."""

    def __init__(self, settings: TransportSettings) -> None:
        self.settings = settings
        self._base = settings.server_address.rstrip("/")
        self._headers = {"content-type": wire.JSON}
        if settings.api_key is not None:
            self._headers["authorization"] = f"Bearer {settings.api_key}"
        self._tls = None if settings.tls is None else settings.tls.client_context()
        self._timeout = aiohttp.ClientTimeout(total=settings.request_timeout, sock_connect=settings.connection_timeout)
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
            weakref.WeakKeyDictionary()
        )
        self._lost_lock = threading.Lock()
        self._unanswered: dict[tuple[str, bytes], list[_Key]] = {}
        """Of claims that were given up after a try that may have been done, by path and body."""
        _transports.add(self)

    async def get(self, path: str) -> bytes:
        """The answer to a query that is all in the path."""
        return (await self.send("GET", path, None, Repeat.HARMLESS)).data

    async def post(self, path: str, data: bytes, repeat: Repeat) -> bytes:
        """The answer to a request with a body."""
        return (await self.send("POST", path, data, repeat)).data

    async def claim(self, path: str, data: bytes) -> tuple[bytes, _Key | None]:
        """``post`` for claims: what one may have claimed that got no answer, the next one like it asks for. The answer
        may then be of that time, and say nothing of now: with it comes the key, which `still_lost` takes."""
        lost = self._take_lost(path, data)
        key = lost or _Key()
        try:
            return (await self.send("POST", path, data, Repeat.KNOWN, key)).data, lost
        except Exception:
            if key.may_be_done:
                self.still_lost(path, data, key)
            raise

    def _take_lost(self, path: str, data: bytes) -> _Key | None:
        with self._lost_lock:
            lost = self._unanswered.get((path, data), [])
            key = lost.pop() if lost else None
            if not lost:
                self._unanswered.pop((path, data), None)
        return key

    def still_lost(self, path: str, data: bytes, key: _Key) -> None:
        """Have the next claim like it ask for this one once more."""
        with self._lost_lock:
            self._unanswered.setdefault((path, data), []).append(key)

    async def send(self, method: str, path: str, data: bytes | None, repeat: Repeat, key: _Key | None = None) -> Reply:
        """Send a request until it is answered or the tries are used up.

        Raises the error that the server answers, Recoverable if it does not answer, and ConfigError if its certificate
        is none to trust.
        """
        key = key or _Key()
        delays = iter(self.settings.retry_delays)
        while True:
            try:
                return await self._send_once(method, path, data, {**self._headers, **key.headers(repeat)})
            except _NoAnswer as error:
                failure: Exception = error
                key.may_be_done |= error.sent
            except Recoverable as error:
                # Any other kind of it says that nothing was done.
                failure = error
                key.may_be_done |= isinstance(error, UnknownOutcome)
                if repeat is Repeat.MATTERS and key.may_be_done:
                    raise
            if not await self._wait_until_healthy(delays):
                if isinstance(failure, _NoAnswer) and isinstance(failure.cause, FromBetween):
                    failure = failure.cause
                if isinstance(failure, Recoverable):
                    raise failure
                why = "it is not running or cannot be reached"
                if self._base.startswith("https:"):
                    why = "it is not running, cannot be reached, or takes no client with this machine's certificate"
                raise Recoverable(f"{method} {path}: no answer from {self._base} ({failure}); {why}") from failure
            logger.info("%s %s is sent again: %s", method, path, failure)

    async def _wait_until_healthy(self, delays: Iterator[float]) -> bool:
        """Wait before another try, longer if the server is not well; False when there is no try left."""
        for delay in delays:
            await asyncio.sleep(delay)
            if not self.settings.health_retry_delays:
                return True
            for health_delay in (0.0, *self.settings.health_retry_delays):
                await asyncio.sleep(health_delay)
                with contextlib.suppress(_NoAnswer, Recoverable):
                    await self._send_once("GET", wire.PREFIX + "/health", None, self._headers)
                    return True
        return False

    async def _send_once(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> Reply:
        request = self._session().request(method, URL(self._base + path, encoded=True), data=data, headers=headers)
        try:
            async with request as response:
                body = await response.read()
                status = response.status
                reply_headers = response.headers
        except aiohttp.ClientConnectorCertificateError as error:
            authority = self.settings.tls.authority if self.settings.tls else f"in {AUTHORITY}"
            raise ConfigError(
                f"the certificate of {self._base} is refused: {error.certificate_error}; expected one of the authority "
                f"{authority}, for this name, and valid now"
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise _NoAnswer(error, sent=False) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _NoAnswer(error, sent=True) from error
        if status < 300:
            return Reply(body, reply_headers)
        if status == 408:
            raise _NoAnswer(Recoverable("the server waited too long for the body"), sent=False)
        error = error_from(status, body, f"{method} {path}")
        if isinstance(error, FromBetween):
            raise _NoAnswer(error, sent=True)
        raise error

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=MAX_CONNECTIONS, keepalive_timeout=30.0, ssl=True if self._tls is None else self._tls
                ),
                timeout=self._timeout,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("user-agent", "accept-encoding"),
            )
            self._sessions[loop] = session
        return session

    def leave_to_parent(self) -> None:
        """Forget connections and claims, in a forked child: they are the parent's."""
        _of_parents.extend(self._sessions.values())
        self._sessions = weakref.WeakKeyDictionary()
        self._lost_lock, self._unanswered = threading.Lock(), {}

    async def close(self) -> None:
        """Close the connections of every event loop."""
        here = asyncio.get_running_loop()
        sessions, self._sessions = self._sessions, weakref.WeakKeyDictionary()
        for loop, session in list(sessions.items()):
            if loop is here:
                await session.close()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.close(), loop))
            else:
                # Its loop is over, and so are its connections; this only keeps aiohttp from complaining.
                with contextlib.suppress(RuntimeError):
                    if session.connector is not None:
                        aiohttp.BaseConnector.close(session.connector)


_transports: weakref.WeakSet[Transport] = weakref.WeakSet()
_of_parents: list[aiohttp.ClientSession] = []
"""Kept for ever: collected, they would take their sockets off the event loop's epoll, which parent and child share."""


def _after_fork_in_child() -> None:
    for transport in _transports:
        transport.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)

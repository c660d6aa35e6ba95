"""One pooled connection to an HTTP endpoint that generates: tries again what may pass, and tells what will not.

It is built on aiohttp, the project's one HTTP library, and not on the `openai` package, which reads answers of any size
to their end, hands on exceptions and log records that hold headers, and takes seconds to import.

What an endpoint answers is somebody else's: answers are read up to a size and within a time, redirects are not
followed, and nothing that it says leaves this module with its key in it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import orjson

from rollout_core.base.errors import ConfigError
from rollout_core.base.settings import Redaction, require_secret, without_password
from rollout_core.inference.pace import Pace
from rollout_core.models.locating import Unchecked

MAX_BACKOFF_SECONDS = 60.0
MAX_RETRY_AFTER_SECONDS = 600.0
MAX_LIST_BYTES = 16 * 2**20
"""Of the list of models."""
MAX_HEADER_BYTES = 64 * 2**10
"""Of one header; gateways write long ones."""
MAX_ERROR_BYTES = 64 * 2**10
"""Of an answer that only says what is wrong; what is beyond is not read."""
MAX_TOLD = 300
"""Characters of what an endpoint says that are passed on."""
MOST_COUNTED = 10**9
"""Tokens; an endpoint that counts more miscounts."""
UNPAID = 402
THROTTLED = 429
PASSING_STATUSES = frozenset({408, 425, THROTTLED})
"""Besides 5xx."""
_GATEWAY_GAVE_UP = frozenset({504, 524})
"""Of gateways whose patience ended: the endpoint behind them may work on, and be paid for it."""
_CONNECT_SECONDS = 10.0
_T = TypeVar("_T")


class Passing(Exception):
    """All tries failed for a reason that may pass; the text says the last one."""


class Refused(Exception):
    """The endpoint refuses this request, and would again."""


class Unpaid(Refused):
    """The endpoint wants to be paid before it answers anybody."""


class NotServed(ConfigError):
    """The endpoint has nothing at this path."""


class Malformed(Exception):
    """An answer that cannot be used; the text says what is wrong with it."""


def environment_proxy(address: str) -> str | None:
    """The proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names for this address, unless NO_PROXY excepts it.

    Raises ConfigError for one that cannot be used.
    """
    target = urlsplit(address)
    if proxy_bypass(target.hostname or ""):
        return None
    proxies = getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    if not proxy:
        return None
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        usable = False
    if not usable:
        raise ConfigError(
            f"the environment names the proxy {without_password(proxy)!r} for {address}; expected http://host:port in "
            f"{target.scheme.upper()}_PROXY or ALL_PROXY, or the endpoint's host in NO_PROXY"
        )
    return parts.geturl()


class Meter(Protocol):
    """Counts what the tries of a request may cost. After an answer, or an error other than Passing, a try that began is
    the caller's to end."""

    async def begin(self) -> None:
        """A try is about to be sent. May wait until there is room for it, or raise."""
        ...

    def end(self, *, lost: bool) -> None:
        """The try came to no answer; where it was ``lost`` on the way, the endpoint may have worked on it."""
        ...


class EndpointSettings(Protocol):
    """What a configuration says of an endpoint, as `OpenAIBackend` describes it."""

    @property
    def url(self) -> str: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def max_concurrency(self) -> int: ...
    @property
    def timeout_seconds(self) -> float: ...
    @property
    def max_retries(self) -> int: ...
    @property
    def backoff_seconds(self) -> float: ...


class Endpoint:
    """The endpoint of a configuration. To be used from one event loop; close it there."""

    def __init__(
        self,
        config: EndpointSettings,
        *,
        table: str = "backend",
        names: str = "backend.served_model",
        headers: Mapping[str, str] | None = None,
        key_header: str | None = None,
        pace: Pace | None = None,
    ) -> None:
        """``table`` of the configuration, and the key ``names`` the model, for messages; ``key_header`` takes the key
        as it is, in place of a bearer token. Raises ConfigError where the key is not to be had."""
        self._config, self._table, self._names = config, table, names
        self.pace = pace or Pace(config.max_concurrency)
        # Compressed, a short answer could fill the memory.
        headers = {"content-type": "application/json", "accept-encoding": "identity", **(headers or {})}
        self._key: Redaction | None = None
        if config.api_key is not None:
            key = require_secret(config.api_key)
            headers |= {"authorization": f"Bearer {key}"} if key_header is None else {key_header: key}
            self._key = Redaction(key)
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None
        # Its own source of chance: the global one belongs to training, which must repeat to the last bit.
        self._chance = random.Random()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _connections(self) -> aiohttp.ClientSession:
        # Made at the first use, because it belongs to the event loop that it is made in.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._config.max_concurrency),
                timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS, sock_read=self._config.timeout_seconds),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                max_line_size=MAX_HEADER_BYTES,
                max_field_size=MAX_HEADER_BYTES,
                auto_decompress=False,
                # Not trust_env, which also sends the login of a .netrc, and looks for it before each request.
                proxy=environment_proxy(self._config.url),
            )
        return self._session

    def fit_to_show(self, text: str) -> str:
        """What the endpoint says, fit to be kept and shown: one line of limited length, without its key."""
        hidden = text if self._key is None else self._key.hide(text)
        line = " ".join("".join(letter if letter.isprintable() else " " for letter in hidden).split())
        return line if len(line) <= MAX_TOLD else line[: MAX_TOLD - 3] + "..."

    def gives_key_away(self, text: str) -> bool:
        """Whether a text repeats the key."""
        return self._key is not None and self._key.is_repeated_in(text)

    async def models(self) -> list[Mapping[str, Any]]:
        """What the endpoint serves. Raises as `post`."""
        listed = await self._request("GET", "/models", None, MAX_LIST_BYTES)
        try:
            return [model for model in listed["data"] if isinstance(model["id"], str)]
        except (LookupError, TypeError):
            raise NotServed(f"{self._config.url}/models lists no models; is {self._table}.url an OpenAI API?") from None

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        max_bytes: int,
        *,
        tokens: int = 0,
        meter: Meter | None = None,
    ) -> Mapping[str, Any]:
        """The JSON answer to ``body``, of at most ``max_bytes``. ``tokens`` are what it may take of a limit by the
        minute.

        Raises Passing when no try succeeded, Refused when the endpoint refuses the request, Malformed for an answer
        that is longer or compressed, ConfigError when the endpoint would refuse every request (key, address, name of
        the model).
        """
        return await self._request("POST", path, orjson.dumps(body), max_bytes, tokens, meter)

    async def _request(
        self,
        method: str,
        path: str,
        content: bytes | None,
        max_bytes: int,
        tokens: int = 0,
        meter: Meter | None = None,
    ) -> Mapping[str, Any]:
        retries = self._config.max_retries
        for attempt in range(retries + 1):
            asked_to_wait, is_lost = 0.0, True
            try:
                async with self.pace.turn(tokens):
                    if meter is not None:
                        await meter.begin()
                    response, read = await self._answer(method, path, content, max_bytes)
                if _is_success(response):
                    self.pace.answered()
                    answer = orjson.loads(read)
                    if isinstance(answer, dict):
                        return answer
                    problem = "the answer is no JSON object"
                else:
                    is_lost = response.status in _GATEWAY_GAVE_UP
                    if response.status == THROTTLED:
                        self.pace.throttled()
                    self._refuse(response, read)
                    asked_to_wait = retry_after(response)
                    self.pace.rest(asked_to_wait)
                    problem = f"HTTP {response.status}: {self._message(read)}"
            except orjson.JSONDecodeError:
                problem = "the answer is no JSON"
            except aiohttp.InvalidURL:
                raise ConfigError(f"{self._config.url} is no address; correct {self._table}.url") from None
            except aiohttp.ConnectionTimeoutError:
                is_lost, problem = False, f"no connection within {_CONNECT_SECONDS:g} s"
            except TimeoutError:
                problem = f"no whole answer within {self._config.timeout_seconds:g} s"
            except (aiohttp.ClientError, OSError) as error:
                is_lost = not isinstance(error, aiohttp.ClientConnectorError)
                problem = self.fit_to_show(f"{type(error).__name__}: {error}").rstrip(": ")
            if meter is not None:
                meter.end(lost=is_lost)
            if attempt < retries:
                await self._back_off(attempt, asked_to_wait)
        raise Passing(f"{self._config.url}: {problem} (after {retries + 1} tries)")

    async def _answer(
        self, method: str, path: str, content: bytes | None, max_bytes: int
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """One try: the answer, and as much of its body as is read."""
        # The client's own limit is for each piece of an answer, and these may drip.
        async with (
            asyncio.timeout(self._config.timeout_seconds + _CONNECT_SECONDS),
            # No redirects: the key is meant for this address.
            self._connections().request(
                method, self._config.url + path, data=content, allow_redirects=False
            ) as response,
        ):
            if _is_success(response) and response.headers.get("content-encoding", "identity") != "identity":
                raise Malformed("the answer is compressed, which was not asked for")
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if not _is_success(response) and len(body) >= MAX_ERROR_BYTES:
                    break
                if len(body) > max_bytes:
                    raise Malformed(f"the answer has more than the {max_bytes:,} bytes that fit what was asked for")
            return response, bytes(body)

    def _refuse(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        """Raise for a status that another try would get again."""
        status, url = response.status, self._config.url
        if status in PASSING_STATUSES or status >= 500:
            return
        message = self._message(body)
        if status in (401, 403):
            named = self._config.api_key
            remedy = f"is secret {named!r} its key?" if named else f"name its key as {self._table}.api_key"
            raise ConfigError(f"{url} refuses access (HTTP {status}: {message}); {remedy}")
        if status in (404, 405) or status < 400:
            raise NotServed(
                f"{url} does not serve this (HTTP {status}: {message}); look at {self._table}.url, {self._table}.api "
                f"and {self._names}"
            )
        kind = Unpaid if status == UNPAID else Refused
        raise kind(f"the endpoint refuses it (HTTP {status}): {message}")

    def _message(self, body: bytes) -> str:
        """What an answer says of the error."""
        text = body.decode(errors="replace")
        with suppress(orjson.JSONDecodeError):
            said = orjson.loads(body)
            for key in ("error", "message"):
                said = said.get(key, said) if isinstance(said, dict) else said
            text = said if isinstance(said, str) else text
        return self.fit_to_show(text)

    async def _back_off(self, attempt: int, asked_to_wait: float) -> None:
        seconds = min(MAX_BACKOFF_SECONDS, self._config.backoff_seconds * 2**attempt)
        await asyncio.sleep(max(seconds * self._chance.uniform(0.5, 1.0), asked_to_wait))


def look_once(make: Callable[[], Endpoint], look: Callable[[Endpoint], Coroutine[Any, Any, _T]]) -> _T:
    """What ``look`` finds at an endpoint that is made for it, in a thread of its own: the caller's may have a loop that
    runs."""

    async def opened() -> _T:
        endpoint = make()
        try:
            return await look(endpoint)
        finally:
            await endpoint.close()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, opened()).result()


def look_for_model(make: Callable[[], Endpoint], url: str, model: str, who: str) -> None:
    """Look once whether an endpoint answers, takes the key, and lists the model.

    Raises ConfigError where it never will answer; Unchecked where it does not now, or does not list the model: many
    gateways have no list, or list only a part of what they serve.
    """

    async def look(endpoint: Endpoint) -> None:
        unknown = f"whether {url} serves {model!r}"
        try:
            names = [str(listed["id"]) for listed in await endpoint.models()]
        except Passing as error:
            raise Unchecked(f"{who} does not answer: {error}") from error
        except (NotServed, Refused, Malformed) as error:
            raise Unchecked(f"{unknown}, as it lists no models: {error}") from error
        if model not in names:
            raise Unchecked(f"{unknown}; it lists {endpoint.fit_to_show(', '.join(sorted(names)) or 'nothing')}")

    look_once(make, look)


def counted_tokens(answer: Mapping[str, Any], api: str) -> tuple[int | None, int | None]:
    """Tokens of prompt and answer in the ``usage`` of an answer; None where there is none, or it can be none."""
    usage = answer.get("usage")

    def counted(name: str) -> int | None:
        count = usage.get(name) if isinstance(usage, Mapping) else None
        return count if type(count) is int and 0 <= count <= MOST_COUNTED else None

    if api != "anthropic":
        return counted("prompt_tokens"), counted("completion_tokens")
    prompt = counted("input_tokens")
    if prompt is not None:
        # What a cache of prompts took or gave is counted apart.
        prompt += sum(counted(name) or 0 for name in ("cache_creation_input_tokens", "cache_read_input_tokens"))
    return prompt, counted("output_tokens")


def _is_success(response: aiohttp.ClientResponse) -> bool:
    return 200 <= response.status < 300


def retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds that the answer asks to wait: a number, or the time until a date."""
    asked = response.headers.get("retry-after", "").strip()
    seconds = 0.0
    with suppress(ValueError, TypeError, OverflowError, OSError):
        seconds = float(asked) if asked[:1].isdigit() else parsedate_to_datetime(asked).timestamp() - time.time()
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS)

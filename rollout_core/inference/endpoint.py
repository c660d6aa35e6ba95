"""One pooled connection to an HTTP endpoint that generates: tries again what may pass, and tells what will not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import orjson

from rollout_core.config import OpenAIBackend
from rollout_core.errors import ConfigError
from rollout_core.secrets import require_secret

MAX_BACKOFF_SECONDS = 60.0
MAX_RETRY_AFTER_SECONDS = 600.0
_PASSING = frozenset({408, 425, 429})
_CONNECT_SECONDS = 10.0


class Passing(Exception):
    """All tries failed for a reason that may pass; the text says the last one."""


class Refused(Exception):
    """The endpoint refuses this request, and would again."""


class Endpoint:
    """The endpoint of a configuration. To be used from one event loop; close it there."""

    def __init__(self, config: OpenAIBackend) -> None:
        """Raises ConfigError where the key is not to be had."""
        self._config = config
        headers = {"content-type": "application/json"}
        if config.api_key is not None:
            headers["authorization"] = f"Bearer {require_secret(config.api_key)}"
        pool = config.max_concurrency
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(config.timeout_seconds, connect=_CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=pool, max_keepalive_connections=pool),
        )
        # Its own source of chance: the global one belongs to training, which must repeat to the last bit.
        self._chance = random.Random()
        self._resume_at = 0.0
        """Monotonic seconds until which the endpoint has asked to be left alone."""

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def models(self) -> list[Mapping[str, Any]]:
        """What the endpoint serves. Raises as `post`."""
        listed = await self._request("GET", "/models", None, retries=self._config.max_retries)
        try:
            return [model for model in listed["data"] if isinstance(model["id"], str)]
        except (LookupError, TypeError) as error:
            raise ConfigError(f"{self._config.url}/models lists no models; is backend.url an OpenAI API?") from error

    async def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The JSON answer to ``body``.

        Raises Passing when no try succeeded, Refused when the endpoint refuses the request, ConfigError when it would
        refuse every one (key, address, name of the model).
        """
        return await self._request("POST", path, orjson.dumps(body), retries=self._config.max_retries)

    async def _request(self, method: str, path: str, content: bytes | None, *, retries: int) -> Mapping[str, Any]:
        for attempt in range(retries + 1):
            await self._wait_until_welcome()
            asked_to_wait = 0.0
            try:
                response = await self._client.request(method, self._config.url + path, content=content)
                if response.is_success:
                    answer = orjson.loads(response.content)
                    if isinstance(answer, dict):
                        return answer
                    problem = "the answer is no JSON object"
                else:
                    self._refuse(response)
                    asked_to_wait = _retry_after(response)
                    problem = f"HTTP {response.status_code}: {_message(response)}"
            except httpx.LocalProtocolError:
                # Its text holds the header, and so the key.
                raise ConfigError(f"{self._config.url}: a header of the request is malformed") from None
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
            except orjson.JSONDecodeError:
                problem = "the answer is no JSON"
            if attempt < retries:
                await self._back_off(attempt, asked_to_wait)
        raise Passing(f"{self._config.url}: {problem} (after {retries + 1} tries)")

    def _refuse(self, response: httpx.Response) -> None:
        """Raise for a status that another try would get again."""
        status, url = response.status_code, self._config.url
        if status in _PASSING or status >= 500:
            return
        message = _message(response)
        if status in (401, 403):
            named = self._config.api_key
            remedy = f"is secret {named!r} its key?" if named else "name its key as backend.api_key"
            raise ConfigError(f"{url} refuses access (HTTP {status}: {message}); {remedy}")
        if status in (404, 405) or status < 400:
            raise ConfigError(
                f"{url} does not serve this (HTTP {status}: {message}); look at backend.url, backend.api and "
                "backend.served_model"
            )
        raise Refused(f"the endpoint refuses it (HTTP {status}): {message}")

    async def _back_off(self, attempt: int, asked_to_wait: float) -> None:
        if asked_to_wait:
            # It speaks for all requests, so the others need not find out one by one.
            self._resume_at = max(self._resume_at, time.monotonic() + asked_to_wait)
        seconds = min(MAX_BACKOFF_SECONDS, self._config.backoff_seconds * 2**attempt)
        await asyncio.sleep(max(seconds * self._chance.uniform(0.5, 1.0), asked_to_wait))

    async def _wait_until_welcome(self) -> None:
        while (seconds := self._resume_at - time.monotonic()) > 0:
            # Not all in the same moment.
            await asyncio.sleep(seconds * self._chance.uniform(1.0, 1.1))


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the answer asks to wait: a number, or the time until a date."""
    told = response.headers.get("retry-after", "").strip()
    seconds = 0.0
    with suppress(ValueError, TypeError):
        seconds = float(told) if told[:1].isdigit() else parsedate_to_datetime(told).timestamp() - time.time()
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS)


def _message(response: httpx.Response) -> str:
    """What the answer says of the error, in one line."""
    text = response.text
    with suppress(ValueError, LookupError, TypeError):
        told = orjson.loads(response.content)
        error = told.get("error", told) if isinstance(told, dict) else told
        text = error["message"] if isinstance(error, dict) else error
    line = " ".join(str(text).split())
    return line if len(line) <= 300 else line[:297] + "..."

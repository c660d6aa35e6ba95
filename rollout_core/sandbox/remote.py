"""A sandbox on another machine, asked over HTTP: the protocol, and the client's side of it. `service` is the server.

| request | body | answer |
|---|---|---|
| ``GET /v1/walls`` | | ``{"kind": ..., "walls": [{"name", "stands", "detail", "needed"}, ...]}`` |
| ``POST /v1/programs`` | a program (`Program.to_json`) | an outcome (`Outcome.to_json`) |
| ``POST /v1/linked`` | ``[first, second]`` | ``[outcome, outcome]`` |

Errors are ``{"detail": ...}`` with status 400 where the request is wrong, 401 without the key, 404 for another path,
409 where the service has no walls, 413 where the body is too large, 503 where trying again may help, and 500 where the
service itself is at fault.
"""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from rollout_core.base.errors import ConfigError, Recoverable, RetryHint
from rollout_core.sandbox.programs import Outcome, Program
from rollout_core.sandbox.walls import NoSandbox, Wall, Walls

SLACK_SECONDS = 60.0
"""Added to a program's own limit, for waiting and transfer."""
MOST_WAIT_SECONDS = 1e6
"""A socket takes no more milliseconds than 31 bits hold."""
MOST_BYTES = 256 * 2**20
"""Of a request or an answer."""


class RemoteRunner:
    """Runs programs by a sandbox service."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._parts = urlsplit(url)
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname or self._parts.username:
            raise ConfigError(
                f"url {self._parts.hostname or url!r} of a sandbox; expected http(s)://HOST[:PORT][/PATH]"
            )
        self._api_key = api_key

    def run(self, program: Program) -> Outcome:
        """Run it there. Raises Recoverable where the service does not answer, NoSandbox where it has no walls or
        refuses this caller, and ConfigError where it refuses the program."""
        answer = self._ask("POST", "/v1/programs", program.to_json(), program.limits.wall_seconds)
        return self._decoded(lambda: Outcome.from_json(answer))

    def run_linked(self, first: Program, second: Program) -> tuple[Outcome, Outcome]:
        """Run both there. Raises as `run`."""
        body = [first.to_json(), second.to_json()]
        answer = self._ask("POST", "/v1/linked", body, first.limits.wall_seconds)
        return self._decoded(lambda: (Outcome.from_json(answer[0]), Outcome.from_json(answer[1])))

    def walls(self) -> Walls:
        """Those that the service has. Raises Recoverable where it does not answer."""
        try:
            answer = self._ask("GET", "/v1/walls", None, 0.0)
            found = tuple(Wall(**wall) for wall in answer["walls"])
        except ConfigError as error:
            found = (Wall("service", False, str(error)),)
        except (KeyError, TypeError) as error:
            found = (Wall("service", False, f"its answer is none of a sandbox service: {error}"),)
        return Walls("http", found)

    def close(self) -> None:
        """Nothing is held."""

    def _ask(self, method: str, path: str, body: Any, seconds: float) -> Any:
        parts = self._parts
        assert parts.hostname is not None
        timeout = min(seconds + SLACK_SECONDS, MOST_WAIT_SECONDS)
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=timeout, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        where = f"the sandbox service at {parts.hostname}:{parts.port or parts.scheme}"
        try:
            text = None if body is None else json.dumps(body).encode()
            connection.request(method, parts.path.rstrip("/") + path, text, headers)
            response = connection.getresponse()
            content = response.read(MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise Recoverable(f"{where} does not answer: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if response.status == 200 and len(content) <= MOST_BYTES:
            return self._decoded(lambda: json.loads(content))
        reason = _reason(content)
        if response.status in (400, 401, 403, 404, 409, 413):
            error = ConfigError if response.status in (400, 413) else NoSandbox
            raise error(f"{where} refuses (status {response.status}): {reason}")
        after = response.headers.get("Retry-After", "")
        hint = RetryHint(delay_seconds=float(after)) if after.isdecimal() else None
        raise Recoverable(f"{where} fails (status {response.status}): {reason}", hint)

    def _decoded(self, decode: Any) -> Any:
        try:
            return decode()
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise Recoverable(f"the answer of a sandbox service is none: {type(error).__name__}: {error}") from None


def _reason(content: bytes) -> str:
    try:
        return str(json.loads(content)["detail"])[:500]
    except (ValueError, KeyError, TypeError):
        return content[:100].decode(errors="replace") or "no reason given"


def walls_json(walls: Walls) -> dict[str, Any]:
    """As JSON values."""
    return {"kind": walls.kind, "walls": [asdict(wall) for wall in walls.walls]}

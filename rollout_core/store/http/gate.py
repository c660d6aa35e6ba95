"""Who is let in: those who have the key; and without one, only programs of this machine, no web pages of others.

A web page can make the browser of somebody on this machine send requests to a server on loopback: with the page's
address as Origin, or, where a name of the page's owner leads to 127.0.0.1 (DNS rebinding), with that name as Host.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_core.store.http import wire
from rollout_core.store.http.errors import Forbidden, Unauthorized
from rollout_core.store.http.listening import is_loopback
from rollout_core.store.http.metrics import Metrics
from rollout_core.store.http.replies import error_reply


class Gate:
    """Lets requests in or refuses them, keeps paths as they were sent, and counts."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, allowed_origins: Sequence[str], metrics: Metrics | None
    ) -> None:
        self._app = app
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._allowed_origins = frozenset(origin.lower() for origin in allowed_origins)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # Ids may hold slashes. So routes are matched before %2F is decoded, and endpoints decode their parts.
        scope["path"] = scope["raw_path"].decode("latin-1")
        refusal = self._refusal(scope)
        if refusal is not None:
            return await error_reply(refusal)(scope, receive, send)
        if self._metrics is None:
            return await self._app(scope, receive, send)
        await self._metrics.watch(self._app, scope, receive, send)

    def _refusal(self, scope: Scope) -> Exception | None:
        if scope["path"] == wire.HEALTH_PATH:
            return None
        if self._authorization is None:
            return self._foreign(scope)
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(given, self._authorization):
            return None
        return Unauthorized("no valid API key; send it as Authorization: Bearer KEY")

    def _foreign(self, scope: Scope) -> Exception | None:
        """Why this may be the request of a web page of others."""
        hosts: list[str] = []
        origins: list[str] = []
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value.decode("latin-1").lower())
            elif name == b"origin":
                origins.append(value.decode("latin-1").lower())
        # Old programs send no Host; browsers always do.
        if len(hosts) > 1 or not all(map(_is_local, hosts)):
            return Forbidden(
                f"the request is for the host {', '.join(hosts)!r:.200}; without an API key this server answers only "
                "to localhost and loopback addresses; give it a key to use it by another name"
            )
        own = {f"http://{host}" for host in hosts}
        for origin in origins:
            if not (origin in own or origin in self._allowed_origins or "*" in self._allowed_origins):
                return Forbidden(
                    f"the request comes from the web page {origin!r:.200}; without an API key this server takes none "
                    "from pages of others, unless it was started with their origin (--cors-allow-origin)"
                )
        return None


@lru_cache(256)
def _is_local(host: str) -> bool:
    """Whether a Host header names this machine as only this machine can."""
    try:
        parts = urlsplit(f"//{host}")
        return parts.netloc == host and "@" not in host and is_loopback(parts.hostname or "")
    except ValueError:
        return False

"""Which requests a server answers: those with its key; and without a key, only those of programs on this machine, never
those of other sites' web pages.

A web page can make the browser of somebody on this machine send requests to a server on loopback: with the page's
address as Origin, or, where a name of the page's owner leads to 127.0.0.1 (DNS rebinding), with that name as Host.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_core.web.http_errors import Forbidden, Unauthorized
from rollout_core.web.listening import is_loopback
from rollout_core.web.replies import error_reply


class Gate:
    """Middleware that answers requests which are not allowed with an error, and keeps paths as they were sent.

    Args:
        app: serves what is allowed.
        api_key: what clients must send as ``Authorization: Bearer KEY``; None: nothing.
        allowed_origins: origins of web pages that may use a server without a key; ``*``: all.
        public: paths that need neither key nor origin.
        direct: what serves a request of a method and path, instead of ``app``.
        watch: runs the application for a request, to measure it.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        *,
        allowed_origins: Collection[str] = (),
        public: Collection[str] = (),
        direct: Mapping[tuple[str, str], ASGIApp] | None = None,
        watch: Callable[[ASGIApp, Scope, Receive, Send], Awaitable[None]] | None = None,
    ) -> None:
        self._app = app
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._allowed_origins = frozenset(origin.lower().encode() for origin in allowed_origins)
        self._public = frozenset(public)
        self._direct = direct or {}
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # Ids may hold slashes. So routes are matched before %2F is decoded, and endpoints decode their parts.
        scope["path"] = scope["raw_path"].decode("latin-1")
        refusal = self.refusal(scope)
        if refusal is not None:
            return await error_reply(refusal)(scope, receive, send)
        app = self._direct.get((scope["method"], scope["path"]), self._app)
        if self._watch is None:
            return await app(scope, receive, send)
        await self._watch(app, scope, receive, send)

    def refusal(self, scope: Scope) -> Exception | None:
        """Why this request, whose path is as it was sent, is not allowed; None where it is."""
        return None if scope["path"] in self._public else self.why_refused(scope)

    def why_refused(self, scope: Scope) -> Exception | None:
        """Why the sender of this request is not allowed; None where it is."""
        if self._authorization is None:
            return self._foreign(scope)
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(given, self._authorization):
            return None
        return Unauthorized("no valid API key; send it as Authorization: Bearer KEY")

    def _foreign(self, scope: Scope) -> Exception | None:
        """Why this may be the request of a web page of others."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        # Old programs send no Host; browsers always do.
        if len(hosts) > 1 or not all(map(_is_local, hosts)):
            shown = b", ".join(hosts).decode("latin-1")
            return Forbidden(
                f"the request is for the host {shown!r:.200}; without an API key this server answers only to localhost "
                "and loopback addresses; give it a key to use it by another name"
            )
        for name, value in scope["headers"]:
            if name == b"origin" and not self._is_allowed(value.lower(), hosts):
                return Forbidden(
                    f"the request comes from the web page {value.decode('latin-1')!r:.200}; without an API key this "
                    "server accepts none from other sites' pages, unless it was started with their origin "
                    "(--cors-allow-origin)"
                )
        return None

    def _is_allowed(self, origin: bytes, hosts: Sequence[bytes]) -> bool:
        is_own = any(origin == b"http://" + host.lower() for host in hosts)
        return is_own or origin in self._allowed_origins or b"*" in self._allowed_origins


@lru_cache(256)
def _is_local(host: bytes) -> bool:
    """Whether a Host header names this machine as only this machine can."""
    text = host.decode("latin-1").lower()
    try:
        parts = urlsplit(f"//{text}")
        return parts.netloc == text and "@" not in text and is_loopback(parts.hostname or "")
    except ValueError:
        return False

"""Who is let in to the pages, and what a browser may do with them. Stands before any application of pages, also one
that is only made when somebody comes."""

from __future__ import annotations

import hmac
import html
from hashlib import blake2b
from urllib.parse import parse_qs, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_core.web.http_errors import Forbidden, TooLarge, TooSlow, Unauthorized
from rollout_core.web.listening import BodyLimits, Gate, read_body
from rollout_core.web.replies import error_reply

LOGIN, STATIC = "/login", "/static/"
_COOKIE = "rollout_ui"
_MOST_LOGIN_BYTES = 4096
_HEADERS = {
    # Nothing from elsewhere is loaded, nothing in a page runs but the project's own files, whatever a prompt contains.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


def base_of(scope: Scope) -> str:
    """What stands before the paths of all pages, such as ``/ui``; nothing where they have a server to themselves."""
    return scope.get("app_root_path", scope.get("root_path", ""))


def page_path(scope: Scope) -> str:
    """The path of a page below `base_of`."""
    return scope["path"].removeprefix(base_of(scope))


def guarded(app: ASGIApp, api_key: str | None) -> ASGIApp:
    """``app`` behind the login."""
    return _WithHeaders(_Login(app, api_key))


class _WithHeaders:
    """Every answer says what a browser may do with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        is_static = page_path(scope).startswith(STATIC)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = is_static and message["status"] in (200, 304)
                headers = {**_HEADERS, "cache-control": "max-age=3600" if kept else "no-store"}
                encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
                message = {**message, "headers": [*message["headers"], *encoded]}
            await send(message)

        await self._app(scope, receive, with_headers)


class _Login(Gate):
    """The store server's rules for who is let in; a browser shows its key once, and a cookie from then on."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        super().__init__(app, api_key)
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        base = base_of(scope)
        if self._key is not None and (scope["method"], page_path(scope)) == ("POST", LOGIN):
            return await (await self._sign_in(Request(scope, receive)))(scope, receive, send)
        refusal = self.refusal(scope)
        if isinstance(refusal, Unauthorized) and "text/html" in Request(scope).headers.get("accept", ""):
            wanted = scope["path"] + ("?" + scope["query_string"].decode("latin-1") if scope["query_string"] else "")
            return await RedirectResponse(f"{base}{LOGIN}?{urlencode({'next': wanted})}", 303)(scope, receive, send)
        if refusal is not None:
            status = 403 if isinstance(refusal, Forbidden) else 401
            return await HTMLResponse(html.escape(str(refusal)), status)(scope, receive, send)
        if scope["method"] not in ("GET", "HEAD"):
            return await HTMLResponse("these pages are only read", 405)(scope, receive, send)
        await self._app(scope, receive, send)

    def refusal(self, scope: Scope) -> Exception | None:
        """As of the store's server, but for the cookie, the way to it, and the style of the page that asks."""
        if self._key is None:
            return self.why_refused(scope)
        if page_path(scope) == LOGIN or page_path(scope).startswith(STATIC):
            return None
        given = Request(scope).cookies.get(_COOKIE, "")
        return None if hmac.compare_digest(given.encode(), self._session.encode()) else self.why_refused(scope)

    @property
    def _session(self) -> str:
        """Stands for the key, which it does not give away."""
        assert self._key is not None, "only with a key"
        return blake2b(self._key, digest_size=32, person=b"rollout ui").hexdigest()

    async def _sign_in(self, request: Request) -> Response:
        assert self._key is not None, "only with a key"
        try:
            body = await read_body(request.scope, request.receive, BodyLimits(_MOST_LOGIN_BYTES))
        except (TooLarge, TooSlow) as error:
            return error_reply(error)
        form = parse_qs(body.decode("latin-1"))
        given, wanted = (form.get(name, [""])[0] for name in ("key", "next"))
        base = base_of(request.scope)
        if not hmac.compare_digest(given.encode(), self._key):
            return RedirectResponse(f"{base}{LOGIN}?{urlencode({'failed': '', 'next': wanted})}", 303)
        # A page of this server, not an address elsewhere.
        is_own = wanted.startswith(f"{base}/") and not wanted.startswith(("//", "/\\"))
        answer = RedirectResponse(wanted if is_own else f"{base}/", 303)
        # These pages are only read, so links from elsewhere may lead to them.
        answer.set_cookie(_COOKIE, self._session, path=f"{base}/", httponly=True, samesite="lax", max_age=30 * 86400)
        return answer

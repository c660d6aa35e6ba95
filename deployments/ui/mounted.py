"""The pages below ``/ui`` of a store's server. They are made when the first request comes, in a thread: a server that
nobody looks at pays nothing for them, and one whose storage is out of reach serves its store all the same."""

from __future__ import annotations

import asyncio
import logging

from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.ui.auth import LOGIN, STATIC, guarded, page_path
from rollout_core.base.errors import ConfigError, RolloutError
from rollout_core.store import LightningStore
from tasks.runtime.prefect_server import connections

log = logging.getLogger(__name__)

PAGES = f"{__name__}:mounted_pages"
"""The name by which worker processes find them."""


def mounted_pages(store: LightningStore, api_key: str | None) -> ASGIApp:
    """Pages over ``store`` and the storage of the settings, by the key of the store's server."""
    return guarded(_MadeWhenAsked(store), api_key)


class _MadeWhenAsked:
    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._app: ASGIApp | None = None
        self._making = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._making:
            problem = "" if self._app is not None else await self._make()
        if self._app is not None:
            return await self._app(scope, receive, send)
        # The way in is open to everybody, who need not know where things are kept.
        is_open = page_path(scope) == LOGIN or page_path(scope).startswith(STATIC)
        text = "these pages cannot be shown now" + ("" if is_open else f": {problem}")
        await PlainTextResponse(text, 503)(scope, receive, send)

    async def _make(self) -> str:
        """What is wrong, if it cannot be made; the next request tries again."""
        try:
            self._app = await run_in_threadpool(_make, self._store)
        except RolloutError as error:
            log.warning("the pages below /ui cannot be shown: %s", error)
            return str(error)
        return ""


def _make(store: LightningStore) -> ASGIApp:
    from deployments.ui.site import application, sources_of

    known = connections()
    if known is None:
        raise ConfigError(
            "the storage of the settings is a block of a Prefect server; set PREFECT_API_URL for this server, too"
        )
    return application(sources_of(known.try_objects(), store))

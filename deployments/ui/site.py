"""What ``rollout ui`` runs: the pages over the storage, the database and the Prefect server of the settings."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deployments.ui import model_pages, rollout_pages, run_pages, sample_pages, stored, suite_pages
from deployments.ui.auth import guarded
from deployments.ui.pages import Pages, Sources, create_app
from rollout_core.base.errors import RolloutError
from rollout_core.base.logs import configure
from rollout_core.objects import ObjectStore
from rollout_core.runs.browsing import SampleBrowser
from rollout_core.runs.run_records import RunRecords
from rollout_core.store import LightningStore, SqlLightningStore
from rollout_core.store.http.app import serving
from rollout_core.web.listening import MainServer, listen, require_key, url_of, uvicorn_config
from tasks.runtime.prefect_server import PREFECT_HOME, running_server

log = logging.getLogger(__name__)

MOST_LOG_LINES = 200


def serve_ui(
    objects: ObjectStore,
    database: str | None,
    *,
    host: str,
    port: int,
    api_key: str | None,
    announce: Callable[[str], None],
) -> None:
    """Serve the pages until SIGTERM or Ctrl-C. ``database`` None: without those of the store.

    Raises ConfigError for an address that cannot be had, and a missing key where other machines could look.
    """
    require_key(host, api_key)
    store = None if database is None else SqlLightningStore.from_url(database)
    configure(logging.WARNING, "%(asctime)s %(name)s %(levelname)s %(message)s")
    listener = listen(host, port)
    address = url_of(host, listener.getsockname()[1])

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        if store is None:
            yield
        else:
            async with serving(store):
                yield

    sources = sources_of(objects, store)
    read_ahead(sources)
    app = guarded(application(sources, lifespan), api_key)
    MainServer(uvicorn_config(app), lambda: announce(f"serving at {address}")).run(sockets=[listener])


def sources_of(objects: ObjectStore, store: LightningStore | None) -> Sources:
    """What pages show of these, with the Prefect server of PREFECT_API_URL, or the one that runs in this folder."""
    return Sources(objects, RunRecords(objects), store, _find_prefect)


def _find_prefect() -> str | None:
    try:
        return running_server(PREFECT_HOME)
    except RolloutError:  # it is only starting, or out of reach
        return None


def read_ahead(sources: Sources) -> None:
    """Read the heads of all runs in a thread of its own, so that the first who looks need not wait for that."""

    def read() -> None:
        try:
            sources.records.heads()
        except RolloutError as error:  # the page says it, too
            log.warning("the runs could not be read yet: %s", error)

    threading.Thread(target=read, name="read-ahead", daemon=True).start()


def application(
    sources: Sources, lifespan: Callable[[Any], AbstractAsyncContextManager[None]] | None = None
) -> Starlette:
    """All pages, to stand behind the login."""
    pages, browser = Pages(sources), SampleBrowser(sources.objects)
    every = [
        *run_pages.routes(pages),
        *sample_pages.routes(pages, browser),
        *rollout_pages.routes(pages, browser),
        *model_pages.routes(pages),
        *suite_pages.routes(pages),
        *stored.routes(pages),
        Route("/runs/{run}/logs", logs_page(pages)),
    ]
    return create_app(every, pages, lifespan)


def logs_page(pages: Pages) -> Callable[[Request], Response]:
    """The last lines that a run has written to the Prefect server, a part of its page."""

    def logs(request: Request) -> Response:
        head = pages.sources.records.find(request.path_params["run"])
        lines, problem = [], "no Prefect server is known; set PREFECT_API_URL, or look while one is running"
        address = pages.sources.find_prefect()
        if address is not None:
            try:
                lines, problem = _last_lines(address, head.id), ""
            except Exception as error:  # noqa: BLE001 - any of the client's; the page is worth showing without logs
                problem = f"the Prefect server {address} gave no log: {error}"
        return pages.show("logs.html", request, lines=lines, problem=problem)

    return logs


def _last_lines(address: str, run: str) -> list[tuple[str, int, str]]:
    """Time, level and text, the oldest first."""
    from uuid import UUID

    # Not before: it takes seconds.
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
    from prefect.client.schemas.sorting import LogSort

    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[UUID(run)]))
    with SyncPrefectClient(address) as client:
        found = client.read_logs(wanted, limit=MOST_LOG_LINES, sort=LogSort.TIMESTAMP_DESC)
    return [(f"{line.timestamp:%H:%M:%S}", line.level, line.message) for line in reversed(found)]

"""Pages of the queue and its workers, and of what uses how much storage."""

from __future__ import annotations

import time

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deployments.ui.app import Pages
from rollout_core.housekeeping.usage import measure
from rollout_core.objects.leases import live_leases
from rollout_core.store.types import RolloutStatus

PAGE = 50
UNFINISHED: tuple[RolloutStatus, ...] = ("queuing", "preparing", "running", "requeuing")
LAST_ENTRIES = 200
"""Of a model's history that are shown."""


def routes(pages: Pages) -> list[Route]:
    """Of these pages."""
    own = StoredPages(pages)
    return [
        Route("/queue", own.queue),
        Route("/storage", own.storage),
    ]


class StoredPages:
    """What answers."""

    def __init__(self, pages: Pages) -> None:
        self._pages, self._sources = pages, pages.sources

    async def queue(self, request: Request) -> Response:
        """What waits, who works, and which runs are under way."""
        store = self._sources.require_store()
        counts = {status: (await store.query_rollouts(status_in=[status], limit=0)).total for status in UNFINISHED}
        workers = await store.query_workers(sort_by="last_heartbeat_time", sort_order="desc", limit=PAGE)
        leases = await run_in_threadpool(lambda: live_leases(self._sources.objects, clear=False))
        return self._pages.show(
            "queue.html",
            request,
            counts=counts,
            workers=workers.items,
            num_workers=workers.total,
            leases=leases,
            resources=await store.get_latest_resources(),
            now=time.time(),
        )

    def storage(self, request: Request) -> Response:
        """What uses how much of the object store; every ref and record is read for it."""
        return self._pages.show("storage.html", request, usage=measure(self._sources.objects))

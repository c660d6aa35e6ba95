"""Pages of the queue and its workers, and of what uses how much storage."""

from __future__ import annotations

import time

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deployments.ui.pages import Pages
from rollout_core.inference.ledger import is_gone
from rollout_core.objects.retention.run_leases import live_leases
from rollout_core.objects.retention.usage import measure
from rollout_core.store.types import RolloutStatus, Worker

PAGE = 50
LOOKED_AT = 200
"""Workers with the latest signs of life, among which those are that are there."""
FORGOTTEN_SECONDS = 900.0
"""A worker that gave no sign of life for so long is not shown."""
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


def last_sign(worker: Worker) -> float:
    """When a worker last did anything, in seconds since the epoch; 0 where that is not known."""
    signs = (worker.last_heartbeat_time, worker.last_dequeue_time, worker.last_busy_time, worker.last_idle_time)
    return max(filter(None, signs), default=0.0)


def _is_there(worker: Worker, now: float) -> bool:
    """Whether a worker may be at work: processes of runs that ended stay in the store."""
    return now - last_sign(worker) < FORGOTTEN_SECONDS and not is_gone(worker.worker_id)


class StoredPages:
    """What answers."""

    def __init__(self, pages: Pages) -> None:
        self._pages, self._sources = pages, pages.sources

    async def queue(self, request: Request) -> Response:
        """What waits, who works, and which runs are under way."""
        store = self._sources.require_store()
        counts = {status: (await store.query_rollouts(status_in=[status], limit=0)).total for status in UNFINISHED}
        workers: dict[str, Worker] = {}
        for sign in ("last_heartbeat_time", "last_dequeue_time"):
            found = await store.query_workers(sort_by=sign, sort_order="desc", limit=LOOKED_AT)
            workers |= {worker.worker_id: worker for worker in found.items}
        now = time.time()
        alive = await run_in_threadpool(lambda: [each for each in workers.values() if _is_there(each, now)])
        alive.sort(key=last_sign, reverse=True)
        leases = await run_in_threadpool(lambda: live_leases(self._sources.objects, clear=False))
        return self._pages.show(
            "queue.html",
            request,
            counts=counts,
            workers=[(worker, now - last_sign(worker)) for worker in alive[:PAGE]],
            num_workers=len(alive),
            leases=leases,
            resources=await store.get_latest_resources(),
        )

    def storage(self, request: Request) -> Response:
        """What uses how much of the object store; every ref and record is read for it."""
        return self._pages.show("storage.html", request, usage=measure(self._sources.objects))

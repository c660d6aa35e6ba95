"""Metrics of a store's server, as Prometheus reads them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_core.base.errors import Fatal, Recoverable
from rollout_core.store.contract import LightningStore

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_COUNTS = ("total_rollouts", "total_attempts", "total_spans", "total_resources", "total_workers")
_RECORDS = b"rollout_store_records"
METRICS_PATH = "/metrics"
MULTIPROCESS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable by which prometheus-client adds up the worker processes of one server."""


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rollout_store_requests", "Requests answered", ["operation", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "rollout_store_request_seconds",
            "Seconds from a request's header to its reply's end",
            ["operation"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._held = Gauge(
            _RECORDS.decode(),
            "Records in the store",
            ["kind"],
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )

    async def watch(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and count it."""
        started = time.perf_counter()
        status = 500

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, note_status)
        finally:
            # Labels are names of operations, never paths: ids would make a time series each.
            route = scope.get("route")
            operation = route.name if route is not None else "unknown"
            self._requests.labels(operation, status).inc()
            self._seconds.labels(operation).observe(time.perf_counter() - started)

    async def show(self, store: LightningStore) -> Response:
        """The metrics page; without the numbers of records while the store cannot be asked."""
        counts: Mapping[str, Any] = {}
        with contextlib.suppress(Recoverable, Fatal):
            counts = await store.statistics()
        for name, value in counts.items():
            if name in _COUNTS and isinstance(value, int):
                self._held.labels(name.removeprefix("total_")).set(value)
        registry = self._registry
        if os.environ.get(MULTIPROCESS_FOLDER):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        page = generate_latest(registry)
        if not counts:  # older ones, possibly of another worker
            page = b"".join(line for line in page.splitlines(keepends=True) if _RECORDS not in line)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

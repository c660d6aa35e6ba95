"""A child process that is started when it is needed and ended when it has not been for a while."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from rollout_core.base.isolation.child import Child
from rollout_core.base.isolation.limits import Limits

IDLE_SECONDS = 60.0

log = logging.getLogger(__name__)


class KeptChild:
    """A `Child` for this process; whoever is forked from it has another."""

    def __init__(self, handler: str, limits: Limits) -> None:
        self._handler = handler
        self._limits = limits
        self._child: Child | None = None
        self._owner = 0
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._calls = 0

    def call(self, request: Any) -> Any:
        """As `Child.call`."""
        with self._lock:
            child = self._begin()
        try:
            return child.call(request)
        finally:
            with self._lock:
                self._end()

    def close(self) -> None:
        """End the child. The next call starts another."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._child is not None and self._owner == os.getpid():
            self._child.close()
        self._child = None

    def _begin(self) -> Child:
        if self._child is None or self._owner != os.getpid():
            self._child = Child(self._handler, self._limits, on_line=log.debug)
            self._owner, self._calls = os.getpid(), 0
        if self._timer is not None:
            self._timer.cancel()
        self._calls += 1
        return self._child

    def _end(self) -> None:
        self._calls -= 1
        if not self._calls:
            self._timer = threading.Timer(IDLE_SECONDS, self._close_idle)
            self._timer.daemon = True
            self._timer.start()

    def _close_idle(self) -> None:
        with self._lock:
            if not self._calls:
                self._close()

"""Has a server answer with what a promotion or rollback makes the latest."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from rollout_core.base.errors import Fatal, in_words
from rollout_core.base.ids import ContentId
from rollout_core.serving.replica import Replica

LOOK_SECONDS = 1.0
"""Between two looks at what is the latest."""
FIRST_RETRY, LONGEST_RETRY = 5.0, 60.0
"""Seconds before weights that could not be had are tried again: doubled each time, up to the longest."""
REFUSED_RETRY = 3600.0
"""Seconds before weights are tried again that the engine did not take, or ran otherwise than the trainer: each try
has requests wait."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Follow:
    """What is followed."""

    resource: str
    latest: Callable[[], Awaitable[ContentId | None]]
    """The model that is the latest; None: none that can be served. May raise anything where the database is away."""


class Follower:
    """Follows until `stop`. To be made on the event loop of ``replica``."""

    def __init__(self, replica: Replica, follow: Follow, *, look_seconds: float = LOOK_SECONDS) -> None:
        self._replica, self._follow, self._look_seconds = replica, follow, look_seconds
        self.resource = follow.resource
        self.latest: ContentId | None = replica.model_id
        """As it was seen last."""
        self.problem: str | None = None
        """Why something else than the latest answers, or why it is not known what is the latest."""
        self._retry_at, self._retry_seconds = 0.0, FIRST_RETRY
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Follow no longer."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _keep(self) -> None:
        await asyncio.wait([self._replica.started])
        while True:
            await self._look()
            await asyncio.sleep(self._look_seconds)

    async def _look(self) -> None:
        try:
            latest = await self._follow.latest()
        except Exception as error:  # noqa: BLE001 - whatever keeps a database from answering, what is served stays
            self._say(f"what is the latest {self.resource!r} cannot be read: {in_words(error)}")
            return
        if latest != self.latest:
            self._retry_at, self._retry_seconds = 0.0, FIRST_RETRY
            self.latest = latest
        if latest is None:
            self._say(f"{self.resource!r} names no model that can be served; the one before answers")
        elif latest == self._replica.model_id:
            self.problem = None
        elif time.monotonic() >= self._retry_at:
            await self._change(latest)

    async def _change(self, latest: ContentId) -> None:
        try:
            await self._replica.change(latest)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with weights, those before stay
            self._say(f"model {latest} is the latest {self.resource!r}, and cannot be served: {in_words(error)}")
            self._retry_at = time.monotonic() + (REFUSED_RETRY if isinstance(error, Fatal) else self._retry_seconds)
            self._retry_seconds = min(2 * self._retry_seconds, LONGEST_RETRY)
        else:
            self.problem = None

    def _say(self, problem: str) -> None:
        if problem != self.problem:
            logger.error("%s; model %s answers", problem, self._replica.model_id)
        self.problem = problem

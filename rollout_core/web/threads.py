"""A server on a thread and event loop of its own, so that a program that blocks does not stop it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from rollout_core.base.errors import Recoverable, in_words
from rollout_core.base.loops import refuse_finalizers
from rollout_core.web.listening import Server, uvicorn_config

T = TypeVar("T")

logger = logging.getLogger(__name__)


class _ListeningServer(Server):
    """Says when it listens."""

    def __init__(self, app: Any, on_listening: Callable[[], None]) -> None:
        config = uvicorn_config(app)
        config.lifespan = "off"
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()


class ServerThread:
    """A server's thread, and the event loop in it.

    ``work`` is run there; it calls ``serve`` with its application, and ends when that returns.
    """

    def __init__(
        self,
        work: Callable[[ServerThread, socket.socket], Coroutine[Any, Any, None]],
        listener: socket.socket,
        name: str,
    ) -> None:
        self.started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        refuse_finalizers(self.loop)
        self.is_stopping = False
        self._name = name
        self._server: _ListeningServer | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work, listener), name=name, daemon=True)
        self._thread.start()

    def _run(
        self, work: Callable[[ServerThread, socket.socket], Coroutine[Any, Any, None]], listener: socket.socket
    ) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(work(self, listener))
        except BaseException as error:  # noqa: BLE001 - handed to whoever starts or stops it
            self._error = error
            if self.started.done():
                logger.error("The %s ended with an error: %s", self._name, in_words(error))
            else:
                self.started.set_exception(error)
        finally:
            listener.close()

    async def serve(self, app: Any, listener: socket.socket) -> None:
        """Answer requests until asked to stop."""
        self._server = _ListeningServer(app, lambda: self.started.set_result(None))
        self._server.should_exit = self.is_stopping
        await self._server.serve(sockets=[listener])

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's loop, from any other. Raises Recoverable when the server is stopped
        meanwhile."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not self.is_alive() or self.is_stopping:
                raise Recoverable(f"the {self._name} was stopped meanwhile") from None
            raise

    def is_alive(self) -> bool:
        """Whether it runs, in this process."""
        return self._thread.is_alive()

    def ask_to_stop(self) -> None:
        """Let it end; from any thread."""
        self.is_stopping = True
        if self._server is not None:
            self._server.should_exit = True

    def join(self) -> None:
        """Wait for its end. Raises what it ended with."""
        self._thread.join()
        if self._error is not None:
            raise self._error

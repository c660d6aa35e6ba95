"""The server as a program: what ``rollout store serve`` runs, and the watch over its worker processes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import orjson
import uvicorn
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import STARTUP_FAILURE
from uvicorn.importer import import_from_string
from uvicorn.supervisors import Multiprocess
from uvicorn.supervisors.multiprocess import Process

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.locks import scratch_folder
from rollout_core.base.logs import configure
from rollout_core.base.processes import signal_name
from rollout_core.store.contract import LightningStore
from rollout_core.store.http.app import AppSettings, create_app, serving
from rollout_core.store.http.server_metrics import MULTIPROCESS_FOLDER
from rollout_core.store.sql.sql_store import SqlLightningStore
from rollout_core.web.certificates import AUTHORITY, CERTIFICATE, KEY, TLSFiles
from rollout_core.web.listening import MainServer, listen, require_key, url_of, uvicorn_config

PAGES_PATH = "/ui"
"""Below it a server may show pages."""
START_SECONDS = 300
"""From a worker's start to its first answer; on a busy machine the imports alone take long."""
HANG_SECONDS = 60.0
"""A worker that has answered before and is silent for longer is replaced."""

logger = logging.getLogger(__name__)


@dataclass
class _Watch:
    """What is known of one worker."""

    asked: float
    """Since when an answer is waited for, in seconds of the monotonic clock."""
    waits: bool = False
    """Whether it has been asked and has not answered yet."""
    answered: bool = False
    serves: bool = False


class Supervisor(Multiprocess):
    """uvicorn's, which gives a worker five seconds for its first answer and kills it without a word.

    Workers are asked without waiting for them, so that signals are heeded meanwhile. ``on_serving`` is called once,
    when all workers serve.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], on_serving: Callable[[], None]) -> None:
        config.timeout_worker_healthcheck = START_SECONDS  # of workers that SIGHUP replaces
        super().__init__(config, sockets)
        self._on_serving = on_serving
        self._has_served = False
        self._failure: str | None = None
        self._watches: dict[Process, _Watch] = {}

    def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises Fatal when workers cannot start."""
        super().run()
        if self._failure is not None:
            raise Fatal(f"{self._failure} before it served; the lines above say why")

    def keep_subprocess_alive(self) -> None:
        for place, process in enumerate(self.processes):
            if self.should_exit.is_set():
                return
            fault = self._fault(process)
            if fault is not None:
                self._replace(place, fault)
        if not self._has_served and all(self._watch(process).serves for process in self.processes):
            self._has_served = True
            self._on_serving()

    def _watch(self, process: Process) -> _Watch:
        return self._watches.setdefault(process, _Watch(time.monotonic()))

    def _fault(self, process: Process) -> str | None:
        """What is wrong with a worker; asks it how it is."""
        watch = self._watch(process)
        if not process.process.is_alive():
            return f"worker process {process.pid} {_end(process.exitcode)}"
        try:
            if not watch.waits:
                process.parent_conn.send(b"ping")
                watch.waits, watch.asked = True, time.monotonic()
            elif process.parent_conn.poll():
                watch.serves = process.parent_conn.recv()
                watch.waits, watch.answered = False, True
        except (OSError, EOFError):
            return None  # it is ending, which the next look shows
        limit = HANG_SECONDS if watch.answered else START_SECONDS
        silent = time.monotonic() - watch.asked
        return f"worker process {process.pid} did not answer for {silent:.0f} s" if silent > limit else None

    def _replace(self, place: int, fault: str) -> None:
        process = self.processes[place]
        served = self._watches.pop(process).serves
        process.kill()
        process.join()
        if process.exitcode == STARTUP_FAILURE or not (served or self._has_served):
            # It would fail the same way again.
            self._failure = fault
            self.should_exit.set()
            return
        logger.warning("%s; another is started", fault)
        self.processes[place] = Process(self.config, self.sockets)
        self.processes[place].start()


def _end(code: int | None) -> str:
    return f"was killed by {signal_name(-code)}" if code and code < 0 else f"ended with exit code {code}"


SETTINGS_VARIABLE = "ROLLOUT_STORE_SERVE"
"""Environment variable by which worker processes learn what to serve. It names the key's variable, not the key."""
PARENT_VARIABLE = "ROLLOUT_STORE_SERVE_PARENT"
"""Environment variable with the process id of the parent, which may be gone before a worker can ask for it."""


@dataclass(frozen=True)
class ServeSettings:
    """Arguments of ``rollout store serve``."""

    database: str
    host: str
    port: int
    workers: int = 1
    api_key_env: str | None = None
    cors_allow_origins: Sequence[str] = ()
    pages: str | None = None
    """``module:function`` of what makes, of the store and the key, an application for all below `PAGES_PATH`."""
    tls: bool = False
    """Over HTTPS, with the files that the environment names, and only for clients of the same authority."""

    def tls_files(self) -> TLSFiles | None:
        """Of this machine, where they are needed. Raises ConfigError if the environment names none."""
        if not self.tls:
            return None
        files = TLSFiles.from_environment()
        if files is None:
            raise ConfigError(
                f"--tls needs {AUTHORITY}, {CERTIFICATE} and {KEY} in the environment; "
                "`rollout ops certificates` issues such files"
            )
        return files

    def app_settings(self) -> AppSettings:
        """The application's part, the key included. Raises ConfigError if the key's variable is not set."""
        api_key = None
        if self.api_key_env is not None:
            api_key = os.environ.get(self.api_key_env)
            if not api_key:
                raise ConfigError(f"the environment variable {self.api_key_env} is not set; it is to hold the API key")
        require_key(self.host, api_key)
        return AppSettings(api_key, tuple(self.cors_allow_origins), prometheus=True)


def serve(settings: ServeSettings, announce: Callable[[str], None]) -> None:
    """Serve a database until SIGTERM or SIGINT; ``announce`` gets a line when workers start, and one with the address
    when it serves.

    Raises ConfigError for a database that cannot be served, an address that cannot be had, and a missing key; Fatal
    when worker processes cannot start.
    """
    if settings.workers < 1:
        raise ConfigError(f"workers is {settings.workers}; expected 1 or more")
    app_settings, tls = settings.app_settings(), settings.tls_files()
    if tls is not None:
        tls.server_options()  # before anything listens, as the database
    # Opened before anything listens, so that a bad database is an error here and not in a worker.
    store = SqlLightningStore.from_url(settings.database)
    configure(logging.WARNING, "%(asctime)s %(name)s %(levelname)s %(message)s")
    listener = listen(settings.host, settings.port)
    address = url_of(settings.host, listener.getsockname()[1], tls=settings.tls)
    if tls is not None and (warning := tls.warning()) is not None:
        logger.warning(warning)
    if settings.workers == 1:
        app = with_pages(create_app(store, app_settings, lifespan=lambda _: serving(store)), store, settings)
        MainServer(uvicorn_config(app, tls=tls), lambda: announce(f"serving at {address}")).run(sockets=[listener])
        return
    asyncio.run(store.close())  # each worker opens its own
    with scratch_folder("store-metrics") as folder:
        os.environ[MULTIPROCESS_FOLDER] = str(folder)
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        os.environ[SETTINGS_VARIABLE] = orjson.dumps(asdict(settings)).decode()
        _supervise(settings.workers, listener, address, announce, tls)


def _supervise(
    workers: int, listener: socket.socket, address: str, announce: Callable[[str], None], tls: TLSFiles | None
) -> None:
    announce(f"starting {workers} worker processes ...")
    began = time.monotonic()

    def on_serving() -> None:
        announce(f"ready in {time.monotonic() - began:.1f} s")
        announce(f"serving at {address}")

    app = f"{__name__}:create_worker_app"
    config = uvicorn_config(app, factory=True, workers=workers, tls=tls)
    Supervisor(config, [listener], on_serving).run()


def create_worker_app() -> ASGIApp:
    """The application of one worker process, from the environment."""
    settings = ServeSettings(**orjson.loads(os.environ[SETTINGS_VARIABLE]))
    store = SqlLightningStore.from_url(settings.database)
    app = create_app(
        store, settings.app_settings(), lifespan=lambda _: serving(store, int(os.environ[PARENT_VARIABLE]))
    )
    return with_pages(app, store, settings)


def with_pages(app: ASGIApp, store: LightningStore, settings: ServeSettings) -> ASGIApp:
    """``app``, together with the pages that ``settings`` name; they stand before all that is the store's own:
    origins that may use the store may not read pages."""
    if settings.pages is None:
        return app
    pages = import_from_string(settings.pages)(store, settings.app_settings().api_key)

    async def with_own_pages(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (scope["path"] + "/").startswith(f"{PAGES_PATH}/"):
            await app(scope, receive, send)
        elif scope["path"] == PAGES_PATH:
            await RedirectResponse(f"{PAGES_PATH}/")(scope, receive, send)
        else:
            await pages({**scope, "root_path": PAGES_PATH}, receive, send)

    return with_own_pages

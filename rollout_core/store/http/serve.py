"""The server as a program: what ``rollout store serve`` runs."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import orjson
from fastapi import FastAPI

from rollout_core.base.errors import ConfigError
from rollout_core.base.scratch import scratch_folder
from rollout_core.store.http.app import AppSettings, create_app
from rollout_core.store.http.listening import MainServer, listen, require_key, serving, url_of, uvicorn_config
from rollout_core.store.http.metrics import MULTIPROCESS_FOLDER
from rollout_core.store.http.supervisor import Supervisor
from rollout_core.store.sql.store import SqlLightningStore

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
    app_settings = settings.app_settings()
    # Opened before anything listens, so that a bad database is an error here and not in a worker.
    store = SqlLightningStore.from_url(settings.database)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    listener = listen(settings.host, settings.port)
    address = url_of(settings.host, listener.getsockname()[1])
    if settings.workers == 1:
        app = create_app(store, app_settings, lifespan=lambda _: serving(store))
        MainServer(uvicorn_config(app), lambda: announce(f"serving at {address}")).run(sockets=[listener])
        return
    asyncio.run(store.close())  # each worker opens its own
    with scratch_folder("store-metrics") as folder:
        os.environ[MULTIPROCESS_FOLDER] = str(folder)
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        os.environ[SETTINGS_VARIABLE] = orjson.dumps(asdict(settings)).decode()
        _supervise(settings.workers, listener, address, announce)


def _supervise(workers: int, listener: socket.socket, address: str, announce: Callable[[str], None]) -> None:
    announce(f"starting {workers} worker processes ...")
    began = time.monotonic()

    def on_serving() -> None:
        announce(f"ready in {time.monotonic() - began:.1f} s")
        announce(f"serving at {address}")

    config = uvicorn_config(f"{__name__}:create_worker_app", factory=True, workers=workers)
    Supervisor(config, [listener], on_serving).run()


def create_worker_app() -> FastAPI:
    """The application of one worker process, from the environment."""
    settings = ServeSettings(**orjson.loads(os.environ[SETTINGS_VARIABLE]))
    store = SqlLightningStore.from_url(settings.database)
    return create_app(
        store, settings.app_settings(), lifespan=lambda _: serving(store, int(os.environ[PARENT_VARIABLE]))
    )

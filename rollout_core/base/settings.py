"""Where this process keeps its objects and its database: settings from the environment.

``ROLLOUT_STORAGE`` is the object store's URL (default ``file://./data/objects``), ``ROLLOUT_DATABASE`` the store's
(default ``sqlite:///./data/rollout.db``), ``ROLLOUT_CACHE`` a local folder for checkpoints fetched from the object
store (default ``./data/cache``), ``ROLLOUT_TRACKING`` the folder of trackers (default ``./data/tracking``).
``ROLLOUT_LIMITS`` lists the concurrency limits that stages ask the Prefect server for
(``engine``, ``learner``; default none), and ``ROLLOUT_STOP_SECONDS`` is how long a run may take to end after a stop
signal (default 10). They say where, never what: no setting enters a cache key. (``ROLLOUT_NUMERICS``, which does, is
read by `numerics`.)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rollout_core.base.errors import ConfigError

DEFAULT_STORAGE = "file://./data/objects"
DEFAULT_DATABASE = "sqlite:///./data/rollout.db"
DEFAULT_CACHE = "./data/cache"
DEFAULT_TRACKING = "./data/tracking"
DEFAULT_STOP_SECONDS = 10.0
BLOCK_PREFIX = "block:"
"""Begins an address that is the slug and name of a block on the Prefect server."""


@dataclass(frozen=True)
class Locations:
    """Addresses of the shared parts and the local cache of this machine."""

    storage: str
    database: str
    cache: Path
    tracking: Path
    limits: frozenset[str]


def locations() -> Locations:
    """Read the environment now, so that a worker's own settings count, not those of the machine that deployed."""
    return Locations(
        storage=os.environ.get("ROLLOUT_STORAGE", DEFAULT_STORAGE),
        database=os.environ.get("ROLLOUT_DATABASE", DEFAULT_DATABASE),
        cache=Path(os.environ.get("ROLLOUT_CACHE", DEFAULT_CACHE)),
        tracking=Path(os.environ.get("ROLLOUT_TRACKING", DEFAULT_TRACKING)),
        limits=frozenset(filter(None, os.environ.get("ROLLOUT_LIMITS", "").replace(" ", "").split(","))),
    )


def stop_seconds() -> float:
    """From a stop signal to the end of the process, at the latest. Raises ConfigError for no positive number."""
    text = os.environ.get("ROLLOUT_STOP_SECONDS", "")
    try:
        seconds = float(text) if text else DEFAULT_STOP_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"ROLLOUT_STOP_SECONDS is {text!r}; expected a positive number of seconds, such as 10")
    return seconds

"""Which servers run on this machine, by a file of each in the local cache, for whoever asks how they fare."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ValidationError

from rollout_core.base.processes import ProcessName, this_machine

_FOLDER = "serving"

logger = logging.getLogger(__name__)


class Listed(BaseModel):
    """A server that runs."""

    process: str
    """As `ProcessName` writes it."""
    url: str
    name: str
    """Of its model."""


@contextmanager
def listed(cache: Path, url: str, name: str) -> Iterator[None]:
    """Inside the block this process is listed. A server whose list cannot be written serves all the same."""
    path = cache / _FOLDER / f"{os.getpid()}.json"
    entry = Listed(process=str(ProcessName.of_this_process()), url=url, name=name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".tmp")
        half.write_text(entry.model_dump_json(), encoding="utf-8")
        half.replace(path)
    except OSError as error:
        logger.warning("rollout doctor status does not see this server, as %s cannot be written: %s", path, error)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def servers_here(cache: Path) -> list[Listed]:
    """Servers that run on this machine, by their names. Files of those that were killed are removed."""
    found: list[Listed] = []
    for path in (cache / _FOLDER).glob("*.json"):
        with suppress(OSError, ValidationError):  # it may end at this moment
            server = Listed.model_validate_json(path.read_bytes())
            process = ProcessName.parse(server.process)
            if process is None or process.machine != this_machine():
                continue
            if process.has_ended():
                path.unlink()
            else:
                found.append(server)
    return sorted(found, key=lambda server: (server.name, server.url))

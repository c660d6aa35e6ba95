"""The schema of a store's database: known versions, and how an older one is brought to the present.

The versions are Alembic's, in ``migrations``. A new database starts empty and goes through all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError
from rollout_core.base.redaction import HIDDEN, without_password

if TYPE_CHECKING:
    from sqlalchemy import Connection

Result = TypeVar("Result")

REVISIONS = ("0001", "0002")
"""Every version there has been, the present one last."""
EXPECTED_POSTGRES = (
    "postgresql://user:password@host:port/database, with %40, %2F, %3F and %23 for @, /, ? and # in a password"
)
BUSY_TIMEOUT_SECONDS = 30.0
"""How long an upgrade waits for others to finish writing."""


_alembic_lock = threading.Lock()  # Alembic keeps the upgrade under way in a global


def migrate(url: str) -> str:
    """Create the store's tables at ``url`` or bring them to the present version; what was done, in a line.

    Opening a store does the same. Safe beside other processes that do it too. Raises ConfigError for a database of
    another program and for one of a newer version, Recoverable if the database is busy or away.
    """
    before, where = _prepare(url)
    if before == REVISIONS[-1]:
        return f"{where} has the present schema {before}"
    if before is None:
        return f"{where} was created with schema {REVISIONS[-1]}"
    return f"{where} was brought from schema {before} to {REVISIONS[-1]}"


def check(url: str) -> None:
    """Raises what `migrate` would, as far as it shows in advance. Nothing is created or changed."""
    if is_postgres(url):
        from rollout_core.store.sql.postgres_schema import inspect

        _run(inspect(url, BUSY_TIMEOUT_SECONDS))
    else:
        from rollout_core.store.sql import sqlite_file

        sqlite_file.inspect(sqlite_file.parse_url(url), BUSY_TIMEOUT_SECONDS)


def _prepare(url: str) -> tuple[str | None, str]:
    """Do it; the version there was before, None for nothing, and the database in words."""
    if is_postgres(url):
        from rollout_core.store.sql.postgres_schema import prepare

        prepared = _run(prepare(url, BUSY_TIMEOUT_SECONDS))
        return prepared.revision_before, without_password(url)
    from rollout_core.store.sql import sqlite_file

    path = sqlite_file.parse_url(url)
    return sqlite_file.prepare(path, BUSY_TIMEOUT_SECONDS), str(path)


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, in a thread of its own: the caller's may be running an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def is_postgres(url: str) -> bool:
    """Whether a database URL is one of PostgreSQL. Raises ConfigError if it is and its driver is not installed."""
    if not url.startswith(("postgresql://", "postgres://")):
        return False
    if find_spec("asyncpg") is None:
        raise ConfigError(f"postgresql:// needs a package: pip install '{DISTRIBUTION}[postgres]'")
    _check_ports(url)
    return True


def _check_ports(url: str) -> None:
    """Raises ConfigError for a port that is none, of one of the hosts; the driver would raise anything."""
    shown = without_password(url)
    try:
        hosts = urlsplit(url).netloc.rpartition("@")[2].split(",")
    except ValueError:  # whose text is a piece of the URL, perhaps of the password
        raise ConfigError(f"database URL {shown!r} cannot be read; expected {EXPECTED_POSTGRES}") from None
    for host in hosts:
        port = host.rpartition("]")[2].rpartition(":")[2] if ":" in host.rpartition("]")[2] else ""
        if port and not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
            # Of a password with a slash a piece stands where the port would.
            told = port[:20] if f":{port}" in shown else HIDDEN
            raise ConfigError(
                f"database URL has port {told!r}; expected a number from 1 to 65535, in {EXPECTED_POSTGRES}"
            )


def known_revision(found: Sequence[str], where: str) -> str:
    """The version that a database of ours records. Raises ConfigError if this program does not know it."""
    if len(found) == 1 and found[0] in REVISIONS:
        return found[0]
    raise ConfigError(
        f"{where} has schema revision {', '.join(found) or 'none'}, this version of rollout knows {REVISIONS[-1]}; "
        "it was written by a newer version, use that one"
    )


def upgrade(connection: Connection) -> None:
    """Bring the database to the present version, in the transaction under way. The caller locks and commits."""
    # Imported here because only a database that is not at the present version needs it.
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    with _alembic_lock:
        command.upgrade(config, "head")

"""Which kind of database a URL means."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError
from rollout_core.base.secrets import HIDDEN, without_password

if TYPE_CHECKING:
    pass

Result = TypeVar("Result")


EXPECTED_POSTGRES = (
    "postgresql://user:password@host:port/database, with %40, %2F, %3F and %23 for @, /, ? and # in a password"
)


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

"""A PostgreSQL server as the store uses it: how connections are made, and what its errors mean.

A committed transaction is on the server's disk: ``synchronous_commit`` is on whatever the server's own default.
"""

from __future__ import annotations

from typing import Any

import asyncpg

from rollout_core.base.errors import ConfigError, Fatal, Recoverable, RolloutError, UnknownOutcome
from rollout_core.base.secrets import without_password
from rollout_core.store.sql.database_urls import EXPECTED_POSTGRES

CONNECT_SECONDS = 10.0
"""How long to wait for a connection before the server counts as unreachable."""
UNFORTUNATE = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError, asyncpg.UniqueViolationError)
"""Another writer was in the way; the same operation, begun again, sees what that one wrote."""
LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # cut while the driver was in the midst of something
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    ConnectionError,
)
"""The connection is gone, and with it a transaction that was not committed."""
DRIVER_ERRORS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
    UnicodeEncodeError,
    OverflowError,
)
"""Everything the driver raises that ``explain`` knows."""
_REFUSED = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.InvalidSchemaNameError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.ClientConfigurationError,
)
_PASSING = (
    *LOST,
    *UNFORTUNATE,
    OSError,
    TimeoutError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.LockNotAvailableError,
    asyncpg.PostgresIOError,
)
_BAD_VALUE = (asyncpg.DataError, asyncpg.ProgramLimitExceededError, UnicodeEncodeError, OverflowError)


def connection_settings(url: str, busy_timeout_seconds: float) -> dict[str, Any]:
    """The arguments of ``asyncpg.connect`` and ``asyncpg.create_pool``."""
    milliseconds = str(max(1, round(busy_timeout_seconds * 1000)))
    return {
        "dsn": url,
        "timeout": CONNECT_SECONDS,
        "statement_cache_size": 512,
        "server_settings": {
            "application_name": "rollout",
            "synchronous_commit": "on",
            "lock_timeout": milliseconds,
            # A process that froze in a transaction would keep its rows locked for ever.
            "idle_in_transaction_session_timeout": milliseconds,
            "jit": "off",  # its start costs more than the largest query here
        },
    }


async def connect(url: str, busy_timeout_seconds: float) -> asyncpg.Connection:
    """A connection with every setting the store relies on. Raises what ``explain`` makes of the driver's errors."""
    try:
        return await asyncpg.connect(**connection_settings(url, busy_timeout_seconds))
    except DRIVER_ERRORS as error:
        raise explain(error, url) from error
    except ValueError:  # whose text is a piece of the URL, perhaps of the password
        raise ConfigError(
            f"database URL {without_password(url)!r} cannot be read; expected {EXPECTED_POSTGRES}"
        ) from None


def explain(error: Exception, url: str) -> Exception:
    """Our error for one that the driver raised, with that one as its cause; any other error as it is."""
    explained = _translate(error, without_password(url))
    if explained is None:
        return error
    explained.__cause__ = error
    return explained


def _translate(error: Exception, where: str) -> RolloutError | None:
    """Recoverable if it may pass, else the kind that says what to do; None for errors that are not the driver's."""
    if isinstance(error, RolloutError):
        return None
    if isinstance(error, _REFUSED):
        return ConfigError(f"{where} refuses the store: {error}; check the address, the user and what it may do")
    if isinstance(error, _BAD_VALUE):
        return ConfigError(f"a value cannot be stored: {error}")
    if isinstance(error, _PASSING):
        what = str(error) or type(error).__name__
        return Recoverable(
            f"{where} could not do this now ({what}); nothing of this call was stored, it can be repeated"
        )
    if isinstance(error, asyncpg.PostgresError):
        return Fatal(f"{where} is damaged or was changed by another program: {error}; restore it from a copy")
    return None


def unknown_outcome(error: Exception, url: str) -> UnknownOutcome:
    """The error for a connection that was lost while a transaction was being committed."""
    return UnknownOutcome(
        f"{without_password(url)} was lost while it committed ({error}): whether this call was stored is not known; "
        "look before you repeat it, or repeat it if it is idempotent"
    )

"""A PostgreSQL server as the store uses it: how it is reached, what its errors mean, and how its tables are made.

A committed transaction is on the server's disk: ``synchronous_commit`` is on whatever the server's own default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.numeric import Int8Dumper

from rollout_core.base.errors import ConfigError, Fatal, Recoverable, RolloutError, UnknownOutcome
from rollout_core.base.settings import HIDDEN, without_password
from rollout_core.store.sql.database import COUNTS, REVISIONS, known_revision, upgrade

if TYPE_CHECKING:
    from sqlalchemy import Connection as AlembicConnection

EXPECTED_URL = (
    "postgresql://user:password@host:port/database, with %40, %2F, %3F and %23 for @, /, ? and # in a password"
)
CONNECT_SECONDS = 10
"""How long to wait for a connection before the server counts as unreachable."""
SIGNS_OF_LIFE = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,  # milliseconds
}
"""By which the end of the server's machine is noticed, which closes no connection; the URL may say otherwise."""
UPGRADE_LOCK = 0x524F4C4C
"""``ROLL`` in ASCII: the advisory lock of whoever creates or upgrades the tables."""

# SQLSTATEs, or their first two characters, which are a class of them.
_CUT = ("08", "57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04")
OTHERS_IN_THE_WAY = ("40P01", "40001", "23505")
_REFUSED = ("28", "3D000", "3F000", "42501", "25006")
_PASSING = ("53", "57", "58030", "55P03")
_TOO_LARGE = ("54",)


def is_lost(error: Exception) -> bool:
    """Whether the connection is gone, and with it a transaction that was not committed."""
    if not isinstance(error, psycopg.Error):
        return isinstance(error, ConnectionError)
    if error.sqlstate is None:
        return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    return error.sqlstate.startswith(_CUT)


def explain(error: Exception, url: str) -> Exception:
    """Our error for one that the driver raised, with that one as its cause; any other error as it is."""
    explained = _translate(error, without_password(url))
    if explained is None:
        return error
    explained.__cause__ = error
    return explained


def _translate(error: Exception, where: str) -> RolloutError | None:
    """Recoverable if it may pass, else the kind that says what to do; None for errors that are not the driver's."""
    if isinstance(error, (UnicodeEncodeError, OverflowError)):
        return ConfigError(f"a value cannot be stored: {_line(error)}")
    if not isinstance(error, (psycopg.Error, OSError)):
        return None
    state = getattr(error, "sqlstate", None) or ""
    if state.startswith(_REFUSED):
        return _refusal(error, where)
    if is_lost(error) or isinstance(error, OSError) or state.startswith((*OTHERS_IN_THE_WAY, *_PASSING)):
        return Recoverable(
            f"{where} could not do this now ({_line(error)}); nothing of this call was stored, it can be repeated"
        )
    # Without a state it is the driver, not the server, that has no way to send a value.
    if isinstance(error, psycopg.DataError) or state.startswith(_TOO_LARGE) or not state:
        return ConfigError(f"a value cannot be stored: {_line(error)}")
    return Fatal(f"{where} is damaged or was changed by another program: {_line(error)}; restore it from a copy")


def _line(error: Exception) -> str:
    """What the driver says, whose messages have several lines."""
    return " ".join(str(error).split()) or type(error).__name__


def _refusal(error: Exception, where: str) -> ConfigError:
    return ConfigError(f"{where} refuses the store: {_line(error)}; check the address, the user and what it may do")


def unknown_outcome(error: Exception, url: str) -> UnknownOutcome:
    """The error for a connection that was lost while a transaction was being committed."""
    return UnknownOutcome(
        f"{without_password(url)} was lost while it committed ({_line(error)}): whether this call was stored is not "
        "known; look before you repeat it, or repeat it if it is idempotent"
    )


def check_url(url: str) -> None:
    """Raises ConfigError for an address that cannot be one, in words that hold no part of its password."""
    shown = without_password(url)
    try:
        hosts = urlsplit(url).netloc.rpartition("@")[2].split(",")
    except ValueError:  # whose text is a piece of the URL, possibly of the password
        raise ConfigError(f"database URL {shown!r} cannot be read; expected {EXPECTED_URL}") from None
    for host in hosts:
        port = host.rpartition("]")[2].rpartition(":")[2] if ":" in host.rpartition("]")[2] else ""
        if port and not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
            # If a password has a slash, a piece of it stands where the port would.
            got = port[:20] if f":{port}" in shown else HIDDEN
            raise ConfigError(f"database URL has port {got!r}; expected a number from 1 to 65535, in {EXPECTED_URL}")


def _connection_settings(url: str, busy_timeout_seconds: float, further: Mapping[str, str]) -> dict[str, Any]:
    """The driver's settings for a URL, and for ``further`` ones of the server.

    What libpq does not know in the query of the URL is a setting of the server too.
    """
    milliseconds = str(max(1, round(busy_timeout_seconds * 1000)))
    ours = {
        "synchronous_commit": "on",
        "lock_timeout": milliseconds,
        # A process that froze in a transaction would keep its rows locked for ever.
        "idle_in_transaction_session_timeout": milliseconds,
        "jit": "off",  # its start costs more than the largest query here
        **further,
    }
    known_names = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    address, _, query = url.partition("?")
    known: list[tuple[str, str]] = []
    server: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in known_names:
            known.append((name, value))
        else:
            server[name] = value
    try:
        settings: dict[str, Any] = conninfo_to_dict(f"{address}?{urlencode(known, quote_via=quote)}")
    except (psycopg.ProgrammingError, ValueError):  # whose text is a piece of the URL, possibly of the password
        raise ConfigError(f"database URL {without_password(url)!r} cannot be read; expected {EXPECTED_URL}") from None
    escaped = [f"-c {name}={value}".replace("\\", "\\\\") for name, value in {**server, **ours}.items()]
    options = " ".join(option[:3] + option[3:].replace(" ", "\\ ") for option in escaped)
    return {
        **SIGNS_OF_LIFE,
        **settings,
        "options": f"{settings.get('options', '')} {options}".strip(),
        "application_name": "rollout",
        "connect_timeout": CONNECT_SECONDS,
    }


def connect(
    url: str,
    busy_timeout_seconds: float,
    further_settings: Mapping[str, str] | None = None,
    *,
    autocommit: bool = True,
    is_known: bool = True,
) -> psycopg.Connection[tuple[Any, ...]]:
    """A connection with every setting the store relies on, and with ``further_settings`` of the server.

    Raises ConfigError for a URL that is none, Recoverable if there is no connection now; and, unless it ``is_known``
    that the server takes this URL, ConfigError if the server refuses it.
    """
    settings = _connection_settings(url, busy_timeout_seconds, further_settings or {})
    try:
        connection = _connect(url, settings, autocommit, is_known)
    except psycopg.Error as error:
        raise explain(error, url) from error
    connection.adapters.register_dumper(int, Int8Dumper)  # one type for all, so that statements are prepared once
    connection.prepare_threshold = 0
    connection.prepared_max = 512
    return connection


def _connect(
    url: str, settings: dict[str, Any], autocommit: bool, is_known: bool
) -> psycopg.Connection[tuple[Any, ...]]:
    try:
        return psycopg.connect(**settings, autocommit=autocommit)
    except psycopg.OperationalError as error:
        if is_known or not _refuses(settings, error):
            raise
    # It may have been coming up when it gave no connection, and been up when it was asked for the reason. So only what
    # follows the answer that it is up is a refusal. It is asked once after each try: asked twice, one that came up in
    # between would seem to have refused what it never saw.
    try:
        return psycopg.connect(**settings, autocommit=autocommit)
    except psycopg.OperationalError as error:
        if not _refuses(settings, error):
            raise
        raise _refusal(error, without_password(url)) from error


def _refuses(settings: dict[str, Any], error: psycopg.OperationalError) -> bool:
    """Whether it is this connection that the server refuses, or that makes no sense, rather than any at present.

    The driver raises the same error for both, and the server may speak any language: that it is full is only recognised
    in English.
    """
    if error.pgconn is None:
        # No server was reached: its name was not found, or there was no answer in time. To ask it would take as long
        # again, and the driver lets no other thread of this process run meanwhile.
        return False
    if "too many" in str(error) or "connection slots" in str(error):
        return False
    answer = pq.PGconn.ping(make_conninfo(**settings).encode())
    return answer in (pq.Ping.OK, pq.Ping.NO_ATTEMPT)


# The tables

_SCHEMA = "SELECT current_schema()"
_TABLES = "SELECT table_name::text FROM information_schema.tables WHERE table_schema = current_schema()"
_REVISIONS = "SELECT version_num::text FROM alembic_version"
_IS_RESTORED = (
    "SELECT EXISTS (SELECT FROM changes WHERE transaction_id >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint)"
)
"""Whether there are changes of transactions that this server has not begun yet: they were another server's."""
_BEGIN_ANEW = (
    "DELETE FROM changes WHERE transaction_id >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint",
    "INSERT INTO changes (transaction_id, number, time, entries)"
    " VALUES (0, 0, extract(epoch FROM clock_timestamp())::float8, '[]')"
    " ON CONFLICT (transaction_id, number) DO UPDATE SET time = EXCLUDED.time",
)


class Prepared(NamedTuple):
    """What was found in a database, before it was brought to the present schema."""

    schema: str
    """The PostgreSQL schema that the tables are in."""
    revision_before: str | None
    """The revision that the tables had, None if there were none."""


def prepare(url: str, busy_timeout_seconds: float) -> Prepared:
    """Make sure that the database at ``url`` is a store of the present schema.

    Raises ConfigError for a database of another program or of a newer version, and what ``explain`` makes of errors.
    """
    found = inspect(url, busy_timeout_seconds)
    if found.revision_before == REVISIONS[-1]:
        _forget_foreign_changes(url, busy_timeout_seconds)
        return found
    return found._replace(revision_before=_upgrade(url, busy_timeout_seconds))


def _forget_foreign_changes(url: str, busy_timeout_seconds: float) -> None:
    """In a database that was restored from another server's copy, drop that server's changes. Their transactions have
    numbers that this server still gives to its own, which would stand among them."""
    try:
        with connect(url, busy_timeout_seconds) as connection:
            if connection.execute(_IS_RESTORED).fetchone() == (True,):
                for statement in _BEGIN_ANEW:
                    connection.execute(statement)
    except psycopg.Error as error:
        raise explain(error, url) from error


def inspect(url: str, busy_timeout_seconds: float) -> Prepared:
    """Look at the database as `prepare` does, with its errors, and leave it as it is."""
    try:
        with connect(url, busy_timeout_seconds, is_known=False) as connection:
            [[schema]] = connection.execute(_SCHEMA)
            if schema is None:
                raise ConfigError(
                    f"{without_password(url)}: the schema that search_path names does not exist; create it first"
                )
            tables = {name for (name,) in connection.execute(_TABLES)}
            found = [name for (name,) in connection.execute(_REVISIONS)] if "alembic_version" in tables else []
            return Prepared(schema, _recognise(tables, found, without_password(url)))
    except psycopg.Error as error:
        raise explain(error, url) from error


def read_counts(url: str, busy_timeout_seconds: float) -> dict[str, int] | None:
    """The counts that are kept, by name; None for a database without the present schema. Raises as `inspect`."""
    if inspect(url, busy_timeout_seconds).revision_before != REVISIONS[-1]:
        return None
    try:
        with connect(url, busy_timeout_seconds) as connection:
            return dict(connection.execute(COUNTS).fetchall())
    except psycopg.Error as error:
        raise explain(error, url) from error


def _recognise(tables: set[str], revisions: Sequence[str], where: str) -> str | None:
    """The schema revision of a store, None if there are no tables. Raises ConfigError for anything else."""
    if not tables:
        return None
    if not {"alembic_version", "rollout_payloads"} <= tables:
        raise ConfigError(
            f"{where} holds tables of another program; give the store a database of its own, or a schema of its own by "
            "?search_path=NAME"
        )
    return known_revision(revisions, where)


def _upgrade(url: str, busy_timeout_seconds: float) -> str | None:
    """Create the tables or bring them to the present; the revision they had."""
    # Imported here because only a new or an old database needs them, and SQLAlchemy takes a third of a second.
    from sqlalchemy import NullPool, create_engine
    from sqlalchemy.exc import DBAPIError

    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: connect(url, busy_timeout_seconds, autocommit=False),
        poolclass=NullPool,
    )
    try:
        with engine.begin() as upgrading:
            return _upgrade_once(upgrading, without_password(url))
    except DBAPIError as error:
        raise explain(error.orig, url) if isinstance(error.orig, Exception) else error from error


def _upgrade_once(connection: AlembicConnection, where: str) -> str | None:
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({UPGRADE_LOCK})")
    # Another process may have done it in the meantime.
    tables = _first_column(connection, _TABLES)
    revision = _recognise(set(tables), _first_column(connection, _REVISIONS) if tables else [], where)
    if revision != REVISIONS[-1]:
        upgrade(connection)
    return revision


def _first_column(connection: AlembicConnection, sql: str) -> list[str]:
    return [row[0] for row in connection.exec_driver_sql(sql)]

"""A private PostgreSQL server for tests: a cluster of its own in a temporary folder, reached by a Unix socket.

The server programs come with the system (Debian: ``apt-get install postgresql``). They refuse to run as root, so then
the server runs as ``nobody``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from rollout_core.store.sql.by_url import migrate
from rollout_core.store.sql.tables import metadata
from tests.store.patience import LONG, wait_until
from tests.support.alive import lives
from tests.support.machine import POSTGRES, postgres_programs, require

SETTINGS = {
    "listen_addresses": "",
    # Tests kill processes, never the machine, and what was written outlives a process without a sync.
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "max_wal_size": "256MB",
}
DATABASE = "contract"
EMPTY = "; ".join(
    [
        f"TRUNCATE {', '.join(table.name for table in metadata.sorted_tables)} RESTART IDENTITY",
        *(f"ALTER SEQUENCE {name} RESTART" for name in ("queue_positions", "resources_changes", "change_numbers")),
        "INSERT INTO changes VALUES (0, 0, 0.0, '[]')",  # as the migration does
    ]
)
"""One database serves all tests, since making one takes a third of a second, and its files as long to delete."""


def programs() -> Path:
    """The folder of the newest server programs of this machine; skips the test without any."""
    require(POSTGRES)
    folder = postgres_programs()
    assert folder is not None
    return folder


class PostgresServer:
    """A server that starts with the first database asked for."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._user: Path | None = None

    def database_of(self, folder: Path) -> str:
        """The URL of the store that stands for a test's folder: empty when asked for by another folder than before."""
        self.start()
        if self._user is None:
            migrate(self.new_database(DATABASE))
        elif folder != self._user:
            self.run_sql(EMPTY, DATABASE)
        self._user = folder
        return self.url(DATABASE)

    def new_database(self, name: str) -> str:
        """The URL of a database without any tables."""
        self.start()
        self.run_sql(f"CREATE DATABASE {name} TEMPLATE template0")
        return self.url(name)

    def url(self, database: str) -> str:
        """How programs reach a database of this server."""
        return f"postgresql://postgres@/{database}?host={quote(str(self._folder))}"

    def run_sql(self, sql: str, database: str = "postgres") -> str:
        """Run a statement as the owner; its output, a line for each row."""
        done = subprocess.run(
            [programs() / "psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", self.url(database), "-c", sql],
            capture_output=True,
            text=True,
            timeout=LONG,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self) -> None:
        """Start the server, made first if need be, and wait until it takes connections."""
        if self._process is not None:
            return
        if self._folder is None:
            programs()  # skips the test before anything is made
            self._folder = Path(tempfile.mkdtemp(prefix="pg-"))  # not below: a socket's path must be short
            if os.getuid() == 0:
                shutil.chown(self._folder, "nobody", "nogroup")
            initdb = ["initdb", "-D", self._data, "-U", "postgres", "--auth=trust", "-E", "UTF8", "--no-sync"]
            done = subprocess.run(
                self._command(*initdb, "--locale=C.UTF-8"), capture_output=True, cwd="/", env=self._environment
            )
            assert done.returncode == 0, done.stderr.decode()
        settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
        with (self._folder / "log").open("ab") as log:
            command = self._command("postgres", "-D", self._data, "-k", str(self._folder), *settings)
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", env=self._environment)
        deadline = time.monotonic() + LONG
        is_ready = [programs() / "pg_isready", "-q", "-h", self._folder, "-U", "postgres"]
        while subprocess.run(is_ready).returncode:
            if self._process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(
                    f"the PostgreSQL server did not start:\n{(self._folder / 'log').read_text()}", pytrace=False
                )
            time.sleep(0.02)

    def stop(self, *, at_once: bool = False) -> None:
        """Stop the server; ``at_once`` as ``pg_ctl -m immediate`` does: without a word, as in a crash."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT if at_once else signal.SIGINT)
            self._process.wait(LONG)
            self._process = None

    def kill(self) -> None:
        """SIGKILL of the server and of every process that serves a connection, as a machine's end does."""
        if self._process is not None:
            main = psutil.Process(self._process.pid)
            main.suspend()  # so that it starts no more of them meanwhile
            family = [*main.children(), main]
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait(LONG)
            self._process = None
            # While one of them lives, no other server can have the data.
            wait_until(lambda: not any(map(lives, family)))

    def close(self) -> None:
        """Stop the server and delete everything."""
        self.stop(at_once=True)
        if self._folder is not None:
            shutil.rmtree(self._folder)

    @property
    def _data(self) -> str:
        return f"{self._folder}/data"

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "HOME": str(self._folder), "LC_ALL": "C.UTF-8"}

    def _command(self, program: str, *arguments: str) -> list[str | Path]:
        # The server ends with the tests, however they end.
        rights = ["--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.getuid() == 0 else []
        return ["setpriv", "--pdeathsig", "INT", *rights, programs() / program, *arguments]

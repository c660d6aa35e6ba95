"""What the servers and workers of tests wrote: an error that nobody expected fails the test, or the session."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ERROR = re.compile(r"\b(ERROR|CRITICAL)\b|^Traceback \(most recent call last\)", re.MULTILINE)
RECORD = re.compile(
    r"\d\d:\d\d:\d\d\.\d+ \| |\d{4}-\d\d-\d\d[ T]\d\d:\d\d|(DEBUG|INFO|WARNING|ERROR|CRITICAL):? |Traceback \("
)
"""How the first line of a record begins: Prefect's, the store server's and Dask's, uvicorn's."""
SHOWN_LINES = 30


OF_SEVERAL_TESTS = "of several tests: "
"""Begins the message of a check of what several tests did. The test that it fails is only the last of them."""


@dataclass(frozen=True)
class Expected:
    """An error that may be in a log."""

    pattern: str
    """Found in its record."""
    reason: str


EVERYWHERE = (
    Expected(
        r"sqlite3\.OperationalError\) database is locked",
        "Prefect reads and then writes in one SQLite transaction, which another write in between ends at once; its "
        "task queue, services, workers and clients try again, and where they do not the test sees no result",
    ),
)
"""Expected of any server or worker."""


class ServerLogs:
    """Log files of servers and workers that a test started, and what may be in them."""

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self._expected = list(EVERYWHERE)

    def watch(self, path: Path) -> Path:
        """Read ``path`` in the end."""
        self._paths.append(path)
        return path

    def expect(self, pattern: str, reason: str) -> None:
        """Errors that match ``pattern`` are what the test is about."""
        assert reason, "an exception without a reason is none"
        self._expected.append(Expected(pattern, reason))

    def errors(self) -> list[str]:
        """Records of unexpected errors, each with its file."""
        return [
            f"{path}:\n{_shortened(record)}"
            for path in self._paths
            if path.exists()
            for record in records(path.read_text(errors="replace"))
            if ERROR.search(record) and not any(re.search(known.pattern, record) for known in self._expected)
        ]

    def check(self, of: str = "") -> None:
        """Fail with the unexpected errors. ``of`` is `OF_SEVERAL_TESTS` where the servers were not one test's own."""
        errors = self.errors()
        assert not errors, f"{of}{len(errors)} errors in the logs of servers and workers:\n" + "\n".join(errors)


def records(text: str) -> Iterator[str]:
    """Lines of a log, those of one record together: a traceback follows the line that it belongs to."""
    record: list[str] = []
    for line in text.splitlines():
        # A traceback belongs to the record before it where that announces an error.
        continues = line.startswith("Traceback") and record and ERROR.search(record[0])
        if RECORD.match(line) and not continues:
            yield "\n".join(record)
            record = []
        record.append(line)
    yield "\n".join(record)


def _shortened(record: str) -> str:
    lines = record.splitlines()
    if len(lines) > SHOWN_LINES:
        lines[SHOWN_LINES // 2 : -SHOWN_LINES // 2] = ["..."]
    return "\n".join(lines)

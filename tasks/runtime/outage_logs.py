"""What Prefect's own parts log in a run's or a worker's process while the server is away: a line each.

Left alone, each of its observers leaves a traceback at every outage and another at its end, and each event that waits
for the server is printed whole, at ERROR, with thousands of characters. A test fails where a version of
Prefect says otherwise what is shortened here (`tests/flows/test_outage_logs.py`).
"""

from __future__ import annotations

import asyncio
import logging

OBSERVERS = ("prefect.FlowRunCancellingObserver", "prefect.FlowRunSuspendingObserver")
"""Loggers of what listens to the server for runs that are cancelled or suspended."""
MOST_OF_AN_ERROR = 300
_ENDED = "_handle_polling_task_done"
_UNSENT = "Service %r failed to process item %r"


class OneLine(logging.Filter):
    """Makes a line of a traceback: of an observer that has lost its server each is the same, and dozens of lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if error is not None:
            why = " ".join(str(error).split())
            record.msg = f"{record.getMessage()} ({type(error).__name__}{': ' if why else ''}{why[:MOST_OF_AN_ERROR]})"
            record.args, record.exc_info, record.exc_text = (), None, None
        return True


class EndOfObservers(logging.Filter):
    """Drops what asyncio says of an observer that ends after an outage: Prefect asks the task that it has just
    cancelled for its exception."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return not (isinstance(error, asyncio.CancelledError) and _ENDED in record.getMessage())


class UnsentEvents(logging.Filter):
    """Makes a short warning of an event that could not be sent. As a rule Prefect keeps it, and sends it again."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg == _UNSENT and isinstance(record.args, tuple) and record.args[:1] == ("EventsWorker",):
            kind = getattr(record.args[1], "event", "of an unknown kind")
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg = "the server does not take event %s now; Prefect sends it again with a later one, if it kept it"
            record.args = (kind,)
        return True


_FILTERS = (
    *((name, OneLine()) for name in OBSERVERS),
    ("asyncio", EndOfObservers()),
    ("prefect._internal.concurrency", UnsentEvents()),
)


def shorten() -> None:
    """Have these loggers of this process say less; a second call changes nothing."""
    for name, kept in _FILTERS:
        logging.getLogger(name).addFilter(kept)

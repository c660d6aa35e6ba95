"""Prefect's log lines: where they go in a terminal, and what they leave out.

While the server is away, each of Prefect's observers would leave a traceback at every outage and another at its end,
and each event that waits for the server would be printed whole, at ERROR, with thousands of characters. Here they are a
line each. A test fails where a version of Prefect says otherwise what is shortened here
(`tests/tasks/test_prefect_logs.py`).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.configuration import setup_logging
from prefect.logging.handlers import PrefectConsoleHandler

from rollout_core.base import logs
from rollout_core.base.errors import RolloutError

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


def _run_ids() -> dict[str, str]:
    """Of the flow run and the task run in which a line is written, for those that no logger of Prefect's writes."""
    flow, task = FlowRunContext.get(), TaskRunContext.get()
    ids: dict[str, str] = {}
    if flow is not None and flow.flow_run is not None:
        ids["flow_run_id"] = str(flow.flow_run.id)
    if task is not None:
        ids["task_run_id"] = str(task.task_run.id)
        if task.task_run.flow_run_id is not None:
            ids["flow_run_id"] = str(task.task_run.flow_run_id)
    return ids


logs.add_ids(_run_ids)


def shorten() -> None:
    """Have these loggers of this process say less; a second call changes nothing."""
    for name, kept in _FILTERS:
        logging.getLogger(name).addFilter(kept)


def _console_handlers() -> list[Any]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, PrefectConsoleHandler)]


@contextmanager
def through_stderr() -> Iterator[None]:
    """Inside the block lines go through the present ``sys.stderr``, which a progress bar has made its own."""
    handlers = _console_handlers()
    files = [handler.console.file for handler in handlers]
    for handler in handlers:
        handler.console.file = sys.stderr
    try:
        yield
    finally:
        for handler, file in zip(handlers, files, strict=True):
            handler.console.file = file


class _WithoutKnownTraces(logging.Formatter):
    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info and isinstance(record.exc_info[1], RolloutError):
            record = copy.copy(record)  # the Prefect server gets it whole
            record.exc_info = record.exc_text = None
        return self._inner.format(record)


@contextmanager
def without_known_traces() -> Iterator[None]:
    """Inside the block lines about our own errors come without a traceback; all others keep it."""
    setup_logging()  # the first flow run would, and make other handlers; a second time they stay
    handlers = _console_handlers()
    formatters = [handler.formatter for handler in handlers]
    for handler in handlers:
        handler.setFormatter(_WithoutKnownTraces(handler.formatter or logging.Formatter()))
    try:
        yield
    finally:
        for handler, formatter in zip(handlers, formatters, strict=True):
            handler.setFormatter(formatter)

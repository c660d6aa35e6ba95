"""Prefect's log lines in a terminal: where they go, and what they leave out."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.logging.configuration import setup_logging
from prefect.logging.handlers import PrefectConsoleHandler

from rollout_core.base.errors import RolloutError


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

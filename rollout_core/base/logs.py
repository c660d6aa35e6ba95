"""The form of what a process logs: lines for people, or with ``ROLLOUT_LOG=json`` a JSON object a line on stderr.

A process takes the form when it imports ``rollout_core``; what starts as a program also calls `require_form`, which
says what is wrong with the variable. Child processes inherit it. In JSON all that Python writes to stderr is such a
line: records of every logger (Prefect's and uvicorn's too), warnings, exceptions that nobody caught, and text that is
written to ``sys.stderr`` itself, whose logger is ``stderr``. A line that is a JSON object already, such as an event,
stays as it is.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from rollout_core.base.errors import ConfigError, well_formed
from rollout_core.base.secret_sources import SECRET_PREFIX
from rollout_core.base.settings import FRAGMENT, HIDDEN, without_passwords

FORM = "ROLLOUT_LOG"
TEXT, JSON = "text", "json"
IDS = ("flow_run_id", "task_run_id", "rollout_id", "attempt_id", "trace_id", "span_id")
"""Fields that a line has where they are known."""
PREFECTS_HANDLERS = ("PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS", "PREFECT_LOGGING_HANDLERS_DEBUG_CLASS")
"""Variables by which Prefect, here and in child processes, takes a class for its handlers that write to stderr."""
_WORKERS_RUN = "PREFECT__FLOW_RUN_ID"
_FIRST_FIELD = '{"time":"'

_ids: ContextVar[Mapping[str, str] | None] = ContextVar("rollout_log_ids", default=None)
_sources: list[Callable[[], Mapping[str, str]]] = []
_lock = threading.RLock()


def form() -> str:
    """``text`` or ``json``. Raises ConfigError where the environment says something else."""
    asked = os.environ.get(FORM, "").strip().lower() or TEXT
    if asked not in (TEXT, JSON):
        raise ConfigError(f"{FORM} is {os.environ[FORM]!r}; expected {JSON}, or {TEXT} (the default)")
    return asked


def is_json() -> bool:
    """Whether this process writes JSON."""
    return isinstance(sys.stderr, _Stderr)


def take_form() -> None:
    """Write JSON from now on, if the environment says so; a second call changes nothing."""
    with suppress(ConfigError):  # what starts as a program says it, in one line
        if form() == JSON and not is_json():
            _write_json()


def require_form() -> None:
    """`take_form` of a program. Raises ConfigError for a value of the variable that is none."""
    form()
    take_form()


def configure(level: int, text_format: str | None = None, **options: Any) -> None:
    """`logging.basicConfig` of a program of ours, whose lines for people have ``text_format``.

    Raises ConfigError as `form` does.
    """
    require_form()
    if is_json():
        logging.getLogger().setLevel(level)
    else:
        logging.basicConfig(level=level, **({} if text_format is None else {"format": text_format}), **options)


@contextmanager
def about(**ids: str) -> Iterator[None]:
    """Lines that are written inside the block, and in tasks that begin there, have these of `IDS`."""
    token = _ids.set({**(_ids.get() or {}), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


def add_ids(source: Callable[[], Mapping[str, str]]) -> None:
    """Have ``source`` asked for `IDS` at each line."""
    _sources.append(source)


def say(line: str, level: int = logging.INFO, name: str = "rollout") -> None:
    """A line of a program to stderr: for people after its name, in JSON a record of the logger ``name``."""
    if is_json():
        _write(_line_of({"level": logging.getLevelName(level), "logger": name, "message": line}))
    else:
        sys.stderr.write(f"{name}: {line}\n")
        sys.stderr.flush()


def text_of(line: str) -> str:
    """The message of a line in JSON that a child process wrote, with its exception, for a record of this process; any
    other line as it is."""
    if not line.startswith(_FIRST_FIELD):
        return line
    try:
        fields = json.loads(line)
        return "\n".join(filter(None, (fields["message"], fields.get("exception"))))
    except (ValueError, KeyError, TypeError, RecursionError):
        return line


class JsonHandler(logging.Handler):
    """Writes each record as a line. It takes what the handlers take whose place it has."""

    def __init__(self, stream: Any = None, styles: Any = None) -> None:
        super().__init__()

    def format(self, record: logging.LogRecord) -> str:
        return json_line(record)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _write(self.format(record))
        except RecursionError:
            raise
        except Exception:  # noqa: BLE001 - logging's own rule: a line that cannot be written is no error of its caller
            self.handleError(record)


def json_line(record: logging.LogRecord) -> str:
    """A record as a JSON object without a newline."""
    fields: dict[str, Any] = {
        "level": record.levelname,
        "logger": record.name,
        "message": record.getMessage().rstrip("\n"),
    }
    fields |= {name: str(value) for name in IDS if (value := getattr(record, name, None))}
    if record.exc_info and record.exc_info[0] is not None:
        fields["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
    elif record.exc_text:
        fields["exception"] = record.exc_text
    if record.stack_info:
        fields["stack"] = record.stack_info
    return _line_of(fields, record.created)


def _line_of(fields: Mapping[str, Any], created: float | None = None) -> str:
    at = datetime.now(UTC) if created is None else datetime.fromtimestamp(created, UTC)
    time = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    shown = {name: _shown(value) for name, value in fields.items()}
    line = {"time": time, "level": "", "logger": "", "message": "", "process": os.getpid(), **_known_ids(), **shown}
    return json.dumps(line, separators=(",", ":"), ensure_ascii=False)


def _known_ids() -> dict[str, str]:
    known: dict[str, str] = {}
    if run := os.environ.get(_WORKERS_RUN):
        known["flow_run_id"] = run
    for source in _sources:
        known |= source()
    return known | dict(_ids.get() or {})


def _shown(value: Any) -> str:
    """A text without passwords in addresses, and without the secrets of this process's environment."""
    text = without_passwords(well_formed(str(value)))
    for name, secret in os.environ.items():
        if name.startswith(SECRET_PREFIX) and len(secret) >= FRAGMENT:
            # Also as it stands in JSON that is a message, or a part of one.
            for form_of_it in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]):
                text = text.replace(form_of_it, HIDDEN)
    return text


def _write(line: str) -> None:
    stream = sys.stderr.inner if isinstance(sys.stderr, _Stderr) else sys.stderr
    with _lock:
        # In one piece: other processes may write to the same file or pipe.
        stream.write(line + "\n")
        stream.flush()


class _Stderr:
    """``sys.stderr``, of which each line becomes a record. It is no terminal, so nothing draws bars on it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._begun: dict[int, str] = {}
        """By thread, a line that has no end yet."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        whole, newline, rest = (self._begun.pop(thread, "") + text).rpartition("\n")
        if rest:
            self._begun[thread] = rest
        if newline and whole.strip():
            self._say(whole)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def forget(self) -> None:
        """Of a line that the process before a fork has begun."""
        self._begun.clear()

    def end(self) -> None:
        """Write what has no end yet."""
        begun, self._begun = self._begun, {}
        for text in begun.values():
            if text.strip():
                self._say(text)

    def _say(self, text: str) -> None:
        lines = [line for line in text.splitlines() if line.strip()]
        if all(_is_object(line) for line in lines):
            _write("\n".join(map(_shown, lines)))
        else:
            # What one call writes is one record, such as a traceback.
            _write(_line_of({"level": "INFO", "logger": "stderr", "message": text.strip("\n")}))


def _is_object(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _write_json() -> None:
    stderr = _Stderr(sys.stderr)
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict)]
    for logger in (logging.root, *loggers):
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                logger.removeHandler(handler)
                if logger is not logging.root:
                    logger.addHandler(_handler(handler.level))
    logging.root.addHandler(_handler(logging.NOTSET))
    sys.stderr = stderr  # type: ignore[assignment]
    atexit.register(stderr.end)
    # A thread of the parent may hold the lock at the fork, and is not there to give it back.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
    os.register_at_fork(after_in_child=stderr.forget)
    logging.captureWarnings(True)
    sys.excepthook, sys.unraisablehook, threading.excepthook = _uncaught, _unraisable, _uncaught_in_thread
    for name in PREFECTS_HANDLERS:
        os.environ.setdefault(name, f"{__name__}.{JsonHandler.__name__}")


def _handler(level: int) -> JsonHandler:
    handler = JsonHandler()
    handler.setLevel(level)
    # Prefect leaves the root logger's handlers alone where one of them has a formatter.
    handler.setFormatter(logging.Formatter())
    return handler


def _uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    logging.getLogger("rollout").critical("the process ends by %s", kind.__name__, exc_info=(kind, error, trace))


def _unraisable(found: Any) -> None:
    what = found.err_msg or "exception ignored in"
    trace = (found.exc_type, found.exc_value, found.exc_traceback)
    logging.getLogger("rollout").error("%s: %r", what, found.object, exc_info=trace)


def _uncaught_in_thread(found: Any) -> None:
    if found.exc_type is SystemExit:
        return
    name = found.thread.name if found.thread is not None else "?"
    trace = (found.exc_type, found.exc_value, found.exc_traceback)
    logging.getLogger("rollout").error("thread %s ends by %s", name, found.exc_type.__name__, exc_info=trace)

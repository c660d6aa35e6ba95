"""What a rank tells its launcher, in lines of JSON through a pipe: data report, start of training, steps, errors."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from rollout_core import errors
from rollout_core.errors import ConfigError, CorruptObject, Fatal, MissingObject, Recoverable, RetryHint, RolloutError

PIPE = "ROLLOUT_RANK_PIPE"
"""Environment variable: number of the open file that messages go to."""


class Messenger:
    """Writes messages, or none where no launcher listens."""

    def __init__(self) -> None:
        number = os.environ.get(PIPE)
        self._file = os.fdopen(int(number), "w", encoding="utf-8") if number else None
        self._lock = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        """One message, out when this returns."""
        if self._file is None:
            return
        with self._lock:
            self._file.write(json.dumps([kind, content]) + "\n")
            self._file.flush()


def error_message(error: BaseException) -> dict[str, Any]:
    """An error as JSON values."""
    return {
        "kind": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "passing": isinstance(error, OSError | RuntimeError),
        "violations": getattr(error, "violations", ()),
        "content_id": getattr(error, "content_id", ""),
        "hint": vars(error.hint) if isinstance(error, Recoverable) else None,
    }


def is_own_error(message: dict[str, Any]) -> bool:
    """Whether it is an error of this project, which another rank's end cannot have caused."""
    kind = getattr(errors, message["kind"], None)
    return isinstance(kind, type) and issubclass(kind, RolloutError)


def error_of(message: dict[str, Any], where: str) -> RolloutError:
    """The error again, of its kind where it is one of this project.

    Others are Recoverable where a lost connection or memory that ran out can be behind them, and Fatal elsewhere.
    """
    text = f"{where}: {message['message']}"
    if not is_own_error(message):
        text = f"{where}: {message['kind']}: {message['message']}"
        return Recoverable(text) if message["passing"] else Fatal(text)
    kind = getattr(errors, message["kind"])
    if issubclass(kind, ConfigError):
        return kind(text, message["violations"])
    if issubclass(kind, CorruptObject | MissingObject):
        return kind(message["content_id"], text)
    if issubclass(kind, Recoverable):
        return kind(text, RetryHint(**message["hint"]))
    return kind(text)

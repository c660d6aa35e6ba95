"""Errors as JSON values, from one process to another; and in words, whatever their own words do."""

from __future__ import annotations

from typing import Any

from rollout_core.base import errors
from rollout_core.base.errors import (
    ConfigError,
    CorruptObject,
    Fatal,
    MissingObject,
    Recoverable,
    RetryHint,
    RolloutError,
    well_formed,
)


def in_words(error: BaseException) -> str:
    """Kind and message of an error, also of one whose ``__str__`` raises."""
    text = _text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    try:
        return well_formed(str(error))
    except (Exception, SystemExit, GeneratorExit) as problem:  # noqa: BLE001 - other people's code, which may do anything
        return f"(its message cannot be shown: __str__ raises {type(problem).__name__})"


def as_cause(error: BaseException) -> BaseException | None:
    """For ``raise ... from``: the error, unless its message cannot be encoded; a log record that shows it could not."""
    try:
        str(error).encode()
    except (Exception, SystemExit, GeneratorExit):  # noqa: BLE001 - other people's code
        return None
    return error


def error_message(error: BaseException) -> dict[str, Any]:
    """An error as JSON values. Of one that is derived from an error of this project, the project's own kind."""
    own = [kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__]
    return {
        "kind": (own or [type(error)])[0].__name__,
        "message": _text(error) or type(error).__name__,
        "passing": isinstance(error, OSError | RuntimeError),
        "violations": [well_formed(str(line)) for line in getattr(error, "violations", ())] if own else [],
        "content_id": str(getattr(error, "content_id", "")) if own else "",
        "hint": vars(error.hint) if isinstance(error, Recoverable) else None,
    }


def is_own_error(message: dict[str, Any]) -> bool:
    """Whether it is an error of this project, which another rank's end cannot have caused."""
    kind = getattr(errors, message["kind"], None)
    return isinstance(kind, type) and issubclass(kind, RolloutError)


def error_of(message: dict[str, Any], where: str = "") -> RolloutError:
    """The error again, of its kind where it is one of this project; ``where`` it was begins its message.

    Others are Recoverable where a lost connection or memory that ran out can be behind them, and Fatal elsewhere.
    """
    begin = f"{where}: " if where else ""
    text = f"{begin}{message['message']}"
    if not is_own_error(message):
        text = f"{begin}{message['kind']}: {message['message']}"
        return Recoverable(text) if message["passing"] else Fatal(text)
    kind = getattr(errors, message["kind"])
    if issubclass(kind, ConfigError):
        return kind(text, message["violations"])
    if issubclass(kind, CorruptObject | MissingObject):
        return kind(message["content_id"], text)
    if issubclass(kind, Recoverable):
        return kind(text, RetryHint(**message["hint"]))
    return kind(text)

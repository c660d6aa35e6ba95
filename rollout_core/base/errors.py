"""Every error a user can meet, as one picklable hierarchy.

Each kind is also the standard-library kind a caller would expect (``ConfigError`` is a ``ValueError`` and so on), so
code that has never heard of this package still handles it. The orchestrator retries by kind: ``Recoverable`` is retried
and its hint is honoured; everything else is final.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RetryHint:
    """When to try again: after ``delay_seconds``, doubled for each further try up to ``max_delay_seconds``."""

    delay_seconds: float = 1.0
    max_delay_seconds: float = 60.0

    def delay_for_try(self, retry: int) -> float:
        """Seconds to wait before retry number ``retry`` (0 for the first retry)."""
        return min(self.delay_seconds * 2.0**retry, self.max_delay_seconds)


def well_formed(text: str) -> str:
    r"""``text`` with lone surrogates as ``\\udc80``: what cannot be encoded can be neither logged nor stored."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class RolloutError(Exception):
    """Base of all errors raised on purpose by this project. ``str(error)`` is one clear line."""

    def __str__(self) -> str:
        # KeyError (a base of NotFound) would show the repr of the message.
        return well_formed(str(self.args[0])) if self.args else type(self).__name__


class ConfigError(RolloutError, ValueError):
    """The configuration or input is wrong; known before work starts; never retried.

    ``violations`` holds one line for each thing that is wrong, so that one run shows all of them.
    """

    def __init__(self, message: str, violations: Iterable[str] = ()) -> None:
        self.violations = tuple(violations)
        super().__init__(message)

    def __reduce__(self):
        return type(self), (self.args[0], self.violations)


class DataError(ConfigError):
    """A row of an input file is malformed. The message begins ``path:line:``."""


class NotFound(RolloutError, KeyError, ValueError):
    """A named thing does not exist. (Also a ``ValueError``: the store's contract promises that for unknown ids.)"""


class Conflict(RolloutError, ValueError):
    """The thing changed under the caller, such as an attempt that has been superseded. Not retried as is."""


class CorruptObject(RolloutError, OSError):
    """Stored bytes do not match their content id. The blob has been set aside; running again recomputes it."""

    def __init__(self, content_id: str, message: str) -> None:
        self.content_id = content_id
        super().__init__(message)

    def __reduce__(self):
        return type(self), (self.content_id, self.args[0])


class CorruptRef(RolloutError, OSError):
    """The file of a ref is not what was written under its name, so what the ref stood for is unknown."""


class MissingObject(NotFound):
    """The object store holds no blob of this content id. Running the stage that made it again brings it back."""

    def __init__(self, content_id: str, message: str) -> None:
        self.content_id = content_id
        super().__init__(message)

    def __reduce__(self):
        return type(self), (self.content_id, self.args[0])


class OtherOutcome(MissingObject):
    """``what`` was computed again and is another than before, so what follows from it has to be computed, too.

    ``content_id`` is what it was before.
    """

    def __init__(self, content_id: str, message: str, what: str) -> None:
        self.what = what
        super().__init__(content_id, message)

    def __reduce__(self):
        return type(self), (self.content_id, self.args[0], self.what)


class Recoverable(RolloutError, RuntimeError):
    """A passing fault (throttling, a lost connection, storage briefly gone); trying again is right."""

    def __init__(self, message: str, hint: RetryHint | None = None) -> None:
        self.hint = hint or RetryHint()
        super().__init__(message)

    def __reduce__(self):
        return type(self), (self.args[0], self.hint)


class UnknownOutcome(Recoverable):
    """A passing fault in the midst of a write, which may have been done. Trying again is right only where doing it
    twice is the same as once; otherwise look first."""


class Stopped(Recoverable):
    """The work ended early because the process was asked to stop. The next run continues with what was done."""


class StageTimeout(Recoverable):
    """A stage took longer than it may. It is tried again, and continues with what it has stored."""


class Fatal(RolloutError, RuntimeError):
    """Work cannot continue and trying again would not help, such as a loss that is not finite."""


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
    own = [kind for kind in type(error).__mro__ if kind.__module__ == __name__]
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
    kind = globals().get(message["kind"])
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
    kind = globals()[message["kind"]]
    if issubclass(kind, ConfigError):
        return kind(text, message["violations"])
    if issubclass(kind, CorruptObject | MissingObject):
        return kind(message["content_id"], text)
    if issubclass(kind, Recoverable):
        return kind(text, RetryHint(**message["hint"]))
    return kind(text)


def near(wanted: str, found: Any) -> str:
    """A hint at the nearest of what was found."""
    import difflib

    close = difflib.get_close_matches(wanted, list(found), n=1)
    return f"did you mean {close[0]!r}?" if close else f"found: {', '.join(sorted(found)) or 'nothing'}"


def shown(value: Any) -> str:
    """The value as an error message shows it."""
    try:
        text = repr(value)
    except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - other people's code
        return f"a {type(value).__name__} whose __repr__ raises {in_words(error)}"
    return text if len(text) <= 80 else text[:77] + "..."

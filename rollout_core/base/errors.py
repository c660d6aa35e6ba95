"""Every error a user can meet, as one picklable hierarchy.

Each kind is also the standard-library kind a caller would expect (``ConfigError`` is a ``ValueError`` and so on), so
code that has never heard of this package still handles it. The orchestrator retries by kind: ``Recoverable`` is retried
and its hint is honoured; everything else is final.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
    """The file of a ref is not what was written under its name, so nobody can tell what the ref stood for."""


class MissingObject(NotFound):
    """The object store holds no blob of this content id. Running the stage that made it again brings it back."""

    def __init__(self, content_id: str, message: str) -> None:
        self.content_id = content_id
        super().__init__(message)

    def __reduce__(self):
        return type(self), (self.content_id, self.args[0])


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
    """The work ended early because the process was asked to stop. What was done is kept; run again, and it goes on."""


class Fatal(RolloutError, RuntimeError):
    """Work cannot go on and trying again would not help, such as a loss that is not finite."""

"""Errors between server and client: the status and body that say one, and the exception that the client raises."""

from __future__ import annotations

import json
from typing import NamedTuple

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from rollout_core.base.errors import (
    ConfigError,
    Conflict,
    CorruptObject,
    Fatal,
    MissingObject,
    NotFound,
    Recoverable,
    RolloutError,
    UnknownOutcome,
)


class ErrorBody(BaseModel):
    """The body of every reply that is not a success."""

    detail: str
    """What was wrong, and what to do."""
    error: str = "Fatal"
    """Kind of the error, by which the client raises the same one."""
    violations: list[str] = []
    """One line for each thing that is wrong."""
    content_id: str | None = None
    """The object that is missing or damaged."""


class _Kind(NamedTuple):
    error: type[Exception]
    status: int


_KINDS = {
    # Subclasses before their bases.
    "MissingObject": _Kind(MissingObject, 410),
    "CorruptObject": _Kind(CorruptObject, 410),
    "ConfigError": _Kind(ConfigError, 400),
    "NotFound": _Kind(NotFound, 404),
    "Conflict": _Kind(Conflict, 409),
    "UnknownOutcome": _Kind(UnknownOutcome, 503),
    "Recoverable": _Kind(Recoverable, 503),
    "Fatal": _Kind(Fatal, 503),
    # The contract's answer for spans that a store has evicted.
    "RuntimeError": _Kind(RuntimeError, 410),
}


class Unprocessable(ConfigError):
    """JSON that is not what this request takes."""


class TooLarge(ConfigError):
    """A body above the server's limit."""


class TooSlow(ConfigError):
    """A body that did not arrive in time."""


class WrongMediaType(ConfigError):
    """A body of a kind that this request does not take."""


class Unauthorized(ConfigError):
    """No API key, or a wrong one."""


class Forbidden(ConfigError):
    """A request that a web page of others may have sent."""


class FromBetween(Recoverable):
    """A failure that is not in the server's words, such as a gateway's: the request may have been done all the same."""


_STATUS = {
    Unprocessable: 422,
    TooLarge: 413,
    TooSlow: 408,
    WrongMediaType: 415,
    Unauthorized: 401,
    Forbidden: 403,
}
_MOST_LINES = 20


def unprocessable(error: ValidationError, num_before: int = 0) -> ConfigError:
    """What pydantic found, one line a place. Bodies that are not JSON at all are bad requests.

    ``num_before`` is how many records came before those that were looked at.
    """
    problems = error.errors(include_url=False, include_context=False, include_input=False)[:_MOST_LINES]
    lines = [f"{_place(problem['loc'], num_before)}: {problem['msg']}" for problem in problems]
    kind = ConfigError if problems[0]["type"] == "json_invalid" else Unprocessable
    return kind(f"not a valid request: {'; '.join(lines)}", lines)


def _place(path: tuple[int | str, ...], num_before: int) -> str:
    if len(path) > 1 and isinstance(path[1], int):
        path = (path[0], path[1] + num_before, *path[2:])
    return ".".join(map(str, path)) or "body"


def status_of(error: Exception) -> int:
    """The HTTP status that says ``error``; 500 for what nobody foresaw."""
    if type(error) in _STATUS:
        return _STATUS[type(error)]
    if isinstance(error, RuntimeError) and not isinstance(error, RolloutError):
        return 410 if type(error) is RuntimeError else 500
    return next((kind.status for kind in _KINDS.values() if isinstance(error, kind.error)), 500)


def error_body(error: Exception) -> bytes:
    """The body that says ``error``. What nobody foresaw keeps its details to itself."""
    if status_of(error) == 500:
        return _as_json(ErrorBody(detail="the server failed; its log says why", error="Fatal"))
    name = next(name for name, kind in _KINDS.items() if isinstance(error, kind.error))
    body = ErrorBody(
        detail=str(error),
        error=name,
        violations=list(getattr(error, "violations", ())),
        content_id=getattr(error, "content_id", None),
    )
    return _as_json(body)


def _as_json(body: ErrorBody) -> bytes:
    try:
        return body.model_dump_json().encode()
    except PydanticSerializationError:  # half of a surrogate pair, which stays an escape
        return json.dumps(body.model_dump()).encode()


_ERROR_BODY = TypeAdapter(ErrorBody)


def error_from(status: int, data: bytes, request: str) -> Exception:
    """The error that a reply says. ``request`` names what was asked, for replies of servers that are not ours."""
    try:
        body = _ERROR_BODY.validate_json(data)
    except ValueError:
        body = ErrorBody(detail=data[:200].decode(errors="replace"), error="")
    kind = _KINDS.get(body.error)
    if kind is None:
        text = f"{request}: the server answered {status}: {body.detail}"
        return FromBetween(text) if status >= 500 else ConfigError(text)
    if kind.error in (MissingObject, CorruptObject):
        return kind.error(body.content_id or "", body.detail)
    if kind.error is ConfigError:
        return ConfigError(body.detail, body.violations)
    return kind.error(body.detail)

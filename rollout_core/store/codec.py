"""JSON as the store writes it: exactly JSON, or a clear error.

What goes in comes out equal. So everything that JSON would silently change is refused: NaN and infinities, keys that
are not strings, bytes, sets, dates and other objects. (Tuples come back as lists, enum members and UUIDs as their
values, NumPy's scalars as the numbers that they equal.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from rollout_core.base.errors import ConfigError

# orjson would write these on its own; a reader would get a string or a dict back.
_OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS


def encode(value: Any, what: str, default: Callable[[Any], Any] | None = None, known_nulls: int = 0) -> str:
    """JSON text of ``value``, see ``encode_bytes``."""
    return encode_bytes(value, what, default, known_nulls).decode()


def encode_bytes(value: Any, what: str, default: Callable[[Any], Any] | None = None, known_nulls: int = 0) -> bytes:
    """JSON of ``value``. ``what`` names it in errors; ``default`` turns our own objects into dicts.

    ``known_nulls`` says how many values in it the caller knows to be None, which spares a search for NaN.

    Raises ConfigError that names the place and the value that JSON cannot hold.
    """
    try:
        data = orjson.dumps(value, default, _OPTIONS)
    except TypeError as error:
        return _encode_slowly(value, what, default, error)
    # orjson writes NaN and infinities as null, so only texts with a null of unknown origin need the search for them.
    if data.count(b"null") != known_nulls and _may_hold_nan(value, default):
        _refuse(value, what, default)
    return data


def encode_stored(value: Any) -> bytes:
    """JSON of what a store returned: models, lists and dicts of values that were checked when they were stored."""
    return ordered_json(value, model_fields)


def ordered_json(value: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """JSON of what was JSON, with its keys in their order, and integers of any size; ``default`` turns other objects
    into such values. Of a surrogate pair, a half without its other one stays an escape."""
    try:
        return orjson.dumps(value, default)
    except orjson.JSONEncodeError:  # an integer beyond 64 bits, or half a surrogate pair
        text = json.dumps(value, default=default, ensure_ascii=False, separators=(",", ":"))
        try:
            return text.encode()
        except UnicodeEncodeError:
            return json.dumps(value, default=default, separators=(",", ":")).encode()


def read_json(data: bytes, *, half_pairs: bool = False) -> Any:
    """The value of JSON that others wrote, with integers of any size as they are. Half of a surrogate pair, which
    models' tokens and other languages' clients give, is read with ``half_pairs`` only.

    Raises ValueError for what is no JSON, and for infinite numbers.
    """
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        if not (half_pairs and b"\\u" in data):
            raise
    else:
        # orjson makes floats of integers beyond 64 bits, which have 19 digits or more.
        if _MANY_DIGITS not in data.translate(_ANY_DIGIT):
            return found
    try:
        return json.loads(data.decode(), parse_constant=_refuse_number, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object that a request's body is. Raises ValueError, with words for who sent it, for anything else."""
    try:
        found = read_json(data)
    except ValueError as error:
        raise ValueError(f"the request's body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"the request's body is a JSON {type(found).__name__}; expected an object")
    return found


_ANY_DIGIT, _MANY_DIGITS = bytes.maketrans(b"123456789", b"0" * 9), b"0" * 19


def _refuse_number(text: str) -> Any:
    raise ValueError(f"{text[:40]} is no number of JSON")


def _finite(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse_number(text)


def decode(text: str | bytes) -> Any:
    """The value of JSON text that ``encode`` wrote."""
    return from_json(text)  # not orjson, which turns integers beyond 64 bits into floats


def json_copy(value: Any) -> Any:
    """A copy of a JSON value."""
    kind = type(value)
    if kind is dict:
        return {key: json_copy(entry) for key, entry in value.items()}
    if kind is list:
        return [entry if type(entry) not in (dict, list) else json_copy(entry) for entry in value]
    return value


def model_fields(value: Any) -> dict[str, Any]:
    """The fields of a model of this package, unknown ones it keeps included, as the ``default`` of ``encode``.

    Models of others are refused: they would come back as dicts.
    """
    if isinstance(value, BaseModel) and type(value).__module__.startswith("rollout_core.store."):
        return {**value.__dict__, **(value.__pydantic_extra__ or {})}
    raise TypeError(type(value).__name__)


def _may_hold_nan(value: Any, default: Callable[[Any], Any] | None) -> bool:
    """Whether the search for NaN is worth its while; a second encoder, which names them, is five times quicker.

    Models do so only with ``ser_json_inf_nan="constants"`` in their configuration.
    """
    named = to_json(value, fallback=default, inf_nan_mode="constants")
    return b"NaN" in named or b"Infinity" in named


def _encode_slowly(value: Any, what: str, default: Callable[[Any], Any] | None, cause: TypeError) -> bytes:
    """Second chance for what JSON holds and orjson does not: big integers, subclasses of float, NumPy's scalars."""
    default = partial(_plain, default)
    _refuse(value, what, default)
    try:
        text = json.dumps(value, default=default, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} cannot be stored as JSON: {error}") from cause


def _plain(default: Callable[[Any], Any] | None, value: Any) -> Any:
    """The number that a scalar of NumPy equals, as tasks out of arrays and data frames have them, or ``default``'s."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        found = value.item()
        if isinstance(found, bool | int | float):
            return found
    if default is None:
        raise TypeError(type(value).__name__)
    return default(value)


def _refuse(value: Any, path: str, default: Callable[[Any], Any] | None, depth: int = 0) -> None:
    """Raise ConfigError for the first place in ``value`` that is not JSON."""
    if depth > 200:
        raise ConfigError(f"{path[:80]}... is nested more than 200 deep or contains itself; JSON to store must not be")
    if value is None or isinstance(value, (bool, int)):
        return
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{path} is not valid Unicode: {error.reason}; remove the lone surrogate") from error
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{path} is {value}; JSON has no NaN or infinities, leave it out or write None")
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path} has the key {key!r} ({type(key).__name__}); JSON keys are strings")
            _refuse(key, f"a key of {path}", default, depth + 1)
            _refuse(entry, f"{path}[{key!r}]", default, depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            _refuse(entry, f"{path}[{index}]", default, depth + 1)
    else:
        if default is not None:
            try:
                inner = default(value)
            except TypeError:
                pass
            else:
                return _refuse(inner, path, default, depth + 1)
        raise ConfigError(f"{path} is of type {type(value).__name__}; only JSON values can be stored")

"""JSON text of values as they are, and values of JSON that others wrote: integers of any size, halves of surrogate
pairs, and keys in their order."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import orjson


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


_ANY_DIGIT, _MANY_DIGITS = bytes.maketrans(b"123456789", b"0" * 9), b"0" * 19


def _refuse_number(text: str) -> Any:
    raise ValueError(f"{text[:40]} is no number of JSON")


def _finite(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse_number(text)

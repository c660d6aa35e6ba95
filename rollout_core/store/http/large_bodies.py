"""Large JSON bodies: read part by part, within limits, in a lane of their own.

pydantic reads a body in one call, which holds the interpreter's lock: for a second if it is 64 MiB, or a million tiny
values. So a long list in a body is cut between its records, and read in parts that take some milliseconds each. What
cannot be cut, a single record, is weighed first. All of this is linear in the bytes of a body, whatever they are.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import weakref
from collections.abc import Callable, Container, Coroutine
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rollout_core.base.errors import ConfigError
from rollout_core.base.loops import LoopThread
from rollout_core.store.http.wire import MAX_RECORDS
from rollout_core.web.http_errors import TooLarge, unprocessable

Result = TypeVar("Result")

LOOP_BYTES = 128 << 10
"""Most bytes of JSON that are read at once: the interpreter's lock is held for as long."""
LOOP_RECORDS = 500
"""Most records of a request or a reply that are handled on the server's event loop."""


class Lane:
    """One thread, with an event loop of its own, that all large requests of a server share.

    They take turns at each ``await``. The interpreter changes threads every few milliseconds, so that the server's own
    loop waits no longer than that, provided that no single call into C takes long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine there; cancelled with its caller."""
        return await self._started().run(work)

    async def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function there."""

        async def call() -> Result:
            return function(*arguments)

        return await self.run(call())

    def _started(self) -> LoopThread:
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread("store-large-requests")
                weakref.finalize(self, self._thread.stop)
            return self._thread


MAX_RECORD_BYTES = 8 << 20
"""Most bytes of a record that is larger than ``LOOP_BYTES``."""
MAX_WEIGHT = 1_000_000
"""Most values of such a record; a text counts as ``TEXT_WEIGHT``, a list or object as ``NESTED_WEIGHT``, for they take
as much longer to read than a number."""
TEXT_WEIGHT, NESTED_WEIGHT = 3, 8

_SPACE = b" \t\r\n"
_NO_SPACE = re.compile(rb"[^ \t\r\n]")
_TOKEN = re.compile(rb'"[^"\\]{0,4096}+"|["\[\]{},]')
_TEXT = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){1,4096}+', re.DOTALL)
"""Of a text so much that it is quickly done."""
_NUMBER_OR_WORD = re.compile(rb"[^,\]}\s]{1,8192}")
_DECODER = json.JSONDecoder()


class _List(NamedTuple):
    """Where the records of a list are."""

    key: str
    start: int
    end: int
    parts: list[tuple[int, int]]
    """First and last byte of each part, with its records and the commas between them."""


def list_fields(kind: Any) -> frozenset[str]:
    """The fields of a model that are lists, or may be."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return frozenset()
    return frozenset(name for name, field in kind.model_fields.items() if _may_be_list(field.annotation))


def _may_be_list(annotation: Any) -> bool:
    origin = get_origin(annotation)
    return origin is list or (origin in (UnionType, Union, Annotated) and any(map(_may_be_list, get_args(annotation))))


async def read_large(read: Callable[[bytes], Any], lists: Container[str], data: bytes) -> Any:
    """What ``read`` makes of a large body; of its outermost object the fields named in ``lists`` can be cut.

    Raises ConfigError if it is no JSON, Unprocessable if it is not what is expected, and TooLarge.
    """
    long_list = await _long_list(data, lists)
    if long_list is None:
        end = _value_end(data, _skip_space(data, 0))
        # Beyond the value there may be any number of spaces.
        return _validated(read, data[:end] if _skip_space(data, end) == len(data) else data[: end + 1], 0)
    head, tail = data[: long_list.start] + b"[", b"]" + data[long_list.end :].rstrip(_SPACE)
    if len(head) + len(tail) > LOOP_BYTES:
        raise TooLarge(f"the body has more than {LOOP_BYTES} bytes besides its list {long_list.key!r:.80}")
    whole: BaseModel | None = None
    records: list[Any] = []
    for start, end in long_list.parts:
        await asyncio.sleep(0)
        whole = _validated(read, b"%b%b%b" % (head, data[start:end], tail), len(records))
        records += getattr(whole, long_list.key)
    assert whole is not None
    return whole.model_copy(update={long_list.key: records})


def _validated(read: Callable[[bytes], Any], data: bytes, num_before: int) -> Any:
    try:
        return read(data)
    except ValidationError as error:
        raise unprocessable(error, num_before) from error


def check_weight(data: bytes) -> None:
    """Raise TooLarge for a large body that takes long to read at once."""
    if len(data) > LOOP_BYTES:
        _value_end(data, _skip_space(data, 0))


async def _long_list(data: bytes, lists: Container[str]) -> _List | None:
    """The list in the outermost object that the body is long for, if there is one."""
    place = _skip_space(data, 0)
    if data[place : place + 1] != b"{":
        return None
    place = _skip_space(data, place + 1)
    found: _List | None = None
    keys: set[str] = set()
    while data[place : place + 1] == b'"':
        key, place = _key(data, place)
        if key in keys:
            raise ConfigError(f"the body has the key {key!r:.80} twice")
        keys.add(key)
        place = _skip_space(data, place)
        if data[place : place + 1] != b":":
            raise _broken(place)
        start = _skip_space(data, place + 1)
        if key in lists and data[start : start + 1] == b"[":
            parts, place = await _records(data, start)
            if len(parts) > 1:
                if found is not None:
                    raise TooLarge(f"the body has two long lists, {found.key!r:.80} and {key!r:.80}; send them apart")
                found = _List(key, start, place, parts)
        else:
            place = _value_end(data, start)
        place = _skip_space(data, place)
        if data[place : place + 1] == b",":
            place = _skip_space(data, place + 1)
            if data[place : place + 1] != b'"':
                raise _broken(place)
    if data[place : place + 1] != b"}":
        raise _broken(place)
    return found


def _key(data: bytes, place: int) -> tuple[str, int]:
    window = data[place : place + 4096].decode(errors="surrogateescape")
    try:
        key, length = _DECODER.raw_decode(window)
    except (ValueError, RecursionError) as error:
        raise _broken(place) from error
    return key, place + _num_bytes(window, length)


async def _records(data: bytes, start: int) -> tuple[list[tuple[int, int]], int]:
    """The parts of the list that begins at ``start``, and where it ends."""
    parts: list[tuple[int, int]] = []
    num_records = 0
    place = _skip_space(data, start + 1)
    while data[place : place + 1] != b"]":
        end, count = _part(data, place)
        parts.append((place, end))
        num_records += count
        if num_records > MAX_RECORDS:
            raise TooLarge(f"the request has more than {MAX_RECORDS} records; send fewer in a request")
        place = _skip_space(data, end)
        if data[place : place + 1] == b",":
            place = _skip_space(data, place + 1)
            if data[place : place + 1] == b"]":
                raise _broken(place)
        elif data[place : place + 1] != b"]":
            raise _broken(place)
        await asyncio.sleep(0)
    return parts, place + 1


def _part(data: bytes, start: int) -> tuple[int, int]:
    """Where the records end that begin at ``start`` and can be read together, and how many they are."""
    window = data[start : start + LOOP_BYTES].decode(errors="surrogateescape")
    end = place = count = 0
    while count < LOOP_RECORDS:
        try:
            _, place = _DECODER.raw_decode(window, place)
        except (ValueError, RecursionError):
            break  # cut off by the end of the window, or no JSON
        if place == len(window):
            break  # a number may go on
        end, count = place, count + 1
        place = _text_after_space(window, place)
        if window[place : place + 1] != ",":
            break
        place = _text_after_space(window, place + 1)
    if count == 0:
        return _value_end(data, start), 1
    return start + _num_bytes(window, end), count


def _text_after_space(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\t", "\r", "\n"):
        place += 1
    return place


def _num_bytes(text: str, length: int) -> int:
    return length if text.isascii() else len(text[:length].encode(errors="surrogateescape"))


def _value_end(data: bytes, start: int) -> int:
    """Where the value ends that begins at ``start``. Raises TooLarge if it is too large or too heavy to be read at
    once."""
    limit = min(len(data), start + MAX_RECORD_BYTES)
    if data[start : start + 1] not in (b'"', b"[", b"{"):
        match = _NUMBER_OR_WORD.match(data, start)
        if match is None:
            raise _broken(start)
        return match.end()
    depth, weight, place = 0, 0, start
    while (match := _TOKEN.search(data, place, limit)) is not None:
        place = match.end()
        token = match[0]
        if token[:1] == b'"':
            weight += TEXT_WEIGHT
            if len(token) == 1:
                place = _text_end(data, place, limit)
        elif token == b",":
            weight += 1
        elif token in (b"[", b"{"):
            weight += NESTED_WEIGHT
            depth += 1
        else:
            depth -= 1
        if depth <= 0:
            return place
        if weight > MAX_WEIGHT:
            raise TooLarge(
                f"a record of the body has too many values; {MAX_WEIGHT} numbers are the most, or {TEXT_WEIGHT} times "
                "fewer texts; keep large values in the object store"
            )
    if limit < len(data):
        raise TooLarge(
            f"a record of the body is larger than {MAX_RECORD_BYTES} bytes; keep large values in the object store"
        )
    raise _broken(limit)


def _text_end(data: bytes, place: int, limit: int) -> int:
    """Where the text ends that has begun before ``place``."""
    while place < limit:
        match = _TEXT.match(data, place, limit)
        if match is None:
            return place + 1  # the quote, or a backslash at the limit
        place = match.end()
    return limit


def _skip_space(data: bytes, place: int) -> int:
    """The next place that is no space, or the end."""
    for start in range(place, len(data), 1 << 20):
        if match := _NO_SPACE.search(data, start, start + (1 << 20)):
            return match.start()
    return len(data)


def _broken(place: int) -> ConfigError:
    return ConfigError(f"not a valid request: the body is not JSON, at byte {place} or later")

"""How many messages a large protobuf body holds, counted before they are made: one of two bytes takes two hundred."""

from __future__ import annotations

from functools import cache

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from rollout_core.store.http.errors import TooLarge

UNCOUNTED_BYTES = 1 << 20
"""A body of so many bytes is read in some 40 ms whatever it holds, and need not be counted."""
MAX_MESSAGES = 500_000
"""Most messages (spans, attributes, values and so on) of one body."""
_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5


def check_messages(kind: Descriptor, data: bytes) -> None:
    """Raise TooLarge for a body of this kind with more than ``MAX_MESSAGES`` messages, DecodeError for one that cannot
    be read."""
    if len(data) <= UNCOUNTED_BYTES:
        return
    num_messages = 1
    waiting = [(kind, 0, len(data))]
    while waiting:
        kind, place, end = waiting.pop()
        parts = _parts(kind)
        while place < end:
            tag, place = _number(data, place)
            wire_type = tag & 7
            if wire_type == _LENGTH:
                length, place = _number(data, place)
                if place + length > end:
                    raise DecodeError("a part is longer than the whole")
                if tag >> 3 in parts:
                    num_messages += 1
                    if num_messages > MAX_MESSAGES:
                        raise TooLarge(f"the body has more than {MAX_MESSAGES} messages; send fewer spans in a request")
                    waiting.append((parts[tag >> 3], place, place + length))
                place += length
            elif wire_type == _VARINT:
                _, place = _number(data, place)
            elif wire_type in (_FIXED_64, _FIXED_32):
                place += 8 if wire_type == _FIXED_64 else 4
            else:
                raise DecodeError(f"wire type {wire_type} is not known")


@cache
def _parts(kind: Descriptor) -> dict[int, Descriptor]:
    """The fields of a message that are messages, by number."""
    return {number: field.message_type for number, field in kind.fields_by_number.items() if field.message_type}


def _number(data: bytes, place: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    value = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise DecodeError("a number is cut off")
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
        shift += 7

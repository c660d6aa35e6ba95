"""Content ids, sample ids and run ids.

A content id is the blake3 digest of bytes, written as 64 lower-case hex digits. Structures are hashed as
``blake3(tag || 0x00 || canonical JSON)``; the tag names the kind and the version of its schema, so two kinds never
collide and a change of meaning changes every id. One digest of each kind is pinned in ``tests/base/test_ids.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from blake3 import blake3
from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from ulid import ULID

from rollout_core.base.errors import ConfigError

CONTENT_ID_PATTERN = "^[0-9a-f]{64}$"
SAMPLING_PARAMS_SCHEMA_VERSION = 1
"""Raised when the meaning or the fields of the sampling parameters change; every sample id changes with it."""

_CONTENT_ID = re.compile(CONTENT_ID_PATTERN)
_NAMED_ID = re.compile(rb'"([0-9a-f]{64})[\\"]')
_NAMED_ID_BYTES = 66


class ContentId(str):
    """The blake3 digest of some bytes: a string of exactly 64 lower-case hex digits.

    Raises ConfigError when built from anything else.
    """

    __slots__ = ()

    def __new__(cls, value: str) -> ContentId:
        if isinstance(value, ContentId):
            return value
        if not isinstance(value, str) or not _CONTENT_ID.fullmatch(value):
            raise ConfigError(f"not a content id: {value!r}; expected 64 lower-case hex digits")
        return super().__new__(cls, value)

    @classmethod
    def of_digest(cls, digest: blake3) -> ContentId:
        """The id of what was hashed."""
        return str.__new__(cls, digest.hexdigest())

    @property
    def short(self) -> str:
        """The first 12 digits, for people to read."""
        return self[:12]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls,
            core_schema.str_schema(pattern=CONTENT_ID_PATTERN),
            serialization=core_schema.to_string_ser_schema(),
        )


def is_content_id(value: object) -> bool:
    """Whether ``value`` has the form of a content id."""
    return isinstance(value, str) and _CONTENT_ID.fullmatch(value) is not None


def canonical_json(value: Any) -> bytes:
    """The one byte string that stands for ``value``: UTF-8, sorted keys, no spaces, floats by shortest round-trip.

    Pydantic models are dumped in JSON mode first. Raises ConfigError on NaN, infinities, unpaired surrogates and
    anything JSON cannot express.
    """
    try:
        return _CANONICAL.encode(value).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"value has no canonical JSON form: {error}") from error


def _jsonable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


_CANONICAL = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_jsonable
)


def hash_bytes(data: bytes) -> ContentId:
    """Content id of raw bytes, which is what the object store files them under."""
    return ContentId.of_digest(blake3(data))


def content_id(tag: str, value: Any) -> ContentId:
    """Content id of a structure: ``blake3(tag || 0x00 || canonical_json(value))``. ``tag`` is like ``"sample/1"``."""
    return ContentId.of_digest(blake3(tag.encode() + b"\x00" + canonical_json(value)))


def named_ids(chunks: Iterable[bytes]) -> Iterator[ContentId]:
    """Content ids that are whole strings in a stream of JSON, or of JSON within its strings. May repeat."""
    window = b""
    for chunk in chunks:
        window = window[1 - _NAMED_ID_BYTES :] + chunk
        for match in _NAMED_ID.finditer(window):
            yield ContentId(match[1].decode())


def sample_id(model: ContentId, prompt: Any, params: BaseModel | Mapping[str, Any], index: int) -> ContentId:
    """Identity of one generation; also its rollout id in the store.

    ``prompt`` is the text or the list of chat messages, ``params`` the sampling parameters, ``index`` numbers repeated
    samples of one prompt. Changing any of them, or the content of the model, gives another id.
    """
    return SampleIds(model, params).of(prompt, index)


class SampleIds:
    """`sample_id` for many prompts of one model and one set of sampling parameters."""

    def __init__(self, model: ContentId, params: BaseModel | Mapping[str, Any]) -> None:
        # A model of settings says itself which of its fields count, so that a later field with its default changes no
        # id.
        counted = params.cache_identity() if hasattr(params, "cache_identity") else params  # pyright: ignore
        self._head = bytes([SAMPLING_PARAMS_SCHEMA_VERSION]) + b"sample\x00[" + canonical_json(model) + b","
        self._tail = b"," + canonical_json(counted) + b","

    def of(self, prompt: Any, index: int) -> ContentId:
        """The id of one sample: the hash of ``[model, prompt, params, index]`` as canonical JSON, after its tag."""
        return ContentId.of_digest(blake3(b"%b%b%b%d]" % (self._head, canonical_json(prompt), self._tail, index)))


def seed_of(content: ContentId) -> int:
    """A seed in [0, 2**31) that is a pure function of ``content``."""
    return int(content[:16], 16) % 2**31


def new_run_id() -> str:
    """A fresh ULID: 26 Crockford characters, sortable by time of making."""
    return str(ULID())

"""Which requests are taken: what a body asks for that is not kept here, or that the engine would ignore in silence, is
refused by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import orjson

from rollout_core.base.errors import ConfigError

ANSWERED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
)
"""Paths to which requests are posted."""

IGNORED = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
        "betas",
    }
)
"""Fields that are taken and change no answer: notes, and wishes for a vendor's own machines. ``store`` is one of them
only where it is false."""

KEPT_AT_A_VENDOR = {
    "previous_response_id": "answers are not kept; send the earlier messages in `input`",
    "conversation": "conversations are not kept; send the earlier messages in `input`",
    "prompt": "prompts are not kept here; send the text in `instructions` and `input`",
}
"""Fields of a request for a response that name what a vendor keeps, and what to do instead."""


def read_object(data: bytes, example: str) -> dict[str, Any]:
    """A body as an object. Raises ConfigError for one that is none, with the ``example`` of one."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"the body is not a JSON object; expected one such as {example}")
    return body


def read_request(path: str, data: bytes, known: Collection[str] | None) -> dict[str, Any]:
    """The body of a request to ``path``. ``known`` are the fields that the engine knows there; None: any.

    Raises ConfigError for a body that is no object, and for fields that are not honoured.
    """
    body = read_object(data, '{"model": ..., "messages": [...]}')
    given = {name for name, value in body.items() if value is not None}
    if path == "/v1/responses":
        for name in sorted(given & KEPT_AT_A_VENDOR.keys()):
            raise ConfigError(f"{name} is not supported: {KEPT_AT_A_VENDOR[name]}")
        if body.get("background"):
            raise ConfigError("background is not supported: answers are not kept; leave it out, or send false")
    if body.get("store"):
        raise ConfigError("store is not supported: answers are not kept; leave it out, or send false")
    unknown = sorted(given - IGNORED - set(known)) if known is not None else []
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} not supported at {path}, and would be "
            "ignored; leave it out"
        )
    return body

"""Rows of others' making as rows of ours: Alpaca and ShareGPT, and values of the types that a column map declares."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_OURS = frozenset({"prompt", "messages", "input_ids"})
"""A row with one of these is taken as it is."""
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""Of ``from`` in ShareGPT's rows."""
_INTEGER = re.compile(r"[+-]?[0-9]+(?:\.0*)?")
_TRUTHS = {"true": True, "false": False, "1": True, "0": False}


def shown(value: Any) -> str:
    """A value of a row in an error."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def of_type(ours: str, kind: str, value: Any) -> Any:
    """The value of the key ``ours`` as text, int, float, bool or json. Raises ValueError for one that is none."""
    try:
        return _TYPES[kind](value)
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError):
        raise ValueError(f"{ours}: expected {kind}, as columns says, got {shown(value)}") from None


def _as_int(value: Any) -> int:
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        if not _INTEGER.fullmatch(value.strip()):
            raise ValueError(value)
        return int(value.strip().partition(".")[0])
    if int(value) != value:
        raise ValueError(value)
    return int(value)


def _as_bool(value: Any) -> bool:
    return value if isinstance(value, bool) else _TRUTHS[str(value).strip().lower()]


def _as_text(value: Any) -> str:
    if isinstance(value, bool | int | float | dict | list):
        return json.dumps(value, ensure_ascii=False)
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


_TYPES: dict[str, Callable[[Any], Any]] = {
    "text": _as_text,
    "int": _as_int,
    "float": float,
    "bool": _as_bool,
    "json": lambda value: json.loads(value) if isinstance(value, str) else value,
}


def form_of(document: dict[str, Any], own_keys: frozenset[str]) -> str | None:
    """The form that a row's keys tell, where they are not ours and the row is not one of any keys."""
    if "prompt" not in own_keys or not _OURS.isdisjoint(document):
        return None
    if "conversations" in document:
        return "sharegpt"
    return "alpaca" if "instruction" in document and not _ANSWERS.isdisjoint(document) else None


_ANSWERS = frozenset({"output", "chosen", "rejected"})


def _alpaca(document: dict[str, Any], own_keys: frozenset[str]) -> dict[str, Any]:
    """Instruction and input are the prompt, with a blank line between; the output is the completion."""
    if "prompt" in document:
        raise ValueError("has both instruction and prompt; Alpaca's rows have instruction, input and output")
    for key in ("system", "history"):
        if document.get(key):
            raise ValueError(f"{key}: no part of a prompt and its completion; give such rows as messages")
    texts = [document.pop("instruction", None), document.pop("input", None) or ""]
    for key, text in zip(("instruction", "input"), texts, strict=True):
        if not isinstance(text, str):
            raise ValueError(f"{key}: expected a string, as in Alpaca's rows, got {shown(text)}")
    if "output" in document and "completion" in own_keys:
        document["completion"] = document.pop("output")
    return {"prompt": "\n\n".join(filter(str.strip, texts)), **document}


def _sharegpt(document: dict[str, Any], own_keys: frozenset[str]) -> dict[str, Any]:
    """Conversations are messages, in pairs the prompt; so is what follows them, and a system prompt with them."""
    if "conversations" not in document:
        raise ValueError(f"has no conversations, as ShareGPT's rows have; keys found: {', '.join(document) or 'none'}")
    target = "messages" if "messages" in own_keys or "prompt" not in own_keys else "prompt"
    if target in document:
        raise ValueError(f"has both conversations and {target}; give one of them")
    messages = _messages("conversations", document.pop("conversations"))
    if system := document.pop("system", None):
        messages = [{"role": "system", "content": system}, *messages]
    for key in ("chosen", "rejected", "completion"):
        answer = document.get(key)
        if isinstance(answer, dict | list):
            document[key] = _messages(key, [answer] if isinstance(answer, dict) else answer)
    return {target: messages, **document}


def role_of(speaker: Any) -> Any:
    """The role of who speaks in a turn, by ShareGPT's names or ours; None where nobody is known by that name."""
    return _ROLES.get(speaker) if isinstance(speaker, str) else None


def _messages(key: str, turns: Any) -> list[Any]:
    if not isinstance(turns, list):
        raise ValueError(f"{key}: expected a list of objects with from and value, got {shown(turns)}")
    return [_message(f"{key}.{number}", turn) for number, turn in enumerate(turns)]


def _message(place: str, turn: Any) -> Any:
    """A message of a turn; one that has ``role`` and ``content`` stays as it is."""
    if not isinstance(turn, dict):
        raise ValueError(f"{place}: expected an object with from and value, got {shown(turn)}")
    if "from" not in turn:
        return turn
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    speaker, value = turn["from"], turn.get("value")
    if speaker == "function_call":
        return {"role": "assistant", "tool_calls": _tool_calls(f"{place}.value", value), **others}
    if speaker not in _ROLES:
        known = ", ".join([*_ROLES, "function_call"])
        raise ValueError(f"{place}.from: expected one of {known}, got {shown(speaker)}")
    return {"role": _ROLES[speaker], "content": value, **others}


def _tool_calls(place: str, value: Any) -> list[dict[str, Any]]:
    try:
        calls = json.loads(value) if isinstance(value, str) else value
        functions = [{"name": call["name"], "arguments": call["arguments"]} for call in _as_list(calls)]
    except (TypeError, ValueError, KeyError, RecursionError):
        raise ValueError(f"{place}: expected a call as JSON, with name and arguments, got {shown(value)}") from None
    return [{"type": "function", "function": function} for function in functions]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


FORMS: dict[str, Callable[[dict[str, Any], frozenset[str]], dict[str, Any]]] = {
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
}
NAMES = {"alpaca": "Alpaca's (instruction, input, output)", "sharegpt": "ShareGPT's (conversations)"}

"""Attributes of spans: nested values as dotted keys, which is all that OpenTelemetry knows, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_core.base.errors import ConfigError, shown
from rollout_core.store.spans import otel_attributes

_PRIMITIVES = (str, bool, int, float)
_DEEPEST = 32
"""Levels of nesting; what lies deeper is one text."""


def flat(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``. Lists of one primitive kind stay lists; other values become JSON text, or
    text where JSON has no words for them. A later key replaces the same one before."""
    found: dict[str, Any] = {}
    _flatten("", attributes, found)
    return found


def _flatten(prefix: str, value: Any, found: dict[str, Any], depth: int = 0) -> None:
    if isinstance(value, Mapping) and (value or not prefix) and depth < _DEEPEST:
        for key, entry in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), entry, found, depth + 1)
    elif value is not None:
        found[prefix] = _attribute(value)


def _attribute(value: Any) -> Any:
    if isinstance(value, _PRIMITIVES):
        return otel_attributes({"value": value})["value"]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for kind in _PRIMITIVES:
            if all(type(entry) is kind for entry in value):
                return otel_attributes({"value": value})["value"]
    try:
        return json.dumps(otel_attributes({"value": value})["value"], ensure_ascii=False)
    except RecursionError:  # it contains itself
        return shown(value)


def refuse_contradictions(attributes: Mapping[str, Any]) -> None:
    """Raises ConfigError if one dotted key lies below another, so that no nested value could hold both."""
    keys = sorted(attributes)
    known = set(keys)
    for key in keys:
        parent = key
        while "." in parent:
            parent = parent.rpartition(".")[0]
            if parent in known:
                raise ConfigError(f"attributes {parent!r} and {key!r} contradict each other; rename one of them")


def nested(attributes: Mapping[str, Any], prefix: str = "") -> Any:
    """What lies below ``prefix`` as nested dicts; those with the keys 0, 1, ... are lists. None if there is nothing."""
    root: dict[str, Any] = {}
    start = f"{prefix}." if prefix else ""
    if prefix and prefix in attributes:
        return attributes[prefix]
    for key, value in attributes.items():
        if not key.startswith(start):
            continue
        parts = key[len(start) :].split(".")
        place = root
        for part in parts[:-1]:
            inner = place.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = place[part] = {"": inner}
            place = inner
        place[parts[-1]] = value
    return _with_lists(root) if root else None


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    entries = {key: _with_lists(entry) for key, entry in value.items()}
    if entries and all(key.isdigit() for key in entries) and sorted(map(int, entries)) == list(range(len(entries))):
        return [entries[str(place)] for place in range(len(entries))]
    return entries

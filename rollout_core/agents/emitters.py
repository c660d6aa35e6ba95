"""What an agent says of itself: rewards, messages, objects, exceptions and annotations, as spans of its trace.

With ``propagate`` the span is part of the active trace, and a RuntimeError is raised where there is none. Without, it
is only built and returned.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollout_core.agents.attributes import flat, nested, refuse_contradictions
from rollout_core.agents.tracing import DummyTracer, Tracer, active_tracer, exception_attributes
from rollout_core.base.errors import ConfigError
from rollout_core.store import SpanCoreFields, TraceStatus
from rollout_core.store.semconv import (
    AGL_ANNOTATION,
    AGL_EXCEPTION,
    AGL_MESSAGE,
    AGL_OBJECT,
    EPISODE_TURN,
    LightningSpanAttributes,
    RewardAttributes,
)

_REWARD = LightningSpanAttributes.REWARD.value
_NAME, _VALUE = RewardAttributes.REWARD_NAME.value, RewardAttributes.REWARD_VALUE.value
_UNSET = TraceStatus(status_code="UNSET")
PRIMARY = "primary"
"""Name of a reward that is one number."""


def tracer_for(propagate: bool, what: str) -> Tracer:
    """The active tracer, or one that stores nothing if not ``propagate``. Raises RuntimeError if none is active."""
    if not propagate:
        return DummyTracer()
    tracer = active_tracer()
    if tracer is None:
        raise RuntimeError(
            f"{what}: no trace is active here; call it inside an agent's rollout (and carry the context into threads), "
            "or with propagate=False"
        )
    return tracer


# Rewards


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> SpanCoreFields:
    """A reward: one number, or several by name, of which ``primary_key`` is the one that trains.

    Raises TypeError for what is no number, ConfigError (a ValueError) for several without a primary one among them and
    for numbers that are not finite.
    """
    return tracer_for(propagate, "emit_reward").create_span(
        AGL_ANNOTATION, {**flat(attributes or {}), **reward_attributes(reward, primary_key)}
    )


def reward_attributes(reward: Any, primary_key: str | None = None) -> dict[str, Any]:
    """A reward as attributes of a span, the primary dimension first. Raises as ``emit_reward``."""
    if isinstance(reward, Mapping):
        if primary_key is None or primary_key not in reward:
            raise ConfigError(
                f"primary_key is {primary_key!r}; expected one of the rewards {', '.join(map(str, reward))}"
            )
        rest = [name for name in reward if name != primary_key]
        values = {str(name): _number(reward[name], ConfigError) for name in (primary_key, *rest)}
    else:
        values = {PRIMARY: _number(reward, TypeError)}
    found: dict[str, Any] = {}
    for place, (name, value) in enumerate(values.items()):
        found[f"{_REWARD}.{place}.{_NAME}"] = name
        found[f"{_REWARD}.{place}.{_VALUE}"] = value
    return found


def _number(value: Any, error: type[Exception]) -> float:
    # NumPy's and torch's scalars are numbers too, and say so by __float__; text is none, though float() reads it.
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise error(f"a reward is {value!r:.80} ({type(value).__name__}); expected a number")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as reason:  # an array of several, say
        raise error(f"a reward is {value!r:.80} ({type(value).__name__}), which is no one number: {reason}") from reason
    if not math.isfinite(number):
        raise ConfigError(f"a reward is {number}; expected a finite number")
    return number


class Reward(NamedTuple):
    """One dimension of a reward."""

    name: str
    value: float


def get_rewards_from_span(span: Any) -> list[Reward]:
    """Names and values of a span's rewards, the primary one first; empty if it has none.

    Read are the attributes that ``emit_reward`` writes, AgentOps' task and entity outputs of type ``reward``, and the
    attribute ``reward`` of older annotations.
    """
    attributes = dict(span.attributes or {})
    found = nested(attributes, _REWARD)
    if isinstance(found, list):
        return [
            Reward(str(entry.get(_NAME, PRIMARY)), float(entry[_VALUE]))
            for entry in found
            if isinstance(entry, dict) and isinstance(entry.get(_VALUE), int | float)
        ]
    for key in ("agentops.task.output", "agentops.entity.output"):
        value = _reward_of_json(attributes.get(key))
        if value is not None:
            return [Reward(PRIMARY, value)]
    older = attributes.get("reward")
    if span.name in (AGL_ANNOTATION, _REWARD) and isinstance(older, int | float):
        return [Reward(PRIMARY, float(older))]
    return []


def _reward_of_json(text: Any) -> float | None:
    if not isinstance(text, str):
        return None
    try:
        output = json.loads(text)
    except ValueError:
        return None
    if not isinstance(output, dict) or output.get("type") != "reward":
        return None
    value = output.get("value")
    return float(value) if isinstance(value, int | float) else None


def get_reward_value(span: Any) -> float | None:
    """The primary reward of a span; None if it has none."""
    rewards = get_rewards_from_span(span)
    return rewards[0][1] if rewards else None


def is_reward_span(span: Any) -> bool:
    """Whether the span carries a reward."""
    return bool(get_rewards_from_span(span))


def find_reward_spans(spans: Sequence[Any]) -> list[Any]:
    """Those that carry a reward, in order."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[Any]) -> float | None:
    """The primary reward of the last span that has one, but for rewards of single turns; None if none has."""
    for span in reversed(spans):
        value = None if EPISODE_TURN in (span.attributes or {}) else get_reward_value(span)
        if value is not None:
            return value
    return None


# Others


def emit_annotation(annotation: Mapping[str, Any], *, propagate: bool = True) -> SpanCoreFields:
    """Anything said about the rollout or a part of it; nested values become dotted keys.

    Raises ConfigError for keys that contradict each other, such as ``a`` and ``a.b``.
    """
    attributes = flat(annotation)
    refuse_contradictions(attributes)
    return tracer_for(propagate, "emit_annotation").create_span(AGL_ANNOTATION, attributes)


def emit_message(message: str, attributes: Mapping[str, Any] | None = None, *, propagate: bool = True) -> None:
    """A text. Raises TypeError for what is none."""
    if not isinstance(message, str):
        raise TypeError(f"the message is a {type(message).__name__}; expected text, see emit_object")
    body = {LightningSpanAttributes.MESSAGE_BODY.value: message, **flat(attributes or {})}
    tracer_for(propagate, "emit_message").create_span(AGL_MESSAGE, body, status=_UNSET)


def get_message_value(span: Any) -> str | None:
    """The text of a message's span."""
    return (span.attributes or {}).get(LightningSpanAttributes.MESSAGE_BODY.value)


def emit_object(object: Any, attributes: Mapping[str, Any] | None = None, *, propagate: bool = True) -> SpanCoreFields:
    """A value, as ``get_object_value`` reads it back. Raises RuntimeError if it is neither bytes nor JSON."""
    encoded = {**object_attributes(object), **flat(attributes or {})}
    return tracer_for(propagate, "emit_object").create_span(AGL_OBJECT, encoded)


def object_attributes(value: Any) -> dict[str, Any]:
    """A value as attributes of a span. Raises as ``emit_object``."""
    kind, literal = LightningSpanAttributes.OBJECT_TYPE.value, LightningSpanAttributes.OBJECT_LITERAL.value
    if isinstance(value, str | bool | int | float):
        return {kind: type(value).__name__, literal: value}
    if isinstance(value, bytes):
        return {kind: "bytes", literal: base64.b64encode(value).decode()}
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"the object is a {type(value).__name__} that is no JSON: {error}") from error
    owner = type(value)
    name = owner.__qualname__ if owner.__module__ == "builtins" else f"{owner.__module__}.{owner.__qualname__}"
    return {kind: name, LightningSpanAttributes.OBJECT_JSON.value: text}


def get_object_value(span: Any) -> Any:
    """The value of an object's span; None if it has none."""
    attributes = span.attributes or {}
    if LightningSpanAttributes.OBJECT_JSON.value in attributes:
        return json.loads(attributes[LightningSpanAttributes.OBJECT_JSON.value])
    literal = attributes.get(LightningSpanAttributes.OBJECT_LITERAL.value)
    if attributes.get(LightningSpanAttributes.OBJECT_TYPE.value) == "bytes" and literal is not None:
        return base64.b64decode(literal)
    return literal


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, *, propagate: bool = True
) -> None:
    """An exception that was caught. Raises TypeError for what is none."""
    if not isinstance(exception, BaseException):
        raise TypeError(f"got a {type(exception).__name__}; expected an exception")
    described = {**exception_attributes(exception), "exception.escaped": False, **flat(attributes or {})}
    tracer_for(propagate, "emit_exception").create_span(AGL_EXCEPTION, described)

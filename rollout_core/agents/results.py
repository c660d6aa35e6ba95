"""What a rollout returned, as spans."""

from __future__ import annotations

import logging
import time
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

from rollout_core.agents.emitters import reward_attributes
from rollout_core.base.errors import ConfigError
from rollout_core.store import AttemptedRollout, Span, SpanCoreFields
from rollout_core.store.semconv import AGL_ANNOTATION

logger = logging.getLogger(__name__)


def spans_of_result(result: Any, rollout: AttemptedRollout) -> list[Span]:
    """The spans that a rollout's result stands for, with the sequence id 0; none for None.

    A number is the final reward. Raises TypeError for what is neither a number nor a list, ConfigError for a list of
    anything but spans of one kind and for a number that is not finite.
    """
    if result is None:
        return []
    ids: dict[str, Any] = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    if isinstance(result, list):
        if not result:
            logger.warning("Rollout %s returned an empty list; None says the same", rollout.rollout_id)
        return [_span(item, kind, ids) for kind in [_kind(result)] for item in result]
    try:
        attributes = reward_attributes(result)
    except TypeError:
        raise TypeError(
            f"the rollout returned {result!r:.80} ({type(result).__name__}); expected None, a number, or a list of "
            "spans"
        ) from None
    if isinstance(result, bool | int):
        logger.warning("Rollout %s returned the reward %r; it counts as %s", rollout.rollout_id, result, float(result))
    now = time.time()
    return [Span.from_attributes(**ids, name=AGL_ANNOTATION, attributes=attributes, start_time=now, end_time=now)]


def _kind(result: list[Any]) -> type | None:
    for kind in (ReadableSpan, Span, SpanCoreFields):
        if all(isinstance(item, kind) for item in result):
            return kind
    kinds = sorted({type(item).__name__ for item in result})
    raise ConfigError(
        f"the rollout returned a list of {', '.join(kinds)}; expected spans of one kind: ReadableSpan, Span or "
        "SpanCoreFields"
    )


def _span(item: Any, kind: type | None, ids: dict[str, str]) -> Span:
    if kind is ReadableSpan:
        return Span.from_opentelemetry(item, ids["rollout_id"], ids["attempt_id"], 0)
    if kind is SpanCoreFields:
        return Span.from_core_fields(item, sequence_id=0, **ids)
    if (item.rollout_id, item.attempt_id) != (ids["rollout_id"], ids["attempt_id"]):
        # Empty ids are to be filled in; others would file the span under somebody else's rollout.
        if item.rollout_id or item.attempt_id:
            raise ConfigError(
                f"the rollout {ids['rollout_id']}, attempt {ids['attempt_id']}, returned a span of rollout "
                f"{item.rollout_id!r}, attempt {item.attempt_id!r}; leave both empty, or give its own"
            )
        return item.model_copy(update=ids)
    return item

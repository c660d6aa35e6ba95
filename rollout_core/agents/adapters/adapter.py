"""What an adapter is: a function from the spans of one rollout to something that an algorithm learns from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from opentelemetry.sdk.trace import ReadableSpan
from pydantic import BaseModel, Field

from rollout_core.store import Span

From = TypeVar("From", contravariant=True)
To = TypeVar("To", covariant=True)


class Adapter(Generic[From, To]):
    """Turns data of one kind into another. Has no state, so one object may serve any number of rollouts."""

    def adapt(self, source: From, /) -> To:
        """Convert ``source``, which is not changed."""
        raise NotImplementedError(f"{type(self).__name__} does not define adapt")

    def __call__(self, source: From, /) -> To:
        """The same as ``adapt``."""
        return self.adapt(source)


class TraceAdapter(Adapter[Sequence[Span | ReadableSpan], To]):
    """An adapter of the spans of one attempt, either the store's or the SDK's ``ReadableSpan``, in any order."""


class Triplet(BaseModel):
    """One LLM call as a step of reinforcement learning: what the model was given, what it wrote, what that earned."""

    prompt: Any
    """``token_ids``, ``raw_content`` (the messages) and ``image_urls``; no ids where the trace has none."""
    response: Any
    """``token_ids``, ``raw_content``, and ``logprobs`` where the trace has them, one entry with the key ``logprob`` for
    each token."""
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    """``request`` and ``response`` as the trace describes them, ``response_id``, ``agent_name``; ``finish_reason`` and
    ``model_id`` (content id of the weights) where they are known."""


def as_spans(source: Sequence[Span | ReadableSpan]) -> list[Span]:
    """Spans of either kind as the store's. Those of the SDK are numbered as they stand."""
    return [
        Span.from_opentelemetry(span, "", "", number) if isinstance(span, ReadableSpan) else span
        for number, span in enumerate(source, start=1)
    ]

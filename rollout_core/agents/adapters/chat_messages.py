"""The adapter from spans to chat messages, as critics of prompts and fine-tuning files want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from opentelemetry.sdk.trace import ReadableSpan

from rollout_core.agents.adapters.adapter import TraceAdapter, as_spans
from rollout_core.agents.adapters.calls import PROXY_SPANS, CallNames, parsed
from rollout_core.agents.adapters.chat import Message, completion_messages, prompt_messages, tool_call, tools
from rollout_core.agents.attributes import nested
from rollout_core.store import Span
from rollout_core.store.semconv import LLM_CALL


class OpenAIMessages(TypedDict):
    """One LLM call in the form of OpenAI's fine-tuning files."""

    messages: list[Message]
    """What went in, then what came out."""
    tools: list[dict[str, Any]] | None
    """What the model could call; None if nothing is recorded of it."""


class TraceToMessages(TraceAdapter[list[OpenAIMessages]]):
    """The conversation of each LLM call, tools and tool calls included, in the order the calls began.

    A call that several tracers or a proxy saw counts once. Tool calls are those of the recorded message; where it has
    none, those that spans directly below the call describe by ``tool.*`` (AgentOps).
    """

    def adapt(self, source: Sequence[Span | ReadableSpan], /) -> list[OpenAIMessages]:
        """Conversations of the spans of one attempt."""
        spans = as_spans(source)
        called, names = _tool_calls_below(spans), CallNames(spans)
        found: dict[str, OpenAIMessages] = {}
        for span in sorted(spans, key=_order):
            prompt, completion = prompt_messages(span.attributes), completion_messages(span.attributes)
            calls = called.get(span.span_id)
            if calls and completion and not any(message.get("tool_calls") for message in completion):
                completion = [{**message, "tool_calls": calls} for message in completion]
            if prompt or completion:
                name = names.any_of(span)
                if name not in found or span.name == LLM_CALL:  # which has the messages as they were sent
                    found[name] = {"messages": [*prompt, *completion], "tools": tools(span.attributes)}
        return list(found.values())


def _order(span: Span) -> tuple[bool, float, int]:
    """By time, and after them all the spans of proxies, whose clocks are their own: a call that a tracer saw keeps its
    place."""
    is_proxys = span.name in PROXY_SPANS
    return is_proxys, 0.0 if is_proxys else span.start_time or 0.0, span.sequence_id


def _tool_calls_below(spans: Sequence[Span]) -> dict[str, list[dict[str, Any]]]:
    """By the parent's id, the tool calls that spans describe."""
    found: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        tool = nested(span.attributes, "tool") if span.parent_id is not None else None
        if isinstance(tool, Mapping) and tool.get("name"):
            call = parsed(tool.get("call"))
            described = {"name": tool["name"], "arguments": tool.get("parameters", "{}")}
            described["id"] = call.get("id") if isinstance(call, Mapping) else None
            found.setdefault(str(span.parent_id), []).append(tool_call(described))
    return found

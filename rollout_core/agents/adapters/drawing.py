"""An attempt's spans drawn as a tree in HTML: its calls with what was said in them, tool calls, rewards, operations.

Everything that comes from a span is escaped and cut to a length that a page can hold.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollout_core.agents.adapters.calls import PROXY_SPANS, CallNames, choices_of, has_failed, prompt_token_ids
from rollout_core.agents.adapters.chat import Message, completion_messages, prompt_messages
from rollout_core.agents.adapters.tree import VIRTUAL_ROOT, TraceTree
from rollout_core.agents.adapters.triplets import LLM_CALL_MATCH
from rollout_core.agents.emitters import PRIMARY, get_rewards_from_span
from rollout_core.store import Span
from rollout_core.store.semconv import LLM_CALL

MAX_SPANS = 200
"""That are drawn of an attempt; of the others only the number is given."""
MAX_CHARACTERS = 2_000
"""Of a text that are shown."""
MAX_MESSAGES = 20
"""Of a call's prompt that are shown, the last ones."""

STYLE = """
.trace, .trace ul { list-style: none; margin: 0; padding: 0; }
.trace ul { margin-left: .6rem; padding-left: 1rem; border-left: 2px solid #d5dbe3; }
.trace li { margin: .35rem 0; } .trace summary { cursor: pointer; } .trace small { color: #5a6675; }
.trace pre { display: inline; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; margin: 0; }
.trace .message { margin: .15rem 0 .15rem 1.1rem; } .trace .message > b { color: #5a6675; margin-right: .5rem; }
.trace .assistant { background: #eef4fc; } .trace .tool { background: #f4f1e8; }
.trace .reward { border: 1px solid #d5dbe3; border-radius: 8px; padding: .1rem .5rem; font-weight: 600; }
.trace .failed { color: #a3262c; }
"""
"""For the page that holds drawings."""


def draw_trace(spans: Sequence[Span]) -> str:
    """A nested list, each span below its parent, in the order in which they began.

    A call that the proxy and a tracer saw is drawn once, and of its messages those that are new to its conversation.
    """
    if not spans:
        return '<ul class="trace"><li><small>no spans</small></li></ul>'
    chosen = sorted(spans, key=lambda span: span.sequence_id)[:MAX_SPANS]
    names = CallNames(chosen)
    recorded = {name: span for span in chosen if span.name == LLM_CALL and (name := names.of(span))}
    seen = {name for span in chosen if span.name not in PROXY_SPANS and (name := names.of(span)) is not None}
    tree = TraceTree.from_spans([span for span in chosen if not (span.name == LLM_CALL and names.of(span) in seen)])
    tree.repair_hierarchy(LLM_CALL_MATCH)
    nodes = tree.traverse()
    drawn: dict[int, str] = {}
    bodies = dict(zip(map(id, nodes), _bodies(nodes, names, recorded), strict=True))
    for node in reversed(nodes):
        below = "".join(drawn.pop(id(child)) for child in node.children)
        if node.id == VIRTUAL_ROOT:
            drawn[id(node)] = below
        else:
            drawn[id(node)] = f"<li>{bodies[id(node)]}{f'<ul>{below}</ul>' if below else ''}</li>\n"
    left = len(spans) - len(chosen)
    more = f"<li><small>and {left} further spans</small></li>" if left else ""
    return f'<ul class="trace">{drawn[id(tree)]}{more}</ul>'


def _bodies(nodes: Sequence[TraceTree], names: CallNames, recorded: Mapping[str, Span]) -> Iterator[str]:
    """What is drawn of each node itself. ``recorded``: the proxy's spans by the names of their calls."""
    prompts: list[list[Message]] = []
    num_calls = 0
    for node in nodes:
        # What the proxy recorded are the messages as they were sent, and it knows the tokens.
        span = recorded.get(names.of(node.span) or "", node.span)
        rewards = get_rewards_from_span(node.span)
        prompt, completion = prompt_messages(span.attributes), completion_messages(span.attributes)
        if rewards:
            named = (f"{'' if name == PRIMARY else f'{_escape(name)} '}{value:g}" for name, value in rewards)
            yield f'<span class="reward">reward {", ".join(named)}</span>'
        elif prompt or completion:
            num_calls += 1
            new = _new_messages(prompt, prompts)
            prompts.append(prompt)
            yield _call(f"call {num_calls}", node, span, [*new[-MAX_MESSAGES:], *completion])
        else:
            yield f"{_escape(_name(node))} {_details(node, [])}{_problem(node.span)}"


def _new_messages(prompt: list[Message], earlier: Sequence[list[Message]]) -> list[Message]:
    """Those that no call before had: behind the longest earlier prompt that this one continues, and its answer."""
    length = max((len(known) for known in earlier if prompt[: len(known)] == known), default=0)
    new = prompt[length:]
    return new[1:] if length and new and new[0].get("role") == "assistant" else new


def _call(title: str, node: TraceTree, span: Span, messages: Sequence[Message]) -> str:
    given = len(prompt_token_ids(span.attributes))
    written = sum(len(choice.token_ids) for choice in choices_of(span.attributes))
    tokens = [f"{given} tokens in, {written} out"] if given or written else []
    body = "".join(map(_message, messages))
    return f"<details open><summary>{title} {_details(node, tokens)}</summary>{body}{_problem(span)}</details>"


def _message(message: Message) -> str:
    role = str(message.get("role"))
    kind = role if role in ("assistant", "tool") else "other"
    content = message.get("content")
    parts = [_pre(content)] if content else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(f"<b>{_escape(function['name'])}</b> {_pre(function['arguments'])}")
    return f'<div class="message {kind}"><b>{_escape(role)}</b>{"<br>".join(parts)}</div>'


def _name(node: TraceTree) -> str:
    agent = node.agent_name()
    return node.span.name if agent is None else f"{node.span.name} [{agent}]"


def _details(node: TraceTree, facts: Sequence[str]) -> str:
    duration = node.end_time - node.start_time
    took = [f"{1000 * duration:.0f} ms"] if math.isfinite(duration) and duration > 0 else []
    return f"<small>{', '.join([*facts, *took])}</small>"


def _problem(span: Span) -> str:
    if not has_failed(span):
        return ""
    return f' <span class="failed">failed: {_pre(span.status.description or "no reason is recorded")}</span>'


def _pre(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"<pre>{_escape(text)}</pre>"


def _escape(text: str) -> str:
    left = len(text) - MAX_CHARACTERS
    return html.escape(text if left <= 0 else f"{text[:MAX_CHARACTERS]}... ({left:,} further characters)")

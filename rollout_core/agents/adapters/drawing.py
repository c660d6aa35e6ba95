"""An attempt's spans drawn as a tree: its calls with what was said in them, tool calls, rewards, operations.

As HTML for reports, and as text for a terminal. What comes from a span is escaped, and cut to what a page can hold.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    tree, shown, left = _shown(spans)
    drawn: dict[int, str] = {}
    for node in reversed(tree.traverse()):
        below = "".join(drawn.pop(id(child)) for child in node.children)
        if node.id == VIRTUAL_ROOT:
            drawn[id(node)] = below
        else:
            drawn[id(node)] = f"<li>{_body(node, shown[id(node)])}{f'<ul>{below}</ul>' if below else ''}</li>\n"
    more = f"<li><small>and {left} further spans</small></li>" if left else ""
    return f'<ul class="trace">{drawn[id(tree)]}{more}</ul>'


def trace_lines(spans: Sequence[Span]) -> list[str]:
    """The same as lines for a terminal, each level two spaces further in."""
    if not spans:
        return ["no spans"]
    tree, shown, left = _shown(spans)
    lines: list[str] = []
    waiting: list[tuple[TraceTree, int]] = [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        is_drawn = node.id != VIRTUAL_ROOT
        if is_drawn:
            lines += (f"{'  ' * depth}{line}" for line in _text_lines(node, shown[id(node)]))
        waiting.extend((child, depth + is_drawn) for child in reversed(node.children))
    lines += [f"and {left} further spans"] if left else []
    # A model writes what it likes, and a terminal obeys some of it.
    return ["".join(letter if letter.isprintable() else "?" for letter in line) for line in lines]


@dataclass(frozen=True)
class _Shown:
    """What is drawn of one span."""

    span: Span
    """Of a call that the proxy recorded, the proxy's."""
    title: str = ""
    """Of a reward or a call; others have their name."""
    is_reward: bool = False
    facts: Sequence[str] = ()
    messages: Sequence[Message] = ()


def _shown(spans: Sequence[Span]) -> tuple[TraceTree, dict[int, _Shown], int]:
    """The tree that is drawn, what is drawn of each node by its ``id()``, and how many spans are left out."""
    chosen = sorted(spans, key=lambda span: span.sequence_id)[:MAX_SPANS]
    names = CallNames(chosen)
    recorded = {name: span for span in chosen if span.name == LLM_CALL and (name := names.of(span))}
    seen = {name for span in chosen if span.name not in PROXY_SPANS and (name := names.of(span)) is not None}
    tree = TraceTree.from_spans([span for span in chosen if not (span.name == LLM_CALL and names.of(span) in seen)])
    tree.repair_hierarchy(LLM_CALL_MATCH)
    shown: dict[int, _Shown] = {}
    prompts: list[list[Message]] = []
    for node in tree.traverse():
        # What the proxy recorded are the messages as they were sent, and it knows the tokens.
        span = recorded.get(names.of(node.span) or "", node.span)
        rewards = get_rewards_from_span(node.span)
        prompt, completion = prompt_messages(span.attributes), completion_messages(span.attributes)
        if rewards:
            named = (f"{'' if name == PRIMARY else f'{name} '}{value:g}" for name, value in rewards)
            shown[id(node)] = _Shown(span, f"reward {', '.join(named)}", is_reward=True)
        elif prompt or completion:
            new = _new_messages(prompt, prompts)
            prompts.append(prompt)
            messages = [*new[-MAX_MESSAGES:], *completion]
            shown[id(node)] = _Shown(span, f"call {len(prompts)}", facts=_token_counts(span), messages=messages)
        else:
            shown[id(node)] = _Shown(node.span)
    return tree, shown, len(spans) - len(chosen)


def _token_counts(span: Span) -> Sequence[str]:
    given = len(prompt_token_ids(span.attributes))
    written = sum(len(choice.token_ids) for choice in choices_of(span.attributes))
    return [f"{given} tokens in, {written} out"] if given or written else []


def _body(node: TraceTree, shown: _Shown) -> str:
    if shown.is_reward:
        return f'<span class="reward">{_escape(shown.title)}</span>'
    details = f"<small>{_details(node, shown.facts)}</small>"
    if not shown.title:
        return f"{_escape(_name(node))} {details}{_problem(node.span)}"
    messages = "".join(map(_message, shown.messages))
    return f"<details open><summary>{shown.title} {details}</summary>{messages}{_problem(shown.span)}</details>"


def _text_lines(node: TraceTree, shown: _Shown) -> Iterator[str]:
    if shown.is_reward:
        yield shown.title
        return
    details = _details(node, shown.facts)
    yield f"{shown.title or _name(node)}{f' ({details})' if details else ''}"
    for message in shown.messages:
        role, content = str(message.get("role")), message.get("content")
        if content:
            yield from _said(role, content)
        for call in message.get("tool_calls") or ():
            yield from _said(f"{role} calls {call['function']['name']}", call["function"]["arguments"])
    if has_failed(shown.span):
        yield from _said("failed", shown.span.status.description or "no reason is recorded")


def _said(who: str, value: Any) -> Iterator[str]:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    first, *rest = _cut(text).splitlines() or [""]
    yield f"  {who}: {first}"
    yield from (f"    {line}" for line in rest)


def _new_messages(prompt: list[Message], earlier: Sequence[list[Message]]) -> list[Message]:
    """Those that no call before had: behind the longest earlier prompt that this one continues, and its answer."""
    length = max((len(known) for known in earlier if prompt[: len(known)] == known), default=0)
    new = prompt[length:]
    return new[1:] if length and new and new[0].get("role") == "assistant" else new


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
    return ", ".join([*facts, *took])


def _problem(span: Span) -> str:
    if not has_failed(span):
        return ""
    return f' <span class="failed">failed: {_pre(span.status.description or "no reason is recorded")}</span>'


def _pre(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"<pre>{_escape(text)}</pre>"


def _escape(text: str) -> str:
    return html.escape(_cut(text))


def _cut(text: str) -> str:
    left = len(text) - MAX_CHARACTERS
    return text if left <= 0 else f"{text[:MAX_CHARACTERS]}... ({left:,} further characters)"

"""Spans drawn as a tree in HTML."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from rollout_core.agents.adapters.drawing import MAX_CHARACTERS, MAX_SPANS, draw_trace, trace_lines
from rollout_core.store import TraceStatus
from tests.agents.test_adapters import (
    ANSWERS,
    QUESTION,
    TOOL,
    WITH_RESULT,
    llm_call,
    reward,
    span,
    trace_of_real_client,
)


class Page(HTMLParser):
    """What a browser sees: texts, the tags around each, and that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, int]] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"class", "open"}
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((data.strip(), self.open.count("ul")))

    def depth(self, text: str) -> int:
        """How many lists a text is in. Raises ValueError unless it is there once."""
        [depth] = [depth for found, depth in self.texts if found == text]
        return depth


async def test_a_trace_shows_what_was_said_once_and_in_order():
    spans = await trace_of_real_client()
    records = [
        llm_call(number, [number] * 9, [7, 8], start=0.0, message=answer["choices"][0]["message"], sent=sent)
        for number, answer, sent in zip((1, 2), ANSWERS, (QUESTION, WITH_RESULT), strict=True)
    ]
    page = Page(draw_trace([*records, *spans]))
    texts = [text for text, _ in page.texts]
    last = "reward right 1, short 0.5"
    shown = ["What colour is the sky?", "look_up", '{"what": "sky"}', "reward 0.25", "blue", "It is blue.", last]
    places = [next(place for place, found in enumerate(texts) if part in found) for part in shown]
    assert places == sorted(places)
    assert page.depth('{"what": "sky"}') == page.depth("blue") == page.depth("It is blue."), "said once"
    assert page.depth("reward 0.25") == page.depth("blue") > page.depth(last), "inside the operation, and outside"
    assert sum("9 tokens in, 2 out" in text for text in texts) == 2, "as the proxy knows"
    assert "failed:" in texts and any("no more answers" in text for text in texts)


async def test_a_terminal_shows_what_was_said_too():
    spans = await trace_of_real_client()
    record = llm_call(1, [1] * 9, [7, 8], start=0.0, message=ANSWERS[0]["choices"][0]["message"], sent=QUESTION)
    lines = trace_lines([record, *spans])
    shown = [
        "  call 1 (9 tokens in, 2 out",
        "    system: Be brief.",
        "    user: What colour is the sky?",
        '    assistant calls look_up: {"what": "sky"}',
        "  reward 0.25",
        "    tool: blue",
        "reward right 1, short 0.5",
        "  failed: ",
    ]
    places = [next(place for place, line in enumerate(lines) if line.startswith(part)) for part in shown]
    assert places == sorted(places), lines


def test_a_terminal_is_told_nothing_by_what_spans_say():
    evil = [{"role": "user", "content": "\x1b[2Jone\r\ntwo"}]
    lines = trace_lines([llm_call(1, [1], [2], start=1, sent=evil)])
    assert lines[1:] == ["  user: ?[2Jone", "    two", "  assistant: yes"] and trace_lines([]) == ["no spans"]


def test_what_spans_say_is_only_text():
    evil = '</pre><script>alert("x")</script><img src=x onerror=y>'
    call = {"id": evil, "type": "function", "function": {"name": evil, "arguments": evil}}
    message = {"role": "assistant", "content": evil, "tool_calls": [call]}
    sent = [{"role": evil, "content": evil}, {"role": "user", "content": [{"type": "text", "text": evil}]}]
    failed = span(evil, 5, 6, attributes={"agent.name": evil})
    failed.status = TraceStatus(status_code="ERROR", description=evil)
    named = reward(1.0, 7)
    named.attributes = {"agentlightning.reward.0.name": evil, "agentlightning.reward.0.value": 1.0}
    drawn = draw_trace([llm_call(1, [1], [2], start=1, message=message, sent=sent), failed, named])
    assert Page(drawn).tags <= {"ul", "li", "details", "summary", "small", "div", "b", "br", "pre", "span"}
    assert drawn.count("&lt;script&gt;") == 10


def test_a_page_can_hold_any_trace():
    chain = [span("step", 0, 10_000, number=1, id="0" * 16)]
    chain += [
        span("step", n, 10_000 - n, number=n + 1, id=f"{n:016x}", parent=f"{n - 1:016x}") for n in range(1, 5_000)
    ]
    page = Page(draw_trace(chain))
    assert sum(text == "step" for text, _ in page.texts) == MAX_SPANS
    assert page.depth(f"and {5_000 - MAX_SPANS} further spans") == 1
    long = draw_trace([llm_call(1, [1], [2], start=1, sent=[{"role": "user", "content": "<" * 10_000_000}])])
    assert len(long) < 10 * MAX_CHARACTERS and "9,998,000 further characters" in long
    assert "no spans" in draw_trace([])


@pytest.mark.parametrize("tools", [True, False])
def test_two_conversations_do_not_hide_each_others_messages(tools: bool):
    more = {} if tools else {"rollout.tools": "[]"}
    one, other = ([{"role": "user", "content": text}] for text in ("first", "second"))
    page = Page(draw_trace([llm_call(n, [1], [2], start=n, sent=sent, **more) for n, sent in enumerate((one, other))]))
    assert page.depth("first") == page.depth("second")
    assert TOOL["function"]["name"] not in [text for text, _ in page.texts], "tools are not drawn"

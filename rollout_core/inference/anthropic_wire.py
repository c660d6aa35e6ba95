"""Anthropic's form of requests and answers, as models that are evaluated and judges both have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PATH = "/messages"
"""Where requests are posted, below the endpoint's url."""
ACCESS: Mapping[str, Any] = {"headers": {"anthropic-version": "2023-06-01"}, "key_header": "x-api-key"}
"""Of an `Endpoint`."""
_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}


def conversation(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keys of a body that hold messages which are given as `ChatMessage.plain` has them: what the system says is no
    message there, calls of tools and what these answer are blocks, and thoughts are left out, as they would have to be
    signed.

    Raises ValueError where a call has no answer right behind it, or an answer has no call: such requests are refused.
    """
    sent: list[dict[str, Any]] = []
    system: list[str] = []
    open_calls: list[str] = []
    num_calls = 0
    for number, message in enumerate(messages, start=1):
        role, text = message["role"], message.get("content") or ""
        if role != "tool" and open_calls:
            raise ValueError(f"message {number} follows a call of a tool that has no answer")
        if role in ("system", "developer"):
            system.append(text)
        elif role == "tool":
            call = message.get("tool_call_id") or (open_calls[0] if open_calls else "")
            if call not in open_calls:
                raise ValueError(f"message {number} answers a call of a tool that is not there")
            open_calls.remove(call)
            block = {"type": "tool_result", "tool_use_id": call, "content": text}
            if messages[number - 2]["role"] == "tool":
                sent[-1]["content"].append(block)
            else:
                sent.append({"role": "user", "content": [block]})
        elif calls := message.get("tool_calls"):
            blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
            for call in calls:
                num_calls += 1
                open_calls.append(call.get("id") or f"call_{num_calls}")
                function = call["function"]
                named = {"id": open_calls[-1], "name": function["name"], "input": function["arguments"]}
                blocks.append({"type": "tool_use", **named})
            sent.append({"role": role, "content": blocks})
        else:
            sent.append({"role": role, "content": text})
    if open_calls:
        raise ValueError("the last message calls a tool and has no answer")
    return {"messages": sent, **({"system": "\n\n".join(system)} if system else {})}


def tools_of(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools that are described in OpenAI's form. Raises LookupError or TypeError for one that is not."""
    described = [tool["function"] for tool in tools]
    return [
        {
            "name": function["name"],
            **({"description": function["description"]} if function.get("description") else {}),
            "input_schema": function.get("parameters") or {"type": "object"},
        }
        for function in described
    ]


def read_message(answer: Mapping[str, Any]) -> tuple[Any, Any]:
    """The text of an answer, and why it ended in OpenAI's words where they have one.

    Raises LookupError or TypeError where it is none.
    """
    text = "".join(part["text"] for part in answer["content"] if part["type"] == "text")
    return text, _REASONS.get(answer["stop_reason"], answer["stop_reason"])

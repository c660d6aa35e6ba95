"""An agent that answers questions about people by looking them up: the plain `openai` client, a tool, a loop.

A task is ``{"question": ..., "records": {name: {field: value}}, "answer": ...}``; see make_lookup.py. The reward is 1
for the right answer and 0 for all else. Nothing here says how to train: the model's calls are recorded by the proxy
that ``llm.endpoint`` leads to.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import openai

from rollout_core.agents import rollout
from rollout_core.store import LLM

MAX_TURNS = 4
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a field of a person.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "field": {"type": "string"}},
            "required": ["name", "field"],
        },
    },
}


@rollout
def lookup_agent(task: dict[str, Any], llm: LLM) -> float:
    """Work on a task; its reward."""
    return float(answer(task["question"], task["records"], llm) == task["answer"])


def answer(question: str, records: dict[str, dict[str, str]], llm: LLM) -> str | None:
    """The model's answer; None where it still looks things up after ``MAX_TURNS``."""
    model = client().with_options(base_url=llm.endpoint, api_key=llm.api_key or "none")
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        reply = model.chat.completions.create(model=llm.model, messages=messages, tools=[TOOL]).choices[0].message
        if not reply.tool_calls:
            return (reply.content or "").strip()
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            found = lookup(records, call.function.arguments) if call.type == "function" else "unknown"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return None


def lookup(records: dict[str, dict[str, str]], arguments: str) -> str:
    """The tool: a field of a person, ``unknown`` where the model asks for what is not there."""
    try:
        asked = json.loads(arguments)
        return records[asked["name"]][asked["field"]]
    except (ValueError, TypeError, KeyError):
        return "unknown"


@functools.cache
def client() -> openai.OpenAI:
    """Of this process: to make one takes longer than a task."""
    return openai.OpenAI(base_url="http://localhost", api_key="none")

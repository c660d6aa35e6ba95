"""Answers questions about people with OpenAI's Agents SDK. Nothing in this program says that its model is trained.

Run: OPENAI_BASE_URL=http://localhost:8000/v1 python people.py my-model "What is the pet of mirola?" records.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from agents import Agent, OpenAIProvider, RunConfig, RunContextWrapper, Runner, function_tool
from openai import AsyncOpenAI

Records = dict[str, dict[str, str]]


@function_tool
def lookup(context: RunContextWrapper[Records], name: str, field: str) -> str:
    """Look up a field of a person."""
    return context.context.get(name, {}).get(field, "unknown")


async def answer(
    question: str, records: Records, *, model: str, base_url: str | None = None, api_key: str | None = None
) -> str:
    """What the agent says in the end."""
    agent = Agent[Records](name="people", tools=[lookup], model=model)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        provider = OpenAIProvider(openai_client=client, use_responses=False)
        config = RunConfig(model_provider=provider, tracing_disabled=True)
        result = await Runner.run(agent, question, context=records, max_turns=4, run_config=config)
    return str(result.final_output)


if __name__ == "__main__":
    model, question, path = sys.argv[1:]
    print(asyncio.run(answer(question, json.loads(Path(path).read_text(encoding="utf-8")), model=model)))

"""LiteLLM: calls of a model at an address, with a tool, asynchronous."""

import json

import litellm
from weather import degrees_in, is_right

from rollout_core.agents import rollout

TOOL = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "The temperature in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@rollout
async def agent(task, llm):
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(4):
        answer = await litellm.acompletion(
            f"hosted_vllm/{llm.model}",
            messages,
            tools=[TOOL],
            api_base=llm.endpoint,
            api_key=llm.api_key or "none",
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return is_right(task, message.content)
        messages.append(message.model_dump())
        for call in message.tool_calls:
            found = degrees_in(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return 0.0

"""OpenAI's client: a loop over tool calls, with streamed answers."""

import json

import openai
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
def agent(task, llm):
    messages = [{"role": "user", "content": task["question"]}]
    with openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none") as client:
        for _ in range(4):
            with client.chat.completions.stream(model=llm.model, messages=messages, tools=[TOOL]) as stream:
                message = stream.get_final_completion().choices[0].message
            if not message.tool_calls:
                return is_right(task, message.content)
            calls = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls]
            messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
            for call in message.tool_calls:
                found = degrees_in(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return 0.0

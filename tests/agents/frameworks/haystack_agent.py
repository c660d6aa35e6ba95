"""Haystack: an agent with a tool."""

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from weather import degrees_in, is_right

from rollout_core.agents import rollout


@tool
def temperature(city: str) -> str:
    """The temperature in a city."""
    return degrees_in(city)


@rollout
def agent(task, llm):
    model = OpenAIChatGenerator(
        model=llm.model, api_base_url=llm.endpoint, api_key=Secret.from_token(llm.api_key or "none")
    )
    result = Agent(chat_generator=model, tools=[temperature]).run(messages=[ChatMessage.from_user(task["question"])])
    return is_right(task, result["last_message"].text)

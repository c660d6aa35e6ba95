"""Pydantic AI: a tool, and a structured answer; no answer is forced to be a call, which the profile says."""

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.openai import OpenAIProvider
from weather import degrees_in

from rollout_core.agents import rollout


class Weather(BaseModel):
    city: str
    degrees: int


weather = Agent(output_type=Weather)


@weather.tool_plain
def temperature(city: str) -> str:
    """The temperature in a city."""
    return degrees_in(city)


@rollout
async def agent(task, llm):
    model = OpenAIChatModel(
        llm.model,
        provider=OpenAIProvider(base_url=llm.endpoint, api_key=llm.api_key or "none"),
        profile=OpenAIModelProfile(supports_forced_tool_choice=False),
    )
    result = await weather.run(task["question"], model=model)
    return result.output.degrees == task["degrees"]

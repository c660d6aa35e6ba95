"""Agno: an agent with a tool, asynchronous. Where a call fails for good, its run says so and raises nothing."""

from agno.agent import Agent
from agno.models.openai.like import OpenAILike
from agno.run.base import RunStatus
from weather import degrees_in, is_right

from rollout_core.agents import rollout


def temperature(city: str) -> str:
    """The temperature in a city."""
    return degrees_in(city)


@rollout
async def agent(task, llm):
    model = OpenAILike(id=llm.model, base_url=llm.endpoint, api_key=llm.api_key or "none")
    answer = await Agent(model=model, tools=[temperature], telemetry=False).arun(task["question"])
    if answer.status == RunStatus.error:
        raise RuntimeError(answer.content)
    return is_right(task, answer.content)

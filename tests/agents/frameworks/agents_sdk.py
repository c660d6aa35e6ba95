"""OpenAI's Agents SDK: an agent with a tool, asynchronous."""

from agents import Agent, AsyncOpenAI, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from weather import degrees_in, is_right

from rollout_core.agents import rollout

set_tracing_disabled(True)


@function_tool
def temperature(city: str) -> str:
    """The temperature in a city."""
    return degrees_in(city)


@rollout
async def agent(task, llm):
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none") as client:
        model = OpenAIChatCompletionsModel(model=llm.model, openai_client=client)
        weather = Agent(name="weather", instructions="Answer in one sentence.", tools=[temperature], model=model)
        result = await Runner.run(weather, task["question"])
    return is_right(task, result.final_output)

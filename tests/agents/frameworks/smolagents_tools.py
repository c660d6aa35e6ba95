"""smolagents: an agent that calls tools; it demands a call in each answer unless the model is set otherwise."""

from smolagents import OpenAIModel, ToolCallingAgent, tool
from weather import degrees_in, is_right

from rollout_core.agents import rollout


@tool
def temperature(city: str) -> str:
    """The temperature in a city.

    Args:
        city: its name.
    """
    return degrees_in(city)


@rollout
def agent(task, llm):
    model = OpenAIModel(model_id=llm.model, api_base=llm.endpoint, api_key=llm.api_key or "none", tool_choice="auto")
    return is_right(task, ToolCallingAgent(tools=[temperature], model=model, max_steps=4).run(task["question"]))

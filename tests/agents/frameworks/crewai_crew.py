"""CrewAI: a crew of one agent with a tool."""

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from weather import degrees_in, is_right

from rollout_core.agents import rollout


@tool("temperature")
def temperature(city: str) -> str:
    """The temperature in a city."""
    return degrees_in(city)


@rollout
def agent(task, llm):
    model = LLM(model=f"openai/{llm.model}", base_url=llm.endpoint, api_key=llm.api_key or "none")
    reporter = Agent(
        role="Reporter",
        goal="Say how warm it is",
        backstory="You ask a weather service.",
        tools=[temperature],
        llm=model,
    )
    question = Task(description=task["question"], expected_output="One sentence.", agent=reporter)
    return is_right(task, Crew(agents=[reporter], tasks=[question]).kickoff().raw)

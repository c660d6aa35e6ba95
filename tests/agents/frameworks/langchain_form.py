"""LangChain: a structured answer, for which the model calls a tool of that form without being forced to."""

from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from weather import degrees_in, is_right

from rollout_core.agents import rollout


class City(BaseModel):
    """The city that is meant."""

    name: str


@rollout
def agent(task, llm):
    model = ChatOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none", model=llm.model)
    form = model.with_structured_output(City, method="function_calling", tool_choice="auto")
    city = form.invoke("Which city is meant? " + task["question"])
    return city is not None and is_right(task, degrees_in(city.name))

"""LangGraph: the agent of examples/agents, which looks people up."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError

from rollout_core.agents import rollout


@rollout
def agent(task, llm):
    @tool
    def lookup(name: str, field: str) -> str:
        """Look up a field of a person."""
        return task["records"].get(name, {}).get(field, "unknown")

    model = ChatOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none", model=llm.model)
    try:
        state = create_agent(model, [lookup]).invoke({"messages": [("user", task["question"])]}, {"recursion_limit": 9})
    except GraphRecursionError:  # it looks things up for ever: the model's fault, so no reward
        return 0.0
    return state["messages"][-1].text.strip() == task["answer"]

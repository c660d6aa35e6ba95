"""LangGraph: LangChain's agent, and a second question in the same conversation."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from weather import degrees_in, is_right

from rollout_core.agents import emit_reward, rollout


@tool
def temperature(city: str) -> str:
    """The temperature in a city."""
    return degrees_in(city)


@rollout
def agent(task, llm):
    model = ChatOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none", model=llm.model)
    graph = create_agent(model, [temperature], checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    for question in (task["question"], "Say it again, please."):
        state = graph.invoke({"messages": [("user", question)]}, thread)
    emit_reward(float(is_right(task, state["messages"][-1].text)))

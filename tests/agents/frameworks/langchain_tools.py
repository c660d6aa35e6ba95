"""LangChain: a chat model with bound tools, its answers streamed."""

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from weather import degrees_in, is_right

from rollout_core.agents import rollout


@tool
def temperature(city: str) -> str:
    """The temperature in a city."""
    return degrees_in(city)


@rollout
async def agent(task, llm):
    model = ChatOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none", model=llm.model).bind_tools([temperature])
    messages = [HumanMessage(task["question"])]
    for _ in range(4):
        answer = None
        async for chunk in model.astream(messages):
            answer = chunk if answer is None else answer + chunk
        if not answer.tool_calls:
            return is_right(task, answer.text)
        messages.append(answer)
        messages += [await temperature.ainvoke(call) for call in answer.tool_calls]
    return 0.0

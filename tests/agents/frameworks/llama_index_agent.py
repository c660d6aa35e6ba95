"""LlamaIndex: an agent of its workflows, with a tool; it streams what the model says."""

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from weather import degrees_in, is_right

from rollout_core.agents import rollout


def temperature(city: str) -> str:
    """The temperature in a city."""
    return degrees_in(city)


@rollout
async def agent(task, llm):
    model = OpenAILike(
        model=llm.model,
        api_base=llm.endpoint,
        api_key=llm.api_key or "none",
        is_chat_model=True,
        is_function_calling_model=True,
    )
    answer = await FunctionAgent(tools=[temperature], llm=model).run(task["question"])
    return is_right(task, str(answer))

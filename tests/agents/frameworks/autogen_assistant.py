"""AutoGen: an assistant with a tool, which reflects on what the tool said."""

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from weather import degrees_in, is_right

from rollout_core.agents import rollout

INFO = ModelInfo(
    family=ModelFamily.UNKNOWN, function_calling=True, json_output=False, structured_output=False, vision=False
)


async def temperature(city: str) -> str:
    """The temperature in a city."""
    return degrees_in(city)


@rollout
async def agent(task, llm):
    client = OpenAIChatCompletionClient(
        model=llm.model, base_url=llm.endpoint, api_key=llm.api_key or "none", model_info=INFO
    )
    assistant = AssistantAgent("weather", client, tools=[temperature], reflect_on_tool_use=True)
    result = await assistant.run(task=task["question"])
    await client.close()
    return is_right(task, result.messages[-1].content)

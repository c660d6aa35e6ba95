"""instructor: an answer with the fields of a model of pydantic, asked again where they are wrong."""

import instructor
import openai
from pydantic import BaseModel, field_validator
from weather import DEGREES, degrees_in, is_right

from rollout_core.agents import rollout


class City(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def is_known(cls, name: str) -> str:
        if name not in DEGREES:
            raise ValueError(f"there is no city {name}")
        return name


@rollout
async def agent(task, llm):
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none") as made:
        client = instructor.from_openai(made, mode=instructor.Mode.MD_JSON)
        asked = [{"role": "user", "content": "Which city is meant? " + task["question"]}]
        city = await client.create(model=llm.model, messages=asked, response_model=City, max_retries=2)
    return is_right(task, degrees_in(city.name))

"""The program people.py as an agent that can be trained: it is given the model's address, and its answer a reward."""

from __future__ import annotations

from typing import Any

from agents import AgentsException
from people import answer

from rollout_core.agents import rollout
from rollout_core.store import LLM


@rollout
async def people_agent(task: dict[str, Any], llm: LLM) -> float:
    """Work on a task of make_lookup.py; its reward."""
    address = {"base_url": llm.endpoint, "api_key": llm.api_key or "none"}
    try:
        said = await answer(task["question"], task["records"], model=llm.model, **address)
    except AgentsException:  # too many turns, or a call of a tool that is not there: the model's fault, so no reward
        return 0.0
    return float(said.strip() == task["answer"])

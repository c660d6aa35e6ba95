"""The look-up agent with a prompt template: how it words the question is not in its code.

A task is ``{"name": ..., "field": ..., "records": {name: {field: value}}, "answer": ...}``, see tune_wording.py. The
model behind it (make_lookup.py) was taught one wording of such questions, and answers others badly or not at all.
"""

from __future__ import annotations

from typing import Any

from lookup_agent import answer

from rollout_core.agents import rollout
from rollout_core.store import LLM, PromptTemplate


@rollout
def wording_agent(task: dict[str, Any], llm: LLM, prompt_template: PromptTemplate) -> float:
    """Work on a task; 1 for the right answer, else 0."""
    question = prompt_template.format(name=task["name"], field=task["field"])
    return float(answer(question, task["records"], llm) == task["answer"])

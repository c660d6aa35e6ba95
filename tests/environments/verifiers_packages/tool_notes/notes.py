import os

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": "How old is Ada?", "answer": "36"}, {"question": "How old is Alan?", "answer": "41"}]
AGES = {"Ada": 36, "Alan": 41}


def age(name: str) -> int:
    """Age of a person.

    Args:
        name: The person.
    """
    if name == "crash":
        os._exit(5)
    return AGES[name]


class Asking(vf.MultiTurnEnv):
    """Asks until the answer is right."""

    async def setup_state(self, state):
        state["asked"] = 1
        return state

    async def env_response(self, messages, state, **kwargs):
        if messages[-1].content == "break":
            raise vf.ToolError("it broke")
        if messages[-1].content == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        state["asked"] += 1
        return [{"role": "user", "content": f"no, {state['asked']}"}]


class Rewriting(Asking):
    """Forgets what was said."""

    async def get_prompt_messages(self, state):
        return state["prompt"] if not state["trajectory"] else [{"role": "user", "content": "again"}]


def load_environment(kind: str = "tools", max_turns: int = 5, seconds: float | None = None):
    async def is_right(completion, answer) -> float:
        said = [message.content for message in completion if message.role == "assistant"]
        return float(bool(said) and said[-1] == answer)

    made = {"tools": vf.ToolEnv, "asking": Asking, "rewriting": Rewriting}[kind]
    tools = {"tools": [age]} if kind == "tools" else {}
    return made(
        dataset=Dataset.from_list(ROWS),
        rubric=vf.Rubric(funcs=[is_right]),
        max_turns=max_turns,
        timeout_seconds=seconds,
        **tools,
    )

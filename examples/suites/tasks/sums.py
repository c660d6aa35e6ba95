"""Tasks of inspect_ai on rows of one's own: one that asks, and one whose model has a tool."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample, json_dataset
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import tool


def read(row: dict) -> Sample:
    return Sample(input=f"What is {row['question']}?", target=str(row["answer"]), id=row["id"])


ROWS = json_dataset("../arithmetic.jsonl", read)


@task
def sums():
    """Sums without help."""
    return Task(dataset=ROWS, solver=[system_message("Answer with a number alone."), generate()], scorer=includes())


@tool
def calculator():
    async def add(x: int, y: int) -> str:
        """Add two numbers.

        Args:
            x: The first number.
            y: The second number.
        """
        return str(x + y)

    return add


@task
def sums_with_a_tool():
    """Sums by a tool, which the model calls."""
    return Task(dataset=ROWS, solver=[use_tools(calculator()), generate()], scorer=includes(), message_limit=12)

"""Tasks of inspect_ai for tests, as its users write them."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from inspect_ai import Epochs, Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ContentImage, GenerateConfig, get_model
from inspect_ai.scorer import Score, accuracy, choice, frequency, grouped, includes, mean, scorer, stderr
from inspect_ai.solver import Generate, TaskState, generate, multiple_choice, solver, system_message, use_tools
from inspect_ai.tool import tool

ROWS = [Sample(id=f"q{n}", input=f"sort {n} 1", target=str(n if n % 2 else 9)) for n in range(2, 8)]


@task
def sums(epochs: int = 2):
    return Task(dataset=ROWS, solver=[system_message("sort"), generate()], scorer=includes(), epochs=epochs)


@task
def chosen():
    rows = [Sample(input=f"sort {n}", choices=["1", "2"], target="A" if n % 2 else "B") for n in range(4)]
    return Task(dataset=rows, solver=multiple_choice(template="{question} {choices}"), scorer=choice())


@scorer(metrics={"length": [mean(), stderr()], "digits": [mean()]})
def measured():
    async def score(state, target):
        text = state.output.completion
        return Score(value={"length": float(len(text)), "digits": sum(map(str.isdigit, text)) / 10})

    return score


@task
def several():
    return Task(dataset=ROWS[:3], solver=generate(), scorer=[includes(), measured()])


@tool
def add():
    async def execute(x: int, y: int) -> str:
        """Add two numbers.

        Args:
            x: One.
            y: The other.
        """
        return str(x + y)

    return execute


@task
def acting():
    return Task(dataset=ROWS[:2], solver=[use_tools(add()), generate()], scorer=includes(), message_limit=5)


@scorer(metrics=[accuracy()])
def graded():
    async def score(state, target):
        answer = await get_model(role="grader").generate(f"grade {state.output.completion[-1]}")
        return Score(value="C" if answer.completion == "yes" else "I")

    return score


@task
def judged():
    return Task(dataset=ROWS[:4], solver=generate(), scorer=graded())


@solver
def failing(at: str):
    async def solve(state: TaskState, ask: Generate) -> TaskState:
        if state.sample_id == at:
            raise ValueError("this one is broken")
        return await ask(state)

    return solve


@task
def broken(at: str = "q3"):
    return Task(dataset=ROWS, solver=failing(at), scorer=includes())


@task
def seen():
    picture = ContentImage(image="data:image/png;base64,AAAA")
    return Task(dataset=[Sample(input=[ChatMessageUser(content=[picture])], target="1")], scorer=includes())


@task
def forced():
    return Task(dataset=ROWS[:1], solver=[use_tools(add(), tool_choice="any"), generate()], scorer=includes())


@task
def long():
    turns = [ChatMessageUser(content="sort 1 " * 200), ChatMessageAssistant(content="1"), ChatMessageUser(content="2")]
    return Task(dataset=[Sample(input=turns, target="1"), Sample(input="sort 1", target="1")], scorer=includes())


@task
def huge():
    return Task(dataset=[Sample(input="\u4e2d" * 100_000, target="1")], scorer=includes())


@task
def cached():
    return Task(dataset=ROWS[1:3], solver=generate(cache=True), scorer=includes())


@task
def own():
    return Task(dataset=ROWS[:1], scorer=includes(), model="mockllm/model")


@task
def roled():
    return Task(dataset=ROWS[:1], scorer=includes(), model_roles={"critic": "mockllm/model"})


@task
def unscored():
    return Task(dataset=ROWS[:1], scorer=None)


@solver
def impatient():
    async def solve(state: TaskState, ask: Generate) -> TaskState:
        first = await get_model().generate("sort 2 1", config=GenerateConfig(attempt_timeout=1))
        second = await get_model().generate("sort 2 1")
        state.metadata["same"] = first.completion == second.completion
        return await ask(state)

    return solve


@task
def waiting():
    return Task(dataset=ROWS[:1], solver=impatient(), scorer=includes())


@solver
def stubborn():
    async def solve(state: TaskState, ask: Generate) -> TaskState:
        while True:
            try:
                return await ask(state)
            except Exception:  # noqa: BLE001 - what this task is about
                await asyncio.sleep(0.01)

    return solve


@task
def going_on():
    return Task(dataset=ROWS[:2], solver=stubborn(), scorer=includes())


@scorer(metrics=[accuracy(), stderr(), grouped(accuracy(), "subject"), grouped(stderr(), "subject")])
def partly(without: bool = True):
    """Nothing, a text, no number, and what counts."""

    async def score(state, target):
        odd = {"q2": None, "q3": Score(value="refused"), "q4": Score(value=float("nan"))} if without else {}
        return odd.get(state.sample_id, Score(value="C" if state.sample_id != "q7" else "I"))

    return score


@task
def graded_partly(without: bool = True):
    rows = [row.model_copy(update={"metadata": {"subject": "ab"[n % 2]}}) for n, row in enumerate(ROWS)]
    return Task(dataset=rows, solver=generate(), scorer=partly(without))


@scorer(metrics=[frequency()])
def named():
    async def score(state, target):
        return Score(value="refused" if state.sample_id == "q3" else "answered")

    return score


@task
def categories():
    return Task(dataset=ROWS[:4], solver=generate(), scorer=named())


@task
def unreduced():
    return Task(dataset=ROWS[:1], solver=generate(), scorer=includes(), epochs=Epochs(2, []))


@task
def thoughtful():
    return Task(dataset=ROWS[:1], scorer=includes(), config=GenerateConfig(reasoning_effort="low", timeout=60))


@task
def thoughtful_later():
    return Task(dataset=ROWS[:1], solver=generate(reasoning_effort="low"), scorer=includes())


@task
def with_sets():
    metadata = {"words": {f"word {n}" for n in range(50)}, "turns": [ChatMessageUser(content="2")]}
    return Task(dataset=[ROWS[0].model_copy(update={"metadata": metadata})], scorer=includes())


@task
def random():
    return Task(dataset=[ROWS[0].model_copy(update={"metadata": {"drawn": str(uuid4())}})], scorer=includes())


@task
def boxed():
    return Task(dataset=ROWS[:1], solver=generate(), scorer=includes(), sandbox="docker")

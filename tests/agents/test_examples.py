"""The agents of examples/agents: what they are made from, what they are rewarded for, and that they learn."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from rollout_core.agents import Trainer
from rollout_core.agents.apo import Experience, PromptWriter
from rollout_core.agents.policy_algorithms import GRPO
from rollout_core.base.ids import ContentId
from rollout_core.config import SamplingParams, TransformersBackend
from rollout_core.inference.backend import ModelRef
from rollout_core.inference.engines import close_engine
from rollout_core.inference.serving import EngineServer
from rollout_core.store import LLM, Attempt, AttemptedRollout, InMemoryLightningStore, PromptTemplate
from tests.agents.scripted_chat import completion, scripted_chat
from tests.conftest import PROJECT

EXAMPLE = PROJECT / "examples" / "agents"
RECORDS = {"ann": {"pet": "cat", "friend": "bob"}, "bob": {"pet": "dog", "friend": "ann"}}
TASK = {"question": "What is the pet of the friend of ann?", "answer": "dog", "records": RECORDS}
ROLLOUT = AttemptedRollout(
    rollout_id="r", input=1, start_time=0, attempt=Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=0)
)


@pytest.fixture
def example(monkeypatch):
    """Imports a file of the example, as a program beside it does."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield import_module
    for name in [name for name, module in sys.modules.items() if _is_of_the_example(module)]:
        del sys.modules[name]


def _is_of_the_example(module: Any) -> bool:
    return str(getattr(module, "__file__", "") or "").startswith(str(EXAMPLE))


def asks(number: int, arguments: Any, name: str = "lookup") -> dict[str, Any]:
    """An answer that calls the tool."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": text}}
    return completion(number, {"content": None, "tool_calls": [call]}, "tool_calls")


def says(number: int, text: str) -> dict[str, Any]:
    return completion(number, {"content": text})


def first_step(number: int = 1) -> dict[str, Any]:
    return asks(number, {"name": "ann", "field": "friend"})


def second_step(number: int = 2) -> dict[str, Any]:
    return asks(number, {"name": "bob", "field": "pet"})


SCRIPTS = {
    "right": ([first_step(), second_step(), says(3, "dog")], 1.0),
    "stops after the first step": ([first_step(), says(2, "bob")], 0.0),
    "guesses": ([says(1, "dig")], 0.0),
    "nonsense is answered": ([asks(1, {"name": "zoe", "field": "pet"}), second_step(), says(3, " dog\n")], 1.0),
    "for ever": ([first_step(number) for number in range(9)], 0.0),
}


def reward_of(module: str, agent: str, answers: Sequence[dict[str, Any]], example: Any) -> float:
    found = getattr(example(module), agent)
    with scripted_chat(answers) as url:
        resources = {"main": LLM(endpoint=url, model="m")}
        if found.is_async():
            return asyncio.run(found.rollout_async(TASK, resources, ROLLOUT))
        return found.rollout(TASK, resources, ROLLOUT)


@pytest.mark.parametrize("agent", ["lookup_agent", "people_agent"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_agent_is_rewarded_for_the_right_answer_alone(agent, script, example):
    answers, reward = SCRIPTS[script]
    assert reward_of(agent, agent, answers, example) == reward


@pytest.mark.parametrize("arguments", ["{", "7", '["ann", "pet"]', '{"name": "ann"}', '{"name": [], "field": {}}'])
def test_what_a_model_writes_for_arguments_harms_nothing(arguments, example):
    answers = [asks(1, arguments), second_step(), says(3, "dog")]
    assert reward_of("lookup_agent", "lookup_agent", answers, example) == 1.0


def test_a_program_of_the_framework_has_no_line_of_ours():
    text = (EXAMPLE / "people.py").read_text(encoding="utf-8")
    assert "rollout_core" not in text and "reward" not in text


def test_the_script_for_debugging_prints_what_the_agent_did_and_raises_what_it_raises(example, capsys):
    debug = example("debug_agent")
    with scripted_chat([first_step(), second_step(), says(3, "dog")]) as url:
        asyncio.run(debug.main(url, "m"))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "succeeded" and "  assistant: dog" in said and said[-1] == "reward 1"
    with scripted_chat([first_step()]) as url, pytest.raises(BadRequestError, match="no more answers"):
        asyncio.run(debug.main(url, "m"))
    said = capsys.readouterr().out
    assert said.startswith("failed\n") and 'calls lookup: {"name": "ann"' in said and "no more answers" in said


def test_an_agent_finds_the_program_beside_it():
    """Also at any later time, and in a process that has never seen its folder."""
    program = """
import gc, sys
from pathlib import Path
from rollout_core.agents.code import AgentCode
agent = AgentCode.read("examples/agents/people_agent.py:people_agent", Path.cwd()).load(alone=True)
gc.collect()
sys.modules.pop("people")
import people
print(type(agent).__name__, Path(people.__file__).parent.name)
"""
    found = subprocess.run([sys.executable, "-P", "-c", program], cwd=PROJECT, capture_output=True, text=True)
    assert found.stdout.split() == ["FunctionalLitAgent", "agents"], found.stderr


def test_tasks_follow_from_the_seed_and_have_one_answer(example):
    make = example("make_lookup")
    tasks = make.make_tasks(200, random.Random(5))
    assert tasks == make.make_tasks(200, random.Random(5))
    assert len({json.dumps(task) for task in tasks}) == 200
    assert {"friend" in task["question"] for task in tasks} == {True, False}
    for task in tasks:
        messages = make.demonstrate(task, random.Random(0))
        careful = messages[-1]["content"] == task["answer"]
        assert careful or ("friend" in task["question"] and messages[-1]["content"] in task["records"])


def test_the_tokenizer_loses_nothing_and_takes_a_token_for_a_word(example):
    make = example("make_lookup")
    tokenizer = make.make_tokenizer()
    for text in ("Grüße, 你好\n\t{}", '<tool_call>{"name": "lookup"}</tool_call>', "What is the pet of x?"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    words = [word for kind in make.make_words().values() for word in kind]
    assert len(set(words)) == len(words) == 80
    assert all(len(tokenizer.encode(word, add_special_tokens=False)) == 1 for word in words)


def test_each_turn_continues_the_tokens_of_the_one_before(example):
    """So the turns of a rollout are one sample."""
    make = example("make_lookup")
    tokenizer = make.make_tokenizer()
    task = next(task for task in make.make_tasks(20, random.Random(1)) if "friend" in task["question"])
    messages = make.demonstrate(task, random.Random(6))
    token_ids, labels = make.encode_demonstration(tokenizer, messages)
    written = tokenizer.decode([label for label in labels if label != -100])
    assert written.count("<tool_call>") == (len(messages) - 2) // 2
    assert written.endswith(f"{messages[-1]['content']}<|im_end|>")
    assert len(token_ids) < 100
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert make.encode_demonstration(tokenizer, messages) == (token_ids, labels), "arguments as a client gives them"


def test_the_model_follows_from_the_seed(example, tmp_path):
    make = example("make_lookup")
    rng = random.Random(3)
    demonstrations = [make.demonstrate(task, rng) for task in make.make_tasks(16, rng)]
    for name in ("one", "other"):
        make.make_model(tmp_path / name, demonstrations, num_steps=2)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "other"))
    assert one == other


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The example's model, and tasks of which one in two is held out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        make = import_module("make_lookup")
        folder = tmp_path_factory.mktemp("lookup") / "model"
        rng = random.Random(11)
        tasks = make.make_tasks(1_088, rng)
        make.make_model(folder, [make.demonstrate(task, rng) for task in tasks[64:]])
    return folder, tasks[:32], tasks[32:64]


@pytest.mark.parametrize("agent", ["lookup_agent", pytest.param("people_agent", marks=pytest.mark.campaign)])
def test_an_agent_learns_to_look_up_twice(agent, example, made, tmp_path):
    folder, training, held_out = made
    algorithm = GRPO(
        folder,
        iterations=3,
        tasks_per_iteration=8,
        rollouts_per_task=8,
        lr=1e-3,
        max_tokens=24,
        learner={"minibatch_size": 128, "gradient_accumulation": 1, "loss_type": "dapo"},
        evaluate_every=3,
        backend=TransformersBackend(),
        storage=tmp_path / "objects",
        cache=tmp_path / "cache",
        num_threads=1,
    )
    trainer = Trainer(algorithm=algorithm, n_runners=8, strategy="shm", store=InMemoryLightningStore())
    try:
        trainer.fit(getattr(example(agent), agent), training, val_dataset=held_out)
    finally:
        close_engine()
    first, *_, last = algorithm.history
    assert last.evaluation is not None and last.evaluation.num_without_reward == 0
    assert last.evaluation.mean_reward >= first.mean_reward + 0.2, "the first rollouts are those of the model as made"
    assert not first.left_out


def test_the_stand_in_critic_writes_templates_that_a_search_can_use(example):
    tune = example("tune_wording")
    writer = PromptWriter(AsyncOpenAI(api_key="k", base_url="http://127.0.0.1:9"), "stand-in-critic", "stand-in-editor")
    settings = tomllib.loads((EXAMPLE / "tune-wording.toml").read_text(encoding="utf-8"))
    assert (settings["critic"]["model"], settings["critic"]["editor"]) == (writer.critic, writer.editor)
    assert settings["critic"]["url"] == f"http://127.0.0.1:{tune.PORT}/v1"
    seed = PromptTemplate(template=settings["template"]["text"], engine="f-string")

    async def write(url: str) -> list[PromptTemplate | None]:
        async with AsyncOpenAI(api_key="k", base_url=url) as client:
            asking = replace(writer, client=client)
            critique = await asking.critique(seed, [Experience(0.0, "succeeded")], random.Random(1))
            assert critique is not None
            return [await asking.edit(seed, critique, random.Random(number)) for number in range(12)]

    with tune.stand_in_critic(0) as url:
        written = asyncio.run(write(url))
    assert len({template.template for template in written if template is not None}) > 5 and None not in written


def test_how_a_question_is_worded_decides_whether_the_model_answers_it(example, made, tmp_path):
    """So a search over templates has something to find."""
    tune, agent = example("tune_wording"), example("wording_agent").wording_agent
    tune.make_wording_tasks(tmp_path)
    first, second = ((tmp_path / name).read_text().splitlines() for name in ("train.jsonl", "held-out.jsonl"))
    assert len(first) == len(second) == len({*first, *second}) / 2 == 128
    tasks = [json.loads(line) for line in second[:24]]
    settings = tomllib.loads((EXAMPLE / "tune-wording.toml").read_text(encoding="utf-8"))

    async def rewards() -> list[float]:
        server = EngineServer(TransformersBackend(), name="m")
        await server.start(ModelRef(ContentId("0" * 64), made[0]), SamplingParams(temperature=0.0, max_tokens=24))
        try:
            means = []
            for text in (settings["template"]["text"], "What is the {field} of {name}?"):
                template = PromptTemplate(template=text, engine="f-string")
                resources = {"llm": LLM(endpoint=server.url, model="m"), "prompt": template}
                calls = [asyncio.to_thread(agent.rollout, task, resources, ROLLOUT) for task in tasks]
                means.append(sum(await asyncio.gather(*calls)) / len(tasks))
            return means
        finally:
            await server.stop()

    try:
        before, after = asyncio.run(rewards())
    finally:
        close_engine()
    assert after >= 0.9 and after >= before + 0.2, (before, after)

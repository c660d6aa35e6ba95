"""Agents in the frameworks that people use, each as its users write it, run unchanged: in an environment of the
framework's own, by `rollout agent work`, against the store, the LLM proxy and the engine's server of this one.

The model is scripted, the engine's server, tokenizer and chat template are real. Two processes of runners work on two
tasks each at a time; each city is asked about once, so an answer that crosses is seen by its degrees.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from framework_environments import REQUIREMENTS, environment
from frameworks.weather import DEGREES
from make_tiny import make_model
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rollout_core.agents import LLMProxy, ModelEntry, TraceToMessages, Upstream, find_final_reward
from rollout_core.agents.adapters.token_sequences import token_turns, trajectories
from rollout_core.config import ScriptedBackend
from rollout_core.data.samples import Completion
from rollout_core.inference import engines
from rollout_core.inference.backend import ModelRef, Request, ScriptedEngine
from rollout_core.inference.serving import EngineServer
from rollout_core.objects import ObjectStore
from rollout_core.store import LLM, EnqueueRolloutRequest, LightningStoreServer, Rollout, Span, SqlLightningStore
from rollout_core.store.lifecycle import FINISHED
from rollout_core.store.semconv import LLM_CALL
from tests.conftest import PROJECT
from tests.flows.kills import free_port
from tests.store.patience import LONG
from tests.support.server_logs import ERROR
from tests.test_wheel import build_wheel

AGENTS = PROJECT / "tests" / "agents" / "frameworks"
KEY = "AGENTS_KEY"
"""Variable of runners that holds a run's key."""
FORGETFUL = ("Oslo", "Quito", "Dakar")
"""Cities of which the model says something wrong."""


@dataclass(frozen=True)
class Conversation:
    """What the model is shown, as the chat template of examples/agents writes it."""

    prompt: str

    @cached_property
    def messages(self) -> list[tuple[str, str]]:
        """Role and content."""
        return re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", self.prompt, re.DOTALL)

    @property
    def city(self) -> str:
        """The only one that is asked about."""
        [city] = set(re.findall(r"warm is it in (\w+)\?", self.prompt))
        return city

    def of_role(self, role: str) -> list[str]:
        return [content for other, content in self.messages if other == role]

    def degrees(self, where: str) -> str:
        """Those found there, or wrong ones."""
        return "0" if self.city in FORGETFUL else re.findall(r"(\d+) degrees", where)[-1]


Script = Callable[[Conversation], str]


def calls_a_tool(said: Conversation) -> str:
    """The tool first, then a sentence of what it said."""
    found = said.of_role("tool")
    if found:
        return f"It is {said.degrees(found[-1])} degrees in {said.city}."
    return f'<tool_call>{{"name": "temperature", "arguments": {{"city": "{said.city}"}}}}</tool_call>'


def then_calls_the_answer(said: Conversation) -> str:
    """The tool first, then the one whose arguments are the answer."""
    found = said.of_role("tool")
    if not found:
        return calls_a_tool(said)
    answer = json.dumps({"city": said.city, "degrees": int(said.degrees(found[-1]))})
    return f'<tool_call>{{"name": "final_result", "arguments": {answer}}}</tool_call>'


def names_the_city(said: Conversation) -> str:
    """By a call; the forgetful model names another one."""
    name = "Atlantis" if said.city in FORGETFUL else said.city
    return f'<tool_call>{{"name": "City", "arguments": {{"name": "{name}"}}}}</tool_call>'


def writes_python(said: Conversation) -> str:
    """Code for smolagents to run, in two steps."""
    observed = re.findall(r"Observation.*?(\d+ degrees)", said.prompt, re.DOTALL)
    if not observed:
        return f'Thought: I ask.\n<code>\nfound = temperature("{said.city}")\nprint(found)\n</code>'
    return f'Thought: I know.\n<code>\nfinal_answer("It is {said.degrees(observed[-1])} degrees.")\n</code>'


def ends_by_a_tool(said: Conversation) -> str:
    """The tool first, then the one that ends smolagents' run."""
    observed = re.findall(r"Observation.*?(\d+ degrees)", said.prompt, re.DOTALL)
    if not observed:
        return calls_a_tool(said)
    answer = f"It is {said.degrees(observed[-1])} degrees."
    return f'<tool_call>{{"name": "final_answer", "arguments": {{"answer": "{answer}"}}}}</tool_call>'


def fills_a_form(said: Conversation) -> str:
    """Fields that are wrong at first; the forgetful model never has them right."""
    is_second = len(said.of_role("assistant")) > 0
    name = {True: "Riga" if said.city == "Oslo" else "Oslo"}.get(said.city in FORGETFUL, said.city)
    return f'```json\n{{"name": "{name if is_second else "Atlantis"}"}}\n```'


def fills_sections(said: Conversation) -> str:
    """DSPy's sections of an answer."""
    asked = said.messages[-1][1]
    if "[[ ## report ## ]]" not in asked:
        return f"[[ ## city ## ]]\n{said.city}\n\n[[ ## completed ## ]]"
    sentence = f"It is {said.degrees(asked)} degrees."
    return f"[[ ## reasoning ## ]]\nThe report says it.\n\n[[ ## answer ## ]]\n{sentence}\n\n[[ ## completed ## ]]"


@dataclass(frozen=True)
class Framework:
    """One of them, at a version with which this was last run."""

    agent: str
    requirements: tuple[str, ...]
    script: Script = calls_a_tool
    turns: int = 2
    """Calls of the model in a rollout."""
    sequences: int = 1
    """To train on, which they come to."""


LANGGRAPH = Framework("langgraph_agent", ("langchain==1.5.2", "langchain-openai==1.7.4", "langgraph==1.2.24"), turns=3)
FRAMEWORKS = (
    Framework("openai_client", ("openai==3.57.0",)),
    Framework("agents_sdk", ("openai-agents==0.24.0",)),
    Framework("langchain_tools", ("langchain-openai==1.7.4",)),
    Framework("langchain_form", ("langchain-openai==1.7.4",), names_the_city, turns=1),
    LANGGRAPH,
    Framework("pydantic_ai_agent", ("pydantic-ai-slim[openai]==2.68.0",), then_calls_the_answer),
    Framework("smolagents_code", ("smolagents[openai]==1.26.0",), writes_python, sequences=2),
    Framework("smolagents_tools", ("smolagents[openai]==1.26.0",), ends_by_a_tool, sequences=2),
    Framework("instructor_form", ("instructor==1.17.0",), fills_a_form),
    Framework("litellm_calls", ("litellm==1.110.2",)),
    Framework("autogen_assistant", ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"), sequences=2),
    Framework("crewai_crew", ("crewai==1.15.30",)),
    Framework("dspy_program", ("dspy==3.4.1",), fills_sections, sequences=2),
    Framework("llama_index_agent", ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1")),
    Framework("haystack_agent", ("haystack-ai==3.4.1",)),
    Framework("agno_agent", ("agno==3.1.10", "openai==3.57.0")),
)


class ModelByScript(ScriptedEngine):
    """Answers each conversation by a function of it."""

    script: Script

    def _complete(self, group: Sequence[Request]) -> Iterator[Completion]:
        for request in group:
            self._config = ScriptedBackend(text=type(self).script(Conversation(request.prompt_text)))
            yield from super()._complete([request])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelRef:
    """With the tokenizer and the chat template of examples/agents; its weights say nothing here."""
    folder = tmp_path_factory.mktemp("model") / "model"
    make_model(folder, hidden_size=64, num_layers=2, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROJECT / "examples" / "agents"))
        import_module("make_lookup").make_tokenizer().save_pretrained(folder)
    return ModelRef(ObjectStore.from_url("memory://models").put_tree(folder), folder)


@asynccontextmanager
async def serving(store: SqlLightningStore, model: ModelRef) -> AsyncIterator[str]:
    """Store, proxy and engine; the store's address."""
    engine, server = EngineServer(ScriptedBackend(), name="policy"), LightningStoreServer(store)
    await engine.start(model)
    proxy = LLMProxy(0, [ModelEntry("policy", [Upstream(url=engine.url, model_id=engine.model_id)])], store)
    await proxy.start()
    await server.start()
    try:
        await store.add_resources({"llm": proxy.as_resource()})
        yield server.endpoint
    finally:
        await proxy.stop()
        await server.stop()
        await engine.stop()
        await asyncio.to_thread(engines.close_engine)


@contextmanager
def working(programs: Path, *arguments: str, folder: Path, logs: Path) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Two processes of `rollout agent work` in ``folder``; what they and the framework leave lies in ``logs``."""
    settings = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
    settings |= {
        "HOME": str(logs),
        "TMPDIR": str(logs),
        "DO_NOT_TRACK": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        KEY: "a key",
    }
    settings |= {"OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false", "HAYSTACK_TELEMETRY_ENABLED": "False"}
    command = [str(programs / "rollout"), "agent", "work", *arguments]
    with ExitStack() as stack:
        processes = []
        for number in range(2):
            log = stack.enter_context((logs / f"runners-{number}.log").open("wb"))
            process = subprocess.Popen(command, cwd=folder, env=settings, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes
        for process in processes:
            process.terminate()
            process.wait(LONG)


def said_by_runners(logs: Path) -> str:
    return "\n".join(file.read_text(errors="replace") for file in sorted(logs.glob("runners-*.log")))


async def ended(store: SqlLightningStore, processes: Sequence[subprocess.Popen[bytes]]) -> list[Rollout]:
    """All rollouts, when none is under way."""
    async with asyncio.timeout(LONG):
        while True:
            found = list(await store.query_rollouts())
            if all(rollout.status in FINISHED for rollout in found):
                return found
            assert all(process.poll() is None for process in processes), "runners have ended"
            await asyncio.sleep(0.2)


def said_of_a_rollout(spans: Sequence[Span]) -> str:
    return json.dumps(TraceToMessages().adapt(spans))


@pytest.mark.campaign
@pytest.mark.timeout(1800)  # pip fetches a framework the first time
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.agent)
async def test_an_agent_of_the_framework_runs_unchanged(framework, wheel, model, tmp_path, monkeypatch, caplog):
    programs = await asyncio.to_thread(environment, framework.requirements, wheel)
    monkeypatch.setattr(ModelByScript, "script", staticmethod(framework.script), raising=False)
    monkeypatch.setattr(engines, "ScriptedEngine", ModelByScript)
    tasks = [{"question": f"How warm is it in {city}?", "city": city, "degrees": DEGREES[city]} for city in DEGREES]
    async with SqlLightningStore.from_url(f"sqlite:///{tmp_path / 'store.db'}") as store:
        async with serving(store, model) as address:
            await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=task, mode="train") for task in tasks])
            order = ("--store", address, "--agent", f"{framework.agent}.py:agent", "--concurrency", "2")
            with working(programs, *order, folder=AGENTS, logs=tmp_path) as processes:
                rollouts = await ended(store, processes)
        logs = said_by_runners(tmp_path)
        statuses = {rollout.input["city"]: rollout.status for rollout in rollouts}
        assert statuses == dict.fromkeys(DEGREES, "succeeded"), logs[-8_000:]
        workers = set()
        for rollout in rollouts:
            city, spans = rollout.input["city"], await store.query_spans(rollout.rollout_id)
            [attempt] = await store.query_attempts(rollout.rollout_id)
            workers.add((attempt.worker_id or "").partition(":")[2])
            assert find_final_reward(spans) == (city not in FORGETFUL), (city, said_of_a_rollout(spans))
            recorded = [span for span in spans if span.name == LLM_CALL]
            assert [span.status.status_code for span in recorded] == ["OK"] * framework.turns
            talks = TraceToMessages().adapt(spans)
            assert len(talks) == framework.turns, [span.name for span in spans]
            for talk in talks:
                assert talk["messages"][-1]["role"] == "assistant" and Conversation(json.dumps(talk)).city == city
            turns = token_turns(spans, model="policy")
            assert len(turns) == framework.turns and len(trajectories(turns)) == framework.sequences
            assert {turn.model_id for turn in turns} == {model.content_id}
    assert len(workers) == 2, "both processes had work"
    assert not ERROR.search(logs), logs[-8_000:]
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


TRAINING = """
num_threads = 1
numerics = "native"

[run]
name = "lookup"

[agent]
function = "langgraph_lookup.py:agent"
timeout_seconds = 120

[algorithm]
kind = "grpo"
loss_type = "dapo"
iterations = 3
prompts_per_iteration = 8
samples_per_prompt = 8
minibatch_size = 128
gradient_accumulation = 1

[algorithm.base_model]
uri = "model"

[algorithm.prompts]
path = "train.jsonl"

[algorithm.sampling]
max_tokens = 24

[algorithm.optimizer]
lr = 1e-3

[backend]
kind = "transformers"

[runners]
where = "elsewhere"
api_key = "AGENTS"

[evaluation.tasks]
path = "held-out.jsonl"

[evaluation.sampling]
temperature = 0.0
max_tokens = 24
"""
COMMAND = "from rollout_core.__main__ import main; main()"


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_model_learns_from_an_agent_whose_framework_is_only_where_its_runners_are(wheel, start_process, tmp_path):
    """This environment has no LangGraph; the one of the runners has no torch."""
    assert find_spec("langgraph") is None
    programs = environment(LANGGRAPH.requirements, wheel)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROJECT / "examples" / "agents"))
        make, rng = import_module("make_lookup"), random.Random(11)
    tasks = make.make_tasks(1_088, rng)
    make.make_model(tmp_path / "model", [make.demonstrate(task, rng) for task in tasks[64:]])
    for name, chosen in (("train", tasks[:32]), ("held-out", tasks[32:64])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in chosen))
    (tmp_path / "run.toml").write_text(TRAINING)
    shutil.copy(AGENTS / "langgraph_lookup.py", tmp_path)

    logs, port = tmp_path / "logs", free_port()
    logs.mkdir()
    secrets = {"ROLLOUT_SECRETS": "AGENTS", "ROLLOUT_SECRET_AGENTS": "a key"}
    command = ("agent", "train", "--config", "run.toml", "--set", f"runners.port={port}")
    order = ("--store", f"http://127.0.0.1:{port}", "--agent", "langgraph_lookup.py:agent", "--api-key-env", KEY)
    with (tmp_path / "run.log").open("w") as log:
        run = start_process("-c", COMMAND, *command, cwd=tmp_path, stdout=log, env=secrets)
        with working(programs, *order, folder=tmp_path, logs=logs):
            run.wait(2 * LONG)
    said = (tmp_path / "run.log").read_text()
    assert run.returncode == 0, f"{said[-4_000:]}\n{said_by_runners(logs)[-4_000:]}"
    held_out = {moment: float(value) for moment, value in re.findall(r"held-out reward (\w+): ([\d.]+)", said)}
    assert held_out["after"] >= held_out["before"] + 0.2, said[-4_000:]
    assert not ERROR.search(said_by_runners(logs)), said_by_runners(logs)[-4_000:]
    assert not ERROR.search(said), said[-4_000:]


WITHOUT = """
import importlib.abc, json, sys
absent = set(json.loads(sys.argv.pop(1)))

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def installed_with(requirements: Sequence[str]) -> set[str]:
    """Distributions that pip installs for these."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name not in found and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += [Requirement(line) for line in distribution(name).requires or ()]
    return found


async def test_agents_work_with_nothing_but_what_their_requirements_list(tmp_path):
    """So an environment of a framework's own needs no torch, Prefect or database."""
    lines = [line for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    there = installed_with(lines) | {"rollout-post-training", "setuptools"}
    names = {name: {canonicalize_name(one) for one in holders} for name, holders in packages_distributions().items()}
    absent = [name for name, holders in names.items() if not holders & there]
    assert {"torch", "prefect", "sqlalchemy", "fastapi", "pyarrow"} <= set(absent)
    (tmp_path / "agent.py").write_text(
        "import openai\nfrom rollout_core.agents import emit_annotation, rollout\n\n\n"
        "@rollout\ndef agent(task, llm):\n    emit_annotation({'a': 1})\n    return 1.0\n"
    )
    async with SqlLightningStore.from_url(f"sqlite:///{tmp_path / 'store.db'}") as store:
        server = LightningStoreServer(store)
        await server.start()
        await store.add_resources({"llm": LLM(endpoint="http://127.0.0.1:9/v1", model="m")})
        await store.enqueue_rollout({"number": 1})
        order = ["agent", "work", "--store", server.endpoint, "--agent", "agent.py:agent"]
        arguments = [sys.executable, "-c", WITHOUT + COMMAND, json.dumps(absent), *order]
        with (tmp_path / "work.log").open("wb") as log:
            process = subprocess.Popen(arguments, cwd=tmp_path, stdout=log, stderr=log)
            try:
                [rollout] = await ended(store, [process])
            finally:
                process.terminate()
                process.wait(LONG)
                await server.stop()
        said = (tmp_path / "work.log").read_text()
        assert rollout.status == "succeeded" and process.returncode == 0, said
        assert find_final_reward(await store.query_spans(rollout.rollout_id)) == 1.0


def test_what_agents_need_is_what_the_project_asks_for():
    """But for pydantic, of which a framework still wants an older release."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {Requirement(line) for line in [*project["dependencies"], *project["optional-dependencies"]["agents"]]}
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    assert {Requirement(line) for line in lines if line[0] != "#"} - asked == {Requirement("pydantic>=2.12,<3")}


def test_the_page_says_with_which_versions_and_what_they_came_to():
    page = (PROJECT / "docs" / "agents-frameworks.md").read_text(encoding="utf-8")
    for framework in FRAMEWORKS:
        versions = ", ".join(f"`{requirement}`" for requirement in framework.requirements)
        assert f"| {versions} | {framework.turns} | {framework.sequences} |" in page, framework


def test_every_framework_has_a_file_and_every_file_a_framework():
    files = {file.stem for file in AGENTS.glob("*.py")} - {"weather", "langgraph_lookup"}
    assert files == {framework.agent for framework in FRAMEWORKS}

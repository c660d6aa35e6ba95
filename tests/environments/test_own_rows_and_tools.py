"""Rows that an environment makes itself, and tools that it knows of only when it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from rollout_core.base.errors import ConfigError
from rollout_core.config import SamplingParams
from rollout_core.config.base import EnvironmentRows
from rollout_core.config.environments import PythonEnvironment
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.hosts import look_at, rows_of
from tests.environments.acting import Scene, called

SERVED = """
from rollout_core.environments import Done, Tool, ToolError

class Env:
    def reset(self, row, seed):
        self.row, self.found = row, ""
        return row["question"]

    async def further_tools(self):
        named = {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]}
        look_up = Tool("look_up", "Look up.", named, self._look_up)
        return [look_up, Tool("give_up", "End it.", {}, self._end)]

    async def _look_up(self, who):
        if who == "nobody":
            raise ToolError("there is nobody of this name")
        self.found += who
        return {"name": who}

    def _end(self):
        return Done("bye")

    def own(self, method: str = "own", episode: int = 0) -> str:
        \"\"\"A method that is a tool.\"\"\"
        return method

    def reward(self):
        return float(self.found == "Ada")

    async def make_rows(self, split, size, seed):
        return ({"question": f"{split} {seed + number}"} for number in range(size or 2))
"""


async def test_tools_that_are_known_at_run_time_are_called_like_methods(scene: Scene):
    scene.write(SERVED)
    said = [
        called("look_up", whom="Ada"),
        called("look_up", who="nobody"),
        called("look_up", who="Ada"),
        called("own", method="yours", episode=1),
        called("give_up"),
    ]
    backend = scene.engine(lambda text, seed: said[text.count("assistant: ") - 1])
    tally = await scene.play(backend, [{"question": "who?"}], max_turns=9)
    assert (tally.done, tally.failed, dict(tally.endings)) == (1, 0, {"done": 1})
    [ended] = await scene.ended([{"question": "who?"}])
    assert ended.reward == 1.0
    answers = [
        span.attributes["agentlightning.operation.output"]
        for span in await scene.spans({"question": "who?"})
        if "agentlightning.operation.output" in span.attributes
    ]
    assert answers[0].startswith("wrong arguments: 'who' is a required property. Expected: who"), answers
    assert answers[1:] == ["there is nobody of this name", '{"name":"Ada"}', "yours", "bye"]


def test_they_are_shown_next_to_methods_and_their_names_are_checked(tmp_path: Path):
    (tmp_path / "env.py").write_text(SERVED)
    environment = PythonEnvironment(path="env.py:Env")
    offer = look_at(EnvironmentCode.of(environment, tmp_path), environment)
    assert [tool["function"]["name"] for tool in offer.tools] == ["own", "look_up", "give_up"]
    (tmp_path / "env.py").write_text(SERVED.replace('"give_up"', '"look_up"'))
    with pytest.raises(ConfigError, match="tools called look_up, look_up; expected names of letters, each once"):
        look_at(EnvironmentCode.of(environment, tmp_path), environment)
    (tmp_path / "env.py").write_text(SERVED.replace("return [look_up", "return 1, [look_up"))
    with pytest.raises(ConfigError, match="expected a list of rollout's Tool"):
        look_at(EnvironmentCode.of(environment, tmp_path), environment)


def test_rows_are_made_by_the_environment(tmp_path: Path):
    (tmp_path / "env.py").write_text(SERVED)
    environment = PythonEnvironment(path="env.py:Env")
    code = EnvironmentCode.of(environment, tmp_path)
    made = rows_of(code, environment, EnvironmentRows(kind="environment", split="eval", size=3, seed=5))
    assert made == [{"question": f"eval {number}"} for number in (5, 6, 7)]
    (tmp_path / "env.py").write_text(SERVED.replace("make_rows", "_make_rows"))
    with pytest.raises(ConfigError, match="has no rows of its own"):
        rows_of(EnvironmentCode.of(environment, tmp_path), environment, EnvironmentRows(kind="environment"))
    (tmp_path / "env.py").write_text(SERVED.replace("({", "(1 or {"))
    with pytest.raises(ConfigError, match="make_rows gave 1 for a row; expected a mapping"):
        rows_of(EnvironmentCode.of(environment, tmp_path), environment, EnvironmentRows(kind="environment"))


CALLING = """
from rollout_core.environments import Done, Tool

class Env:
    def reset(self, row, seed):
        self.found = []
        return row["question"]

    def further_tools(self):
        return [Tool("find", "Find.", {"type": "object"}, None)]

    def call_tools(self, message):
        calls = message["tool_calls"]
        self.found += [call["function"]["arguments"] for call in calls]
        if len(self.found) > 2:
            return Done()
        answers = [{"role": "tool", "content": f"no {n}", "tool_call_id": c["id"]} for n, c in enumerate(calls)]
        return [*answers, {"role": "user", "content": "go on"}]

    def reward(self):
        return float(len(self.found))
"""


@pytest.mark.parametrize("role", ["tool", "user"])
async def test_an_environment_may_take_all_calls_of_an_answer_itself(scene: Scene, role: str):
    scene.write(CALLING)
    seen = []

    def policy(text: str, seed: int) -> str:
        seen.append(text)
        return called("find", a=1) + called("find", a=2) if text.count("assistant: ") == 1 else called("find", a=3)

    sampling = SamplingParams(max_tokens=400)
    tally = await scene.play(scene.engine(policy), [{"question": "who?"}], tool_role=role, sampling=sampling)
    assert dict(tally.endings) == {"done": 1}
    shown = [line.removesuffix("<|endoftext|>") for line in seen[1].splitlines()]
    assert shown[-4:-1] == [f"{role}: no 0", f"{role}: no 1", "user: go on"]
    spans = await scene.spans({"question": "who?"})
    outputs = [span.attributes.get("agentlightning.operation.output") for span in spans]
    assert [output for output in outputs if output is not None] == ["no 0", "no 1", ""]
    [ended] = await scene.ended([{"question": "who?"}])
    assert ended.reward == 3.0


def test_such_an_environment_is_checked_by_hand_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(CALLING)
    (tmp_path / "rows.jsonl").write_text('{"question": "who?"}\n')
    result = CliRunner().invoke(app, ["env", "check", "env.py:Env", "--rows", "rows.jsonl", "--set", "max_turns=1"])
    assert result.exit_code == 0 and "[tool] no 0" in result.output and "[user] go on" in result.output

"""`rollout env`: what it finds of environments, and an episode that a person plays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from tests.environments.test_episodes import SUMS

COUNTING = """
import random, time
SEEN = []

class Env:
    def reset(self, row, seed):
        self.row, self.turns = row, 0
        return f"{row['word']} {DRAWN}"

    def step(self, message):
        self.turns += 1
        TALK
        return None if self.turns == 2 else "go on"

    def reward(self):
        return REWARD
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"word": f"w{number}", "a": number, "b": 1} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def check(*options: str, command: str = "check", stdin: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["env", command, "env.py:Env", "--rows", "rows.jsonl", *options], input=stdin)
    return result.exit_code, result.output


def environment(drawn: str = "seed % 10", talk: str = "pass", reward: str = "1.0") -> str:
    return COUNTING.replace("DRAWN", drawn).replace("TALK", talk).replace("REWARD", reward)


def test_a_sound_environment_passes_and_its_tools_are_shown(work: Path):
    (work / "env.py").write_text(SUMS)
    code, said = check()
    assert code == 0, said
    assert "3 rows: the same episode alone, again, in another process and next to others" in said
    assert 'tool: {"name": "add", "description": "Add two numbers."' in said
    assert "[add] 2" in said and "[submit] thanks" in said and 'reward: {"right"' in said


def test_what_turns_earn_is_shown_and_has_to_follow_from_the_seed(work: Path):
    earning = "\n    def turn_reward(self):\n        return EARNED\n"
    (work / "env.py").write_text(environment() + earning.replace("EARNED", "None if self.turns == 1 else 0.25"))
    code, said = check()
    assert code == 0, said
    assert "reward of turn 2: 0.25" in said and "reward of turn 1" not in said
    (work / "env.py").write_text(environment() + earning.replace("EARNED", "random.random()"))
    code, said = check()
    assert code == 1 and "row 1 is another episode when it is played again: 'reward of turn 1: " in said


def test_the_tools_are_shown_as_the_models_template_has_them(work: Path, chatting):
    (work / "env.py").write_text(SUMS)
    code, said = check("--model", str(chatting.folder))
    assert code == 0 and 'tools: [{"type": "function", "function": {"name": "add"' in said.replace("\n", "")


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (environment(drawn="random.random()"), "row 1 is another episode when it is played again"),
        (environment(drawn="hash(row['word'])"), "row 1 is another episode when it is played in another process"),
        (
            environment(talk="SEEN.append(1); time.sleep(0.2)", reward="len(SEEN) % 2 if len(SEEN) > 18 else 1"),
            "next to others",
        ),
        (environment(reward="'much'"), "row 1: reward gave 'much' (str); expected a finite number"),
        (environment(talk="1 / 0"), "row 1: step raised ZeroDivisionError: division by zero (line 12 of env.py)"),
        (environment(talk="__import__('os')._exit(1)"), "row 1: the environment's process ended its process"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said(
    work: Path, monkeypatch: pytest.MonkeyPatch, source: str, fault: str
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (work / "env.py").write_text(source)
    code, said = check()
    assert code == 1 and fault in said.replace("\n", " "), said


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("Env = 3", "environment env.py:Env is a int; expected a class, or a function"),
        ("class Env:\n    def reset(self, row, seed): ...", "makes a Env without a method reward"),
        ("class Env:\n    def reset(self): ...\n    def reward(self): ...", "reset() is called as reset(row, seed)"),
        ("class Env:\n    def __init__(self, size): ...", "has the signature (size), and config gives nothing"),
        ("import nothing_of_this_name\nclass Env: ...", "fails on import: ModuleNotFoundError"),
        ("class Env:\n    def __init__(self): raise KeyError('x')", "cannot be made: KeyError"),
        (
            "class Env:\n    def reset(self, row, seed): ...\n    def reward(self): ...\n    def tool(self, a): ...",
            "has no docstring",
        ),
    ],
)
def test_what_is_no_environment_is_refused_in_one_line(work: Path, source: str, problem: str):
    (work / "env.py").write_text(source)
    code, said = check()
    assert code == 2 and problem in said and len(said.splitlines()) == 1, said


def test_a_person_can_be_the_model(work: Path):
    (work / "env.py").write_text(SUMS)
    typed = '!add {"a": 2, "b": 2}\n!multiply\n!submit {"answer": 3}\n'
    code, said = check("--row", "3", command="play", stdin=typed)
    assert code == 0, said
    assert "[user] 2 + 1?" in said and "[add] 4" in said and "there is no tool 'multiply'" in said
    assert 'reward: {"right": 1.0, "tools": -0.1}' in said

"""The reward of programs that a model wrote: rows of both kinds, and hostile programs beside honest ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.config.rewards import RewardSpec
from rollout_core.config.verifiers import CodeReward
from rollout_core.rewards import RewardInput, load_reward, score, source_id
from rollout_core.rewards.scoring import RewardFunction
from rollout_core.sandbox import Sandbox

SPECS: TypeAdapter[Any] = TypeAdapter(RewardSpec)
LIMITS: dict[str, Any] = {"cpu_seconds": 20.0, "timeout_seconds": 120.0}


def spec_of(**keys: Any) -> Any:
    return SPECS.validate_python({"kind": "code", **LIMITS, **keys})


@pytest.fixture(scope="module", autouse=True)
def stands() -> None:
    with Sandbox() as sandbox:
        walls = sandbox.walls()
    if not walls.stand:
        pytest.skip(f"this machine has no sandbox: {'; '.join(walls.missing())}")


@pytest.fixture(scope="module")
def by_tests() -> Iterator[RewardFunction]:
    reward = load_reward(spec_of())
    yield reward
    reward.close()


ADD = "def add(a, b):\n    return a + b\n"
ROW = {"tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}
HUMAN_EVAL = {"tests": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}


def inputs(*pairs: tuple[str, dict[str, Any]]) -> list[RewardInput]:
    return [RewardInput("write it", completion, row) for completion, row in pairs]


def test_a_program_that_passes_its_rows_tests_earns_one(by_tests: RewardFunction):
    fenced = f"Here it is:\n```python\n{ADD}```\nDone."
    wrong = ADD.replace("+", "-")
    given = inputs((fenced, ROW), (ADD, ROW), (wrong, ROW), ("I cannot.", ROW), ("", ROW), (ADD, HUMAN_EVAL))
    assert score(by_tests, given) == [1, 1, 0, 0, 0, 1]


def test_the_share_of_cases_counts_where_it_is_asked_for():
    reward = load_reward(spec_of(value="share"))
    half = "def add(a, b):\n    return 3\n"
    try:
        assert score(reward, inputs((half, ROW), (ADD, ROW), ("nothing", ROW))) == [0.5, 1, 0]
    finally:
        reward.close()


HOSTILE = [
    "import os\nos._exit(0)",
    "import sys\nsys.exit(0)",
    "import builtins, os\nbuiltins.print('ok')\nos.kill(os.getppid(), 9)",
    "while True: pass",
    "open('/etc/passwd', 'w')",
    "class Yes(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Yes()",
    "x = bytearray(10**11)",
]


def test_hostile_programs_earn_nothing_and_move_no_honest_score():
    reward = load_reward(spec_of(cpu_seconds=2.0))
    programs = [text for hostile in HOSTILE for text in (hostile, ADD)]
    try:
        assert score(reward, inputs(*((text, ROW) for text in programs))) == [float(text == ADD) for text in programs]
    finally:
        reward.close()


def test_what_a_program_writes_is_compared_with_its_rows_cases():
    reward = load_reward(spec_of(check="output"))
    program = "print(sum(map(int, input().split())))"
    listed = {"cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10\n"}]}
    apart = {"cases": {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3", "10"]}}
    try:
        assert score(reward, inputs((program, listed), (program, apart), ("print(3)", listed))) == [1, 1, 0]
    finally:
        reward.close()


def test_other_languages_run_where_the_machine_has_them():
    reward = load_reward(spec_of(check="output", language="sh"))
    row = {"cases": [{"input": "4\n", "output": "8\n"}]}
    try:
        assert score(reward, inputs(("```sh\nread x\necho $((x * 2))\n```", row))) == [1]
    finally:
        reward.close()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"test": "x"}, "the prompt's row has no 'tests'; did you mean 'test'"),
        ({"tests": []}, "expected unit tests"),
        ({"tests": [1]}, "expected unit tests"),
        ({"tests": "assert True", "entry_point": "a b"}, "expected a function's name"),
    ],
)
def test_a_row_without_tests_is_named(by_tests: RewardFunction, row: dict[str, Any], message: str):
    with pytest.raises(Fatal, match=f"reward code failed on sample 0: .*{message}"):
        score(by_tests, inputs((ADD, row)))


@pytest.mark.parametrize(
    "cases", [[], [{"input": "1"}], {"inputs": ["1"], "outputs": []}, [{"input": 1, "output": "1"}], "1"]
)
def test_cases_of_another_form_are_named(cases: Any):
    reward = load_reward(spec_of(check="output"))
    try:
        with pytest.raises(Fatal, match="the row's 'cases'"):
            score(reward, inputs((ADD, {"cases": cases})))
    finally:
        reward.close()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"language": "perl"}, 'check = "tests" runs unit tests in Python'),
        ({"sandbox": {"kind": "http"}}, "url goes with"),
        ({"sandbox": {"url": "http://127.0.0.1"}}, "url goes with"),
        ({"sandbox": "non"}, "none"),
    ],
)
def test_settings_that_mean_nothing_are_refused(keys: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        CodeReward(**keys)


def test_what_cannot_run_here_is_refused_before_anything_is_generated():
    with pytest.raises(ConfigError, match="language 'cobol' of reward code is not known"):
        load_reward(spec_of(check="output", language="cobol"))
    with pytest.raises(ConfigError, match="no sandbox of kind command"):
        load_reward(spec_of(sandbox={"kind": "command", "command": ["there-is-no-such-program"]}))


def test_where_programs_run_is_no_part_of_the_id_and_what_they_find_there_is():
    assert source_id(spec_of()) == source_id(spec_of(sandbox={"kind": "bubblewrap"}))
    assert source_id(spec_of()) != source_id(spec_of(sandbox={"image": "python:3.12-slim"}))
    assert source_id(spec_of()) != source_id(spec_of(value="share"))

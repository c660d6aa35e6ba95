"""The reward of programs that a model wrote: rows of both kinds, and hostile programs beside honest ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import TypeAdapter, ValidationError

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.config.rewards import RewardSpec
from rollout_core.config.verifiers import CodeReward
from rollout_core.rewards import RewardInput, load_reward, score, source_id
from rollout_core.rewards.scoring import RewardFunction, judge
from rollout_core.rewards.verifiers.code_reward import CodeGrader
from rollout_core.sandbox import NoSandbox, Outcome, Program, Sandbox
from rollout_core.sandbox.service import SandboxService

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
        *(({"sandbox": {"kind": kind}}, 'check = "tests" links two programs') for kind in ("docker", "gvisor")),
        ({"sandbox": {"kind": "command", "command": ["nsjail"]}}, 'check = "tests" links two programs'),
        ({"sandbox": {"kind": "docker", "packages": ["/a"]}, "check": "output"}, "not by python or packages of this"),
        ({"sandbox": {"kind": "http", "url": "http://a", "python": "/a"}}, "not by python or packages of this"),
        ({"sandbox": {"packages": ["a/b"]}}, "packages holds 'a/b'; expected an absolute path"),
        ({"sandbox": {"packages": ["/"]}}, "packages holds '/'; expected an absolute path"),
        ({"sandbox": {"image": "python:3.12-slim"}}, "image goes with"),
        ({"sandbox": {"api_key": "SANDBOX"}}, "api_key goes with"),
        ({"sandbox": {"kind": "http", "url": "http://a", "api_key": "not a name"}}, "api_key"),
    ],
)
def test_settings_that_mean_nothing_are_refused(keys: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        CodeReward(**keys)


def test_what_cannot_run_here_is_refused_before_anything_is_generated():
    with pytest.raises(ConfigError, match="language 'cobol' of reward code is not known"):
        load_reward(spec_of(check="output", language="cobol"))
    with pytest.raises(ConfigError, match="no sandbox of kind command"):
        load_reward(spec_of(check="output", sandbox={"kind": "command", "command": ["there-is-no-such-program"]}))


def test_where_programs_run_is_no_part_of_the_id_and_what_they_find_there_is():
    def identity(**sandbox: Any) -> Any:
        return spec_of(check="output", sandbox=sandbox).cache_identity()["sandbox"]

    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert (
        source_id(spec_of()) == source_id(spec_of(sandbox={"kind": "bubblewrap"})) == source_id(spec_of(sandbox="none"))
    )
    assert source_id(spec_of()) != source_id(spec_of(value="share"))
    assert identity() == {"python": version, "packages": []}
    assert identity(python="/usr/bin/python3.12", packages=["/a"]) == {
        "python": "/usr/bin/python3.12",
        "packages": ["/a"],
    }
    assert identity(kind="docker", image="a") == identity(kind="gvisor", image="a") == {"image": "a"}
    assert identity(kind="command", command=["a", "b"]) == {"command": ["a", "b"]}
    assert identity(kind="command", command=["a", "{image}"]) == {
        "command": ["a", "{image}"],
        "image": "python:3.11-slim",
    }
    assert (
        identity(kind="http", url="http://a", api_key="KEY")
        == identity(kind="http", url="http://b")
        == {"service": True}
    )


def test_a_services_key_is_a_secret_by_name(monkeypatch: pytest.MonkeyPatch):
    with Sandbox() as sandbox:
        service = SandboxService(sandbox, api_key="the-key").start()
        spec = spec_of(sandbox={"kind": "http", "url": service.url, "api_key": "SANDBOX"})
        monkeypatch.setenv("ROLLOUT_SECRETS", "SANDBOX")
        try:
            with pytest.raises(ConfigError, match="secret 'SANDBOX' is not set"):
                load_reward(spec)
            monkeypatch.setenv("ROLLOUT_SECRET_SANDBOX", "another")
            with pytest.raises(ConfigError, match="no valid API key") as refused:
                load_reward(spec)
            assert "another" not in str(refused.value)
            monkeypatch.setenv("ROLLOUT_SECRET_SANDBOX", "the-key")
            reward = load_reward(spec)
            assert score(reward, inputs((ADD, ROW))) == [1]
            reward.close()
        finally:
            service.close()


def test_the_interpreter_of_a_virtual_environment_brings_its_packages():
    reward = load_reward(spec_of(check="output", memory_mb=1024, sandbox={"python": sys.executable}))
    row = {"cases": [{"input": "", "output": "3"}]}
    try:
        assert score(reward, inputs(("import regex\nprint(len(regex.findall('a', 'aaba')))", row))) == [1]
    finally:
        reward.close()


def test_objects_of_a_program_answer_where_they_are_asked_for():
    row = {"tests": "assert head([4]).value == 4"}
    program = "class Node:\n    def __init__(self, value): self.value = value\ndef head(xs): return Node(xs[0])"
    for objects, expected in ((None, 0), (True, 1)):
        reward = load_reward(spec_of(objects=objects))
        try:
            assert score(reward, inputs((program, row))) == [expected]
        finally:
            reward.close()


@pytest.mark.parametrize("value", ["all", "share"])
def test_threads_are_as_many_as_programs_run_at_a_time(value: Literal["all", "share"], monkeypatch: pytest.MonkeyPatch):
    grader = CodeGrader(CodeReward(check="output", value=value, **LIMITS, sandbox="none"))
    most, run = 0, grader._sandbox.run

    def counted(program: Program) -> Outcome:
        nonlocal most
        most = max(most, sum(thread.name.startswith("rollout-code") for thread in threading.enumerate()))
        return run(program)

    grader._sandbox.parallel = 4
    monkeypatch.setattr(grader._sandbox, "run", counted)
    row = {"cases": [{"input": "", "output": "1"}] * 6}
    try:
        assert grader(inputs(*[("echo 1" if value == "share" else "print(1)", row)] * 6)) == [value == "all"] * 6
    finally:
        grader.close()
    assert 0 < most <= 4


def test_a_machine_that_has_no_sandbox_any_more_is_no_samples_fault(monkeypatch: pytest.MonkeyPatch):
    reward = load_reward(spec_of(check="output"))

    def refuse(sandbox: Sandbox, program: Program) -> Outcome:
        raise NoSandbox("this machine has no sandbox")

    monkeypatch.setattr(Sandbox, "run", refuse)
    row = {"cases": [{"input": "", "output": "1"}]}
    try:
        with pytest.raises(Fatal, match="failed on the batch of 2 samples: NoSandbox: this machine has no sandbox"):
            judge(reward, inputs((ADD, row), (ADD, row)))
    finally:
        reward.close()


@pytest.mark.parametrize("check", ["tests", "output"])
def test_a_broken_row_fails_alone(check: str):
    reward = load_reward(spec_of(check=check))
    broken = {"tests": "assert add(", "cases": []}
    row = {**ROW, "cases": [{"input": "", "output": ""}]}
    try:
        with pytest.raises(Fatal, match="reward code failed on sample 1: "):
            score(reward, inputs((ADD, row), (ADD, broken)))
        assert score(reward, inputs((ADD, row))) == [1]
    finally:
        reward.close()

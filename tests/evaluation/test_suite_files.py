"""Suites by name and file: built-in ones, TOML, and Python files whose code runs in a process of its own."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import FunctionRows, Suite
from rollout_core.data.datasets import PromptRow, TaskRow
from rollout_core.evaluation.suite_files import builtin_names, function_rows, read_suite

SOUND = """
    from helper import DIGITS

    suite = {
        "name": "sums",
        "prompt": {"text": "{{ question }} =", "few_shot": {"count": 1}},
        "sampling": {"max_tokens": 8},
    }

    def rows():
        for n in DIGITS:
            yield {"question": f"{n} + 1", "answer": n + 1}

    def examples():
        return [{"question": "7 + 1", "answer": 8}]

    def score(sample):
        return float(str(sample.extras["answer"]) in sample.completion)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "helper.py").write_text("DIGITS = range(3)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str) -> str:
    (folder / "suite.py").write_text(dedent(text))
    return "suite.py"


def rows_of(name: str) -> list[dict[str, Any]]:
    return [row.task for row in function_rows(FunctionRows(kind="function", callable=name), TaskRow)]


def test_a_python_file_gives_the_settings_and_names_its_functions(folder: Path):
    table = read_suite(write(folder, SOUND))
    assert table["rows"] == {"kind": "function", "callable": "suite.py:rows"}
    assert table["scorer"] == {"kind": "function", "callable": "suite.py:score"}
    assert table["prompt"]["few_shot"]["rows"] == {"kind": "function", "callable": "suite.py:examples"}
    assert Suite.model_validate(table).sampling.temperature == 0
    assert rows_of("suite.py:rows") == [{"question": f"{n} + 1", "answer": n + 1} for n in range(3)]


def test_a_function_may_make_the_settings_which_go_before_functions(folder: Path):
    text = """
        def suite():
            return {"name": "s", "rows": {"path": "rows.jsonl"}, "scorer": {"kind": "math"}}

        def rows():
            raise RuntimeError("not asked")

        def score(sample):
            return 0.0
    """
    assert read_suite(write(folder, text)) == {
        "name": "s",
        "rows": {"path": "rows.jsonl"},
        "scorer": {"kind": "math"},
    }


def test_the_file_is_run_in_a_process_of_its_own(folder: Path):
    text = SOUND + '\n    import os\n    suite["name"] = f"of-{os.getpid()}"\n'
    assert read_suite(write(folder, text))["name"] != read_suite("suite.py")["name"]


def test_prompts_may_be_made_whole(folder: Path):
    write(folder, 'def rows():\n    return [{"prompt": "Hi", "answer": "x", "id": 1}]\n')
    [row] = function_rows(FunctionRows(kind="function", callable="suite.py:rows"), PromptRow)
    assert (row.prompt, row.id, row.extras) == ("Hi", "1", {"answer": "x"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("suite = {", "suite file .*suite.py fails on import: SyntaxError"),
        ("import nothing_like_it", "suite file .*suite.py fails on import: ModuleNotFoundError"),
        ("1 / 0", "suite file .*suite.py fails on import: ZeroDivisionError"),
        ("import sys\nsys.exit(3)", "suite file .*suite.py fails on import: SystemExit"),
        ("import os\nos._exit(3)", "suite.py:suite cannot be run: it ended its process with exit code 3"),
        ("tables = {}", "suite.py has no suite; expected a table or a function"),
        ("suite = ['a']", r"suite is \['a'\]; expected a table of a suite's keys"),
        ("def suite():\n    raise ValueError('no data here')", "suite of suite.py failed: ValueError: no data here"),
        ("def suite(path):\n    return {}", "suite of suite.py failed: TypeError"),
        ("suite = {'name': {1, 2}}", "value has no canonical JSON form"),
        ("suite = {'name': 's'}", "suite.py: rows: required, but not given"),
        (
            "suite = {'name': 's', 'rows': {'path': 'x'}, 'metric': []}",
            "suite.py: metric: unknown key; did you mean 'metrics'",
        ),
    ],
)
def test_a_broken_file_is_one_clear_error(folder: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        read_suite(write(folder, text))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 'abc'", "it returned 'abc'; expected rows"),
        ("return []", "it returned no rows"),
        ("return None", "it returned None; expected rows"),
        ("return [1]", "row 1 is 1; expected an object"),
        ("yield {'a': 1}\n    raise KeyError('b')", "rows of suite.py failed: KeyError"),
        ("return [{'a': float('nan')}]", "value has no canonical JSON form"),
        ("return [{}]", "suite.py:rows, row 1: a task needs at least one key"),
    ],
)
def test_rows_that_are_none_are_one_clear_error(folder: Path, body: str, message: str):
    write(folder, f"def rows():\n    {body}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        rows_of("suite.py:rows")
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_not_there_is_named(folder: Path):
    with pytest.raises(ConfigError, match=r"suite file none\.py does not exist"):
        read_suite("none.py")
    with pytest.raises(ConfigError, match=r"none\.toml: no such config file"):
        read_suite("none.toml")


def test_built_in_suites_are_sound_and_take_rows_of_a_file():
    assert builtin_names() == ["gsm8k", "ifeval", "mmlu"]
    for name in builtin_names():
        found = Suite.model_validate(read_suite(name))
        assert (found.name, found.rows.kind) == (name, "hugging_face")
    local = Suite.model_validate(read_suite("gsm8k", rows="sums.jsonl"))
    assert local.rows.address == "sums.jsonl"
    assert local.prompt is not None and local.prompt.few_shot is not None
    assert local.prompt.few_shot.rows.address == "sums.jsonl"


def test_a_name_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="suite 'mmul': there is no such suite and no such file; did you mean 'mmlu'"):
        read_suite("mmul")

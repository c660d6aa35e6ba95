"""`rollout eval`: what is refused before anything starts, and what a dry run prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from deployments.cli import app
from rollout_core.base.ids import hash_bytes

SUITE = """
name = "sums"
rows = { path = "sums.jsonl" }
prompt = { text = "{{ question }} =" }
sampling = { max_tokens = 8 }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = ({"question": f"sort {n} 1", "answer": f"1 {n}"} for n in range(2, 5))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.toml").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return tmp_path


def rollout(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", *arguments])


def refused(result: Result, code: int = 2) -> list[str]:
    assert (result.exit_code, result.stdout) == (code, ""), (result.stdout, result.stderr, result.exception)
    return [line.removeprefix("rollout: ") for line in result.stderr.splitlines()]


def test_a_dry_run_says_what_would_be_asked(tiny_model: Path):
    options = ("--suite", "sums.toml", "--backend", "transformers", "--dry-run")
    result = rollout("run", str(tiny_model), *options, "--set", "backend.max_model_len=64")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"dry-run OK: model={tiny_model}\nquestions:\n  sums  3\n"


def test_everything_that_is_wrong_with_files_is_said_with_their_names(folder: Path, tiny_model: Path):
    (folder / "one.toml").write_text(SUITE.replace("text", "txet"))
    (folder / "two.toml").write_text(SUITE + "samples = 0\nmetric = 1\n")
    (folder / "three.toml").write_text("name = ")
    files = [option for name in ("one", "two", "three", "four") for option in ("--suite", f"{name}.toml")]
    lines = refused(rollout("run", str(tiny_model), *files))
    assert [line.partition(":")[0] for line in lines] == [
        "one.toml",
        "two.toml",
        "two.toml",
        "three.toml",
        "four.toml",
    ]
    assert lines[0] == "one.toml: prompt.txet: unknown key; did you mean 'text'?"
    assert lines[-1] == "four.toml: no such config file"


def test_options_are_named_where_their_values_are_wrong(tiny_model: Path):
    options = ("--suite", "sums.toml", "--backend", "scripted", "--set", "backend.delay=1")
    [line] = refused(rollout("run", str(tiny_model), *options))
    assert "--set" in line and "backend.delay: unknown key" in line


def test_a_model_that_is_not_there_is_refused():
    [line] = refused(rollout("run", "no/where/at-all", "--suite", "sums.toml", "--backend", "scripted", "--dry-run"))
    assert line.startswith("model: ")


def test_there_is_no_latest_model_before_one_is_promoted():
    [line] = refused(rollout("run", "latest", "--suite", "sums.toml", "--backend", "scripted"))
    assert line == "'policy' serves no model of ours; `rollout promotions` lists what does"


def test_nothing_is_listed_before_a_model_is_evaluated():
    assert rollout("list").stdout.startswith("no model was evaluated yet; ")
    assert json.loads(rollout("list", "--format", "json").stdout) == []


def test_models_that_were_not_evaluated_are_not_compared():
    [line] = refused(rollout("compare", hash_bytes(b"a"), hash_bytes(b"b")))
    assert line.endswith("is recorded; `rollout eval list` lists the models that have one")

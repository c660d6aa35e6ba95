"""`rollout plugins`: what there is, what is wrong with it, its test cases, and a first one that works."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from rollout_core import __version__
from rollout_core.config import TrainGRPOConfig
from rollout_core.plugins.cases import TEST_CASES, TEST_SECONDS
from rollout_core.plugins.manifest import KINDS

EXAMPLES = Path(__file__).parents[2] / "examples/plugins"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plugins", *words])
    return result.exit_code, result.output


@pytest.mark.parametrize("mode", ["in-process", "sidecar"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_plugin_passes_its_own_test(kind: str, mode: str):
    began = time.monotonic()
    code, output = run("new", kind, "words", "--mode", mode)
    assert code == 0, output
    assert output.splitlines()[-2] == "next: rollout plugins test plugins/words"
    code, output = run("test", "plugins/words")
    assert code == 0, output
    assert "plugin words 0.1.0: 2 test cases passed in " in output
    code, output = run("check", "plugins/words")
    assert code == 0, output
    assert f"plugin words 0.1.0 is right: {KINDS[kind]}, 4 files, id " in output
    assert time.monotonic() - began < TEST_SECONDS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("storage", "x"),
            f"kind of plugin: got 'storage'; expected one of {', '.join(map(repr, KINDS))}",
        ),
        (("reward", "../x"), "name: String should match pattern"),
        (("reward", "x", "--mode", "cdylib"), "--mode: got 'cdylib'; expected one of 'in-process', 'sidecar'"),
        (("reward", "there"), "plugins/there: got a folder that is there already; expected a new one"),
    ],
)
def test_what_cannot_be_begun_writes_nothing(here: Path, words: tuple[str, ...], said: str):
    (here / "plugins/there").mkdir(parents=True)
    code, output = run("new", *words)
    assert (code, output.count("\n")) == (2, 1)
    assert said in output
    assert [path.name for path in here.rglob("*")] == ["plugins", "there"]


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.iterdir()))
def test_the_examples_pass_their_own_tests(example: str):
    code, output = run("test", str(EXAMPLES / example))
    assert code == 0, output


def test_a_case_that_fails_is_named_by_its_line(here: Path):
    mine = shutil.copytree(EXAMPLES / "brevity", here / "mine")
    cases = mine / TEST_CASES
    cases.write_text(cases.read_text().replace("0.25", "0.5"))
    code, output = run("test", "mine")
    assert code == 1
    assert f"{TEST_CASES}:2: got 0.25; expected 0.5" in output
    assert "plugin brevity 0.1.0: 1 of 3 test cases failed" in output


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "got no test cases; expected lines of test-cases.jsonl"),
        ("{", "test-cases.jsonl:1: got what is no JSON"),
        ('{"input": {"prompt": "a", "completion": "b"}}', "test-cases.jsonl:1: reward: required, but not given"),
        ('{"input": {"prompt": "a"}, "reward": 1}', "test-cases.jsonl:1: input.completion: required, but not given"),
        (
            '{"input": {"prompt": "a", "completion": "b", "extra": {}}, "reward": 1}',
            "test-cases.jsonl:1: input.extra: unknown field; did you mean 'extras'?",
        ),
    ],
)
def test_cases_that_are_none_are_refused(here: Path, line: str, said: str):
    mine = shutil.copytree(EXAMPLES / "brevity", here / "mine")
    (mine / TEST_CASES).write_text(f"{line}\n")
    code, output = run("test", "mine")
    assert code == 2
    assert said in output


def test_the_list_tells_what_is_taken_in_place_of_what_and_what_is_wrong(here: Path):
    shutil.copytree(EXAMPLES / "brevity", here / "given/brevity")
    shutil.copytree(EXAMPLES / "brevity", here / "plugins/brevity")
    broken = shutil.copytree(EXAMPLES / "brevity-shell", here / "plugins/shell")
    manifest = broken / "rollout-plugin.toml"
    manifest.write_text(manifest.read_text().replace('"reward-model"', '"queue"'))
    code, output = run("list", "--plugin", "given", "--json")
    assert code == 0, output
    first, second, third = [one for one in json.loads(output) if one["found_in"] != "built in"]
    assert (first["name"], first["found_in"], first["shadowed_by"]) == ("brevity", "--plugin", None)
    assert (second["found_in"], second["shadowed_by"]) == ("./plugins", str(here / "given/brevity"))
    assert first["id"] == second["id"]
    assert (third["name"], third["id"]) == ("brevity-shell", None)
    assert "kind: plugins of kind 'queue' are not supported yet" in third["problem"]
    _, table = run("list", "--plugin", "given")
    assert f"not taken: {here / 'given/brevity'} is before it" in " ".join(table.split())
    code, shown = run("show", "brevity", "--plugin", "given")
    assert code == 0
    assert f"taken in place of {here / 'plugins/brevity'} (./plugins)" in shown
    assert "network   none" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "brevity"), "no plugin is named 'brevity'; `rollout plugins list` prints those that are here"),
        (("check", "nowhere"), "plugin folder nowhere: got no rollout-plugin.toml; expected one"),
        (("check", str(EXAMPLES / "brevity"), "--config", '{"limit": 0}'), "config.limit: 0 is less than the minimum"),
        (("check", str(EXAMPLES / "brevity"), "--config", "[]"), "--config: got []; expected an object"),
        (("list", "--plugin", "nowhere"), "nowhere: got no folder; expected one with rollout-plugin.toml"),
    ],
)
def test_what_is_wrong_is_one_line(words: tuple[str, ...], said: str):
    code, output = run(*words)
    assert (code, output.count("\n")) == (2, 1)
    assert said in output


def test_a_python_plugin_that_fails_on_import_is_named(here: Path):
    mine = shutil.copytree(EXAMPLES / "brevity", here / "mine")
    (mine / "brevity.py").write_text("import a_module_beside_it\n")
    (here / "a_module_beside_it.py").write_text("")
    code, output = run("check", "mine")
    assert code == 2
    assert "plugin brevity: brevity:create_plugin fails: ModuleNotFoundError: No module named 'a_module_" in output


def test_what_is_built_in_is_listed_by_the_names_that_a_configuration_takes():
    code, output = run("list", "--json")
    assert code == 0, output
    listed = {(one["kind"], one["name"]) for one in json.loads(output)}
    assert all(one["version"] == __version__ for one in json.loads(output))
    definitions = TrainGRPOConfig.model_json_schema()["$defs"]
    for table, kind in (("Environment", "env-harness"), ("Tool", "tool-harness"), ("Backend", "inference-backend")):
        taken = {
            definition["properties"]["kind"].get("const")
            for name, definition in definitions.items()
            if name.endswith(table) and "kind" in definition["properties"]
        }
        assert taken - {"plugin", "harbor"} <= {name for of, name in listed if of == kind}
        assert taken, table
    assert {("reward-model", "exact_match"), ("reward-model", "composite"), ("tracker", "tensorboard")} <= listed
    assert not [name for _, name in listed if name in ("plugin", "harbor")], "one is each plugin, one is refused"
    _, table = run("list")
    assert "no plugin is here; `rollout plugins new reward-model NAME` begins one" in table
    assert "def reward(sample: RewardInput) -> float | None" in " ".join(table.split())
    assert "A game of TextArena that one player plays" in " ".join(table.split())

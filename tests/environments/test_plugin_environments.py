"""Environments that plugins have: the same episodes as those of a user's own file, and what a sidecar does wrong costs
one attempt of the episode that it does it to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config.base import EnvironmentRows
from rollout_core.config.environments import PluginEnvironment
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.hosts import look_at, rows_of
from rollout_core.objects import ObjectStore
from rollout_core.objects.origins import sources_of
from tests.environments import hostile_sidecar
from tests.environments.acting import Scene, called
from tests.environments.test_episodes import ROWS, SUMS, adds

IN_PROCESS = """\
name = "sums"
version = "1.0"
kind = "env-harness"
trait_id = "rollout_core::EnvHarness"
mode = "in-process"
network_allowlist = []
runtime = { python_min = "3.11" }
entry = { in-process = { module = "sums", factory = "create_plugin" } }
"""
SIDECAR = """\
name = "hostile"
version = "1.0"
kind = "env-harness"
trait_id = "rollout_core::Plugin"
mode = "sidecar"
network_allowlist = []
config_schema_path = "schema.json"
limits = { start_seconds = 5 }
entry = { sidecar = { command = ["{python}", "main.py"] } }
"""


def write_sums(base: Path, code: str = SUMS) -> None:
    folder = base / "plugins/sums"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rollout-plugin.toml").write_text(IN_PROCESS)
    (folder / "sums.py").write_text(f"{code}\n\ndef create_plugin(config):\n    return Env\n")


@pytest.fixture
def hostile(scene: Scene) -> dict[str, Any]:
    """A configuration of the plugin of `hostile_sidecar`, which is there."""
    folder = scene.folder / "plugins/hostile"
    folder.mkdir(parents=True)
    (folder / "rollout-plugin.toml").write_text(SIDECAR)
    (folder / "schema.json").write_text("{}")
    shutil.copy(hostile_sidecar.__file__, folder / "main.py")
    marks = scene.folder / "marks"
    marks.mkdir()
    return {"marks": str(marks)}


async def test_an_answer_longer_than_its_manifest_allows_costs_an_attempt(scene: Scene):
    write_sums(scene.folder, SUMS.replace('return f"{row', 'return "x" * 2**20 + f"{row'))
    tally = await scene.play(scene.engine(adds), ROWS[:1], plugin="sums", max_attempts=1)
    assert (tally.failed, tally.attempts_failed) == (1, 1)
    assert "reset gave 1048" in (tally.first_failure or "")
    assert "bytes; 1048576 are allowed (limits.answer_bytes)" in (tally.first_failure or "")


def code_of(base: Path, name: str, **config: Any) -> tuple[EnvironmentCode, PluginEnvironment]:
    settings = PluginEnvironment(kind="plugin", name=name, config=config)
    return EnvironmentCode.of(settings, base), settings


async def test_a_python_plugin_plays_the_episodes_of_the_same_class(scene: Scene):
    write_sums(scene.folder)
    tally = await scene.play(scene.engine(adds), ROWS, group=2, plugin="sums")
    assert (tally.done, tally.failed, dict(tally.endings)) == (12, 0, {"done": 12})
    assert [row.reward for row in await scene.ended(ROWS, group=2)] == [pytest.approx(0.9)] * 12


@pytest.mark.parametrize(
    "how",
    ["hang", "crash", "signal", "garbage", "long", "flood", "close", "no messages", "no object", "says", "nan"],
)
async def test_what_a_sidecar_does_wrong_costs_one_attempt_of_its_episode(
    scene: Scene, hostile: dict[str, Any], how: str
):
    rows = [{"task": f"{kind}{number}", "how": kind, "at": 2} for kind in (how, "none") for number in range(2)]
    is_lasting = how == "nan"
    tally = await scene.play(
        scene.engine(lambda text, seed: f"answer {seed}"),
        rows,
        plugin="hostile",
        config=hostile,
        turn_seconds=5.0 if how in ("hang", "flood") else 60.0,  # a busy machine is slow
        max_attempts=2,
    )
    ended = [(found.status, found.reward) for found in await scene.ended(rows)]
    assert ended == [("failed", None) if is_lasting else ("succeeded", 3.0)] * 2 + [("succeeded", 3.0)] * 2
    failed = [await scene.num_failed(row) for row in rows]
    assert failed == [1 + is_lasting] * 2 + [0, 0]
    said = {
        "hang": "step took longer than 5 s",
        "crash": "plugin hostile: at step it ended with exit status 3 before it answered",
        "signal": "at step it ended with signal SIGSEGV before it answered",
        "garbage": "which is no JSON",
        "long": "1048576 are allowed (limits.answer_bytes)",
        "flood": "step took longer than 5 s",
        "close": "at step it closed its socket before it answered",
        "no messages": "step gave None (NoneType); expected a text, a message or a list of messages",
        "no object": "plugin hostile: at step it answered with [1]; expected an object",
        "says": "plugin hostile: at step it says: no more cards",
        "nan": "reward gave nan (float); expected a finite number",
    }
    assert said[how] in (tally.first_failure or "")


async def test_a_sidecar_serves_many_episodes_and_is_told_of_the_end_of_each(scene: Scene, hostile: dict[str, Any]):
    rows = [{"task": str(number), "how": "none", "at": 0} for number in range(12)]

    def says(text: str, seed: int) -> str:
        return "done" if "tool: " in text else called("echo", text="twice") if "turn 1" in text else called("echo")

    tally = await scene.play(scene.engine(says), rows, plugin="hostile", config=hostile, max_turns=3)
    assert (tally.done, tally.attempts_failed) == (12, 0)
    spans = await scene.spans(rows[0])
    assert [span.attributes["agentlightning.operation.output"][:16] for span in spans if "operation" in span.name] == [
        "wrong arguments:"
    ]
    closed = (scene.folder / "marks/closed").read_text().splitlines()
    assert len(set(closed)) == len(closed) == 12


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hang": True}, "cannot be loaded: it took longer than 5 s"),
        ({"describes": {"tools": {}}}, "at describe, tools: got {}; expected a list of objects"),
        ({"describes": {"tools": [{"name": "a"}]}}, "expected name and description, texts, and parameters"),
        (
            {"describes": {"tools": [{"name": "a", "description": "b", "parameters": {"type": "objekt"}}]}},
            "at describe, parameters of tool a: got \"'objekt' is not valid under any of the given schemas\"",
        ),
        (
            {"describes": {"tools": [{"name": "a b", "description": "b", "parameters": {}}]}},
            "at describe: further_tools gave tools called a b; expected names of letters, each once",
        ),
        ({"describes": {"has_step": "yes"}}, "at describe, has_step: got 'yes'; expected true or false"),
    ],
)
def test_a_sidecar_that_describes_what_is_none_is_refused_by_the_plan(
    scene: Scene, hostile: dict[str, Any], config: dict[str, Any], said: str
):
    with pytest.raises(ConfigError) as error:
        look_at(*code_of(scene.folder, "hostile", **hostile, **config))
    assert said in str(error.value)


def test_a_sidecar_without_rows_of_its_own_says_so(scene: Scene, hostile: dict[str, Any]):
    with pytest.raises(ConfigError, match="plugin hostile: at make_rows it says: no method make_rows"):
        rows_of(*code_of(scene.folder, "hostile", **hostile), EnvironmentRows(kind="environment"))


def test_files_version_and_configuration_are_the_id_and_where_they_lie_is_not(scene: Scene, hostile: dict[str, Any]):
    def id_of(**config: Any) -> str:
        code, settings = code_of(scene.folder, "hostile", **config)
        return code.id(settings, scene.folder)

    first = id_of(a=1)
    assert id_of(a=2) != first
    own = scene.folder / "plugins/hostile"
    manifest = own / "rollout-plugin.toml"
    manifest.write_text(manifest.read_text().replace('"1.0"', '"1.1"'))
    assert id_of(a=1) != first
    manifest.write_text(SIDECAR)
    own.rename(scene.folder / "plugins/elsewhere")
    assert id_of(a=1) == first


def test_what_is_filed_is_what_is_played_without_the_folder(scene: Scene, tmp_path: Path):
    write_sums(scene.folder)
    code, settings = code_of(scene.folder, "sums")
    objects = ObjectStore.from_url(f"file://{tmp_path}/filed")
    source = code.file(objects, settings, scene.folder)
    shutil.rmtree(scene.folder / "plugins")
    filed = EnvironmentCode.filed(objects, source)
    filed.check(source, settings, scene.folder)
    assert [tool["function"]["name"] for tool in look_at(filed, settings).tools] == ["add", "submit"]
    [place] = sources_of(objects, source.id)
    assert (place.kind, place.address, place.num_files) == ("environment", "plugin sums 1.0", 2)


def test_a_limit_that_would_have_no_effect_is_refused(scene: Scene, hostile: dict[str, Any]):
    manifest = scene.folder / "plugins/hostile/rollout-plugin.toml"
    manifest.write_text(SIDECAR.replace("start_seconds = 5", "call_seconds = 5.0"))
    with pytest.raises(
        ConfigError, match=r"limits.call_seconds: got 5.0; expected none for kind 'env-harness': turn_s"
    ):
        code_of(scene.folder, "hostile")

"""Tools that plugins have: what the model reads, what a plugin keeps of an episode, and what it does wrong."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config.environments import PythonEnvironment
from rollout_core.config.tools import FilesTool, PluginTools
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.protocol import EnvironmentFailed, HostEnded
from rollout_core.environments.tools.plugin_tools import PluginToolProcesses
from rollout_core.environments.tools.toolbox import Toolbox, ToolResources
from rollout_core.objects import ObjectStore
from rollout_core.plugins import host
from rollout_core.plugins.discovery import find_plugin
from tests.environments import hostile_sidecar
from tests.environments.acting import Scene, called
from tests.environments.test_plugin_environments import IN_PROCESS, SIDECAR

COUNTER = '''
from rollout_core.environments import ToolError


class Counter:
    def __init__(self, word):
        self.word, self.uses = word, 0

    async def echo(self, text: str, times: int = 1) -> str:
        """Say it again."""
        if text == "no":
            raise ToolError("not that")
        if text == "fail":
            raise KeyError("lost")
        self.uses += 1
        return f"{self.uses} {self.word} {text * times}"

    def close(self):
        print("closed", self.uses, flush=True)


def create_plugin(config):
    return lambda: Counter(config.get("word", ""))
'''
ENV = """
class Env:
    def reset(self, row, seed):
        return "go"

    def step(self, message):
        self.said = message["content"]

    def reward(self):
        return float(getattr(self, "said", "") == "done")
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "FIRST_PAUSE_SECONDS", 0.01)


def write_counter(base: Path) -> None:
    folder = base / "plugins/sums"
    folder.mkdir(parents=True, exist_ok=True)
    manifest = IN_PROCESS.replace("env-harness", "tool-harness").replace("EnvHarness", "ToolHarness")
    (folder / "rollout-plugin.toml").write_text('config_schema_path = "schema.json"\n' + manifest)
    (folder / "schema.json").write_text("{}")
    (folder / "sums.py").write_text(COUNTER)


def write_hostile(base: Path) -> dict[str, Any]:
    """The plugin of `hostile_sidecar`; a configuration of it."""
    folder = base / "plugins/hostile"
    folder.mkdir(parents=True)
    manifest = SIDECAR.replace("env-harness", "tool-harness").replace("start_seconds = 5", "call_seconds = 2")
    (folder / "rollout-plugin.toml").write_text(manifest)
    (folder / "schema.json").write_text("{}")
    shutil.copy(hostile_sidecar.__file__, folder / "main.py")
    (base / "marks").mkdir()
    return {"marks": str(base / "marks")}


def resources_of(base: Path, *specs: Any) -> ToolResources:
    return ToolResources(specs, index_folder=base, base=base)


async def test_a_python_plugins_methods_are_tools_of_an_object_for_each_episode(tmp_path: Path):
    write_counter(tmp_path)
    spec = PluginTools(kind="plugin", name="sums", config={"word": "so"})
    resources = resources_of(tmp_path, FilesTool(), spec)
    try:
        resources.start()
        async with (
            Toolbox(resources.tools, tmp_path, resources=resources) as one,
            Toolbox(resources.tools, tmp_path, resources=resources) as other,
        ):
            assert [schema["function"]["name"] for schema in one.schemas] == ["files", "echo"]
            function = one.schemas[1]["function"]
            assert (function["name"], function["description"]) == ("echo", "Say it again.")
            said = [await box.call("echo", {"text": "a"}) for box in (one, one, other)]
            assert [found.text for found in said] == ["1 so a", "2 so a", "1 so a"]
            wrong = await one.call("echo", {"text": 1})
            assert wrong.is_error and "text" in wrong.text
            assert (await one.call("echo", {"text": "no"})).text == "not that"
            with pytest.raises(EnvironmentFailed, match="plugin sums: it failed: KeyError: 'lost'"):
                await one.call("echo", {"text": "fail"})
    finally:
        resources.close()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("hang", "plugin hostile: it took longer than 2 s"),
        ("crash", "plugin hostile: it ended with exit status 3 before it answered"),
        ("garbage", "which is no JSON"),
        ("long", "1048576 are allowed (limits.answer_bytes)"),
        ("flood", "plugin hostile: it wrote more than"),
        ("no object", "plugin hostile: it answered with [1]; expected an object"),
        ("text", "tool echo of plugin hostile answered with {}; expected text"),
    ],
)
async def test_what_a_plugin_does_wrong_costs_the_episode_that_asked_and_what_it_kept_of_others_is_not_made_up(
    tmp_path: Path, how: str, said: str
):
    spec = PluginTools(kind="plugin", name="hostile", config=write_hostile(tmp_path))
    resources = resources_of(tmp_path, spec)
    try:
        async with (
            Toolbox(resources.tools, tmp_path, resources=resources) as one,
            Toolbox(resources.tools, tmp_path, resources=resources) as other,
        ):
            assert (await other.call("echo", {"text": "a"})).text == "1 a"
            with pytest.raises(EnvironmentFailed) as error:
                await one.call("echo", {"text": f"do {how}"})
            assert said in str(error.value)
            if how in ("no object", "text"):
                assert (await other.call("echo", {"text": "a"})).text == "2 a"
            else:
                with pytest.raises(HostEnded, match="plugin hostile was started again, and what it kept of the"):
                    await other.call("echo", {"text": "a"})
        async with Toolbox(resources.tools, tmp_path, resources=resources) as again:
            assert (await again.call("echo", {"text": "b"})).text == "1 b"
    finally:
        resources.close()


async def test_episodes_whose_tool_crashes_are_played_again_and_every_one_counts(scene: Scene):
    config = write_hostile(scene.folder)
    scene.write(ENV)

    def says(text: str, seed: int) -> str:
        uses = text.count("tool: ")
        return "done" if uses == 3 else called("echo", text="do crash" if uses == 1 else "a")

    rows = [{"number": number} for number in range(6)]
    tools = ({"kind": "plugin", "name": "hostile", "config": config},)
    tally = await scene.play(scene.engine(says), rows, tools=tools)
    assert (tally.done, tally.failed, tally.attempts_failed) == (6, 0, 1)
    assert [row.reward for row in await scene.ended(rows)] == [1.0] * 6
    for row in rows:
        spans = await scene.spans(row)
        outputs = [span.attributes["agentlightning.operation.output"] for span in spans if "operation" in span.name]
        assert outputs == ["1 a", "2 do crash", "3 a"], "each by one state of the plugin"
    assert "plugin hostile: it ended with exit status 3" in (tally.first_failure or "")
    closed = (scene.folder / "marks/closed").read_text().splitlines()
    assert len(set(closed)) == len(closed) >= 6


def test_files_of_plugins_are_part_of_the_id_and_filed(scene: Scene, tmp_path: Path):
    write_counter(scene.folder)
    scene.write(ENV)

    def code_of(**table: Any) -> tuple[EnvironmentCode, PythonEnvironment]:
        spec = PluginTools(kind="plugin", name="sums", **table)
        settings = PythonEnvironment(path="env.py:Env", tools=(spec,))
        return EnvironmentCode.of(settings, scene.folder), settings

    code, settings = code_of()
    first = code.id(settings, scene.folder)
    objects = ObjectStore.from_url(f"file://{tmp_path}/filed")
    source = code.file(objects, settings, scene.folder)
    file = scene.folder / "plugins/sums/sums.py"
    file.write_text(COUNTER + "# edited\n")
    assert code_of()[0].id(settings, scene.folder) != first
    shutil.rmtree(scene.folder / "plugins")
    filed = EnvironmentCode.filed(objects, source)
    filed.check(source, settings, scene.folder)
    assert filed.tool_plugins["sums"].files["sums.py"].decode() == COUNTER
    assert json.dumps(PluginTools(kind="plugin", name="sums", processes=4).cache_identity()) == json.dumps(
        PluginTools(kind="plugin", name="sums", path="elsewhere").cache_identity()
    )


def test_names_that_two_tools_have_are_refused(tmp_path: Path):
    write_counter(tmp_path)
    resources = resources_of(tmp_path, FilesTool(name="echo"), PluginTools(kind="plugin", name="sums"))
    try:
        with pytest.raises(ConfigError, match="two tools are called 'echo'; rename one"):
            Toolbox(resources.tools, tmp_path, resources=resources)
    finally:
        resources.close()


def test_a_plugin_that_describes_what_is_no_tool_is_refused(tmp_path: Path):
    config = write_hostile(tmp_path) | {"describes": {"tools": [{"name": "a"}]}}
    spec = PluginTools(kind="plugin", name="hostile", config=config)
    processes = PluginToolProcesses(spec, find_plugin("hostile", tmp_path))
    try:
        with pytest.raises(ConfigError, match=r"plugin hostile: at describe, tools: got .* expected name and descr"):
            processes.described()
    finally:
        processes.close()


async def test_a_process_for_each_of_several_plays_them_at_once(tmp_path: Path):
    write_counter(tmp_path)
    spec = PluginTools(kind="plugin", name="sums", processes=2)
    resources = resources_of(tmp_path, spec)
    try:
        async with (
            Toolbox(resources.tools, tmp_path, resources=resources) as one,
            Toolbox(resources.tools, tmp_path, resources=resources) as other,
        ):
            said = await asyncio.gather(*(box.call("echo", {"text": "a"}) for box in (one, other)))
            assert [found.text for found in said] == ["1  a", "1  a"]
            figures = [process.plugin.take_figures() for process in resources.plugins["sums"]._processes]
            assert [one.calls for one in figures] in ([2, 1], [1, 2])
    finally:
        resources.close()

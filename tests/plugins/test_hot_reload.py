"""Edited files of a plugin are taken between two calls, by a process that reloads them; what is wrong with an edit is
said, and costs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_core.plugins import host
from rollout_core.plugins.host import PluginProcess
from rollout_core.plugins.identity import read_plugin
from rollout_core.plugins.scaffold import write_plugin
from rollout_core.rewards.plugin_rewards import ADAPTER

SAMPLE = {"prompt": "2 + 2 =", "completion": "four"}


class Edited:
    """A plugin that works, opened by a process that reloads it, or not; with what was said."""

    def __init__(self, folder: Path, mode: str) -> None:
        write_plugin("reward", "words", folder, mode)
        self.code = folder / ("plugin.py" if mode == "in-process" else "main.py")
        self.folder = folder
        self.lines: list[str] = []
        self.process: PluginProcess | None = None

    def open(self, *, reloads: bool = True) -> None:
        code, config = read_plugin(self.folder), {"word": "four"}
        self.process = PluginProcess(code, config, adapter=ADAPTER, on_line=self.lines.append, reloads=reloads)

    def replace(self, old: str, new: str) -> None:
        text = self.code.read_text()
        assert old in text
        self.code.write_text(text.replace(old, new))

    def reward(self) -> Any:
        assert self.process is not None
        [reward] = self.process.call({"inputs": [SAMPLE]})["rewards"]
        return reward

    def reloads(self) -> list[str]:
        """What edits came to: nothing, or what is wrong with them."""
        assert self.process is not None
        return [reload.problem for reload in self.process.take_figures().reloads]

    def starts(self) -> int:
        return sum(line.startswith("plugin_loaded") for line in self.lines)


@pytest.fixture(params=["in-process", "sidecar"])
def plugin(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edited]:
    monkeypatch.setattr(host, "FIRST_PAUSE_SECONDS", 0.01)
    edited = Edited(tmp_path / "words", request.param)
    yield edited
    if edited.process is not None:
        edited.process.close()


def test_an_edit_counts_from_the_next_call_on_and_without_reloading_never(plugin: Edited):
    plugin.open()
    assert plugin.reward() == 1.0
    plugin.replace("1.0 if", "0.25 if")
    assert (plugin.reward(), plugin.reward()) == (0.25, 0.25)
    assert plugin.reloads() == [""]
    assert plugin.starts() == 2
    assert any(
        re.fullmatch(r"plugin_reloaded words 0\.1\.0 \([0-9a-f]+\), in \d+\.\d+ s", line) for line in plugin.lines
    )
    assert plugin.process is not None
    plugin.process.close()
    plugin.open(reloads=False)
    assert plugin.reward() == 0.25
    plugin.replace("0.25 if", "0.5 if")
    assert plugin.reward() == 0.25
    assert plugin.reloads() == []


def test_a_file_that_is_saved_as_it_was_starts_nothing(plugin: Edited):
    plugin.open()
    assert plugin.reward() == 1.0
    plugin.code.write_text(plugin.code.read_text())
    assert plugin.reward() == 1.0
    assert (plugin.reloads(), plugin.starts()) == ([], 1)


def test_what_cannot_be_started_is_not_taken_until_it_is_mended(plugin: Edited):
    plugin.open()
    assert plugin.reward() == 1.0
    good = plugin.code.read_text()
    plugin.code.write_text("def broken(:\n")
    assert (plugin.reward(), plugin.reward()) == (1.0, 1.0)
    [problem] = plugin.reloads()
    assert problem.startswith("plugin words: ")
    assert any("edited files are not taken, and those it has stay: plugin words: " in line for line in plugin.lines)
    plugin.code.write_text(good.replace("1.0 if", "0.5 if"))
    assert plugin.reward() == 0.5
    assert plugin.reloads() == [""]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'name = "words"',
            'name = "other"',
            r"plugin words: its manifest is of reward-model other now; expected reward-",
        ),
        ('version = "0.1.0"', "version = 1", r".*rollout-plugin\.toml: version: Input should be a valid string"),
        (
            '"config.schema.json"',
            '"gone.json"',
            r".*config_schema_path: got 'gone\.json'; expected a file that the folder",
        ),
    ],
)
def test_a_manifest_that_is_wrong_is_not_taken(plugin: Edited, old: str, new: str, said: str):
    plugin.open()
    plugin.code = plugin.folder / "rollout-plugin.toml"
    plugin.replace(old, new)
    assert plugin.reward() == 1.0
    [problem] = plugin.reloads()
    assert re.match(said, problem), problem


def test_what_is_wrong_with_a_folder_is_said_once(plugin: Edited):
    plugin.open()
    (plugin.folder / "link").symlink_to(plugin.folder / "nowhere")
    assert [plugin.reward() for _ in range(3)] == [1.0] * 3
    [problem] = plugin.reloads()
    assert "link" in problem
    (plugin.folder / "link").unlink()
    plugin.replace("1.0 if", "0.25 if")
    assert plugin.reward() == 0.25


def test_a_schema_that_refuses_the_configuration_is_not_taken(plugin: Edited):
    plugin.open()
    plugin.code = plugin.folder / "config.schema.json"
    plugin.replace('"minLength": 1', '"minLength": 5')
    assert plugin.reward() == 1.0
    [problem] = plugin.reloads()
    assert "config.word: 'four' is too short" in problem


def test_limits_of_an_edited_manifest_hold(sidecar: Edited):
    sidecar.open()
    assert sidecar.reward() == 1.0
    sidecar.replace("            found = [", "            import time; time.sleep(60)\n            found = [")
    sidecar.code = sidecar.folder / "rollout-plugin.toml"
    sidecar.replace("call_seconds = 10", "call_seconds = 1")
    with pytest.raises(host.CallFailed, match="it took longer than 1 s"):
        sidecar.reward()


def test_a_folder_that_is_gone_leaves_what_runs(plugin: Edited):
    plugin.open()
    assert plugin.reward() == 1.0
    plugin.folder.rename(plugin.folder.with_name("elsewhere"))
    assert plugin.reward() == 1.0
    assert plugin.reloads() == []


# -- sidecars that reload by themselves -------------------------------------------------------------------------------

RELOADS = """
        elif method == "Reload":
            print("reload", payload, file=sys.stderr, flush=True)
            config = {"word": open("word.txt").read()}
            result = {"reloaded": True}
        elif method == "Call":
"""


@pytest.fixture
def sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edited]:
    monkeypatch.setattr(host, "FIRST_PAUSE_SECONDS", 0.01)
    edited = Edited(tmp_path / "words", "sidecar")
    (edited.folder / "word.txt").write_text("four")
    edited.replace('\n        elif method == "Call":\n', RELOADS)
    yield edited
    if edited.process is not None:
        edited.process.close()


def test_a_sidecar_that_answers_reload_goes_on_with_the_edited_files_in_its_folder(sidecar: Edited):
    sidecar.open()
    assert sidecar.reward() == 1.0
    (sidecar.folder / "word.txt").write_text("five")
    assert sidecar.reward() == 0.0
    assert (sidecar.reloads(), sidecar.starts()) == ([""], 1)
    assert "plugin words: reload {'files': ['word.txt']}" in sidecar.lines
    (sidecar.folder / "word.txt").unlink()
    assert sidecar.reward() == 1.0, "it ended, and was started again with its configuration"
    assert (sidecar.reloads(), sidecar.starts()) == ([""], 2)


@pytest.mark.parametrize(
    "done",
    [
        'result = {"reloaded": "yes"}',
        "result = []",
        "import os; os._exit(3)",
        "import time; time.sleep(60)",
        'connection.sendall(b"\\x00\\x00\\x00\\x01{")',
    ],
)
def test_one_that_answers_reload_in_another_way_is_started_again(sidecar: Edited, done: str):
    manifest = sidecar.folder / "rollout-plugin.toml"
    manifest.write_text(manifest.read_text().replace("call_seconds = 10", "call_seconds = 1"))
    sidecar.replace('result = {"reloaded": True}', done)
    sidecar.open()
    assert sidecar.reward() == 1.0
    sidecar.replace("1.0 if", "0.25 if")
    assert sidecar.reward() == 0.25
    assert (sidecar.reloads(), sidecar.starts()) == ([""], 2)


def test_a_manifest_that_changed_starts_it_again_unasked(sidecar: Edited):
    sidecar.open()
    assert sidecar.reward() == 1.0
    manifest = sidecar.folder / "rollout-plugin.toml"
    manifest.write_text(manifest.read_text().replace("0.1.0", "0.2.0"))
    assert sidecar.reward() == 1.0
    assert (sidecar.reloads(), sidecar.starts()) == ([""], 2)
    assert not any("reload" in line for line in sidecar.lines if not line.startswith("plugin_"))

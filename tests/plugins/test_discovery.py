"""Plugins are found in one order, and one that is in the place of another says so."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config.rewards import PluginReward
from rollout_core.plugins import discovery
from rollout_core.plugins.discovery import find_plugin
from rollout_core.plugins.manifest import MANIFEST
from rollout_core.rewards.loading import load_reward
from rollout_core.rewards.scoring import RewardInput, score
from tests.plugins.test_manifest import GOOD


def plugin(folder: Path, version: str, *, module: str = "plugin") -> Path:
    folder.mkdir(parents=True)
    text = GOOD.replace("0.1.0", version).replace('config_schema_path = "config.json"\n', "")
    (folder / MANIFEST).write_text(text.replace('module = "plugin"', f'module = "{module}"'))
    (folder / "plugin.py").write_text("def create_plugin(config): return lambda sample: 1.0\n")
    return folder


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("ROLLOUT_PLUGINS", raising=False)
    monkeypatch.setattr(discovery, "_told", set())
    return tmp_path


def test_plugins_are_found_in_one_order(base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def version(path: str | None = None) -> str:
        return find_plugin("brevity", base, path).manifest.version

    site = base / "site-packages"
    info = site / "brevity_plugin-5.dist-info"
    plugin(site / "brevity_plugin", "5", module="brevity_plugin.plugin")
    (site / "brevity_plugin/__init__.py").write_text("")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brevity-plugin\nVersion: 5\n")
    (info / "entry_points.txt").write_text("[rollout.plugins]\nbrevity = brevity_plugin\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    assert version() == "5"
    assert find_plugin("brevity", base).package == "brevity_plugin"
    reward = load_reward(PluginReward(kind="plugin", name="brevity"), base=base)
    try:
        assert score(reward, [RewardInput("2 + 2 =", "4")]) == [1.0]
    finally:
        reward.close()
    users = plugin(base / "data/rollout/plugins/mine", "4")
    assert version() == "4"
    here = plugin(base / "plugins/mine", "3")
    assert version() == "3"
    given = plugin(base / "elsewhere/mine", "2")
    monkeypatch.setenv("ROLLOUT_PLUGINS", str(given))
    assert version() == "2"
    monkeypatch.setenv("ROLLOUT_PLUGINS", str(given.parent))
    assert version() == "2"
    plugin(base / "configured", "1")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert version("configured") == "1"
        assert version("configured") == "1"
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"plugin brevity of {base}/configured (the configuration) is taken in place of the one of {other} ({origin})"
        for other, origin in [
            (given, "--plugin"),
            (here, "./plugins"),
            (users, "the user's folder"),
            (site / "brevity_plugin", "entry point brevity = brevity_plugin"),
        ]
    ]


def test_one_that_is_not_there_is_named_with_where_it_was_looked_for(base: Path):
    plugin(base / "plugins/mine", "3")
    with pytest.raises(
        ConfigError, match=r"no plugin is named 'brevty' in the folders of --plugin, .*; did you mean 'brev"
    ):
        find_plugin("brevty", base)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("nowhere", r"--plugin .*nowhere: got no folder; expected one with rollout-plugin\.toml"),
        ("empty", r"--plugin .*empty: got a folder; expected one with rollout-plugin\.toml"),
    ],
)
def test_a_given_folder_without_a_plugin_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch, path: str, sentence: str
):
    (base / "empty").mkdir()
    monkeypatch.setenv("ROLLOUT_PLUGINS", str(base / path))
    with pytest.raises(ConfigError, match=sentence):
        find_plugin("brevity", base)


def test_a_configured_folder_has_the_plugin_of_the_name(base: Path):
    plugin(base / "configured", "1")
    with pytest.raises(ConfigError, match="got the path configured, whose plugin is 'brevity'; expected 'long'"):
        find_plugin("long", base, "configured")


def test_another_plugin_with_a_bad_manifest_is_no_matter(base: Path):
    plugin(base / "plugins/mine", "3")
    (base / "plugins/broken").mkdir()
    (base / "plugins/broken" / MANIFEST).write_text("name = ")
    assert find_plugin("brevity", base).manifest.version == "3"
    with pytest.raises(ConfigError, match="not readable as TOML"):
        find_plugin("broken", base)

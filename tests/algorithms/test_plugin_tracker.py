"""Trackers of plugins get each step once, and no step waits for one."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from updates import sft_settings

from rollout_core.algorithms import plugin_tracker
from rollout_core.algorithms.training import Series, Tracking
from rollout_core.base.ids import content_id
from rollout_core.config import identity
from rollout_core.config.learning import PluginTracker
from rollout_core.plugins import host
from rollout_core.plugins.scaffold import write_plugin

HOSTILE = """
import os, sys, time

class Hostile:
    def __init__(self, how):
        self.how, self.count = how, 0

    def log(self, series, step, figures):
        self.count += 1
        if step == 2:
            if self.how == "hang":
                time.sleep(3600)
            if self.how == "crash":
                os._exit(3)
            if self.how == "raise":
                raise KeyError("lost")
            if self.how == "flood":
                while True:
                    sys.stdout.write("x" * 65536)
        if self.how == "always":
            raise KeyError("lost")


def create_plugin(config):
    return Hostile(config["file"])
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(host, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(plugin_tracker, "FINISH_SECONDS", 20.0)  # a busy machine starts processes slowly
    monkeypatch.setattr(plugin_tracker, "_hung", set())
    return tmp_path


def tracked(here: Path, file: str, steps: Sequence[int], value: float = 0.5) -> float:
    """Rows of these steps are logged; the longest time that one took."""
    series = Series(here, "run", content_id("test", {"series": 1}), content_id("test", {"update": 1}))
    longest = 0.0
    with Tracking([PluginTracker(kind="plugin", name="lines", config={"file": file})], series) as tracking:
        for step in steps:
            began = time.monotonic()
            tracking.log({"step": step, "loss": value})
            longest = max(longest, time.monotonic() - began)
    return longest


@pytest.mark.parametrize("mode", ["in-process", "sidecar"])
def test_each_step_is_delivered_once_and_in_order_also_by_a_run_that_is_resumed(here: Path, mode: str):
    write_plugin("tracker", "lines", here / "plugins/lines", mode)
    file = here / "figures.jsonl"
    tracked(here, str(file), [1, 2, 3])
    tracked(here, str(file), [2, 3, 4, 5], float("nan"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["step"], row["figures"]) for row in rows] == [
        *((step, {"loss": 0.5}) for step in (1, 2, 3)),
        *((step, {"loss": None}) for step in (4, 5)),
    ]
    assert {row["series"] for row in rows} == {content_id("test", {"series": 1})}


@pytest.mark.parametrize(
    ("how", "lost", "said"),
    [
        ("raise", 1, "plugin lines: it failed: KeyError: 'lost'"),
        ("crash", 1, "plugin lines: it ended its process with exit code 3"),
        ("flood", 1, "plugin lines: it wrote more than"),
        ("hang", 4, "it had not taken it 3 s after the last step"),
        ("always", 5, "plugin lines: it failed: KeyError: 'lost'"),
    ],
)
def test_what_a_tracker_does_wrong_holds_up_no_step_and_is_counted(
    here: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str, lost: int, said: str
):
    if how == "hang":
        monkeypatch.setattr(plugin_tracker, "FINISH_SECONDS", 3.0)
    folder = here / "plugins/lines"
    write_plugin("tracker", "lines", folder)
    (folder / "plugin.py").write_text(HOSTILE)
    with caplog.at_level(logging.WARNING):
        assert tracked(here, how, [1, 2, 3, 4, 5]) < 0.5
    assert f"tracker plugin lines: {lost} of 5 rows were not delivered; first: {said}" in caplog.text
    caplog.clear()
    if how == "hang":
        with caplog.at_level(logging.WARNING):
            began = time.monotonic()
            tracked(here, how, [1])
        assert time.monotonic() - began < 3.0
        assert "plugin lines (1) is dropped: Fatal: it held up the end of an earlier update" in caplog.text


CRASHES_ONCE = """
import os

class Lines:
    def open(self, series, run, **about):
        self.file = open(os.environ.get("FIGURES", "lines.txt"), "a")
        return 0

    def log(self, series, step, figures):
        if step == 2 and not os.path.exists("crashed"):
            open("crashed", "w").close()
            os._exit(3)
        self.file.write(f"{step} ")
        self.file.flush()


def create_plugin(config):
    os.chdir(config["file"])
    return Lines()
"""


def test_a_tracker_that_is_started_again_is_opened_again(here: Path, caplog: pytest.LogCaptureFixture):
    folder = here / "plugins/lines"
    write_plugin("tracker", "lines", folder)
    (folder / "plugin.py").write_text(CRASHES_ONCE)
    with caplog.at_level(logging.WARNING):
        tracked(here, str(here), [1, 2, 3, 4, 5])
    assert (here / "lines.txt").read_text().split() == ["1", "3", "4", "5"]
    assert "1 of 5 rows were not delivered" in caplog.text


def test_a_tracker_that_is_not_there_is_dropped(here: Path, caplog: pytest.LogCaptureFixture):
    tracked(here, "x", [1])
    assert "plugin lines (1) is dropped: ConfigError: no plugin is named 'lines'" in caplog.text


def test_no_id_depends_on_trackers():
    plugin = PluginTracker(kind="plugin", name="lines")
    assert identity(sft_settings(trackers=(plugin,))) == identity(sft_settings())

"""Python plugins are imported by processes of their own: what one does wrong costs its call, and it finds nothing that
its id does not have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.config.rewards import PluginReward
from rollout_core.plugins import host
from rollout_core.rewards.loading import load_reward
from rollout_core.rewards.scoring import RewardFunction, RewardInput, judge

MANIFEST = """
name = "mine"
version = "1"
kind = "reward"
trait_id = "rollout_core::Plugin"
mode = "in-process"
network_allowlist = []

[runtime]
python_min = "3.11"

[limits]
call_seconds = 2
answer_bytes = 2048
batch_size = {batch_size}

[entry.in-process]
module = "plugin"
factory = "create_plugin"
"""
Opened = Callable[..., RewardFunction]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Open the plugin that this code is."""
    monkeypatch.setattr(host, "FIRST_PAUSE_SECONDS", 0.01)
    rewards: list[RewardFunction] = []

    def load(code: str, *, batch_size: int = 1, **files: str) -> RewardFunction:
        folder = tmp_path / "plugins/mine"
        folder.mkdir(parents=True)
        (folder / "rollout-plugin.toml").write_text(MANIFEST.format(batch_size=batch_size))
        (folder / "plugin.py").write_text(code)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        rewards.append(load_reward(PluginReward(kind="plugin", name="mine"), base=tmp_path))
        return rewards[-1]

    yield load
    for reward in rewards:
        reward.close()


def judged(reward: RewardFunction, *completions: str) -> list[Any]:
    found = judge(reward, [RewardInput("2 + 2 =", completion, {"answer": "4"}) for completion in completions])
    return [str(value) if isinstance(value, Fatal) else value for value in found]


ATTACKS = """
import os, sys, time
def create_plugin(config):
    def reward(sample):
        match sample.completion:
            case "exit": os._exit(3)
            case "hang": time.sleep(3600)
            case "raise": raise KeyError("answr")
            case "text": return "1.0"
            case "long": raise ValueError("x" * 5000)
        return None if sample.completion == "abstain" else 1.0
    return reward
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("exit", r"reward mine failed on sample 1: plugin mine: it ended its process with exit code 3"),
        ("hang", r"reward mine failed on sample 1: plugin mine: it took longer than 2 s"),
        ("raise", r"reward mine failed on sample 1: KeyError: 'answr'"),
        ("text", r"reward mine returned '1\.0' for sample 1; expected a finite number"),
        (
            "long",
            r"reward mine failed on sample 1: plugin mine: it answered with \d+ bytes; 2048 are allowed .*",
        ),
    ],
)
def test_what_a_plugin_does_wrong_costs_one_call(opened: Opened, what: str, said: str):
    good, failed, abstained = judged(opened(ATTACKS), "good", what, "abstain")
    assert (good, abstained) == (1.0, None)
    assert re.fullmatch(said, failed), failed


def test_a_call_that_fails_costs_all_samples_of_its_batch(opened: Opened):
    found = judged(opened(ATTACKS, batch_size=2), "good", "good", "exit", "good", "good")
    assert [isinstance(value, str) for value in found] == [False, False, True, True, False]


def test_it_is_called_in_the_forms_of_reward_functions(opened: Opened):
    code = """
from other import same
async def reward(completions, answer, **kwargs):
    return [same(*pair) for pair in zip(completions, answer)]
def create_plugin(config):
    return reward
"""
    other = "def same(one, other): return float(one == other)\n"
    assert judged(opened(code, batch_size=2, other=other), "4", "5", "4") == [1.0, 0.0, 1.0]


def test_modules_next_to_the_run_are_not_found(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "module_of_the_run.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="plugin mine: plugin:create_plugin fails: ModuleNotFoundError"):
        opened("import module_of_the_run\n")


def test_what_is_no_reward_function_is_refused(opened: Opened):
    with pytest.raises(ConfigError, match="reward mine is of type float; expected a function that returns a number"):
        opened("def create_plugin(config): return 1.0\n")

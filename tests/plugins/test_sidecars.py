"""Sidecars are real programs: what one of them does wrong costs the call it did it at, named, and no other."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.config.rewards import CompositeReward, PluginReward, WeightedReward
from rollout_core.plugins import host
from rollout_core.rewards.loading import load_reward
from rollout_core.rewards.scoring import RewardFunction, RewardInput, judge, score, within_share
from tests.plugins import hostile

EXAMPLES = Path(__file__).parents[2] / "examples"
MANIFEST = """
name = "hostile"
version = "1"
kind = "reward-model"
trait_id = "rollout_core::Plugin"
mode = "sidecar"
network_allowlist = []
config_schema_path = "schema.json"

[runtime]
memory_mib = 512

[limits]
call_seconds = 2
processes = 8

[entry.sidecar]
command = ["{python}", "main.py"]
"""


def write_hostile(folder: Path) -> None:
    """The plugin's files."""
    folder.mkdir(parents=True)
    (folder / "rollout-plugin.toml").write_text(MANIFEST)
    (folder / "schema.json").write_text("{}")
    shutil.copy(hostile.__file__, folder / "main.py")


class Hostile:
    """The plugin, opened with a configuration; with what it wrote."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.lines: list[str] = []
        self.opened: list[RewardFunction] = []
        write_hostile(base / "plugins/hostile")

    def open(self, **config: Any) -> RewardFunction:
        spec = PluginReward(kind="plugin", name="hostile", config=config)
        reward = load_reward(spec, base=self.base, on_line=self.lines.append)
        self.opened.append(reward)
        return reward

    @property
    def pids(self) -> list[int]:
        return [int(found[1]) for line in self.lines if (found := re.search(r"plugin hostile: pid (\d+)", line))]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    monkeypatch.setattr(host, "FIRST_PAUSE_SECONDS", 0.01)
    made = Hostile(tmp_path)
    yield made
    for reward in made.opened:
        reward.close()


def judged(reward: RewardFunction, *prompts: str) -> list[Any]:
    found = judge(reward, [RewardInput(prompt, "x") for prompt in prompts])
    return [str(value) if isinstance(value, Fatal) else value for value in found]


COSTS = {
    hostile.HANG: r"it took longer than 2 s; its last output: asked to hang",
    hostile.CRASH: r"it ended with exit status 3 before it answered",
    hostile.KILL: r"it ended with signal SIGSEGV before it answered",
    hostile.GARBAGE: r"it answered with b'\\xff not JSON', which is no JSON",
    hostile.NO_OBJECT: r"it answered with \[1\.0\]; expected an object with result, or with error, a text",
    hostile.LONG: r"it answered with a frame of 4294967295 bytes; 1048576 are allowed \(limits\.answer_bytes\)",
    hostile.CLOSE: r"it closed its socket before it answered",
    hostile.FLOOD: r"it wrote more than 16 MiB of output; its last output: .*",
    hostile.SAYS: r"it says: no such word",
}
"""By what it does, what of the call is said."""


@pytest.mark.parametrize("what", COSTS)
def test_what_a_sidecar_does_wrong_costs_one_call(plugin: Hostile, what: str):
    reward = plugin.open()
    first, failed, last = judged(reward, "good", what, "good")
    assert (first, last) == (1.0, 1.0)
    assert re.fullmatch(f"reward hostile failed on sample 1: plugin hostile: {COSTS[what]}", failed), failed
    restarted = what != hostile.SAYS
    assert len(plugin.pids) == 1 + restarted, "started again, unless it answered"
    if restarted:
        assert_gone(plugin.pids[0])


def assert_gone(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            hostile.TWICE,
            r"sample 0: plugin hostile: it answered with {'rewards': \[1\.0, 1\.0\]}; expected rewards, a list of 1",
        ),
        (hostile.TEXT, r"answered with '1\.0' for sample 0; expected a number or null"),
        (hostile.NAN, r"returned nan for sample 0; expected a finite number"),
    ],
)
def test_rewards_that_are_none_cost_their_sample(plugin: Hostile, what: str, said: str):
    failed, good = judged(plugin.open(), what, "good")
    assert good == 1.0
    assert re.search(said, failed), failed


def test_an_answer_that_nobody_asked_for_is_nobodys_reward(plugin: Hostile):
    reward = plugin.open()
    assert judged(reward, hostile.UNASKED) == [1.0]
    failed, good = judged(reward, "good", "good")
    assert good == 1.0
    assert "it wrote to its socket without being asked" in failed


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"lie": {"name": "another"}}, "at Init it says that it is .*'another'.*; expected .*'hostile'"),
        ({"lie": {"kind": "storage"}}, "at Init it says that it is .*'storage'.*; expected .*'reward-model'"),
        ({"lie": {"protocol": 2}}, "at Init it says that it is .*2.*; expected .*1"),
        ({"refuse": "no such model"}, "at Preflight it says: no such model"),
    ],
)
def test_a_sidecar_that_is_not_what_its_manifest_says_is_refused(plugin: Hostile, config: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=f"plugin hostile: {said}"):
        plugin.open(**config)
    assert_gone(plugin.pids[0])


def test_a_sidecar_that_was_killed_between_calls_is_started_again_and_costs_nothing(plugin: Hostile):
    reward = plugin.open()
    assert judged(reward, "good") == [1.0]
    os.kill(plugin.pids[0], signal.SIGKILL)
    assert judged(reward, "good") == [1.0]
    assert "plugin hostile: it ended with signal SIGKILL between calls, and is started again" in plugin.lines
    assert len(set(plugin.pids)) == 2


def test_one_that_ends_while_it_is_asked_and_has_not_read_the_request_is_asked_again_at_no_cost(plugin: Hostile):
    """As one that is killed just before a call, and is not gone yet."""
    assert judged(plugin.open(), hostile.LEAVE, "good", "good") == [1.0, 1.0, 1.0]
    assert "plugin hostile: it ended with exit status 0 between calls, and is started again" in plugin.lines
    assert len(set(plugin.pids)) == 2


def test_a_process_that_has_more_than_a_thousand_files_open_has_plugins_all_the_same(plugin: Hostile):
    """`select` takes no descriptor above 1023, and those of the pipes are inherited."""
    with ExitStack() as files:
        for _ in range(1100):
            files.enter_context(open(os.devnull, "rb"))
        assert judged(plugin.open(), "good", hostile.CRASH, "good")[::2] == [1.0, 1.0]


def test_one_that_only_fails_is_given_up(plugin: Hostile):
    reward = plugin.open()
    with pytest.raises(Fatal, match="That was call 8 that failed so, one after another; the plugin is not asked again"):
        judged(reward, *[hostile.CRASH] * 20)
    assert len(plugin.pids) == host.MOST_FAILURES


def test_failures_are_held_against_the_share_that_is_allowed(plugin: Hostile):
    reward = plugin.open()
    prompts = ["good"] * 9 + [hostile.SAYS]
    assert len(within_share(reward, judge(reward, [RewardInput(prompt, "x") for prompt in prompts]))) == 1
    with pytest.raises(Fatal, match=r"more than max_failed_share = 0\.1 allows"):
        within_share(reward, judge(reward, [RewardInput(prompt, "x") for prompt in prompts[3:] + prompts[-1:]]))


def test_it_has_a_private_socket_no_network_and_nothing_is_left(plugin: Hostile, tmp_path: Path):
    main = plugin.base / "plugins/hostile/main.py"
    look = """
import glob
found = [socket.if_indextoname(number) for number, _ in socket.if_nameindex()]
mode = oct(os.stat(sys.argv[-1]).st_mode & 0o777), oct(os.stat(os.path.dirname(sys.argv[-1])).st_mode & 0o777)
print("has", found, mode, os.environ.get("ROLLOUT_STORAGE"), os.path.dirname(sys.argv[-1]), file=sys.stderr, flush=True)
"""
    main.write_text(main.read_text().replace("            attack(what, connection)\n", f"            exec({look!r})\n"))
    reward = plugin.open()
    assert judged(reward, "good") == [1.0]
    [said] = [line for line in plugin.lines if "has" in line]
    found = re.fullmatch(r"plugin hostile: has \['lo'\] \('0o600', '0o700'\) None (\S+)", said)
    assert found, said
    assert stat.S_ISDIR(os.stat(found[1]).st_mode)
    [pid] = plugin.pids
    reward.close()
    assert not Path(found[1]).exists()
    assert_gone(pid)


# -- the examples, of a Python module, a program in Python, and one in the shell --------------------------------------


@pytest.mark.parametrize("name", ["brevity", "brevity-sidecar", "brevity-shell"])
def test_the_examples_score(name: str):
    reward = load_reward(PluginReward(kind="plugin", name=name), base=EXAMPLES)
    try:
        assert score(reward, [RewardInput("2 + 2 =", "4"), RewardInput("2 + 2 =", "é" * 300)]) == [1.0, 0.0]
    finally:
        reward.close()


def test_a_plugin_is_a_part_of_a_sum():
    part = PluginReward(kind="plugin", name="brevity", config={"limit": 4})
    spec = CompositeReward(parts=(WeightedReward(weight=2.0, reward=part), WeightedReward(reward=part)))
    reward = load_reward(spec, base=EXAMPLES)
    try:
        assert score(reward, [RewardInput("2 + 2 =", "it is 4")]) == [0.75]
        assert [part.name for part in reward.parts] == ["brevity", "brevity 2"]
    finally:
        reward.close()

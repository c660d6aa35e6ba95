"""Rewards of plugins in runs: edited code scores anew and nothing before it is computed again; what was run is filed,
so that it is made again, and scored by other machines, without the plugin."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.cli.common import plugins_at
from flows.reproduce import plan_reproduction, reproduce
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config import TrainGRPOConfig, parse_config
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.objects import ObjectStore
from rollout_core.objects.origins import sources_of
from rollout_core.objects.plugin_files import is_hot_reloaded
from rollout_core.objects.records import Completions, Scores
from rollout_core.plugins import host
from rollout_core.plugins.scaffold import write_plugin
from rollout_core.rewards import kept, source_ids
from rollout_core.rewards.kept import open_reward
from rollout_core.rewards.scoring import RewardInput, score
from rollout_core.runs.reproduction import hold_code
from tasks.runtime.events import EVENT
from tests.flows.conftest import objects, small_grpo, write_toml
from tests.plugins import hostile
from tests.plugins.test_sidecars import write_hostile

EXAMPLES = Path(__file__).parents[2] / "examples/plugins"
SMALL = {
    "iterations": 1,
    "prompts_per_iteration": 4,
    "samples_per_prompt": 4,
    "minibatch_size": 16,
    "optimizer": {"lr": 1e-4},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return folder


def composite(name: str, **config: Any) -> dict[str, Any]:
    """A plugin as part of a sum, beside one that is built in."""
    plugin = {"kind": "plugin", "name": name, "config": config}
    parts = [{"weight": 0.5, "reward": plugin}, {"weight": 1.0, "reward": {"kind": "exact_match"}}]
    return {"kind": "composite", "parts": parts}


@pytest.mark.server
@pytest.mark.parametrize("name", ["brevity", "brevity-sidecar"])
def test_an_edited_plugin_scores_anew_and_what_was_run_is_made_again_without_it(
    name: str, tiny_model, sorting_task, prefect_server, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from flows.train import train_grpo
    from tasks.runtime.planning import plan_run

    mine = shutil.copytree(EXAMPLES / name, here / "plugins/mine")
    document = small_grpo(tiny_model, sorting_task, f"plugin-{name}", **SMALL)
    document["algorithm"]["reward"] = composite(name, limit=6)
    config = parse_config(document, TrainGRPOConfig)
    model = ContentId(train_grpo(config)["model"])

    def states() -> dict[str, str]:
        calls = plan_run("train-grpo", config).calls
        return {call.stage: call.state for call in calls if call.state != "checked"}  # what is brought in

    assert set(states().values()) == {"cached"}
    code = mine / ("brevity.py" if name == "brevity" else "main.py")
    text = code.read_text()
    code.write_text(text + "\n# edited\n")
    made, follows = ("enqueue_prompts", "batch_inference"), ("score_rewards", "grpo_update", "snapshot")
    assert states() == dict.fromkeys(made, "cached") | dict.fromkeys(follows, "computed")
    code.write_text(text)
    shutil.move(mine, tmp_path / "data/rollout/plugins/elsewhere")
    assert set(states().values()) == {"cached"}, "where it lies does not count"

    shutil.rmtree(tmp_path / "data")
    monkeypatch.setattr(source_ids, "_held", {})
    source = objects()
    plan = plan_reproduction(source, model)
    assert plan.problems == []
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'again'}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / 'again.db'}")
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "again-cache"))
    assert reproduce(model, source.url) == {"same": [step.title for step in plan.steps], "difference": None}


@pytest.mark.server
def test_whichever_process_scores_runs_the_code_that_was_filed(
    prefect_server, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As a worker of another machine, which has no such plugin."""
    from prefect import flow

    from flows.evaluation import Judge, judge_of
    from rollout_core.config.rewards import PluginReward

    shutil.copytree(EXAMPLES / "brevity-sidecar", here / "plugins/mine")
    spec = PluginReward(kind="plugin", name="brevity-sidecar", config={"limit": 6})

    @flow(name="test-plugin", persist_result=False)
    def taken() -> Judge:
        return judge_of(spec)

    judge = taken()
    [where] = sources_of(objects(), judge.source)
    assert (where.kind, where.address, where.num_files) == ("reward", "plugin brevity-sidecar 0.1.0", 4)
    shutil.rmtree(here / "plugins")
    monkeypatch.setattr(source_ids, "_held", {})
    monkeypatch.setattr(kept, "_kept", {})
    warned: list[str] = []
    store = ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])
    options = {"base": here, "models": tmp_path, "on_line": warned.append, "on_warning": warned.append}
    reward = open_reward(judge.reward, judge.source, objects=store, **options)
    try:
        assert score(reward, [RewardInput("2 + 2 =", "four"), RewardInput("2 + 2 =", "four hundred")]) == [1.0, 0.0]
    finally:
        kept.close_rewards()
    assert [line for line in warned if "changed" in line] == []


@pytest.mark.server
def test_starts_calls_and_failures_are_events(
    prefect_server, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from prefect import flow

    from rollout_core.config.rewards import PluginReward
    from tasks.score import score_rewards

    monkeypatch.setattr(host, "FIRST_PAUSE_SECONDS", 0.01)
    write_hostile(here / "plugins/hostile")
    spec = PluginReward(kind="plugin", name="hostile", max_failed_share=0.5)
    prompts = ["good", hostile.CRASH, "good", "good"]

    @flow(name="test-plugin-events", persist_result=False)
    def scored() -> Scores:
        return score_rewards(completions_of(*prompts), spec, source_ids.source_id(spec, here))

    file = tmp_path / "events.ndjson"
    monkeypatch.setenv("ROLLOUT_EVENTS", str(file))
    try:
        scores = scored()
    finally:
        kept.close_rewards()
    assert json.loads(objects().get_bytes(scores.scores)) == [1.0, None, 1.0, 1.0]
    assert scores.num_reward_failed == 1
    lines = [EVENT.validate_json(line) for line in file.read_bytes().splitlines()]
    found = [line for line in lines if line.topic.startswith("plugin_")]
    assert [line.topic for line in found] == ["plugin_loaded", "plugin_loaded", "plugin_call_error", "plugin_call"]
    _, _, failed, calls = found
    assert failed.error == "plugin hostile: it ended with exit status 3 before it answered"
    assert (calls.plugin, calls.stage, calls.calls, calls.failed) == ("hostile", "score_rewards", 4, 1)
    assert 0 < calls.slowest_seconds <= calls.seconds


@pytest.mark.server
def test_scores_of_a_run_with_hot_reload_are_of_no_other_run_and_say_so(
    prefect_server, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from prefect import flow

    from flows.evaluation import judge_of
    from rollout_core.config.rewards import PluginReward
    from tasks.score import score_rewards

    mine = shutil.copytree(EXAMPLES / "brevity", here / "plugins/mine") / "brevity.py"
    spec = PluginReward(kind="plugin", name="brevity")
    given = [completions_of("a"), completions_of("a", "b")]

    @flow(name="test-plugin-hot-reload", persist_result=False)
    def scored(edit: str | None = None) -> tuple[ContentId, list[list[float]]]:
        judge, found = judge_of(spec), []
        for completions in given:
            scores = score_rewards(completions, judge.reward, judge.source)
            found.append(json.loads(objects().get_bytes(scores.scores)))
            if edit is not None:
                mine.write_text(mine.read_text().replace("max(0.0", edit))
        return judge.source, found

    file = tmp_path / "events.ndjson"
    try:
        stable, first = scored()
        monkeypatch.setenv("ROLLOUT_EVENTS", str(file))
        with plugins_at(None, hot_reload=True):
            hot, edited = scored("5 + max(0.0")
            [(before, after)] = [sources_of(objects(), hot)]
        with plugins_at(None, hot_reload=True):
            again, after_it = scored()
        mine.write_text(mine.read_text().replace("5 + 5 + ", ""))
        assert scored() == (stable, first), "what is filed under the stable key is as it was"
    finally:
        kept.close_rewards()
    assert len({stable, hot, again}) == 3
    assert (first, edited, after_it) == ([[1.0], [1.0, 1.0]], [[1.0], [6.0, 6.0]], [[11.0], [11.0, 11.0]])
    lines = [EVENT.validate_json(line) for line in file.read_bytes().splitlines()]
    [reloaded] = [line for line in lines if line.topic == "plugin_reloaded"]
    assert (reloaded.plugin, reloaded.problem) == ("brevity", "")
    assert before.address.startswith("plugin brevity 0.1.0 (hot reload, ")
    assert after.address.endswith(f"{ContentId(reloaded.id).short})"), "each state of the files that was used is filed"
    assert is_hot_reloaded(objects(), hot)
    assert not is_hot_reloaded(objects(), stable)
    step: Any = SimpleNamespace(inputs={"reward": spec, "reward_source": hot})
    with pytest.raises(ConfigError, match=r"plugins that ran with --hot-reload.*run it without --hot-reload"):
        hold_code(objects(), step, here)


def completions_of(*prompts: str) -> Completions:
    """One to each prompt, of which no store knows."""
    ids = [hash_bytes(f"plugin {number}".encode()) for number in range(len(prompts))]
    samples = [Sample(key, prompt, [1, 2], 0, None, {}) for key, prompt in zip(ids, prompts, strict=True)]
    made = [Completion(key, [3], [-0.5], "x", "stop") for key in ids]
    return Completions(
        completions=objects().put_bytes(b"".join(map(encode_completion, made))),
        samples=objects().put_bytes(encode_samples(samples)),
        model=hash_bytes(b"model"),
        num_samples=len(ids),
        num_tokens=len(ids),
        finish_reasons={"stop": len(ids)},
    )


def test_one_plugin_by_two_ways_is_filed_for_both(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from rollout_core.config.rewards import CompositeReward, PluginReward, WeightedReward

    shutil.copytree(EXAMPLES / "brevity", here / "plugins/mine")
    named = PluginReward(kind="plugin", name="brevity", config={"limit": 6})
    placed = PluginReward(kind="plugin", name="brevity", path="plugins/mine")
    spec = CompositeReward(parts=(WeightedReward(reward=named), WeightedReward(reward=placed)))
    store = ObjectStore.from_url(f"file://{tmp_path / 'objects'}")
    wanted = source_ids.source_id(spec, here)
    source_ids.record_code(store, spec, source_ids.source_of(spec, here, wanted))
    shutil.rmtree(here / "plugins")
    monkeypatch.setattr(source_ids, "_held", {})
    assert source_ids.source_of(spec, here, wanted, store).id == wanted


def test_a_plan_finds_plugins_of_the_command_and_refuses_their_wrong_configurations(
    tiny_model, sorting_task, here: Path, tmp_path: Path
):
    path = write_toml(tmp_path / "run.toml", small_grpo(tiny_model, sorting_task, "planned", **SMALL))

    def planned(reward: dict[str, Any], *options: str) -> tuple[int, str]:
        command = ["train", "grpo", "--config", str(path), "--dry-run", *options]
        command += ["--set", f"algorithm.reward={json.dumps(reward)}"]
        result = CliRunner().invoke(app, command)
        return result.exit_code, result.output

    given = ("--plugin", str(EXAMPLES))
    code, output = planned(composite("brevity", limit=6), *given)
    assert code == 0, output
    assert f"plugin_brevity=0.1.0 in {EXAMPLES / 'brevity'}" in output
    code, output = planned(composite("brevity", limit=6))
    assert (code, output.count("\n")) == (2, 1)
    assert "algorithm.reward: no plugin is named 'brevity' in the folders of --plugin" in output
    code, output = planned(composite("brevity", limit="six"), *given)
    assert code == 2
    assert "algorithm.reward: plugin brevity: config.limit: 'six' is not of type 'integer'; expected what" in output
    code, output = planned({"kind": "plugin", "name": "brevity", "conifg": {}}, *given)
    assert code == 2
    assert "algorithm.reward.conifg: unknown key; did you mean 'config'?" in output
    code, output = planned({"kind": "exact_match"}, "--hot-reload")
    assert (code, output) == (2, "rollout: --hot-reload: got no plugin; expected a reward of kind 'plugin'\n")
    code, output = planned(composite("brevity", limit=6), *given, "--hot-reload")
    assert code == 0, output
    placed = ("--set", 'placement={"dask": {"address": "tcp://127.0.0.1:1"}, "scoring": {}}')
    code, output = planned(composite("brevity", limit=6), *given, "--hot-reload", *placed)
    assert code == 2
    assert "--hot-reload: got [placement]; expected none" in output


def test_a_nightly_run_promotes_nothing_by_scores_of_edited_plugins(
    small_nightly: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_toml(tmp_path / "nightly.toml", small_nightly)
    monkeypatch.setenv("ROLLOUT_HOT_RELOAD", "1")
    result = CliRunner().invoke(app, ["nightly", "--config", str(path), "--dry-run"])
    assert result.exit_code == 2
    assert "ROLLOUT_HOT_RELOAD is set; expected not, as a nightly run promotes a model by its rewards" in result.output


def test_a_plan_reads_rows_of_plugins_and_a_run_files_them(tiny_model, sorting_task, here: Path, tmp_path: Path):
    path = write_toml(tmp_path / "run.toml", small_grpo(tiny_model, sorting_task, "planned-rows", **SMALL))
    folder = here / "plugins/words"
    write_plugin("data-source", "words", folder)

    def planned(**prompts: Any) -> tuple[int, str]:
        given = json.dumps({"kind": "plugin", "name": "words"} | prompts)
        reward = json.dumps({"kind": "exact_match"})
        command = ["train", "grpo", "--config", str(path), "--dry-run", "--set", f"algorithm.prompts={given}"]
        result = CliRunner().invoke(app, [*command, "--set", f"algorithm.reward={reward}"])
        return result.exit_code, result.output

    code, output = planned(config={"word": "1"})
    assert code == 0, output
    code, output = planned()
    assert code == 2
    assert "algorithm.prompts.name: plugin words: config: 'word' is a required property; expected what" in output
    edited = (folder / "plugin.py").read_text().replace('"answer"', '"solution"')
    (folder / "plugin.py").write_text(edited)
    code, output = planned(config={"word": "1"})
    assert code == 2
    assert "algorithm.prompts.name: " in output
    assert "'answer'" in output


@pytest.mark.server
def test_rows_of_an_edited_plugin_count_by_their_content(prefect_server, here: Path):
    from prefect import flow

    from rollout_core.config.base import PluginDataset
    from tasks.imports import import_prompts

    folder = here / "plugins/words"
    write_plugin("data-source", "words", folder)
    source = PluginDataset(kind="plugin", name="words", config={"word": "four"})

    @flow(name="test-plugin-rows", persist_result=False)
    def imported(edit: str = "") -> ContentId:
        (folder / "plugin.py").write_text((folder / "plugin.py").read_text().replace("(1, 2)", edit or "(1, 2)"))
        return import_prompts(source).data

    first = imported()
    assert imported("[1, 2]") == first
    (folder / "plugin.py").write_text((folder / "plugin.py").read_text().replace("[1, 2]", "[1, 2, 3]"))
    assert imported() != first
    places = sources_of(objects(), first)
    assert [place.address for place in places] == ["plugin words 0.1.0"]


def test_the_published_schema_is_that_of_every_plugin(here: Path):
    """No form and no schema depends on which plugins are there."""
    before = json.dumps(TrainGRPOConfig.model_json_schema())
    shutil.copytree(EXAMPLES / "brevity", here / "plugins/mine")
    assert json.dumps(TrainGRPOConfig.model_json_schema()) == before
    assert '"const": "plugin"' in before

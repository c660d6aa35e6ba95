"""Data sets of reasoning-gym, played unchanged: their questions, and the scores that they give."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from rollout_core.base.errors import ConfigError
from rollout_core.config.base import EnvironmentRows, JsonlDataset, parse_config
from rollout_core.config.environments import ReasoningGymEnvironment
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.hosts import Hosts, look_at, rows_of

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")


def of(dataset: str = "chain_sum", **settings: Any) -> ReasoningGymEnvironment:
    return ReasoningGymEnvironment(kind="reasoning_gym", dataset=dataset, **settings)


def rows(environment: ReasoningGymEnvironment, split: str = "train", size: int = 4, seed: int = 0) -> list[Any]:
    source = EnvironmentRows(kind="environment", split=split, size=size, seed=seed)  # type: ignore[arg-type]
    return rows_of(EnvironmentCode.of(environment, Path()), environment, source)


def rewards(environment: ReasoningGymEnvironment, row: dict[str, Any], *said: str) -> list[Any]:
    """Of an episode for each answer."""

    async def play() -> list[Any]:
        hosts, found = Hosts(EnvironmentCode.of(environment, Path()), environment), []
        try:
            for text in said:
                async with hosts.place(text) as place:
                    await place.call("reset", row, 1)
                    assert await place.call("step", {"role": "assistant", "content": text}) is None
                    found.append(await place.call("reward"))
                    await place.call("close")
        finally:
            await hosts.close()
        return found

    return asyncio.run(play())


def test_questions_and_scores_are_those_of_reasoning_gym():
    import reasoning_gym

    environment = of(config={"min_terms": 3})
    found = rows(environment, size=6, seed=5)
    own = reasoning_gym.create_dataset("chain_sum", min_terms=3, seed=5, size=6)
    assert [row["question"] for row in found] == [item["question"] for item in own]
    answer = own[2]["answer"]
    said = [f"<answer>{answer}</answer>", f"so <answer>1</answer> no, <answer> {answer} </answer>", answer, ""]
    assert rewards(environment, found[2], *said) == [1.0, 1.0, 0.0, 0.0]
    partly = f"{answer} apples"
    assert rewards(environment, found[2], f"<answer>{partly}</answer>") == [own.score_answer(partly, own[2])]
    assert rewards(of(config={"min_terms": 3}, answer_tag="none"), found[2], f" {answer}\n") == [1.0]


def test_an_item_that_depends_on_the_size_of_its_data_set_is_made_again_as_it_was():
    import reasoning_gym

    own = reasoning_gym.create_dataset("list_functions", seed=3, size=30)
    environment = of("list_functions")
    row = rows(environment, size=30, seed=3)[28]
    assert rewards(environment, row, f"<answer>{own[28]['answer']}</answer>") == [1.0]


def test_a_data_set_that_draws_from_other_numbers_than_its_seeds_is_the_same_each_time():
    environment = of("list_functions")
    row = rows(environment, size=30, seed=3)[29]  # two data sets of reasoning-gym differ in this item
    assert rewards(environment, row, "") == [0.0]


def test_held_out_rows_are_made_of_other_seeds_and_both_are_the_same_each_time():
    environment = of(config={"min_digits": 4, "max_digits": 6})
    train, held_out = rows(environment, size=50), rows(environment, "eval", size=50)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    assert rows(environment, size=50) == train
    assert rows(environment, size=50, seed=1) != train


def test_a_row_of_other_settings_is_refused():
    row = rows(of(), size=2)[1]
    with pytest.raises(Exception, match="another question than reasoning-gym makes now"):
        rewards(of(config={"min_digits": 7, "max_digits": 8}), row, "")
    with pytest.raises(Exception, match="expected the keys of rows of kind"):
        rewards(of(), {"question": "1 + 1"}, "")


def test_versions_and_settings_are_its_identity_and_nothing_else(tmp_path: Path):
    code = EnvironmentCode.of(of(), tmp_path)
    assert code.adapted == {
        "kind": "reasoning_gym",
        "version": 1,
        "packages": {"reasoning-gym": version("reasoning-gym")},
        "settings": {"dataset": "chain_sum", "config": {}, "answer_tag": "answer"},
    }
    here = code.id(of(), tmp_path)
    assert EnvironmentCode.of(of(), Path("/")).id(of(), Path("/")) == here
    other = of(config={"min_terms": 3})
    assert EnvironmentCode.of(other, tmp_path).id(other, tmp_path) != here
    limits = {"max_turns", "truncated", "tools", "episodes_at_once"}
    assert not {"kind", "dataset", "config", "answer_tag"} & set(of().cache_identity())
    assert limits - {"tools", "episodes_at_once"} <= set(of().cache_identity())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"dataset": "chain_sums"}, "reasoning-gym has no data set 'chain_sums'.*chain_sum"),
        ({"config": {"min_term": 1}}, "config.min_term: chain_sum has no such key.*min_terms"),
        ({"config": {"min_terms": -1}}, "min_terms must be positive"),
    ],
)
def test_what_is_wrong_with_the_settings_is_said_before_a_run(settings: dict[str, Any], problem: str):
    environment = of(**{"dataset": "chain_sum", **settings})
    with pytest.raises(ConfigError, match=problem):
        look_at(EnvironmentCode.of(environment, Path()), environment)


def test_size_and_seed_are_said_by_the_rows():
    with pytest.raises(ConfigError, match=r"config\.seed: rows say it"):
        parse_config({"kind": "reasoning_gym", "dataset": "chain_sum", "config": {"seed": 1}}, ReasoningGymEnvironment)


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError) as raised:
        EnvironmentCode.of(of(), tmp_path)
    assert str(raised.value) == (
        'kind = "reasoning_gym" needs the package reasoning-gym, which is not installed: '
        "pip install 'rollout-post-training[reasoning-gym]'"
    )


def test_rows_of_an_environment_are_refused_where_there_is_none(tmp_path: Path):
    from rollout_core.data.dataset_sources import read_dataset
    from rollout_core.data.datasets import PromptRow

    with pytest.raises(ConfigError, match="here there is none"):
        list(read_dataset(EnvironmentRows(kind="environment"), PromptRow, base=tmp_path))


def test_it_is_tried_from_the_table_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('[environment]\nkind = "reasoning_gym"\ndataset = "chain_sum"\n')
    checked = CliRunner().invoke(app, ["env", "check", "run.toml", "--set", 'dataset="spell_backward"'])
    assert checked.exit_code == 0, checked.output
    assert "3 rows: the same episode alone, again, in another process and next to others" in checked.output
    first, second = rows(of(), size=2)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (second, first)))
    assert JsonlDataset(path="rows.jsonl")
    played = CliRunner().invoke(app, ["env", "play", "run.toml", "--rows", "rows.jsonl"], input="<answer>x</answer>\n")
    assert played.exit_code == 0, played.output
    assert second["question"] in played.output and "reward: 0.0" in played.output

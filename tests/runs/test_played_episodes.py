"""Episodes of an earlier run as conversations: which of them are rows, and what these hold."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from rollout_core.agents.adapters.ended import look_up
from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.config import (
    DPOSettings,
    EpisodesDataset,
    KTOSettings,
    OptimizerConfig,
    RewardModelSettings,
    SFTSettings,
)
from rollout_core.data.dataset_sources import read_dataset
from rollout_core.data.datasets import SftRow
from rollout_core.models.locating import Unchecked
from rollout_core.runs.played_episodes import PlayedEpisodes, read_episodes
from rollout_core.runs.run_records import RunDetail, RunHead, RunRecords, StageCall
from rollout_core.store import SqlLightningStore
from rollout_core.store.types import RolloutMode
from tests.environments.acting import Scene, called
from tests.environments.conftest import chatting as chatting, scene as scene

ADDING = '''
from rollout_core.environments import Done


class Env:
    def reset(self, row, seed):
        if row["a"] == 13:
            raise ValueError("no luck")
        self.row = row
        return [{"role": "system", "content": "Add."}, {"role": "user", "content": str(row["a"])}]

    def add(self, a: int) -> int:
        """Add one to a number."""
        return a + 1

    def submit(self, answer: int):
        """Give the answer."""
        return Done()

    def reward(self):
        return self.row["a"] / 10
'''


def acts(text: str, seed: int) -> str:
    number = int(text.split("user: ")[1].split("<")[0])
    if number == 9:
        return "x" * 300
    return called("add", a=number) if "tool: " not in text else called("submit", answer=number + 1)


def played(scene: Scene, numbers: Sequence[int], **options: Any) -> None:
    """Episodes of these numbers, in the record of a run."""
    asyncio.run(_played(scene, numbers, **options))


async def _played(scene: Scene, numbers: Sequence[int], *, calls: int = 1, mode: RolloutMode = "train") -> None:
    scene.write(ADDING)
    rows = [{"a": number} for number in numbers]
    await scene.play(scene.engine(acts), rows, max_attempts=1, mode=mode)
    ids = [episode.rollout_id for episode in scene.episodes(rows)]
    async with SqlLightningStore.from_url(scene.database) as store:
        record = await look_up(store, scene.objects, ids, scene.model.content_id)
    result = record.model_dump(mode="json")
    call = StageCall(
        stage="play", label="", state="Completed", ended=0.0, seconds=1.0, kind="AgentRollouts", result=result
    )
    now = datetime.now(UTC)
    head = RunHead(id="1234-of-a-flow-run", name="digits", flow="train-grpo", state="completed", began=now, written=now)
    other = call.model_copy(update={"stage": "run_agents"})
    RunRecords(scene.objects).write(head, RunDetail(config={}, calls=(other, *[call] * calls)))


def read(scene: Scene, **source: Any) -> PlayedEpisodes:
    return read_episodes(EpisodesDataset(kind="episodes", **{"run": "digits", **source}), scene.objects, scene.database)


def numbers(found: PlayedEpisodes) -> list[int]:
    return [int(document["messages"][1]["content"]) for document in found.documents]


def test_an_episode_is_a_conversation_with_its_tools_and_what_they_answered(scene: Scene):
    played(scene, [4])
    found = read(scene)
    [document] = found.documents
    assert [message["role"] for message in document["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert document["messages"][3]["content"] == "5"
    assert document["messages"][2]["tool_calls"][0]["function"]["name"] == "add"
    assert [tool["function"]["name"] for tool in document["tools"]] == ["add", "submit"]
    row = SftRow.model_validate(document)
    assert row.messages is not None and row.tools is not None and found.left_out == {}


def test_a_share_is_what_its_digits_say(scene: Scene):
    """In binary 0.28 of 25 is a little more than 7."""
    played(scene, list(range(20, 45)))
    assert len(numbers(read(scene, best=0.28))) == 7
    assert len(numbers(read(scene, best=0.29))) == 8


def test_episodes_are_chosen_by_reward_and_the_others_are_counted(scene: Scene):
    played(scene, [5, 13, 1, 9, 3, 2], calls=2)
    assert numbers(read(scene)) == [5, 1, 3, 2]
    found = read(scene, min_reward=0.2)
    assert numbers(found) == [5, 3, 2]
    assert found.left_out == {"failed": 1, "with an answer that was cut": 1, "below min_reward": 1}
    best = read(scene, run="1234", min_reward=0.2, best=0.5)
    assert numbers(best) == [5, 3]
    assert best.remark() == (
        "2 of 6 episodes are rows, 1 below min_reward, 1 failed, 1 not among the best, 1 with an answer that was cut"
    )
    with pytest.raises(ConfigError, match=r"run 'digits': 0 of 6 episodes are rows, 4 below min_reward.*lower min_r"):
        read(scene, min_reward=0.9)


def test_held_out_episodes_are_not_learned_from(scene: Scene):
    played(scene, [4], mode="test")
    with pytest.raises(ConfigError, match="0 of 1 episodes are rows, 1 held out"):
        read(scene)


def test_a_run_that_is_not_there_or_played_nothing_is_named(scene: Scene):
    played(scene, [4], calls=0)
    with pytest.raises(ConfigError, match="run 'digits' has played no episodes"):
        read(scene)
    with pytest.raises(ConfigError, match="no run is recorded under 'other'"):
        read(scene, run="other")


def test_episodes_that_have_changed_since_are_an_error(scene: Scene):
    played(scene, [4])
    with contextlib.closing(sqlite3.connect(scene.folder / "store.db")) as store, store:
        store.execute("DELETE FROM spans WHERE name = 'agentlightning.annotation'")
    with pytest.raises(Fatal, match="are not all in the database any more"):
        read(scene)


def test_without_a_database_they_are_not_checked_and_other_learners_refuse_them(scene: Scene):
    source = EpisodesDataset(kind="episodes", run="digits")
    with pytest.raises(Unchecked, match="episodes of run 'digits'"):
        read_dataset(source, SftRow, base=scene.folder).check()
    options: Any = {"dataset": source, "optimizer": OptimizerConfig(lr=1e-3)}
    for settings in (RewardModelSettings, DPOSettings, KTOSettings):
        with pytest.raises(ValueError, match="dataset"):
            settings(**options)
    assert SFTSettings(**options).dataset == source
    with pytest.raises(ValueError, match="leave out columns and format"):
        EpisodesDataset(kind="episodes", run="digits", columns={"prompt": "question"})

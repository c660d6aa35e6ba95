"""What an environment remembers between episodes: given to each, left by each, and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, CorruptObject
from rollout_core.base.ids import canonical_json
from rollout_core.config.environments import PythonEnvironment
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.hosts import look_at, merged_memory
from rollout_core.environments.memory import find_memory, merge_notes, read_memory
from rollout_core.objects import SnapshotStore
from rollout_core.store.semconv import EPISODE_MEMORY
from tests.environments.acting import Scene

REMEMBERS = '''
class Env:
    """Remembers what was said."""

    def load_memory(self, memory):
        self.memory = memory
        if memory is not None:
            memory.append("mine")  # of this episode alone

    def reset(self, row, seed):
        self.row, self.said = row, ""
        return f"{row['n']}: I know {self.memory}"

    def step(self, message):
        self.said = message["content"]

    def reward(self):
        return float(self.row["n"])

    async def save_memory(self):
        return SAVED

    def merge_memory(self, memory, notes):
        return MERGED
'''
ROWS = [{"n": number} for number in range(4)]


def write(scene: Scene, saved: str = "[self.row['n'], self.said]", merged: str = "[*(memory or []), *notes]") -> None:
    scene.write(REMEMBERS.replace("SAVED", saved).replace("MERGED", merged))


def says_it_again(text: str, seed: int) -> str:
    return text.split("user: ")[1].split("<")[0].strip()


async def left(scene: Scene, row: dict[str, Any]) -> list[Any]:
    return [
        json.loads(span.attributes[EPISODE_MEMORY])
        for span in await scene.spans(row)
        if EPISODE_MEMORY in span.attributes
    ]


async def test_each_episode_begins_with_the_same_memory_and_leaves_a_note(scene: Scene):
    write(scene)
    engine = scene.engine(says_it_again)
    tally = await scene.play(engine, ROWS, memory='["old"]', episodic_memory=True, processes=2)
    assert (tally.done, tally.failed) == (4, 0)
    for row in ROWS:
        assert await left(scene, row) == [[row["n"], f"{row['n']}: I know ['old', 'mine']"]]
    ended = await scene.ended(ROWS)
    assert [each.reward for each in ended] == [0.0, 1.0, 2.0, 3.0], "a note is no reward"
    assert len(await scene.samples(ROWS)) == 4


async def test_without_a_memory_it_begins_with_none_and_may_leave_nothing(scene: Scene):
    write(scene, saved="None")
    await scene.play(scene.engine(says_it_again), ROWS[:1], episodic_memory=True)
    assert await left(scene, ROWS[0]) == []


@pytest.mark.parametrize("saved", ["float('nan')", "object()", "'x' * (2 ** 20 + 1)", "1 / 0"])
async def test_a_note_that_cannot_be_kept_costs_an_attempt(scene: Scene, saved: str):
    write(scene, saved=saved)
    tally = await scene.play(scene.engine(says_it_again), ROWS[:1], episodic_memory=True, max_attempts=2)
    assert (tally.failed, tally.attempts_failed) == (1, 2)
    assert "save_memory" in str(tally.first_failure)


def settings(scene_folder: Path, **more: Any) -> tuple[EnvironmentCode, PythonEnvironment]:
    environment = PythonEnvironment(path="env.py:Env", **more)
    return EnvironmentCode.read(environment.path, scene_folder), environment


def test_the_methods_are_tools_where_no_memory_is_asked_for_and_have_to_be_there_where_one_is(scene: Scene):
    write(scene)
    with pytest.raises(ConfigError, match=r"tool .*Env\.load_memory has no docstring"):
        look_at(*settings(scene.folder))
    assert look_at(*settings(scene.folder, episodic_memory=True)).tools == []
    scene.write(
        "class Env:\n    def reset(self, row, seed): ...\n    def step(self, m): ...\n    def reward(self): ...\n"
    )
    with pytest.raises(ConfigError, match=r"without a method load_memory, which environment\.episodic_memory = true"):
        look_at(*settings(scene.folder, episodic_memory=True))


def test_notes_are_merged_in_their_order(scene: Scene):
    write(scene)
    asked = settings(scene.folder, episodic_memory=True)
    assert merged_memory(*asked, "null", [1, {"b": 2}]) == '[1,{"b":2}]'
    assert merged_memory(*asked, "[0]", []) == "[0]"
    for merged, problem in (("1 / 0", "merge_memory raised ZeroDivisionError"), ("float('inf')", "JSON cannot hold")):
        write(scene, merged=merged)
        with pytest.raises(ConfigError, match=problem):
            merged_memory(*settings(scene.folder, episodic_memory=True), "null", [])


def test_the_example_remembers_what_was_right():
    from examples.environments.notebook import Notebook

    row = {"question": "who?", "answer": "me"}
    notes = []
    for said in ("me", "you"):
        episode = Notebook()
        episode.load_memory(None)
        assert episode.reset(row, 0) == "who?"
        episode.step({"content": f"{said} "})
        notes.append(episode.save_memory())
    assert notes == [["who?", "me"], None]
    later = Notebook()
    later.load_memory(Notebook().merge_memory(None, notes[:1]))
    assert later.reset(row, 0) == "Noted: me\nwho?"


def test_a_memory_is_a_snapshot_of_its_own_kind(scene: Scene, tmp_path: Path):
    write(scene)
    objects = scene.objects
    asked = settings(scene.folder, episodic_memory=True)
    about = {"run_id": "1", "step": 1, "algorithm": "grpo", "meta": {"run": "monday"}}
    saved = merge_notes(objects, *asked, None, ["a"], **about)
    assert merge_notes(objects, *asked, None, ["a"], **about).id == saved.id
    later = merge_notes(objects, *asked, saved.id, ["b"], **about | {"step": 2})
    assert read_memory(objects, later.id) == '["a","b"]' and read_memory(objects, None) == "null"
    snapshots = SnapshotStore(objects)
    assert [found.step for found in snapshots.list(kind="episodic_memory")] == [2, 1]
    assert find_memory(objects, saved.id[:8]) == saved.id
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_bytes(canonical_json("x"))
    other = snapshots.save(tmp_path / "other", run_id="1", step=1, algorithm="grpo")
    with pytest.raises(ConfigError, match="is a train_state; expected an episodic_memory"):
        find_memory(objects, other.id)
    with pytest.raises(CorruptObject, match=r"has no memory.json"):
        read_memory(objects, other.id)


def test_a_memory_to_start_with_needs_a_memory_and_is_part_of_no_identity():
    with pytest.raises(ValueError, match="episodic_memory = true"):
        PythonEnvironment(path="env.py:Env", start_memory="0" * 8)
    plain = PythonEnvironment(path="env.py:Env")
    assert "episodic_memory" not in plain.cache_identity() and "start_memory" not in plain.cache_identity()
    remembers = PythonEnvironment(path="env.py:Env", episodic_memory=True)
    begins = PythonEnvironment(path="env.py:Env", episodic_memory=True, start_memory="0" * 8)
    assert remembers.cache_identity() == begins.cache_identity() == {**plain.cache_identity(), "episodic_memory": True}

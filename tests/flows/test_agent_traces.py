"""Which traces a report shows of a run that trains an agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli.agent_trace import _trace_lines
from rollout_core.agents.adapters.ended import EndedRollout, most_changed
from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.objects import ObjectStore
from rollout_core.store import EnqueueRolloutRequest, Span, SqlLightningStore
from rollout_core.store.reachable import Connections


def ended(moment: str, rewards: list[float | None]) -> list[EndedRollout]:
    return [EndedRollout(f"{moment}-{place}", "succeeded", reward=reward) for place, reward in enumerate(rewards)]


def shown(before: list[float | None], after: list[float | None]) -> list[int]:
    pairs = most_changed(ended("before", before), ended("after", after), num_gained=3, num_lost=1)
    places = [(int(one.rollout_id.split("-")[1]), int(other.rollout_id.split("-")[1])) for one, other in pairs]
    assert all(one == other for one, other in places), "of one task"
    return [one for one, _ in places]


def test_tasks_that_gained_most_are_shown_then_the_one_that_lost_most():
    assert shown([0, 0, 1, 0, 0.5, None], [1, 0, 0, 0.5, 0.5, 1]) == [0, 5, 3, 2]
    assert shown([1, 1, 1, 1, 1], [1, 1, 1, 1, 1]) == [0, 1, 2, 4]


def test_a_task_is_shown_once():
    assert shown([0, 0], [1, 1]) == [0, 1]
    assert shown([0, 0, 0, 0], [1, 1, 1, 0]) == [0, 1, 2, 3]
    assert shown([], []) == []


async def test_a_rollout_is_found_by_the_first_characters_of_its_id(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'rollout.db'}"
    known = Connections(lambda: ObjectStore.from_url(f"file://{tmp_path / 'objects'}"), lambda: url)
    async with SqlLightningStore.from_url(url) as store:
        for name in ("aaaa-1", "aaaa-2", "c-3456"):
            await store.enqueue_many_rollouts([EnqueueRolloutRequest(rollout_id=name, input=name)])
            rollout = await store.start_attempt(name)
            ids = {"rollout_id": name, "attempt_id": rollout.attempt.attempt_id}
            await store.add_span(Span.from_attributes(**ids, sequence_id=1, name="look-up", attributes={}))
    for given in ("c-3456", "c-3"):
        lines = await _trace_lines(known, given, "latest")
        assert lines[0] == "rollout c-3456: running, reward None" and lines[2] == "look-up"
    with pytest.raises(ConfigError, match="2 rollouts have ids that begin with 'aaaa', aaaa-1 and aaaa-2 among them"):
        await _trace_lines(known, "aaaa", "latest")
    with pytest.raises(NotFound, match="no rollout in the database has an id that begins with 'b'"):
        await _trace_lines(known, "b", "latest")

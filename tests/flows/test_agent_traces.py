"""Which traces a report shows of a run that trains an agent."""

from __future__ import annotations

from flows.agent import chosen_pairs
from rollout_core.agents.adapters.ended import EndedRollout


def ended(moment: str, rewards: list[float | None]) -> list[EndedRollout]:
    return [EndedRollout(f"{moment}-{place}", "succeeded", reward=reward) for place, reward in enumerate(rewards)]


def shown(before: list[float | None], after: list[float | None]) -> list[int]:
    pairs = chosen_pairs(ended("before", before), ended("after", after))
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

"""When a training reward counts as exploited, by curves made by hand."""

from __future__ import annotations

import pytest

from rollout_core.algorithms.reward_hacking import HackingWatch, PolicyRewards, reward_hacking
from rollout_core.base.errors import Fatal
from rollout_core.base.ids import hash_bytes
from rollout_core.config import RewardHackingGuard

SOME = hash_bytes(b"some")


@pytest.mark.parametrize(
    ("pairs", "is_hacked"),
    [
        ([(0.1, 0.5), (0.2, 0.6), (0.3, 0.5), (0.4, 0.4)], True),
        ([(0.1, 0.5), (0.2, 0.6), (0.3, 0.5)], False),  # once
        ([(0.1, 0.5), (0.2, 0.6), (0.3, 0.5), (0.4, 0.6)], False),  # it came back
        ([(0.1, 0.5), (0.2, 0.6), (0.1, 0.5), (0.1, 0.4)], False),  # both fell
        ([(0.1, 0.5), (0.2, 0.6), (0.3, 0.57), (0.4, 0.56)], False),  # within the bound
        ([(0.3, 0.6), (0.4, 0.5), (0.5, 0.7), (0.6, 0.6)], False),  # against the best so far, once
        ([(0.1, 0.6)], False),
    ],
)
def test_a_reward_is_hacked_where_it_rises_while_another_falls(pairs, is_hacked):
    found = [PolicyRewards(number, SOME, *pair) for number, pair in enumerate(pairs, start=1)]
    told = reward_hacking(found, max_fall=0.05, evaluations=2)
    assert (told is not None) == is_hacked
    if told is not None:
        assert told.startswith("in the last 2 evaluations the training reward is above that of iteration 2 (0.2)")
        assert "3: 0.3, 0.5; 4: 0.4, 0.4" in told and SOME in told


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_watch_knows_the_best_model_and_ends_the_run_that_hacks(is_stored: bool):
    guard = RewardHackingGuard.model_validate({"prompts": {"path": "x"}, "max_fall": 0.05, "evaluations": 1})
    watch, models = HackingWatch(guard), [hash_bytes(name) for name in (b"first", b"second", b"third")]
    assert watch.best is None
    watch.note(PolicyRewards(1, models[0], 0.1, 0.5), is_stored=is_stored)
    watch.note(PolicyRewards(2, models[1], 0.2, 0.6), is_stored=is_stored)
    assert watch.best == models[1]
    with pytest.raises(Fatal, match="This iteration trained nothing, and checkpoints before it stay") as raised:
        watch.note(PolicyRewards(3, models[2], 0.3, 0.4), is_stored=is_stored)
    assert ("by `rollout reproduce`" in str(raised.value)) != is_stored
    assert watch.best == models[1]

"""When a training reward counts as exploited, by curves made by hand."""

from __future__ import annotations

import pytest

from rollout_core.algorithms.reward_hacking import PolicyRewards, reward_hacking
from rollout_core.base.ids import hash_bytes

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

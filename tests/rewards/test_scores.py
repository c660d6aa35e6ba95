"""How many groups dynamic sampling draws, by hand."""

from __future__ import annotations

import pytest

from rollout_core.base.errors import Fatal
from rollout_core.base.ids import hash_bytes
from rollout_core.config import DynamicSampling
from rollout_core.objects.records import SelectedGroups
from rollout_core.rewards.scores import num_to_draw


def selected(num_groups: int, num_drawn: int) -> SelectedGroups:
    ids = dict.fromkeys(("scores", "completions", "samples"), hash_bytes(b"blob"))
    figures = dict.fromkeys(("mean", "std", "mean_drawn"), 0.0)
    return SelectedGroups.model_validate(
        {**ids, **figures, "num_samples": 2 * num_groups, "num_groups": num_groups, "num_drawn": num_drawn}
    )


@pytest.mark.parametrize(
    ("num_groups", "num_drawn", "drawn_next"),
    [
        (8, 8, 0),
        (9, 20, 0),  # more than wanted
        (6, 8, 3),  # 2 are missing, and 6 of 8 differ: 2 * 8 / 6
        (1, 8, 8),  # 56 would be needed; a round has no more than the iteration wants
        (0, 8, 8),
    ],
)
def test_a_round_draws_what_the_share_of_useful_groups_lets_expect(num_groups: int, num_drawn: int, drawn_next: int):
    settings = DynamicSampling(max_rounds=2)
    found = num_to_draw(selected(num_groups, num_drawn), 8, settings, num_rounds=1, label="iteration 1")
    assert found == drawn_next


def test_after_the_last_round_an_iteration_has_enough_or_fewer_or_the_run_ends():
    stops, takes_fewer = (DynamicSampling(max_rounds=2, when_short=choice) for choice in ("stop", "fewer"))
    last = {"num_rounds": 2, "label": "iteration 3"}
    assert num_to_draw(selected(8, 16), 8, stops, **last) == 0
    assert num_to_draw(selected(5, 16), 8, takes_fewer, **last) == 0
    with pytest.raises(Fatal, match=r"iteration 3: in 2 rounds 5 of 16 groups .* or set when_short = \"fewer\"$"):
        num_to_draw(selected(5, 16), 8, stops, **last)
    with pytest.raises(Fatal, match=r"0 of 16 groups have rewards that differ.* or dynamic_sampling\.max_rounds$"):
        num_to_draw(selected(0, 16), 8, takes_fewer, **last)

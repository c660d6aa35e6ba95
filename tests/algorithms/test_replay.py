"""Prioritised replay: what is kept and drawn, against arithmetic by hand, and what an update makes of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from updates import GRPO_SETTINGS, grpo, replayed_completions, rows_of, scored_completions, update_context

from rollout_core.algorithms.experience import Trajectory, build_batch
from rollout_core.algorithms.on_policy import compare_groups
from rollout_core.algorithms.on_policy_updates import load_trajectories
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config import AnyGroupSettings, GRPOSettings, ImportanceCorrection, Replay, identity
from rollout_core.data.replay import Buffer, Drawn, Group, num_fresh, priorities

MODEL = hash_bytes(b"weights")


def drawn(number: int, scores: list[float]) -> Drawn:
    lines = [[f'{{"{what}":{number}{row}}}\n'.encode() for row in range(len(scores))] for what in "sc"]
    return Drawn(number, ContentId(MODEL), lines[0], lines[1], scores)


def buffer_of(*priority: float) -> Buffer:
    groups = tuple(Group(0, place, value) for place, value in enumerate(priority))
    return Buffer(1, (drawn(0, [0.0] * len(priority)),), groups)


def test_a_groups_priority_is_the_mean_distance_of_its_rewards_from_their_mean():
    assert priorities([1, 0, 1, 1, 4, 0], 2) == pytest.approx([0.5, 0.0, 2.0], abs=2e-6)
    assert priorities([1, 0, 1, 1, 4, 0], 3) == pytest.approx(
        [(1 / 3 + 2 / 3 + 1 / 3) / 3, (2 / 3 + 7 / 3 + 5 / 3) / 3], abs=2e-6
    )
    assert priorities([1, 3], 1) == pytest.approx([1.0, 1.0], abs=2e-6), "single completions: from all of them"


def test_equal_rewards_have_the_least_priority_and_completions_without_a_score_none():
    """(1, -, 3) is compared by 1 and 3; of (-, -, 5) and (0.1, 0.1, 0.1) nothing differs, whatever rounding says."""
    assert priorities([1, None, 3, None, None, 5, 0.1, 0.1, 0.1], 3) == [1 + 1e-6, 1e-6, 1e-6]
    assert priorities([1, None, 3], 1) == pytest.approx([1.0, 0.0, 1.0], abs=2e-6)


def test_groups_are_drawn_as_often_as_their_priorities_say_and_weigh_as_much_less():
    """Chances 1/6, 2/6, 3/6; w = (3 P)^-1 is 2, 1 and 2/3."""
    buffer, settings = buffer_of(1, 2, 3), Replay(groups=1, priority_exponent=1, weight_exponent=1)
    seen = Counter(buffer.draw(settings, str(seed))[0][0].place for seed in range(6000))
    assert [seen[place] / 6000 for place in range(3)] == pytest.approx([1 / 6, 2 / 6, 3 / 6], abs=0.02)
    groups, weights = buffer.draw(Replay(groups=3, priority_exponent=1, weight_exponent=1), "a seed")
    assert dict(zip([group.place for group in groups], weights, strict=True)) == pytest.approx({0: 1, 1: 0.5, 2: 1 / 3})
    assert buffer.draw(Replay(groups=3, weight_exponent=0), "a seed")[1] == [1, 1, 1]
    assert buffer.draw(settings, "a seed") == buffer.draw(settings, "a seed")
    even = Counter(buffer.draw(Replay(groups=1, priority_exponent=0), str(seed))[0][0].place for seed in range(3000))
    assert min(even.values()) > 900


def test_the_newest_groups_stay_and_a_folder_holds_all_of_them(tmp_path: Path):
    settings = Replay(groups=1, capacity=3, max_age=2)
    buffer = Buffer(2)
    for number in range(3):
        buffer = buffer.with_iteration(drawn(number, [1, 0, 2, 0]), settings)
    assert [(group.iteration, group.place) for group in buffer.groups] == [(1, 1), (2, 0), (2, 1)]
    assert [item.number for item in buffer.iterations] == [1, 2]
    older = Buffer(2).with_iteration(drawn(0, [1, 0]), settings).with_iteration(drawn(2, [1, 0]), settings)
    assert [group.iteration for group in older.groups] == [2], "too old"
    buffer.write(tmp_path)
    assert Buffer.read(tmp_path) == buffer
    item, rows = buffer.rows(buffer.groups[0])
    assert item.completions[rows] == [b'{"c":12}\n', b'{"c":13}\n'] and item.model == MODEL


def test_how_many_groups_are_fresh_follows_from_the_settings():
    assert [num_fresh(number, 8, Replay(groups=3)) for number in range(4)] == [8, 5, 5, 5]
    assert [num_fresh(number, 8, None) for number in range(2)] == [8, 8]
    assert [num_fresh(number, 4, Replay(groups=3, capacity=3)) for number in range(3)] == [4, 1, 1]
    for number, wanted in enumerate([4, 1, 3, 1]):  # the buffer has 4, then only 1 of age 1
        assert num_fresh(number, 4, Replay(groups=3, capacity=64, max_age=1)) == wanted


def test_advantages_of_replayed_completions_have_their_weight():
    def row(score: float, weight: float) -> Trajectory:
        return Trajectory([5, 6], [7, 8], [-1.0, -1.0], score, truncated=False, weight=weight)

    settings = GRPOSettings.model_validate(
        {"prompts": {"path": "x"}, "optimizer": {"lr": 1}, "samples_per_prompt": 2, "advantage_scaling": "none"}
    )
    batch = build_batch([row(1, 1), row(0, 1), row(1, 0.25), row(0, 0.25)])
    found, _ = compare_groups(torch.nn.Identity(), None, batch, settings, device=torch.device("cpu"))
    assert found.columns["advantages"][:, 0].tolist() == [0.5, -0.5, 0.125, -0.125]
    plain = build_batch([row(1, 1), row(0, 1)])
    assert set(plain.columns) == {"old_logprobs"}, "without replay no column"


def test_an_update_learns_from_fresh_and_replayed_completions_and_tells_how_many(tiny_model: Path, tmp_path: Path):
    place = update_context(tmp_path)
    scores, samples, replayed = replayed_completions(place.objects)
    rows = load_trajectories(place.objects, samples, scores, replayed)
    assert len(rows) == 12 and [row.weight for row in rows[:8]] == [1] * 8 and max(row.weight for row in rows[8:]) == 1
    told = place.objects.get_json(replayed)
    assert len(set(told["drawn_by"][:8])) == 1 and told["drawn_by"][8] != told["drawn_by"][0]
    first = scored_completions(place.objects, seed=1)
    old = {tuple(row.token_ids) for row in load_trajectories(place.objects, first[1], first[0])}
    assert all(tuple(row.token_ids) in old for row in rows[8:])
    row = rows_of(grpo(place, tiny_model, replay=Replay(groups=2), correction=ImportanceCorrection()), place.objects)[0]
    assert row["replay/share"] == pytest.approx(4 / 12) and 0 < row["replay/weight_mean"] <= 1


def test_replay_corrects_for_older_weights_by_default_and_changes_no_other_identity():
    fields: dict[str, Any] = {"prompts": {"path": "x"}, "optimizer": {"lr": 1e-4}}
    plain = GRPOSettings.model_validate(fields)
    settings = GRPOSettings.model_validate({**fields, "replay": {"groups": 2}})
    assert settings.correction == ImportanceCorrection() and "replay" not in identity(plain)
    corrected = GRPOSettings.model_validate({**fields, "correction": {}})
    assert identity(settings) == identity(corrected), "what is replayed is among the samples"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replay": {"groups": 9, "capacity": 8}}, "capacity is 8, fewer than the 9 groups that are drawn from it"),
        ({"replay": {"groups": 128}}, "replay.groups is 128 of 128 prompts_per_iteration; at least one must be fresh"),
        ({"replay": {"groups": 2}, "correction": None}, "replay needs a correction"),
        ({"replay": {"groups": 2}, "loss": "online_dpo"}, 'kind = "online_dpo" has no use for .*replay'),
        (
            {"replay": {"groups": 2}, "reward_normalization": "each", "advantage_scaling": "batch"},
            'replay and reward_normalization = "each"',
        ),
    ],
)
def test_what_cannot_be_replayed_is_said(changes: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        fields = GRPO_SETTINGS.model_dump(exclude={"correction"})
        TypeAdapter(AnyGroupSettings).validate_python({**fields, "prompts_per_iteration": 128, **changes})

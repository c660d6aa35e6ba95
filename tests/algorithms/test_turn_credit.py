"""Credit by turn: returns and advantages by hand, and what they have in common with credit by outcome."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings as hypothesis_settings, strategies as st
from torch import Tensor

from rollout_core.algorithms.advantages import Groups, gae, group_advantages
from rollout_core.algorithms.experience import Trajectory, build_batch
from rollout_core.algorithms.on_policy import assign_credit, compare_groups, turn_advantages
from rollout_core.algorithms.policy import Policy, zero_head
from rollout_core.algorithms.turn_credit import EpisodeTurns, compared_episodes, episode_gae
from rollout_core.base.errors import ConfigError
from rollout_core.config import GRPOSettings, JsonlDataset, OptimizerConfig, PPOSettings
from rollout_core.models.pretrained import load_causal_lm

CPU = torch.device("cpu")
COMMON: Any = {
    "prompts": JsonlDataset(path="x"),
    "optimizer": OptimizerConfig(lr=1e-3),
    "minibatch_size": 8,
    "gradient_accumulation": 1,
}


def grpo(**changes: Any) -> GRPOSettings:
    return GRPOSettings(**COMMON | {"samples_per_prompt": 2, "credit": "turn", **changes})


def episode(*turns: int) -> Trajectory:
    """One trajectory whose turns wrote so many tokens, with one that was given after each."""
    tokens, written = [], []
    for count in turns:
        written.append((len(tokens), len(tokens) + count))
        tokens += [7 + place for place in range(count)] + [3]
    return Trajectory([1, 2], tokens[:-1], [-1.0] * (len(tokens) - 1), 1.0, False, written)


def apart(item: Trajectory) -> list[Trajectory]:
    """The same with a trajectory for each turn."""
    return [
        Trajectory([1, 2, *item.token_ids[:start]], item.token_ids[start:stop], item.logprobs[start:stop], 1.0, False)
        for start, stop in item.written or ()
    ]


def turns_of(items: list[Trajectory], rewards: list[list[float | None]], size: int = 1) -> EpisodeTurns:
    """Of episodes that are one trajectory each."""
    numbers = [list(range(len(item.written or ()))) for item in items]
    return EpisodeTurns.of(items, Groups(range(len(items)), size), numbers, rewards)


def test_returns_discount_later_turns_and_end_with_the_outcome():
    found = turns_of([episode(1, 2, 1), episode(2)], [[0.5, None, 1.0], [0.25]])
    outcomes = torch.tensor([2.0, -1.0])
    assert found.returns(outcomes, gamma=0.5).tolist() == [[0.5 + 0.25 * 3, 0.5 * 3, 3.0], [-0.75, 0.0, 0.0]]
    assert found.reached.tolist() == [[True, True, True], [True, False, False]]
    assert found.figures() == {"turn_rewards": (1.5 + 0.25) / 2, "num_turns": 2.0}


def test_a_turn_is_compared_with_the_same_turn_of_the_others_that_have_one():
    returns, reached = torch.tensor([[3.0, 2.0], [1.0, 0.0]]), torch.tensor([[True, True], [True, False]])
    assert turn_advantages(returns, reached, grpo(advantage_scaling="none")).tolist() == [[1.0, 0.0], [-1.0, 0.0]]
    both = torch.ones_like(reached)
    scaled = turn_advantages(returns, both, grpo())
    std = 2**0.5
    assert scaled.tolist() == [
        pytest.approx([1 / (std + 1e-4)] * 2),
        pytest.approx([-1 / (std + 1e-4)] * 2),
    ]


def test_with_episodes_as_baseline_each_episode_counts_alike():
    # Means of turns are 2.5 and 1, so that of the group is 1.75.
    returns, reached = torch.tensor([[3.0, 2.0], [1.0, 0.0]]), torch.tensor([[True, True], [True, False]])
    plain = turn_advantages(returns, reached, grpo(turn_baseline="episodes", advantage_scaling="none"))
    assert plain.tolist() == [[1.25, 0.25], [-0.75, 0.0]]
    others = turn_advantages(
        returns, reached, grpo(turn_baseline="episodes", advantage_scaling="none", baseline="leave_one_out")
    )
    assert others.tolist() == [[2.0, 1.0], [-1.5, 0.0]]
    variance = (1.25**2 + 0.25**2) / 2 + 0.75**2
    scaled = turn_advantages(returns, reached, grpo(turn_baseline="episodes"))
    assert scaled[0, 0].item() == pytest.approx(1.25 / (variance**0.5 + 1e-4))
    over_the_batch = turn_advantages(returns, reached, grpo(turn_baseline="episodes", advantage_scaling="batch"))
    torch.testing.assert_close(over_the_batch, scaled)  # of one group


numbers = st.floats(-4, 4, width=16)


@given(st.lists(st.tuples(numbers, st.integers(1, 4)), min_size=3, max_size=3), st.booleans(), st.booleans())
@hypothesis_settings(deadline=None, max_examples=60)
def test_of_a_last_reward_alone_both_credits_are_the_same(
    episodes: list[tuple[float, int]], normalize: bool, leave_one_out: bool
):
    outcomes = torch.tensor([reward for reward, _ in episodes])
    lengths = torch.tensor([count for _, count in episodes])
    rewards = torch.zeros(3, int(lengths.max()))
    found = EpisodeTurns(Groups(range(3), 3), torch.zeros(3, 1, dtype=torch.long), rewards, lengths)
    returns = found.returns(outcomes, gamma=1.0)
    options: Any = {"normalize": normalize, "leave_one_out": leave_one_out, "eps": 1e-4}
    by_outcome = group_advantages(outcomes, 3, **options)[:, None].expand_as(returns).masked_fill(~found.reached, 0.0)
    torch.testing.assert_close(
        compared_episodes(returns, found.reached, 3, **options), by_outcome, atol=2e-4, rtol=1e-3
    )
    settings = grpo(
        samples_per_prompt=3,
        baseline="leave_one_out" if leave_one_out else "group",
        advantage_scaling="group" if normalize else "none",
    )
    whole = torch.ones_like(found.reached)
    same_length = turn_advantages(outcomes[:, None].expand_as(returns), whole, settings)
    wanted = group_advantages(outcomes, 3, **options)[:, None].expand_as(returns)
    assert torch.equal(same_length, wanted)


@given(st.lists(st.lists(numbers, min_size=1, max_size=4), min_size=2, max_size=2), st.floats(0.25, 1.0))
@example([[-1.0, 2.0**-23, 2.0**-24], [-1.0, 4.0, -4.0]], 1.0)
@hypothesis_settings(deadline=None, max_examples=40)
def test_what_is_behind_an_episode_and_other_groups_change_nothing(rewards: list[list[float]], gamma: float):
    alone = [Trajectory([1], [5] * len(row), [-1.0] * len(row), 1.0, False, [(n, n + 1) for n in range(len(row))])
             for row in rewards]  # fmt: skip
    short, longer = ([*alone, episode(*other), episode(1)] for other in ((1,), (1, 1, 1, 1, 1)))

    def advantages(items: list[Trajectory], given: list[Any]) -> Tensor:
        turns = turns_of(items, given, 2)
        returns = turns.returns(torch.zeros(len(items)), gamma=gamma)
        return turn_advantages(returns, turns.reached, grpo())

    found, most = advantages(short, [*rewards, [9.0], [1.0]]), max(map(len, rewards))
    wide = advantages(longer, [*rewards, [9.0] * 5, [1.0]])
    assert torch.equal(wide[:2, :most], found[:2]) and not wide[:2, most:].any()
    # torch has another kernel for the deviation of a single group: returns that are nearly equal differ in last bits.
    torch.testing.assert_close(advantages(alone, rewards), found[:2], atol=2e-4, rtol=1e-3)


def policies(tiny_model: Any) -> tuple[Policy, Policy]:
    trained = load_causal_lm(tiny_model).eval()
    policy = Policy(trained, zero_head(trained))
    torch.nn.init.normal_(policy.values.weight)  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
    return policy, Policy(load_causal_lm(tiny_model).eval())


def test_ppo_gives_a_turns_reward_to_its_last_token_in_either_form(tiny_model: Any):
    policy, reference = policies(tiny_model)
    item, rewards = episode(2, 1, 2), [[0.5, None, -1.0]]
    settings = PPOSettings(**COMMON, whiten_advantages=False, credit="turn", gamma=0.9)
    found = {}
    for form, items in (("trajectory", [item]), ("transition", apart(item))):
        turns = EpisodeTurns.of(
            items,
            Groups([0] * len(items), 1),
            [[0, 1, 2]] if form == "trajectory" else [[0], [1], [2]],
            rewards * len(items),
        )
        batch = build_batch(items)
        credited, figures, _ = assign_credit(policy, reference, batch, settings, kl_coef=0.0, device=CPU, turns=turns)
        found[form] = {name: credited.columns[name][batch.mask] for name in ("advantages", "returns", "old_values")}
        assert figures["turn_rewards"] == -0.5 and figures["num_turns"] == 3.0
    values = found["trajectory"]["old_values"][None]
    by_hand = torch.tensor([[0.0, 0.5, 0.0, 0.0, -1.0 + 1.0]])
    advantages, returns = gae(by_hand, values, torch.ones(1, 5, dtype=torch.bool), gamma=0.9, lam=settings.lam)
    torch.testing.assert_close(found["trajectory"]["advantages"], advantages[0])
    torch.testing.assert_close(found["trajectory"]["returns"], returns[0])
    torch.testing.assert_close(found["transition"]["advantages"], advantages[0], atol=1e-4, rtol=1e-4)


def test_ppo_without_rewards_of_turns_is_credited_as_by_outcome(tiny_model: Any):
    policy, reference = policies(tiny_model)
    items = [episode(2, 1), episode(3)]
    settings = PPOSettings(**COMMON)
    options: Any = {"kl_coef": 0.1, "device": CPU}
    batch = build_batch(items)
    by_outcome, _, _ = assign_credit(policy, reference, batch, settings, **options)
    turns = turns_of(items, [[None, None], [None]])
    by_turn, _, _ = assign_credit(policy, reference, batch, settings, **options, turns=turns)
    for name, column in by_outcome.columns.items():
        assert torch.equal(column, by_turn.columns[name]), name


def test_a_turn_that_wrote_nothing_gives_its_reward_to_the_last_token_before_it():
    # The second of three turns has no tokens, as of an answer that was empty.
    item = Trajectory([1], [5, 6, 7], [-1.0] * 3, 1.0, False, [(0, 2), (2, 3)])
    turns = EpisodeTurns.of([item], Groups([0], 1), [[0, 2]], [[None, 4.0, None]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    nothing = torch.zeros(1, 3)
    advantages, _ = episode_gae(nothing, nothing, mask, turns, torch.tensor([1.0]), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[5.0, 5.0, 1.0]]
    # Before the first token nothing is to be credited.
    turns = EpisodeTurns.of([item], Groups([0], 1), [[1, 2]], [[4.0, None, None]])
    advantages, _ = episode_gae(nothing, nothing, mask, turns, torch.tensor([1.0]), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("form", ["trajectory", "transition"])
def test_grpo_gives_each_token_its_turns_advantage(tiny_model: Any, form: str):
    items, rewards = [episode(2, 1), episode(1, 2)], [[1.0, 0.0], [0.0, 0.5]]
    if form == "trajectory":
        rows, rollouts, numbers, earned = items, [0, 1], [[0, 1]] * 2, rewards
    else:
        rows, rollouts = [part for item in items for part in apart(item)], [0, 0, 1, 1]
        numbers, earned = [[0], [1]] * 2, [rewards[0], rewards[0], rewards[1], rewards[1]]
    groups = Groups(rollouts, 2)
    turns = EpisodeTurns.of(rows, groups, numbers, earned)
    batch = build_batch(rows)
    policy = Policy(load_causal_lm(tiny_model).eval())
    settings = grpo(advantage_scaling="none")
    found, figures = compare_groups(policy, None, batch, settings, device=CPU, groups=groups, turns=turns)
    # Outcomes are 1: returns are [2, 1] and [1.5, 1.5].
    assert found.columns["advantages"][batch.mask].tolist() == [0.25, 0.25, -0.25, -0.25, 0.25, 0.25]
    assert found.columns["advantages"][~batch.mask].abs().sum() == 0
    assert figures["turn_rewards"] == 0.75 and figures["reward"] == 1.0
    assert found.learned is not None and found.learned.all()  # though outcomes are alike


def test_turns_that_do_not_fit_what_was_written_are_refused():
    with pytest.raises(ConfigError, match="2 written parts is of the turns"):
        EpisodeTurns.of([episode(1, 1)], Groups([0], 1), [[0]], [[1.0]])
    with pytest.raises(ConfigError, match="its episode has 1 turns"):
        EpisodeTurns.of([episode(1, 1)], Groups([0], 1), [[0, 1]], [[1.0]])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"credit": "outcome", "gamma": 0.9}, 'gamma is of credit = "turn"'),
        ({"credit": "outcome", "turn_baseline": "episodes"}, 'turn_baseline is of credit = "turn"'),
        ({"turn_baseline": "episodes", "baseline": "none", "advantage_scaling": "none"}, "nothing is compared"),
        ({"kl_coef": 0.1, "kl_in": "reward"}, 'take kl_in = "loss"'),
    ],
)
def test_settings_without_a_meaning_are_refused(changes: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        grpo(**changes)

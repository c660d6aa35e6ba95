"""GSPO, CISPO, REINFORCE, the entropy bonus, and the advantages of RLOO and REINFORCE++: by hand, and against the
equations of the papers written sequence by sequence."""

from __future__ import annotations

import math

import pytest
import torch
from test_losses import LONGEST, leaf, random, random_mask, value_and_gradient
from torch import Tensor

from rollout_core.algorithms.advantages import Groups, group_advantages
from rollout_core.algorithms.experience import Trajectory, punish_overlong, soft_overlong
from rollout_core.algorithms.on_policy import RewardParts, _token_advantages, scaled_advantages
from rollout_core.algorithms.policy_losses import grpo_loss
from rollout_core.base.errors import ConfigError
from rollout_core.config import GRPOAlgorithm, GRPOSettings, parse_config

FOUR = torch.ones(1, 4, dtype=torch.bool)
ALGORITHM = {"prompts": {"path": "x"}, "optimizer": {"lr": 1e-6}}


def test_gspo_takes_one_ratio_for_a_sequence_by_hand():
    """Ratios 8 and 1/2: that of the sequence is 2, which counts up to 1.2 under A = 1 and whole under A = -1."""
    logprobs, mask = torch.log(torch.tensor([[8.0, 0.5], [8.0, 0.5]])), torch.ones(2, 2, dtype=torch.bool)
    result = grpo_loss(logprobs, torch.zeros(2, 2), torch.tensor([1.0, -1.0]), mask, loss="gspo")
    assert result.loss.item() == pytest.approx((-1.2 + 2.0) / 2)
    assert (result.clip_fraction_high.item(), result.clip_fraction_low.item()) == (0.5, 0.0)


def gspo_by_the_paper(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """arXiv:2507.18071, eq. 5 to 7, negated."""
    terms = []
    for x, y, a, real in zip(logprobs, old, advantages, mask, strict=True):
        if real.any():
            ratio = torch.exp((x[real] - y[real]).sum() / real.sum())
            terms.append(torch.minimum(ratio * a, ratio.clamp(1 - 0.1, 1 + 0.15) * a))
    return -sum(terms) / len(mask)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("seed", range(6))
def test_gspo_has_value_and_gradient_of_the_papers_sequence_objective(seed: int):
    x, old = random(seed, 5, 6, scale=0.3), random(seed + 50, 5, 6, scale=0.3)
    a, mask = random(seed + 99, 5), random_mask(seed, 5, 6)
    expected = value_and_gradient(lambda x: gspo_by_the_paper(x, old, a, mask), x)
    got = value_and_gradient(lambda x: grpo_loss(x, old, a, mask, loss="gspo", clip_low=0.1, clip_high=0.15).loss, x)
    assert torch.allclose(got[0], expected[0]) and torch.allclose(got[1][0], expected[1][0])


def test_cispo_clips_the_weight_and_keeps_every_gradient_by_hand():
    """Ratios 2, 1/2, 1.1, 3 under A = 1, 1, -2, -1, with weights between 0.8 and 1.2."""
    logprobs = torch.log(torch.tensor([[2.0, 0.5, 1.1, 3.0]]))
    advantages, weights = torch.tensor([[1.0, 1.0, -2.0, -1.0]]), torch.tensor([[1.2, 0.8, 1.1, 1.2]])

    def loss(x: Tensor) -> Tensor:
        return grpo_loss(x, torch.zeros(1, 4), advantages, FOUR, loss="cispo", loss_type="dapo").loss

    value, (gradient,) = value_and_gradient(loss, logprobs)
    assert value.item() == pytest.approx(-float((weights * advantages * logprobs).sum()) / 4)
    assert gradient.flatten().tolist() == pytest.approx((-weights * advantages / 4).flatten().tolist())
    result = grpo_loss(logprobs, torch.zeros(1, 4), advantages, FOUR, loss="cispo")
    assert (result.clip_fraction_low.item(), result.clip_fraction_high.item()) == (0.25, 0.5)


def test_cispo_without_a_lower_bound():
    logprobs = torch.log(torch.tensor([[0.01]]))
    _, (gradient,) = value_and_gradient(
        lambda x: grpo_loss(x, torch.zeros(1, 1), torch.ones(1), FOUR[:, :1], loss="cispo", clip_low=1.0).loss, logprobs
    )
    assert gradient.item() == pytest.approx(-0.01)


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo", "reinforce"])
def test_on_policy_all_of_them_have_the_gradient_of_reinforce(loss: str):
    x, a, mask = random(1, 3, 4), random(2, 3), random_mask(3, 3, 4)
    _, (gradient,) = value_and_gradient(
        lambda p: grpo_loss(p, x, a, mask, loss=loss, loss_type="dr_grpo", max_completion_length=LONGEST).loss, x
    )
    assert torch.allclose(gradient, -(a[:, None] * mask) / (3 * LONGEST))


def test_the_entropy_bonus_by_hand_and_its_gradient():
    entropy = torch.tensor([[1.0, 2.0, 3.0, math.nan]])
    mask = torch.tensor([[True, True, True, False]])
    options = {"loss_type": "dapo", "entropy_coef": 0.5}
    value, (gradient,) = value_and_gradient(
        lambda h: grpo_loss(torch.zeros(1, 4), torch.zeros(1, 4), torch.ones(1), mask, entropy=h, **options).loss,
        entropy,
    )
    assert value.item() == pytest.approx(-1 - 0.5 * 2)
    assert gradient.flatten().tolist() == pytest.approx([-0.5 / 3] * 3 + [0])


@pytest.mark.parametrize("loss", ["gspo", "cispo"])
def test_surrogates_ignore_masked_tokens_and_padding(loss: str):
    x, old, a, mask = random(1, 3, 4), random(2, 3, 4), random(3, 3), random_mask(4, 3, 4)

    def of(x: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        return grpo_loss(x, old, a, mask, loss=loss).loss

    expected = value_and_gradient(lambda x: of(x, old, mask), x)
    got = value_and_gradient(lambda x: of(x, old, mask), x.masked_fill(~mask, math.nan))
    assert got[0] == expected[0] and torch.equal(got[1][0], expected[1][0])
    wide = torch.nn.functional.pad
    assert torch.allclose(of(wide(x, (0, 2)), wide(old, (0, 2)), wide(mask, (0, 2))), expected[0])


def test_gradients_stay_finite_where_a_ratio_overflows():
    x, old = torch.zeros(1, 4), torch.full((1, 4), -1000.0)
    for loss in ("gspo", "cispo", "reinforce"):
        _, (gradient,) = value_and_gradient(
            lambda p, loss=loss: grpo_loss(p, old, torch.ones(1), FOUR, loss=loss).loss, x
        )
        assert gradient.isfinite().all()


def test_what_does_not_fit_is_refused():
    x = leaf(torch.zeros(1, 4))
    with pytest.raises(ConfigError, match="dual_clip bounds a clipped surrogate, which cispo has not"):
        grpo_loss(x, x, torch.ones(1), FOUR, loss="cispo", dual_clip=3.0)
    with pytest.raises(ConfigError, match="expected grpo, gspo, cispo or reinforce"):
        grpo_loss(x, x, torch.ones(1), FOUR, loss="ppo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="entropy_coef needs entropy"):
        grpo_loss(x, x, torch.ones(1), FOUR, entropy_coef=0.1)


# -- advantages of RLOO and REINFORCE++ --------------------------------------------------------------------------------


def settings_of(**changes) -> GRPOSettings:
    return GRPOSettings.model_validate({**ALGORITHM, **changes})


def test_leave_one_out_by_hand():
    """Each against the mean of the two others: 3 - (0 + 6) / 2, 0 - 4.5, 6 - 1.5."""
    rewards = torch.tensor([3.0, 0.0, 6.0])
    found = group_advantages(rewards, 3, normalize=False, leave_one_out=True)
    assert found.tolist() == pytest.approx([0.0, -4.5, 4.5])


def test_rloo_takes_the_kl_of_a_completion_off_its_reward_by_hand():
    """Rewards 2 and 1 less 0.5 times KLs of 1 and 3 nats: 1.5 and -0.5."""
    settings = settings_of(
        samples_per_prompt=2, baseline="leave_one_out", advantage_scaling="none", kl_coef=0.5, kl_in="reward"
    )
    mask = torch.tensor([[True, True], [True, False]])
    penalty = 0.5 * torch.tensor([[0.25, 0.75], [3.0, 0.0]])
    found = _token_advantages(torch.tensor([2.0, 1.0]), Groups.of_neighbours(2, 2), mask, settings, penalty)
    assert found.tolist() == [[2.0, 2.0], [-2.0, 0.0]]


def test_reinforce_plus_plus_whitens_reward_less_the_kl_to_come_by_hand():
    """Before whitening 2 - 1, 2 - 0.75 and 1 - 3: over three tokens mean 1/12 and variance 157/48."""
    settings = settings_of(
        samples_per_prompt=1, baseline="none", advantage_scaling="whiten", kl_coef=1.0, kl_in="reward"
    )
    mask = torch.tensor([[True, True], [True, False]])
    penalty = torch.tensor([[0.25, 0.75], [3.0, 0.0]])
    found = _token_advantages(torch.tensor([2.0, 1.0]), Groups.of_neighbours(2, 1), mask, settings, penalty)
    raw = [1.0, 1.25, -2.0]
    mean = sum(raw) / 3
    deviation = math.sqrt(sum((x - mean) ** 2 for x in raw) / 2)
    assert found[mask].tolist() == pytest.approx([(x - mean) / deviation for x in raw])
    assert found[1, 1] == 0


def test_turns_of_a_rollout_share_the_kl_of_all_of_them():
    settings = settings_of(samples_per_prompt=2, advantage_scaling="none", kl_coef=1.0, kl_in="reward")
    penalty, mask = torch.tensor([[1.0], [2.0], [0.0]]), torch.ones(3, 1, dtype=torch.bool)
    found = _token_advantages(torch.tensor([0.0, 0.0]), Groups([0, 0, 1], 2), mask, settings, penalty)
    assert found.flatten().tolist() == [-1.5, -1.5, 1.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_per_prompt": 1}, r'samples_per_prompt is 1, .*; take 2 or more, or baseline = "none"'),
        ({"baseline": "none"}, r'advantage_scaling is "group", but with baseline = "none" no groups are compared'),
        ({"kl_in": "reward"}, r'kl_in is "reward", but kl_coef is 0'),
        ({"loss": "cispo", "dual_clip": 3.0}, r'dual_clip bounds a clipped surrogate, which loss = "cispo" has not'),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_config({**ALGORITHM, **changes}, GRPOSettings)


# -- DAPO's penalty of length ------------------------------------------------------------------------------------------


def test_the_soft_overlong_penalty_by_hand():
    """A limit of 20 with a cache of 5: 0 up to 15, then a fifth for each token."""
    assert [soft_overlong(length, 20, 5) for length in (0, 15, 16, 18, 20, 30)] == [0, 0, -0.2, -0.6, -1, -1]


def test_only_what_the_policy_wrote_counts_as_long():
    settings = settings_of(sampling={"max_tokens": 10}, overlong={"cache": 4, "penalty": 0.5})
    tokens, logprobs = [1] * 8, [-1.0] * 8
    items = [
        Trajectory([1], tokens, logprobs, 1.0, False),
        Trajectory([1], tokens, logprobs, 1.0, False, written=[(0, 2), (3, 8)]),
        Trajectory([1], tokens[:5], logprobs[:5], 1.0, False),
    ]
    assert [item.score for item in punish_overlong(items, settings)] == pytest.approx([0.75, 0.875, 1.0])
    assert punish_overlong(items, settings_of()) == items


def test_a_cache_longer_than_a_completion_is_refused():
    with pytest.raises(ConfigError, match=r"overlong\.cache is 300, more than the 16 tokens of a completion; lower it"):
        parse_config({**ALGORITHM, "overlong": {"cache": 300}}, GRPOSettings)


def test_keys_at_their_default_stay_out_of_the_identity():
    """Results kept before there were these keys are found."""
    named = settings_of().cache_identity()
    assert not {"loss", "baseline", "kl_in", "entropy_coef", "overlong", "dynamic_sampling"} & set(named)
    assert settings_of(loss="gspo", overlong={"cache": 4}).cache_identity()["overlong"]["cache"] == 4


# -- rewards of several parts ------------------------------------------------------------------------------------------


def test_parts_of_a_reward_are_compared_each_by_itself_by_hand():
    """GDPO: sums 1, 1 and 2 would hide that the first two differ; parts have deviations of 1 / sqrt(3) each."""
    settings = settings_of(samples_per_prompt=3, reward_normalization="each")
    parts = RewardParts(
        ["right", "short"], torch.tensor([1.0, 0.5]), torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 2.0]])
    )
    deviations = math.sqrt(1 / 3) + 1e-4, 2 * math.sqrt(1 / 3) + 1e-4
    expected = [
        (right - 2 / 3) / deviations[0] + 0.5 * (short - 4 / 3) / deviations[1]
        for right, short in parts.values.tolist()
    ]
    scores = parts.values @ parts.weights
    assert scores.tolist() == [1.0, 1.0, 2.0]
    assert scaled_advantages(scores, settings, parts).tolist() == pytest.approx(expected, abs=1e-6)

    penalised = scores - torch.tensor([0.3, 0.0, 0.0])
    moved = [one + rest for one, rest in zip(expected, (-0.2, 0.1, 0.1), strict=True)]
    assert scaled_advantages(penalised, settings, parts).tolist() == pytest.approx(moved, abs=1e-6)

    batch = settings_of(samples_per_prompt=3, reward_normalization="each", advantage_scaling="batch")
    mean = sum(expected) / 3
    deviation = math.sqrt(sum((x - mean) ** 2 for x in expected) / 2)
    scaled = [x / (deviation + 1e-4) for x in expected]
    assert scaled_advantages(scores, batch, parts).tolist() == pytest.approx(scaled, abs=1e-6)
    assert parts.figures()["rewards/short/mean"] == pytest.approx(4 / 3)


def test_a_reward_without_parts_is_refused():
    document = {**ALGORITHM, "base_model": {"uri": "m"}, "reward_normalization": "each"}
    with pytest.raises(ConfigError, match=r'needs the parts of a "composite" reward; this one is "exact_match"'):
        parse_config(document, GRPOAlgorithm)
    composite = {"kind": "composite", "parts": [{"reward": {"kind": "exact_match"}}]}
    assert parse_config({**document, "reward": composite}, GRPOAlgorithm).reward_normalization == "each"

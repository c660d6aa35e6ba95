"""Advantages against hand arithmetic, an independent float64 reference, numerical gradients, and their invariants."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from rollout_core.algorithms.advantages import deviation, gae, group_advantages, masked_whiten
from rollout_core.algorithms.losses import ShapeError
from rollout_core.base.errors import ConfigError

seeds = st.integers(0, 2**31 - 1)
lengths = st.lists(st.integers(0, 6), min_size=1, max_size=4)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def right_padded(row_lengths: list[int], tokens: int = 6) -> Tensor:
    return torch.arange(tokens)[None] < torch.tensor(row_lengths)[:, None]


def reference_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition, arXiv:1506.02438, eq. 16, as a double sum."""
    after = [*values, 0.0][1:]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def test_gae_by_hand():
    """gamma = lam = 0.5, last token first: 1 - 1 = 0; 0 + 0.5 * 1 - 2 + 0.25 * 0 = -1.5; its returns 1 and 0.5."""
    advantages, returns = gae(
        torch.tensor([[0.0, 1.0, 9.0]]),
        torch.tensor([[2.0, 1.0, 9.0]]),
        torch.tensor([[True, True, False]]),
        gamma=0.5,
        lam=0.5,
    )
    assert advantages.tolist() == [[-1.5, 0.0, 0.0]]
    assert returns.tolist() == [[0.5, 1.0, 0.0]]


@settings(max_examples=50, deadline=None)
@given(seeds, lengths, st.floats(0, 1), st.floats(0, 1))
def test_gae_agrees_with_the_reference(seed: int, row_lengths: list[int], gamma: float, lam: float):
    mask = right_padded(row_lengths)
    rewards, values = random(seed, *mask.shape), random(seed + 1, *mask.shape)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row, length in enumerate(row_lengths):
        expected = reference_gae(rewards[row, :length].tolist(), values[row, :length].tolist(), gamma, lam)
        assert advantages[row, :length].tolist() == pytest.approx(expected)
        assert returns[row, :length].tolist() == pytest.approx(
            [a + v for a, v in zip(expected, values[row].tolist(), strict=False)]
        )
        assert (advantages[row, length:] == 0).all() and (returns[row, length:] == 0).all()


@settings(max_examples=25, deadline=None)
@given(seeds, lengths)
def test_gae_without_discount_is_return_minus_value(seed: int, row_lengths: list[int]):
    mask = right_padded(row_lengths)
    rewards, values = random(seed, *mask.shape) * mask, random(seed + 1, *mask.shape) * mask
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    rewards_to_go = rewards.flip(1).cumsum(1).flip(1) * mask
    assert torch.allclose(returns, rewards_to_go)
    assert torch.allclose(advantages, rewards_to_go - values)


@settings(max_examples=25, deadline=None)
@given(seeds, lengths, st.sampled_from([math.nan, math.inf, 1e30]), st.integers(0, 3), st.integers(0, 2))
def test_gae_ignores_masked_tokens_and_padding_at_either_end(
    seed: int, row_lengths: list[int], junk: float, right: int, left: int
):
    mask = right_padded(row_lengths)
    rewards, values = random(seed, *mask.shape), random(seed + 1, *mask.shape)
    expected = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    noisy = [
        torch.nn.functional.pad(tensor.masked_fill(~mask, junk), (left, right), value=junk)
        for tensor in (rewards, values)
    ]
    got = gae(*noisy, torch.nn.functional.pad(mask, (left, right)), gamma=0.9, lam=0.8)
    for tensor, expected_tensor in zip(got, expected, strict=True):
        assert torch.equal(tensor[:, left : left + 6], expected_tensor)
        assert tensor.isfinite().all() and tensor.count_nonzero() == expected_tensor.count_nonzero()


def test_gae_passes_the_gradient_check():
    mask = right_padded([4, 0, 6, 1])
    inputs = tuple(random(i, 4, 6).requires_grad_() for i in range(2))
    assert torch.autograd.gradcheck(lambda r, v: gae(r, v, mask, gamma=0.9, lam=0.8), inputs)


def test_gae_refuses_a_gap_between_real_tokens():
    mask = torch.tensor([[True, True, False], [True, False, True]])
    with pytest.raises(ShapeError, match="row 1 have a gap"):
        gae(torch.zeros(2, 3), torch.zeros(2, 3), mask, gamma=1.0, lam=1.0)


def test_gae_of_no_tokens_is_empty():
    empty = torch.zeros(2, 0)
    advantages, returns = gae(empty, empty, empty.bool(), gamma=1.0, lam=1.0)
    assert advantages.shape == returns.shape == (2, 0)


def test_group_advantages_by_hand():
    """Group (1, 3): mean 2, deviation with ddof 1 sqrt(2). Group (5, 5): no spread, no advantage."""
    got = group_advantages(torch.tensor([1.0, 3.0, 5.0, 5.0]), 2)
    one = 1 / (math.sqrt(2) + 1e-4)
    assert got.tolist() == pytest.approx([-one, one, 0.0, 0.0])
    assert group_advantages(torch.tensor([1.0, 3.0]), 2, normalize=False).tolist() == [-1.0, 1.0]


@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(2, 5), st.integers(1, 4), st.booleans())
def test_group_advantages_agree_with_the_reference(seed: int, group_size: int, groups: int, normalize: bool):
    rewards = random(seed, groups * group_size)
    expected = []
    for group in range(groups):
        members = rewards[group * group_size : (group + 1) * group_size].tolist()
        scale = statistics.stdev(members) + 1e-4 if normalize else 1.0
        expected += [(member - statistics.fmean(members)) / scale for member in members]
    assert group_advantages(rewards, group_size, normalize=normalize).tolist() == pytest.approx(expected, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(seeds, st.permutations(range(3)))
def test_groups_do_not_influence_each_other(seed: int, order: list[int]):
    rewards = random(seed, 3, 4)
    whole = group_advantages(rewards.flatten(), 4).view(3, 4)
    assert torch.allclose(group_advantages(rewards[list(order)].flatten(), 4).view(3, 4), whole[list(order)])


scales = st.one_of(st.sampled_from([0.1, 0.3, 7.3, 100.1, 1000.1]), st.floats(-1e6, 1e6, width=32))


@settings(max_examples=60, deadline=None)
@given(scales, st.integers(2, 64), st.booleans(), st.booleans())
def test_equal_rewards_have_no_advantage_at_any_scale(value: float, size: int, normalize: bool, leave_one_out: bool):
    """float32 rounds the mean: eight rewards of 1000.1 had advantages of -0.37. Another group counts as ever."""
    rewards = torch.tensor([value] * size + [0.0] * (size - 1) + [1.0])
    found = group_advantages(rewards, size, normalize=normalize, leave_one_out=leave_one_out)
    assert found[:size].tolist() == [0.0] * size
    assert found[-1] > 0


@settings(max_examples=30, deadline=None)
@given(scales, st.integers(2, 64))
def test_equal_values_deviate_by_nothing_and_are_whitened_to_nothing(value: float, count: int):
    values, mask = torch.full((count + 1,), value), torch.arange(count + 1) < count
    assert deviation(values).item() == 0.0
    assert masked_whiten(values, mask).tolist() == [0.0] * (count + 1)
    kept = masked_whiten(values, mask, shift_mean=False)
    assert kept.tolist() == [values[0].item()] * count + [0.0]


def test_rewards_that_are_nearly_equal_are_compared():
    """Exact equality decides: 1 and 1 + 2^-20 deviate by 2^-20 / sqrt(2), far below eps."""
    found = group_advantages(torch.tensor([1.0, 1.0 + 2**-20]), 2)
    expected = 2**-21 / (2**-20 / math.sqrt(2) + 1e-4)
    assert found.tolist() == pytest.approx([-expected, expected], rel=1e-4)


def test_what_is_not_counted_is_in_no_group():
    """Of (1, -, 3, 5) three are compared: mean 3, deviation 2. Of (2, -, -, -) one is left, of (-, 7, -, 7) equal."""
    rewards = torch.tensor([1.0, 99.0, 3.0, 5.0, 2.0, 99.0, 99.0, 99.0, 99.0, 7.0, 99.0, 7.0])
    counted = rewards != 99.0
    found = group_advantages(rewards, 4, counted=counted)
    one = 2 / (2 + 1e-4)
    assert found.tolist() == pytest.approx([-one, 0.0, 0.0, one] + [0.0] * 8)
    others = group_advantages(rewards, 4, counted=counted, normalize=False, leave_one_out=True)
    assert others.tolist() == pytest.approx([-3.0, 0.0, 0.0, 3.0] + [0.0] * 8)
    whole = group_advantages(rewards, 4, counted=torch.ones(12, dtype=torch.bool))
    assert torch.equal(whole, group_advantages(rewards, 4))


def test_group_advantages_pass_the_gradient_check():
    for normalize in (True, False):
        assert torch.autograd.gradcheck(
            lambda r, normalize=normalize: group_advantages(r, 3, normalize=normalize), (random(1, 6).requires_grad_(),)
        )


def test_group_advantages_refuse_groups_that_do_not_fit():
    with pytest.raises(ShapeError, match="N a multiple of 3"):
        group_advantages(torch.zeros(4), 3)
    with pytest.raises(ShapeError, match=r"expected \[N\]"):
        group_advantages(torch.zeros(2, 2), 2)
    with pytest.raises(ConfigError, match="group_size is 1; a completion needs others"):
        group_advantages(torch.zeros(4), 1)


def test_whitening_by_hand():
    """Real entries 1, 2, 3: mean 2, unbiased variance 1."""
    x, mask = torch.tensor([[1.0, 2.0, 99.0, 3.0]]), torch.tensor([[True, True, False, True]])
    assert masked_whiten(x, mask).tolist()[0] == pytest.approx([-1.0, 0.0, 0.0, 1.0])
    assert masked_whiten(x, mask, shift_mean=False).tolist()[0] == pytest.approx([1.0, 2.0, 0.0, 3.0])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.integers(0, 4))
def test_whitened_entries_have_mean_zero_and_variance_one(entries: list[float], padding: int):
    x = torch.tensor(entries + [7.0] * padding, dtype=torch.float64)
    mask = torch.tensor([True] * len(entries) + [False] * padding)
    mean, variance = statistics.fmean(entries), statistics.variance(entries)
    whitened = masked_whiten(x, mask)
    expected = [(entry - mean) / math.sqrt(variance + 1e-8) for entry in entries]
    assert whitened[mask].tolist() == pytest.approx(expected, abs=1e-6)
    assert (whitened[~mask] == 0).all()
    assert whitened[mask].mean().item() == pytest.approx(0, abs=1e-6)
    if variance > 1e-2:
        assert whitened[mask].var().item() == pytest.approx(1, rel=1e-5)


@settings(max_examples=25, deadline=None)
@given(seeds, st.sampled_from([math.nan, math.inf, 1e30]), st.booleans())
def test_whitening_ignores_masked_entries_in_value_and_gradient(seed: int, junk: float, shift_mean: bool):
    x, weights = random(seed, 3, 4), random(seed + 1, 3, 4)
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) < 0.6
    results = []
    for tensor in (x, x.masked_fill(~mask, junk)):
        tensor = tensor.clone().requires_grad_()
        whitened = masked_whiten(tensor, mask, shift_mean=shift_mean)
        (whitened * weights).sum().backward()
        results.append((whitened.detach(), tensor.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert (results[1][1][~mask] == 0).all()


def test_whitening_passes_the_gradient_check():
    mask = torch.tensor([[True, False, True], [True, True, False]])
    for shift_mean in (True, False):
        assert torch.autograd.gradcheck(
            lambda x, shift_mean=shift_mean: masked_whiten(x, mask, shift_mean=shift_mean),
            (random(1, 2, 3).requires_grad_(),),
        )


@pytest.mark.parametrize("real", [0, 1])
def test_whitening_fewer_than_two_entries_gives_zero(real: int):
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    whitened = masked_whiten(x, torch.arange(2) < real)
    whitened.sum().backward()
    assert (whitened == 0).all() and x.grad is not None and x.grad.isfinite().all()


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ShapeError, match=r"^gae: rewards \[1, 2\], values \[1, 3\], mask \[1, 2\]"):
        gae(torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2), gamma=1.0, lam=1.0)
    with pytest.raises(ShapeError, match=r"^masked_whiten: x \[2\], mask \[3\]"):
        masked_whiten(torch.zeros(2), torch.zeros(3))

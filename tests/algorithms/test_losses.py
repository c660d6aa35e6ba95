"""Every loss against hand arithmetic, an independent float64 reference, numerical gradients, and its invariants.

The references are loops over numpy scalars written from the papers' equations; they share no code with the library.
"""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from rollout_core.algorithms import losses
from rollout_core.algorithms.losses import (
    ShapeError,
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    selected_logprobs,
    sft_loss,
    simpo_loss,
    token_logprobs,
)
from rollout_core.algorithms.policy_losses import grpo_loss, kl_estimate, ppo_policy_loss, ppo_value_loss
from rollout_core.base.errors import ConfigError

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]
LONGEST = 9
seeds = st.integers(0, 2**31 - 1)


def random(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_mask(seed: int, batch: int, tokens: int) -> Tensor:
    return torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed)) < 0.6


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def value_and_gradient(loss, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [leaf(tensor) for tensor in inputs]
    value = loss(*leaves)
    value.backward()
    return value.detach(), [tensor.grad for tensor in leaves if tensor.grad is not None]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# -- log-probabilities and the supervised loss -------------------------------------------------------------------------


def reference_logprob(row: np.ndarray, target: int) -> float:
    return float(row[target]) - math.log(sum(math.exp(float(x)) for x in row))


def test_logprobs_of_hand_made_logits():
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]])
    assert torch.allclose(
        selected_logprobs(logits, torch.tensor([1, 1])), torch.tensor([math.log(3 / 4), math.log(1 / 5)])
    )


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_logprobs_agree_with_the_reference(seed: int):
    logits = random(seed, 4, 7, scale=3.0)
    targets = torch.tensor([0, -100, 6, 3])
    expected = [0.0 if t == -100 else reference_logprob(logits[n].numpy(), int(t)) for n, t in enumerate(targets)]
    assert torch.allclose(selected_logprobs(logits, targets), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("elements", [1, 14, 21, 2**20])
def test_logprobs_and_their_gradient_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch, elements: int):
    logits, targets = random(1, 5, 7), torch.tensor([0, 1, -100, 5, 6])
    expected = value_and_gradient(lambda x: (selected_logprobs(x, targets) ** 2).sum(), logits)
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", elements)
    got = value_and_gradient(lambda x: (selected_logprobs(x, targets) ** 2).sum(), logits)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1][0], expected[1][0])


def test_logprobs_pass_the_gradient_check():
    targets = torch.tensor([2, -100, 0])
    assert torch.autograd.gradcheck(lambda x: selected_logprobs(x, targets), (leaf(random(3, 3, 4)),))
    labels = torch.tensor([[1, 2, -100], [0, -100, 3]])
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, labels), (leaf(random(4, 2, 3, 4)),))


def test_logprobs_stay_finite_for_extreme_logits():
    logits = torch.tensor([[1e4, -1e4, 0.0], [3e38, 3e38, 3e38], [-math.inf, 0.0, 0.0]])
    got = selected_logprobs(logits, torch.tensor([1, 0, 2]))
    assert torch.allclose(got, torch.tensor([-2e4, -math.log(3.0), -math.log(2.0)]))


def test_logprobs_of_half_precision_logits_are_reduced_in_float32():
    logits = random(5, 3, 1000).bfloat16()
    targets = torch.tensor([0, 1, 2])
    got = selected_logprobs(logits, targets)
    assert got.dtype == torch.float32
    assert torch.allclose(got, selected_logprobs(logits.float(), targets), atol=1e-6)
    (gradient,) = value_and_gradient(lambda x: selected_logprobs(x, targets).sum(), logits)[1]
    assert gradient.dtype == torch.bfloat16


def test_logprobs_do_not_read_rows_without_a_target():
    logits = random(6, 3, 4)
    logits[1] = math.nan
    targets = torch.tensor([1, -100, 2])
    value, (gradient,) = value_and_gradient(lambda x: selected_logprobs(x, targets).sum(), logits)
    assert value.isfinite() and gradient.isfinite().all() and (gradient[1] == 0).all()


def test_token_logprobs_shift_labels_by_one():
    logits = random(7, 2, 4, 5)
    labels = torch.tensor([[0, 1, 2, 3], [4, -100, 0, 1]])
    got = token_logprobs(logits, labels)
    assert got.shape == (2, 3)
    assert got[0, 0].item() == pytest.approx(reference_logprob(logits[0, 0].numpy(), 1))
    assert got[1, 2].item() == pytest.approx(reference_logprob(logits[1, 2].numpy(), 1))
    assert got[1, 0] == 0


def test_sft_loss_of_uniform_logits_is_log_of_the_vocabulary():
    assert sft_loss(torch.zeros(2, 3, 8), torch.ones(2, 3, dtype=torch.int64)).item() == pytest.approx(math.log(8))


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_sft_loss_agrees_with_the_reference(seed: int):
    logits = random(seed, 3, 5, 6, scale=2.0)
    labels = torch.randint(0, 6, (3, 5), generator=torch.Generator().manual_seed(seed))
    labels[random_mask(seed, 3, 5)] = -100
    terms = [
        -reference_logprob(logits[b, t].numpy(), int(labels[b, t + 1]))
        for b in range(3)
        for t in range(4)
        if labels[b, t + 1] != -100
    ]
    expected = sum(terms) / len(terms) if terms else 0.0
    assert sft_loss(logits, labels).item() == pytest.approx(expected, rel=1e-9)
    assert sft_loss(logits, labels, num_items=20).item() == pytest.approx(sum(terms) / 20, rel=1e-9)


def test_sft_loss_passes_the_gradient_check():
    labels = torch.tensor([[1, -100, 2], [3, 0, -100]])
    assert torch.autograd.gradcheck(lambda x: sft_loss(x, labels, num_items=3), (leaf(random(8, 2, 3, 4)),))


@settings(max_examples=15, deadline=None)
@given(seeds, st.integers(1, 3))
def test_sft_loss_and_gradient_ignore_untrained_logits_and_right_padding(seed: int, padding: int):
    logits, labels = random(seed, 2, 4, 5), torch.tensor([[0, 1, -100, 3], [2, -100, -100, 4]])
    trained = torch.nn.functional.pad(labels[:, 1:] != -100, (0, 1))
    noisy = torch.cat([logits.clone(), torch.full((2, padding, 5), math.nan, dtype=torch.float64)], dim=1)
    noisy[:, :4][~trained] = math.nan
    padded_labels = torch.nn.functional.pad(labels, (0, padding), value=-100)
    expected = value_and_gradient(lambda x: sft_loss(x, labels), logits)
    got = value_and_gradient(lambda x: sft_loss(x, padded_labels), noisy)
    assert torch.allclose(got[0], expected[0])
    assert torch.allclose(got[1][0][:, :4], expected[1][0]) and (got[1][0][:, 4:] == 0).all()


def test_sft_loss_of_accumulated_parts_gives_the_gradient_of_the_whole():
    logits, labels = random(9, 4, 5, 6), torch.randint(0, 6, (4, 5))
    labels[1:, 3:] = -100
    num_items = int((labels[:, 1:] != -100).sum())
    whole, (whole_gradient,) = value_and_gradient(lambda x: sft_loss(x, labels), logits)
    parts = [
        value_and_gradient(lambda x, i=i: sft_loss(x, labels[i : i + 1], num_items=num_items), logits[i : i + 1])
        for i in range(4)
    ]
    assert sum(value for value, _ in parts).item() == pytest.approx(whole.item())
    assert torch.allclose(torch.cat([gradient for _, (gradient,) in parts]), whole_gradient)


def test_sft_loss_without_trained_tokens_is_zero_with_a_zero_gradient():
    labels = torch.full((2, 3), -100)
    for num_items in (None, 0, 7):
        value, (gradient,) = value_and_gradient(
            lambda x, n=num_items: sft_loss(x, labels, num_items=n), random(10, 2, 3, 4)
        )
        assert value == 0 and (gradient == 0).all()


def test_sft_loss_refuses_an_impossible_denominator():
    with pytest.raises(ConfigError, match="num_items is 0, but 2 tokens are trained"):
        sft_loss(torch.zeros(1, 3, 4), torch.ones(1, 3, dtype=torch.int64), num_items=0)


# -- pairs -------------------------------------------------------------------------------------------------------------


def test_bradley_terry_golden_values():
    """The values and tolerances the rollout framework's own test suite asserts."""

    def loss(chosen: list[float], rejected: list[float]) -> float:
        return bradley_terry_loss(torch.tensor(chosen), torch.tensor(rejected)).item()

    assert loss([1.0], [1.0]) == pytest.approx(math.log(2), abs=1e-6)
    assert 0 <= loss([5.0], [-5.0]) < 1e-3
    assert loss([-5.0], [5.0]) == pytest.approx(10.0, abs=1e-3)
    assert loss([2.0, 1.0], [1.0, 2.0]) == pytest.approx(0.8133, abs=1e-3)
    assert loss([], []) == 0
    assert loss([-50.0], [0.0]) == pytest.approx(50, abs=1e-4)
    assert loss([50.0], [0.0]) == pytest.approx(0, abs=1e-4)


def test_bradley_terry_takes_the_margin_off_the_difference():
    chosen, rejected, margin = torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([2.0])
    assert bradley_terry_loss(chosen, rejected, margin).item() == pytest.approx(math.log(2), abs=1e-6)


def test_dpo_loss_by_hand():
    """h = (-1 - -2) - (-4 - -3) = 2; beta h = 1."""
    inputs = [torch.tensor([x]) for x in (-1.0, -4.0, -2.0, -3.0)]
    assert dpo_loss(*inputs, beta=0.5).item() == pytest.approx(math.log(1 + math.exp(-1)), abs=1e-6)
    smoothed = 0.9 * math.log(1 + math.exp(-1)) + 0.1 * math.log(1 + math.exp(1))
    assert dpo_loss(*inputs, beta=0.5, label_smoothing=0.1).item() == pytest.approx(smoothed, abs=1e-6)


def test_ipo_loss_by_hand():
    """h = 2 and 1 / (2 beta) = 1, so (2 - 1)^2."""
    assert ipo_loss(*[torch.tensor([x]) for x in (-1.0, -4.0, -2.0, -3.0)], beta=0.5).item() == pytest.approx(1.0)


def test_orpo_loss_by_hand():
    """Mean probabilities 1/2 and 1/4 have odds 1 and 1/3, of ratio 3."""
    found = orpo_loss(torch.log(torch.tensor([0.5])), torch.log(torch.tensor([0.25])), beta=0.1)
    assert found.loss.item() == pytest.approx(math.log(2) - 0.1 * math.log(sigmoid(math.log(3))))
    assert found.nll.item() == pytest.approx(math.log(2)) and found.log_odds_ratio.item() == pytest.approx(math.log(3))


def test_simpo_loss_by_hand():
    found = simpo_loss(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5]), beta=2.0, gamma=0.5)
    assert found.item() == pytest.approx(-(math.log(sigmoid(1.5)) + math.log(sigmoid(-1.5))) / 2)


def test_losses_without_a_reference_pass_the_gradient_check_and_bear_certain_answers():
    inputs = [leaf(-random(seed, 3).abs() - 0.1) for seed in (1, 2)]
    assert torch.autograd.gradcheck(lambda *x: orpo_loss(*x, beta=0.3).loss, inputs)
    assert torch.autograd.gradcheck(lambda *x: simpo_loss(*x, beta=2.0, gamma=0.4), inputs)
    certain = leaf(torch.zeros(1))
    orpo_loss(certain, torch.tensor([-1000.0]), beta=0.1).loss.backward()
    assert certain.grad is not None and certain.grad.isfinite().all()
    assert orpo_loss(torch.zeros(0), torch.zeros(0), beta=0.1).loss.item() == 0


def test_kto_loss_by_hand():
    """Log-ratios 2 and -1, kl 1, beta 1: 2 (1 - sigmoid(1)) and 3 (1 - sigmoid(2)), over two completions."""
    got = kto_loss(
        *[torch.tensor([x]) for x in (-1.0, -4.0, -3.0, -3.0)],
        torch.tensor(1.0),
        beta=1.0,
        desirable_weight=2.0,
        undesirable_weight=3.0,
    )
    assert got.item() == pytest.approx((2 * (1 - sigmoid(1)) + 3 * (1 - sigmoid(2))) / 2, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(0.05, 2.0), st.floats(0, 0.4))
def test_pair_losses_agree_with_the_reference(seed: int, beta: float, smoothing: float):
    pc, pr, rc, rr = inputs = [random(seed + i, 5, scale=3.0) for i in range(4)]
    margins = [(float(a) - float(c)) - (float(b) - float(d)) for a, b, c, d in zip(pc, pr, rc, rr, strict=True)]
    dpo = [-(1 - smoothing) * math.log(sigmoid(beta * h)) - smoothing * math.log(sigmoid(-beta * h)) for h in margins]
    assert dpo_loss(*inputs, beta=beta, label_smoothing=smoothing).item() == pytest.approx(sum(dpo) / 5)
    ipo = [(h - 0.5 / beta) ** 2 for h in margins]
    assert ipo_loss(*inputs, beta=beta).item() == pytest.approx(sum(ipo) / 5)
    bt = [-math.log(sigmoid(float(a) - float(b) - float(abs(c)))) for a, b, c in zip(pc, pr, rc, strict=True)]
    assert bradley_terry_loss(pc, pr, rc.abs()).item() == pytest.approx(sum(bt) / 5)


@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(-3, 3), st.integers(0, 4), st.integers(0, 4))
def test_kto_loss_agrees_with_the_reference(seed: int, kl: float, num_chosen: int, num_rejected: int):
    pc, rc = random(seed, num_chosen), random(seed + 1, num_chosen)
    pr, rr = random(seed + 2, num_rejected), random(seed + 3, num_rejected)
    z = max(kl, 0.0)
    terms = [1.5 * (1 - sigmoid(0.3 * (float(a) - float(b) - z))) for a, b in zip(pc, rc, strict=True)]
    terms += [0.5 * (1 - sigmoid(0.3 * (z - (float(a) - float(b))))) for a, b in zip(pr, rr, strict=True)]
    got = kto_loss(pc, pr, rc, rr, torch.tensor(kl), beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    assert got.item() == pytest.approx(sum(terms) / max(len(terms), 1), abs=1e-7)


def test_kto_baseline_is_clamped_at_zero_and_carries_no_gradient():
    inputs = [random(i, 3) for i in range(4)]
    kl = torch.tensor(0.7, requires_grad=True)
    kto_loss(*[leaf(tensor) for tensor in inputs], kl, beta=0.1).backward()
    assert kl.grad is None
    assert kto_loss(*inputs, torch.tensor(-5.0), beta=0.1) == kto_loss(*inputs, 0.0, beta=0.1)


def test_pair_losses_pass_the_gradient_check():
    pairs = tuple(leaf(random(i, 4)) for i in range(4))
    assert torch.autograd.gradcheck(bradley_terry_loss, pairs[:3])
    assert torch.autograd.gradcheck(lambda *x: dpo_loss(*x, beta=0.3, label_smoothing=0.1), pairs)
    assert torch.autograd.gradcheck(lambda *x: ipo_loss(*x, beta=0.3), pairs)
    assert torch.autograd.gradcheck(lambda *x: kto_loss(*x, 0.4, beta=0.3, undesirable_weight=1.3), pairs)


@settings(max_examples=15, deadline=None)
@given(seeds, st.permutations(range(5)))
def test_pair_losses_ignore_the_order_of_the_batch(seed: int, order: list[int]):
    inputs = [random(seed + i, 5) for i in range(4)]
    shuffled = [tensor[list(order)] for tensor in inputs]
    for loss in (
        lambda *x: bradley_terry_loss(*x[:3]),
        lambda *x: dpo_loss(*x, beta=0.3),
        lambda *x: ipo_loss(*x, beta=0.3),
        lambda *x: kto_loss(*x, 0.4, beta=0.3),
    ):
        assert torch.allclose(loss(*inputs), loss(*shuffled))


def test_pair_losses_of_extreme_logprobs_have_finite_gradients():
    inputs = [torch.tensor([x]) for x in (-1e4, 0.0, 0.0, -1e4)]
    for loss in (lambda *x: dpo_loss(*x, beta=0.1), lambda *x: kto_loss(*x, 0.0, beta=0.1)):
        value, gradients = value_and_gradient(loss, *inputs)
        assert value.isfinite() and all(gradient.isfinite().all() for gradient in gradients)


def test_pair_losses_of_no_pairs_are_zero():
    none = [torch.zeros(0) for _ in range(4)]
    for loss in (dpo_loss(*none, beta=0.1), ipo_loss(*none, beta=0.1), kto_loss(*none, 0.0, beta=0.1)):
        assert loss == 0


# -- PPO ---------------------------------------------------------------------------------------------------------------


def surrogate(logprob: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(logprob - old)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def dual_surrogate(logprob: float, old: float, advantage: float, low: float, high: float, dual: float) -> float:
    """arXiv:1912.09729: where A < 0 the objective is max(min(r A, clip(r) A), c A)."""
    objective = -surrogate(logprob, old, advantage, low, high)
    return -(max(objective, dual * advantage) if advantage < 0 else objective)


def test_ppo_policy_loss_by_hand():
    """Ratios 2 (clipped to 1.2 under A = 1), 2 (not clipped under A = -1), 0.5 (clipped to 0.8 under A = -1)."""
    result = ppo_policy_loss(
        torch.log(torch.tensor([[2.0, 2.0, 0.5, 7.0]])),
        torch.zeros(1, 4),
        torch.tensor([[1.0, -1.0, -1.0, 5.0]]),
        torch.tensor([[True, True, True, False]]),
    )
    assert result.loss.item() == pytest.approx((-1.2 + 2.0 + 0.8) / 3)
    assert result.clip_fraction.item() == pytest.approx(2 / 3)
    approx_kl = sum((r - 1) - math.log(r) for r in (2.0, 2.0, 0.5)) / 3
    assert result.approx_kl.item() == pytest.approx(approx_kl)


def test_dual_clip_by_hand():
    """Ratios 5, 2 and 0.5 under A = -2: bounded to 3, as it is, clipped to 0.8. Under A = 1 ratio 5 counts 1.2."""
    inputs = (
        torch.log(torch.tensor([[5.0, 2.0, 0.5, 5.0]])),
        torch.zeros(1, 4),
        torch.tensor([[-2.0, -2.0, -2.0, 1.0]]),
        torch.ones(1, 4, dtype=torch.bool),
    )
    ppo, group = ppo_policy_loss(*inputs, dual_clip=3.0), grpo_loss(*inputs, dual_clip=3.0)
    for result in (ppo, group):
        assert result.loss.item() == pytest.approx((6.0 + 4.0 + 1.6 - 1.2) / 4)
        assert result.clip_fraction_dual.item() == pytest.approx(1 / 4)
        assert result.clip_fraction.item() == pytest.approx(3 / 4)
    assert ppo_policy_loss(*inputs).loss.item() == pytest.approx((10.0 + 4.0 + 1.6 - 1.2) / 4), "without it no bound"
    with pytest.raises(ConfigError, match=r"dual_clip is 1\.2, within the clip range; expected more than 1\.2"):
        ppo_policy_loss(*inputs, dual_clip=1.2)


@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(1.3, 4.0))
def test_dual_clip_agrees_with_the_reference(seed: int, dual_clip: float):
    x, old, a = (random(seed + i, 3, 4, scale=1.5) for i in range(3))
    mask = random_mask(seed, 3, 4)
    real = [(b, t) for b in range(3) for t in range(4) if mask[b, t]]
    terms = [dual_surrogate(float(x[i]), float(old[i]), float(a[i]), 0.2, 0.2, dual_clip) for i in real]
    expected = pytest.approx(sum(terms) / max(len(real), 1))
    assert ppo_policy_loss(x, old, a, mask, dual_clip=dual_clip).loss.item() == expected
    assert grpo(x, old, a, mask, loss_type="dapo", dual_clip=dual_clip).item() == expected


def test_dual_clip_passes_the_gradient_check_and_stops_the_gradient_of_what_it_bounds():
    old, mask = random(2, 3, 4), torch.ones(3, 4, dtype=torch.bool)
    a, x = random(3, 3, 4), random(1, 3, 4, scale=2.0)
    assert ppo_policy_loss(x, old, a, mask, dual_clip=1.5).clip_fraction_dual > 0
    for loss in (ppo_policy_loss, grpo_loss):
        assert torch.autograd.gradcheck(lambda p, loss=loss: loss(p, old, a, mask, dual_clip=1.5).loss, (leaf(x),))
        _, (gradient,) = value_and_gradient(lambda p, loss=loss: loss(p, old, a, mask, dual_clip=1.5).loss, x)
        assert (gradient[((x - old).exp() > 1.5) & (a < 0)] == 0).all()


def test_dual_clip_bounds_the_loss_of_a_token_whose_ratio_overflows():
    logprobs, old, mask = torch.zeros(1, 1), torch.full((1, 1), -1000.0), torch.ones(1, 1, dtype=torch.bool)
    value, (gradient,) = value_and_gradient(
        lambda x: ppo_policy_loss(x, old, -torch.ones(1, 1), mask, dual_clip=3.0).loss, logprobs
    )
    assert value.item() == 3.0 and gradient.item() == 0.0


def test_ppo_value_loss_by_hand():
    """Old value 0, clip 0.2: errors (1 - 2)^2 against (0.2 - 2)^2, and (1 - 0)^2 against (0.2 - 0)^2."""
    result = ppo_value_loss(
        torch.tensor([[1.0, 1.0]]), torch.zeros(1, 2), torch.tensor([[2.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    )
    assert result.loss.item() == pytest.approx(0.5 * (3.24 + 1.0) / 2)
    assert result.clip_fraction.item() == pytest.approx(0.5)


@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(0.05, 0.5))
def test_ppo_losses_agree_with_the_reference(seed: int, clip: float):
    x, old, a = (random(seed + i, 3, 4, scale=0.5) for i in range(3))
    mask = random_mask(seed, 3, 4)
    real = [(b, t) for b in range(3) for t in range(4) if mask[b, t]]
    terms = [surrogate(float(x[i]), float(old[i]), float(a[i]), clip, clip) for i in real]
    got = ppo_policy_loss(x, old, a, mask, clip=clip)
    assert got.loss.item() == pytest.approx(sum(terms) / max(len(real), 1))
    differences = [float(old[i]) - float(x[i]) for i in real]
    assert got.approx_kl.item() == pytest.approx(
        sum(math.exp(-d) - 1 + d for d in differences) / max(len(real), 1), abs=1e-9
    )
    errors = []
    for i in real:
        v, v_old, target = float(x[i]), float(old[i]), float(a[i])
        clipped = min(max(v, v_old - clip), v_old + clip)
        errors.append(0.5 * max((v - target) ** 2, (clipped - target) ** 2))
    assert ppo_value_loss(x, old, a, mask, clip=clip).loss.item() == pytest.approx(sum(errors) / max(len(real), 1))


def test_ppo_losses_pass_the_gradient_check():
    x, old, a, mask = leaf(random(1, 3, 4)), random(2, 3, 4), random(3, 3, 4), random_mask(4, 3, 4)
    assert torch.autograd.gradcheck(lambda p: ppo_policy_loss(p, old, a, mask).loss, (x,))
    assert torch.autograd.gradcheck(lambda v: ppo_value_loss(v, old, a, mask).loss, (x,))


def test_ppo_gradient_of_a_clipped_token_is_zero_even_where_the_ratio_overflows():
    logprobs, old = torch.tensor([[0.0, 0.0]]), torch.tensor([[-1000.0, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    value, (gradient,) = value_and_gradient(lambda x: ppo_policy_loss(x, old, torch.ones(1, 2), mask).loss, logprobs)
    assert value.item() == pytest.approx(-1.2)
    assert (gradient == 0).all()


# -- GRPO --------------------------------------------------------------------------------------------------------------


def grpo(logprobs: Tensor, old: Tensor, a: Tensor, mask: Tensor, ref: Tensor | None = None, **options) -> Tensor:
    return grpo_loss(logprobs, old, a, mask, ref_logprobs=ref, max_completion_length=LONGEST, **options).loss


def test_grpo_loss_types_differ_in_their_denominator_only():
    """On policy every token's loss is -A: two tokens of A = 1 and one of A = 4, in two sequences."""
    zeros, mask = torch.zeros(2, 2), torch.tensor([[True, True], [True, False]])
    advantages = torch.tensor([1.0, 4.0])
    expected = {"grpo": -(1 + 4) / 2, "bnpo": -6 / 3, "dapo": -6 / 3, "dr_grpo": -6 / (2 * LONGEST)}
    for loss_type, value in expected.items():
        assert grpo(zeros, zeros, advantages, mask, loss_type=loss_type).item() == pytest.approx(value), loss_type


def test_grpo_clips_at_its_two_ends():
    """Ratios 2 and 0.25 with advantages 1 and -1: clipped to 1.3 and 0.9."""
    result = grpo_loss(
        torch.log(torch.tensor([[2.0], [0.25], [1.1]])),
        torch.zeros(3, 1),
        torch.tensor([1.0, -1.0, 1.0]),
        torch.ones(3, 1, dtype=torch.bool),
        clip_low=0.1,
        clip_high=0.3,
    )
    assert result.loss.item() == pytest.approx((-1.3 + 0.9 - 1.1) / 3)
    assert result.clip_fraction_low.item() == pytest.approx(1 / 3)
    assert result.clip_fraction_high.item() == pytest.approx(1 / 3)
    assert result.clip_fraction.item() == pytest.approx(2 / 3)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from(LOSS_TYPES), st.sampled_from([0.0, 0.1]), st.booleans())
def test_grpo_loss_agrees_with_the_reference(seed: int, loss_type: str, beta: float, per_token: bool):
    x, old, ref = (random(seed + i, 4, 5, scale=0.5) for i in range(3))
    a = random(seed + 4, 4, 5) if per_token else random(seed + 4, 4)
    mask = random_mask(seed, 4, 5)
    sums, counts, kls = [0.0] * 4, [int(n) for n in mask.sum(1)], []
    for b in range(4):
        for t in range(5):
            if mask[b, t]:
                advantage = float(a[b, t] if per_token else a[b])
                log_r = float(ref[b, t]) - float(x[b, t])
                kls.append(math.exp(log_r) - log_r - 1)
                sums[b] += surrogate(float(x[b, t]), float(old[b, t]), advantage, 0.2, 0.28) + beta * kls[-1]
    expected = {
        "grpo": sum(s / max(n, 1) for s, n in zip(sums, counts, strict=True)) / 4,
        "bnpo": sum(sums) / max(sum(counts), 1),
        "dapo": sum(sums) / max(sum(counts), 1),
        "dr_grpo": sum(sums) / (4 * LONGEST),
    }[loss_type]
    got = grpo_loss(
        x, old, a, mask, ref_logprobs=ref, beta=beta, clip_high=0.28, loss_type=loss_type, max_completion_length=LONGEST
    )
    assert got.loss.item() == pytest.approx(expected)
    assert got.kl.item() == pytest.approx(sum(kls) / max(len(kls), 1))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_loss_passes_the_gradient_check(loss_type: str):
    old, ref, mask = random(2, 3, 4), random(3, 3, 4), random_mask(4, 3, 4)
    for advantages in (random(5, 3), random(5, 3, 4)):
        assert torch.autograd.gradcheck(
            lambda x, a=advantages: grpo(x, old, a, mask, ref, beta=0.2, loss_type=loss_type), (leaf(random(1, 3, 4)),)
        )


def test_grpo_figures_carry_no_gradient():
    result = grpo_loss(
        leaf(random(1, 2, 3)), random(2, 2, 3), random(3, 2), torch.ones(2, 3), ref_logprobs=random(4, 2, 3)
    )
    assert [value.requires_grad for value in result] == [True, *[False] * (len(result) - 1)]


def test_grpo_says_what_is_missing_or_unknown():
    x, a, mask = torch.zeros(1, 2), torch.zeros(1), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ConfigError, match=r"beta is 0\.1, which needs ref_logprobs"):
        grpo_loss(x, x, a, mask, beta=0.1)
    with pytest.raises(ConfigError, match="dr_grpo divides by max_completion_length"):
        grpo_loss(x, x, a, mask, loss_type="dr_grpo")
    with pytest.raises(ConfigError, match="expected grpo, bnpo, dr_grpo or dapo"):
        grpo_loss(x, x, a, mask, loss_type="gspo")  # pyright: ignore[reportArgumentType]


# -- invariants of every token loss ------------------------------------------------------------------------------------

TOKEN_LOSSES = {
    "ppo_policy": lambda x, y, z, mask: ppo_policy_loss(x, y, z, mask).loss,
    "ppo_policy, dual clip": lambda x, y, z, mask: ppo_policy_loss(x, y, z, mask, dual_clip=1.5).loss,
    "ppo_value": lambda x, y, z, mask: ppo_value_loss(x, y, z, mask).loss,
    **{
        loss_type: lambda x, y, z, mask, loss_type=loss_type: grpo(x, y, z, mask, y, beta=0.3, loss_type=loss_type)
        for loss_type in LOSS_TYPES
    },
}


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@settings(max_examples=10, deadline=None)
@given(seed=seeds, junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -7.0]))
def test_masked_tokens_change_neither_loss_nor_gradient(name: str, seed: int, junk: float):
    loss = TOKEN_LOSSES[name]
    inputs, mask = [random(seed + i, 3, 4) for i in range(3)], random_mask(seed, 3, 4)
    expected = value_and_gradient(lambda *x: loss(*x, mask), *inputs)
    got = value_and_gradient(lambda *x: loss(*x, mask), *[tensor.masked_fill(~mask, junk) for tensor in inputs])
    assert got[0] == expected[0]
    for gradient, expected_gradient in zip(got[1], expected[1], strict=True):
        assert torch.equal(gradient, expected_gradient) and (gradient[~mask] == 0).all()


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@settings(max_examples=10, deadline=None)
@given(seed=seeds, padding=st.integers(1, 4), order=st.permutations(range(3)))
def test_right_padding_and_order_do_not_change_a_token_loss(name: str, seed: int, padding: int, order: list[int]):
    loss = TOKEN_LOSSES[name]
    inputs, mask = [random(seed + i, 3, 4) for i in range(3)], random_mask(seed, 3, 4)
    expected = loss(*inputs, mask)
    pad = (0, padding)
    padded = loss(
        *[torch.nn.functional.pad(tensor, pad, value=3.0) for tensor in inputs], torch.nn.functional.pad(mask, pad)
    )
    shuffled = loss(*[tensor[list(order)] for tensor in inputs], mask[list(order)])
    assert torch.allclose(padded, expected) and torch.allclose(shuffled, expected)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_a_token_loss_without_real_tokens_is_zero_with_a_zero_gradient(name: str):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    value, gradients = value_and_gradient(lambda *x: TOKEN_LOSSES[name](*x, mask), *[random(i, 2, 3) for i in range(3)])
    assert value == 0 and gradients and all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_a_token_loss_takes_masks_of_numbers_as_well(name: str):
    inputs, mask = [random(i, 2, 3) for i in range(3)], random_mask(5, 2, 3)
    assert TOKEN_LOSSES[name](*inputs, mask) == TOKEN_LOSSES[name](*inputs, mask.float())


# -- KL ----------------------------------------------------------------------------------------------------------------


def test_kl_estimates_by_hand():
    """log r = log 2: k1 = -log 2, k2 = (log 2)^2 / 2, k3 = 2 - 1 - log 2."""
    logprobs, ref = torch.tensor([0.0]), torch.tensor([math.log(2.0)])
    assert kl_estimate(logprobs, ref, kind="k1").item() == pytest.approx(-math.log(2))
    assert kl_estimate(logprobs, ref, kind="k2").item() == pytest.approx(0.5 * math.log(2) ** 2)
    assert kl_estimate(logprobs, ref).item() == pytest.approx(1 - math.log(2))


@settings(max_examples=50, deadline=None)
@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k2_and_k3_are_never_negative(logprob: float, ref_logprob: float):
    for dtype, slack in ((torch.float64, 1e-15), (torch.float32, 1e-7)):
        pair = torch.tensor(logprob, dtype=dtype), torch.tensor(ref_logprob, dtype=dtype)
        assert kl_estimate(*pair, kind="k2") >= 0
        assert kl_estimate(*pair, kind="k3") >= -slack


def test_k1_and_k3_average_to_the_exact_divergence():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    exact = (p * (p / q).log()).sum()
    for kind in ("k1", "k3"):
        assert torch.allclose((p * kl_estimate(p.log(), q.log(), kind=kind)).sum(), exact)


def test_kl_estimates_pass_the_gradient_check():
    pair = leaf(random(1, 2, 3)), leaf(random(2, 2, 3))
    for kind in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x, y, kind=kind: kl_estimate(x, y, kind=kind), pair)


def test_an_unknown_kl_estimate_is_refused():
    with pytest.raises(ConfigError, match="expected k1, k2 or k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind="k4")  # pyright: ignore[reportArgumentType]


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_every_loss_names_the_shapes_that_do_not_fit():
    one, two, grid, wide = torch.zeros(1), torch.zeros(2), torch.zeros(1, 2), torch.zeros(1, 3)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    calls = {
        "selected_logprobs": lambda: selected_logprobs(grid, ids),
        "token_logprobs": lambda: token_logprobs(grid, ids),
        "sft_loss": lambda: sft_loss(torch.zeros(1, 3, 4), ids),
        "bradley_terry_loss": lambda: bradley_terry_loss(one, one, two),
        "dpo_loss": lambda: dpo_loss(one, one, one, two, beta=0.1),
        "ipo_loss": lambda: ipo_loss(grid, grid, grid, grid, beta=0.1),
        "kto_loss": lambda: kto_loss(one, two, one, one, 0.0, beta=0.1),
        "ppo_policy_loss": lambda: ppo_policy_loss(grid, grid, grid, wide),
        "ppo_value_loss": lambda: ppo_value_loss(grid, wide, grid, grid),
        "grpo_loss": lambda: grpo_loss(grid, grid, two, grid),
        "kl_estimate": lambda: kl_estimate(one, two),
    }
    for name, call in calls.items():
        with pytest.raises(ShapeError, match=rf"^{name}: .*\[.*\].*expected"):
            call()
    with pytest.raises(ShapeError, match="expected a scalar"):
        kto_loss(one, one, one, one, two, beta=0.1)
    assert issubclass(ShapeError, ValueError)
    assert str(pickle.loads(pickle.dumps(ShapeError("a: [1]")))) == "a: [1]"  # noqa: S301

"""Losses of one's own, for any algorithm that trains by log-probabilities:

    rollout train dpo --config examples/dpo-tiny.toml --set algorithm.loss.path=examples/losses.py:hinge
    rollout train grpo --config examples/grpo-tiny.toml --set algorithm.loss.path=examples/losses.py:penalized

What they are called with is in docs/grpo.md and docs/dpo.md.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hinge(
    policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> Tensor:
    """Loss of each pair, [P]: max(0, 1 - beta h), h as in DPO; arXiv:2309.06657. Pairs that are far enough apart give
    no gradient."""
    margin = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    return torch.relu(1 - beta * margin)


def penalized(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, penalty: float = 1.0, **others: Tensor | None
) -> Tensor:
    """Loss of each token, [B,T]: the ratio is not clipped; KL(old || new) keeps it near 1 (arXiv:1707.06347, eq. 8)."""
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(log_ratio)
    return -advantages * ratio + penalty * (ratio - 1 - log_ratio)

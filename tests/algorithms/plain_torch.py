"""One step of training by torch and transformers alone: a row at a time, without packing, padding or anything of ours.

What the product is held against, so nothing of `rollout_core` is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification


@dataclass(frozen=True)
class Optimizer:
    """AdamW after gradients were clipped to a norm. ``eps`` is well above what rounding leaves of a gradient of 0: a
    first step divides each gradient by its own size, so below that it would show rounding alone."""

    lr: float = 1e-2
    eps: float = 1e-3
    weight_decay: float = 0.1
    max_grad_norm: float = 0.5


@dataclass(frozen=True)
class Row:
    """A prompt and what follows it."""

    ids: list[int]
    first: int
    """Place of the first token that is trained."""


@dataclass(frozen=True)
class Drawn:
    """A completion as an engine drew it."""

    row: Row
    logprobs: list[float]
    reward: float


@dataclass(frozen=True)
class Step:
    """What a step was, and the weights behind it."""

    loss: float
    grad_norm: float
    weights: dict[str, Tensor]


def load(folder: Path, attention: str, *, scored: bool = False) -> Any:
    """The model of a folder in float32, without dropout."""
    kind = AutoModelForSequenceClassification if scored else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


def logprobs(model: Any, row: Row, temperature: float = 1.0) -> Tensor:
    """Of the trained tokens of a row, which is alone in its pass."""
    logits = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0] / temperature
    chosen = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(row.ids[1:])[:, None]).squeeze(1)
    return chosen[row.first - 1 :]


def sft_loss(model: Any, rows: Sequence[Row]) -> Tensor:
    """Mean over the trained tokens of all rows."""
    return -torch.cat([logprobs(model, row) for row in rows]).mean()


def dpo_loss(model: Any, reference: Any, pairs: Sequence[tuple[Row, Row]], *, beta: float) -> Tensor:
    """arXiv:2305.18290, eq. 7."""

    def log_ratio(row: Row) -> Tensor:
        return logprobs(model, row).sum() - logprobs(reference, row).sum().detach()

    return -torch.stack([logsigmoid(beta * (log_ratio(one) - log_ratio(other))) for one, other in pairs]).mean()


def reward_loss(model: Any, pairs: Sequence[tuple[Row, Row]]) -> Tensor:
    """arXiv:2203.02155, eq. 1."""

    def score(row: Row) -> Tensor:
        return model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0, 0]

    return -torch.stack([logsigmoid(score(one) - score(other)) for one, other in pairs]).mean()


def grpo_loss(
    model: Any, reference: Any, groups: Sequence[Sequence[Drawn]], *, clip: float, beta: float, temperature: float
) -> Tensor:
    """arXiv:2402.03300, eq. 3 and 4."""
    losses = []
    for group in groups:
        rewards = torch.tensor([item.reward for item in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for item, advantage in zip(group, advantages, strict=True):
            now = logprobs(model, item.row, temperature)
            ratio = torch.exp(now - torch.tensor(item.logprobs))
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
            log_r = logprobs(reference, item.row, temperature).detach() - now
            losses.append((beta * (torch.exp(log_r) - 1 - log_r) - surrogate).mean())
    return torch.stack(losses).mean()


def step(model: Any, loss_of: Callable[[Any], Tensor], optimizer: Optimizer) -> Step:
    """Take one step of ``model``. Vectors, which are norms and biases, do not decay."""
    loss = loss_of(model)
    loss.backward()
    parameters = list(model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(parameters, optimizer.max_grad_norm)
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    others = [parameter for parameter in parameters if parameter.ndim > 1]
    groups = [{"params": others, "weight_decay": optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=optimizer.lr, eps=optimizer.eps).step()
    return Step(loss.item(), norm.item(), {name: one.detach() for name, one in model.named_parameters()})

"""How far one model's distribution of the next token is from another's, on completions of the one: the KL divergence.

J. Schulman, "Approximating KL Divergence", 2020 (k1 and k3, from the tokens that were drawn); Amini, Vieira and
Cotterell, "Better Estimation of the KL Divergence Between Language Models", arXiv:2504.10637 (the sum over the
vocabulary at each place, which has the same mean and less variance).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_core.algorithms.output_layer import TokenDivergence, token_divergence
from rollout_core.algorithms.policy import Policy
from rollout_core.algorithms.policy_losses import kl_estimate
from rollout_core.base.determinism import probe_device, seed_everything
from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.data.packing import pack_completions
from rollout_core.models.pretrained import load_causal_lm, load_tokenizer

BATCH_TOKENS = 8192
"""Prompts and completions that go through the models together."""


class MeanKL(NamedTuple):
    """Estimates of KL(model || reference): means over ``num_tokens`` completion tokens, nats a token."""

    num_tokens: int
    exact: float
    """Of the whole distribution at each token, given the tokens before it; never negative."""
    k1: float
    k3: float


def mean_kl(
    model: Path,
    reference: Path,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    num_threads: int | None = None,
) -> MeanKL:
    """KL(model || reference) on completions of ``model``, both at ``temperature``; 1 where that is 0.

    ``prompts`` and ``completions`` are token ids; empty completions count for nothing. k1 and k3 want tokens that were
    drawn from the model at that temperature, ``exact`` takes any. Both models run in float32, at the same time.
    Raises ConfigError where the two do not read the same token ids or there is no token, Fatal where a
    log-probability is not finite.
    """
    seed_everything(0, num_threads=num_threads)
    _refuse_other_tokens(model, reference)
    device = torch.device(probe_device())
    policy, other = (Policy(load_causal_lm(folder).to(device).eval()) for folder in (model, reference))
    rows = [(list(prompt), list(rest)) for prompt, rest in zip(prompts, completions, strict=True) if rest]
    sums = dict.fromkeys(("exact", "k1", "k3"), 0.0)
    num_tokens = 0
    for batch in _batches(rows):
        found = _divergence(policy, other, batch, temperature or 1.0, device)
        num_tokens += len(found.kl)
        sums["exact"] += _sum(found.kl)
        for kind in ("k1", "k3"):
            sums[kind] += _sum(kl_estimate(found.logprobs, found.ref_logprobs, kind=kind))
    if not num_tokens:
        raise ConfigError("none of the completions has a token; there is nothing to measure a KL divergence on")
    means = {kind: total / num_tokens for kind, total in sums.items()}
    if not all(map(math.isfinite, means.values())):
        raise Fatal(f"KL of {model} from {reference} is not finite ({means}); the weights of one of them are broken")
    return MeanKL(num_tokens, **means)


def _sum(values: Tensor) -> float:
    return float(values.double().sum())


def _refuse_other_tokens(model: Path, reference: Path) -> None:
    vocabularies = [load_tokenizer(folder).get_vocab() for folder in (model, reference)]
    if vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"its tokenizer has another vocabulary ({len(vocabularies[0])} tokens) than that of the model which "
            f"it is held against ({len(vocabularies[1])} tokens), so their distributions are of different things"
        )


def _batches(rows: Sequence[tuple[list[int], list[int]]]) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Rows in order, cut where the next would exceed `BATCH_TOKENS`."""
    batch: list[tuple[list[int], list[int]]] = []
    size = 0
    for prompt, rest in rows:
        tokens = len(prompt) + len(rest)
        if batch and size + tokens > BATCH_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append((prompt, rest))
        size += tokens
    if batch:
        yield batch


@torch.no_grad()
def _divergence(
    policy: Policy, other: Policy, rows: Sequence[tuple[list[int], list[int]]], temperature: float, device: Any
) -> TokenDivergence:
    batch = pack_completions(*zip(*rows, strict=True)).to(device)
    hidden, ref_hidden = (model.hidden_states(batch, batch.predictors, batch.rows) for model in (policy, other))
    layer, ref_layer = (model.model.get_output_embeddings() for model in (policy, other))
    options: Any = {"transforms": (policy.transform, other.transform), "temperature": temperature}
    return token_divergence(hidden, ref_hidden, layer, ref_layer, batch.targets, **options)

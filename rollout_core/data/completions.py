"""What a generated sample is: a completion, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollout_core.base.errors import well_formed

FinishReason = Literal["stop", "length"]

TopLogprobs = Sequence[tuple[int, float]]
"""Tokens and their log-probabilities in nats, the most likely first; none that could not be drawn."""


@dataclass(frozen=True)
class Completion:
    """One finished generation."""

    key: str
    token_ids: Sequence[int]
    """Includes the end-of-sequence token when one ended the completion."""
    logprobs: Sequence[float]
    """Log-probability of each token under the distribution it was drawn from (after temperature), nats."""
    text: str
    """Decoded completion without special tokens, the stop string or the stop token."""
    finish_reason: FinishReason
    top_logprobs: Sequence[TopLogprobs] = ()
    """For each token, where ``params.logprobs`` asks for them, the most likely ones under the same distribution."""


@dataclass(frozen=True)
class Failure:
    """A request that cannot be completed. The others go on."""

    key: str
    reason: str
    """One line for people."""
    passing: bool = False
    """Another try later may succeed (an overloaded endpoint); False where it never will (a prompt that is too long)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", well_formed(self.reason))


Outcome = Completion | Failure

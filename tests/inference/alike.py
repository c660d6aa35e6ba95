"""Requests that the tests of engines share, and what it means that two engines answer them alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollout_core.config import SamplingParams
from rollout_core.data.samples import Completion
from rollout_core.inference.backend import Request

PROMPTS = ["sort 3 1 2 =", "sort 9 9 0 4 4 1 =", "0", "hello world", "sort 5 5 5 ="]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
TOLERANCE = 1e-4
"""Nats; float32 on a CPU."""


def requests(tokenizer: Any, params: SamplingParams, prompts: Sequence[str] = PROMPTS) -> list[Request]:
    """A request for each prompt, with a seed of its own."""
    return [
        Request(f"r{number}", tokenizer(prompt)["input_ids"], params, 1000 + number, prompt)
        for number, prompt in enumerate(prompts)
    ]


def assert_alike(got: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """The same tokens and texts, and log-probabilities within `TOLERANCE`."""
    for one, other in zip(got, expected, strict=True):
        told = (one.key, one.token_ids, one.text, one.finish_reason)
        assert told == (other.key, other.token_ids, other.text, other.finish_reason)
        assert_close(one.logprobs, other.logprobs)
        for mine, theirs in zip(one.top_logprobs, other.top_logprobs, strict=True):
            assert [token for token, _ in mine] == [token for token, _ in theirs]
            assert_close([p for _, p in mine], [p for _, p in theirs])


def assert_close(got: Sequence[float], expected: Sequence[float]) -> None:
    """Log-probabilities within `TOLERANCE`."""
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=TOLERANCE, rtol=0)

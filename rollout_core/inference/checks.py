"""What every completion must be, whoever made it, before it is kept: held against what was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_core.config import SamplingParams

LOGPROB_NOISE = 1e-3
"""A log-probability above 0 by no more than this, in nats, is the rounding of a certain token's."""
TEXT_TOKENS = 8
"""Token ids made of a text may be so many times those it was sampled as: a byte that is no character reads as one of
three bytes, and the endpoint's own vocabulary may have longer tokens."""
TOKEN_CHARACTERS = 256
"""No token is longer, at least not on average: the longest of common vocabularies are 128 spaces."""


def problem_with(
    token_ids: Sequence[int], logprobs: Sequence[float], params: SamplingParams, vocab_size: int | None = None
) -> str | None:
    """Why these tokens with their log-probabilities are no completion under ``params``, if they are none.

    Without log-probabilities the ids were made of a text, and their number tells only roughly what was sampled.
    """
    if token_ids and (min(token_ids) < 0 or (vocab_size is not None and max(token_ids) >= vocab_size)):
        beyond = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        known = "" if vocab_size is None else f"; the model has {vocab_size} tokens"
        return f"token id {beyond}, which is outside the vocabulary{known}"
    if not logprobs:
        return _problem_with_length(len(token_ids), params)
    if len(logprobs) != len(token_ids):
        return f"{len(token_ids)} tokens, but log-probabilities of {len(logprobs)}"
    if len(token_ids) > params.max_tokens:
        return f"{len(token_ids)} tokens, but sampling.max_tokens is {params.max_tokens}"
    if max(logprobs) > LOGPROB_NOISE:
        return f"a log-probability of {max(logprobs):g}, above 0"
    return None


def _problem_with_length(num_tokens: int, params: SamplingParams) -> str | None:
    most = TEXT_TOKENS * params.max_tokens
    if num_tokens <= most:
        return None
    return f"a text of {num_tokens} tokens, more than {TEXT_TOKENS} times sampling.max_tokens {params.max_tokens}"


def problem_with_text(text: str, params: SamplingParams) -> str | None:
    """Why this is no text of a completion under ``params``, if it is none, before anybody tokenises it."""
    most = TOKEN_CHARACTERS * params.max_tokens
    if len(text) <= most:
        return None
    return (
        f"a text of {len(text):,} characters, more than the {most:,} that fit sampling.max_tokens {params.max_tokens}"
    )

"""Continuations of prompts whose log-probability is asked for, as samples: nothing is generated, and what comes back is
the log-probability of each of the continuation's tokens.

Prompt and continuation are tokenised together, and the continuation's tokens are those behind as many as the prompt has
alone; white space at the prompt's end is the continuation's. So does `_encode_pair` of lm-evaluation-harness (0.4.13).
Special tokens, such as BOS, are those that the tokenizer puts before every prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, SampleIds
from rollout_core.config import SamplingParams
from rollout_core.data.datasets import PromptRow
from rollout_core.data.samples import (
    Sample,
    SampledCompletion,
    identified,
    occurrences_of,
    prompt_of,
    refuse_long_prompts,
)
from rollout_core.data.text import ENDS_ANSWERED, render_chats, token_ids_of
from rollout_core.models.bounded.tokenizing import Chat, Problem
from rollout_core.models.facts import max_positions
from rollout_core.models.pretrained import borrowed_tokenizer

SCORING = SamplingParams(temperature=0.0, max_tokens=1)
"""Of requests that score: engines draw one token, which is not kept."""
_IDENTITY = {"scoring": 1}
"""What stands for sampling parameters in ids."""


class Continued(NamedTuple):
    """A prompt, and a text that may follow it."""

    row: PromptRow
    """Its prompt may be empty: then the text follows the token that begins every text."""
    continuation: str


@dataclass(frozen=True)
class Loglikelihood:
    """Of a continuation."""

    total: float
    """Sum over its tokens, nats."""
    num_tokens: int
    is_greedy: bool
    """Whether greedy decoding writes the same."""

    @classmethod
    def of(cls, scored: SampledCompletion) -> Loglikelihood:
        return cls(sum(scored.logprobs), len(scored.logprobs), bool(scored.greedy))


def moved_spaces(prompt: str, continuation: str) -> tuple[str, str]:
    """White space at the prompt's end moves to the continuation: tokenizers take it together with the word behind."""
    kept = prompt.rstrip()
    return kept, prompt[len(kept) :] + continuation


def encode_continuations(tokenizer: Any, pairs: Sequence[Continued]) -> list[tuple[list[int], int]]:
    """Token ids of each prompt with its continuation, and how many of the last ones are the continuation's.

    Raises ConfigError for the first pair whose prompt does not go through the chat template or ends with an answer, or
    whose continuation adds no token; and for an empty prompt where no token begins a text.
    """
    chats = {place: row for place, (row, _) in enumerate(pairs) if row.messages is not None}
    rendered = render_chats(tokenizer, [Chat(row.messages or (), True, row.tools or ()) for row in chats.values()])
    written = dict(zip(chats, rendered, strict=True))
    found: list[tuple[list[int], int]] = [([], 0)] * len(pairs)
    for is_chat in (True, False):
        places = [place for place in range(len(pairs)) if (place in chats) == is_chat]
        texts: list[tuple[str, str]] = []
        for place in places:
            row, continuation = pairs[place]
            prompt = written[place] if is_chat else row.prompt or ""
            if isinstance(prompt, Problem):
                raise ConfigError(f"prompt {place + 1} {prompt.reason}")
            if row.messages and row.messages[-1].role == "assistant":
                raise ConfigError(f"prompt {place + 1} {ENDS_ANSWERED}")
            texts.append(moved_spaces(prompt, continuation))
        for place, ids in zip(places, _encode_pairs(tokenizer, texts, special_tokens=not is_chat), strict=True):
            if not ids[1]:
                raise ConfigError(
                    f"prompt {place + 1}: the continuation {pairs[place].continuation!r} adds no token; give at least "
                    "one character"
                )
            found[place] = ids
    return found


def _encode_pairs(
    tokenizer: Any, texts: Sequence[tuple[str, str]], *, special_tokens: bool
) -> list[tuple[list[int], int]]:
    prompts = list(dict.fromkeys(prompt for prompt, _ in texts if prompt))
    alone = dict(zip(prompts, token_ids_of(tokenizer, prompts, special_tokens=special_tokens), strict=True))
    begun = [prompt + continuation for prompt, continuation in texts if prompt]
    whole = iter(token_ids_of(tokenizer, begun, special_tokens=special_tokens))
    unprompted = [continuation for prompt, continuation in texts if not prompt]
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if unprompted and first is None:
        raise ConfigError(
            f"a prompt is empty, and the tokenizer {type(tokenizer).__name__} of {tokenizer.name_or_path!r} has "
            "neither a BOS nor an EOS token for its choices to follow; give each prompt at least one character"
        )
    bare = iter(token_ids_of(tokenizer, unprompted, special_tokens=False))
    found = []
    for prompt, _ in texts:
        if prompt:
            ids = next(whole)
            found.append((ids, max(0, len(ids) - len(alone[prompt]))))
        else:
            ids = next(bare)
            own = ids[1:] if ids[:1] == [first] else ids
            found.append(([first, *own], len(own)))
    return found


def scored_samples(
    folder: Path, pairs: Sequence[Continued], *, model: ContentId, max_model_len: int | None = None
) -> list[Sample]:
    """A sample of each pair, for the model in a folder. Without ``max_model_len`` the model's own context is the limit.

    Raises ConfigError as `encode_continuations`, and naming pairs that are longer than the limit.
    """
    with borrowed_tokenizer(folder) as tokenizer:
        encoded = encode_continuations(tokenizer, pairs)
    limit = max_model_len or max_positions(folder)
    if limit is not None:
        refuse_long_prompts([ids for ids, _ in encoded], SCORING.max_tokens, limit)
    return _samples(pairs, encoded, model)


def scored_texts(pairs: Sequence[Continued], *, model: ContentId) -> list[Sample]:
    """The same for a model whose tokenizer is elsewhere."""
    return _samples(pairs, [([], 0)] * len(pairs), model)


def _samples(pairs: Sequence[Continued], encoded: Sequence[tuple[list[int], int]], model: ContentId) -> list[Sample]:
    ids = SampleIds(model, _IDENTITY)
    named = [{"prompt": identified(row), "continuation": continuation} for row, continuation in pairs]
    # Equal ones of a set have numbers, as everywhere: a sample is one line of the results.
    places = occurrences_of(ids.of(each, 0) for each in named)
    return [
        Sample(
            id=ids.of(each, place),
            prompt=prompt_of(row),
            prompt_token_ids=token_ids,
            index=place,
            row_id=row.id,
            extras=row.extras,
            tools=list(row.tools or ()),
            continuation=continuation,
            scored=scored,
        )
        for (row, continuation), (token_ids, scored), each, place in zip(pairs, encoded, named, places, strict=True)
    ]

"""Completions token by token: which part of the text each is, and how likely it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rollout_core.base.errors import RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.objects import ObjectStore
from rollout_core.runs.browsing import SampleView

_FILE = "tokenizer.json"
_MOST_BYTES = 64 << 20
"""Of a tokenizer; those of vocabularies of 250,000 words have 35 MB."""
_LEVELS = (0.9, 0.5, 0.1, 0.01)
MOST_TOKENS = 20_000
"""Of a completion that are shown one by one."""


@dataclass(frozen=True)
class Token:
    """A token of a completion."""

    id: int
    text: str
    """Nothing where the next token completes a character."""
    logprob: float
    """Nats."""
    level: int
    """0: likelier than 0.9; to 4: less likely than 0.01; -1: it was given to the model."""
    others: tuple[tuple[str, float], ...] = ()
    """What could have stood there, with log-probabilities, the likeliest first."""

    @property
    def probability(self) -> float:
        """From 0 to 1."""
        return math.exp(min(0.0, self.logprob))


class TokenTexts:
    """Decodes tokens by the tokenizers of models, as far as they are in the object store."""

    def __init__(self, objects: ObjectStore, *, kept: int = 4) -> None:
        self._objects = objects
        self._tokenizer = lru_cache(maxsize=kept)(self._read)

    def _read(self, model: ContentId) -> Tokenizer | None:
        try:
            files = {file.path: file for file in self._objects.manifest(model).files}
            file = files.get(_FILE)
            if file is None or file.size > _MOST_BYTES:
                return None
            return Tokenizer.from_str(self._objects.get_bytes(file.content_id).decode())
        except (RolloutError, UnicodeDecodeError):
            return None
        except Exception:  # noqa: BLE001 - whatever the library raises of a tokenizer that it cannot read; ids are shown
            return None

    def readable(self, model: ContentId | None, sample: SampleView) -> SampleView:
        """The same with texts decoded, where there are only tokens, as of an agent's calls."""
        tokenizer = None if model is None or sample.prompt or sample.completion else self._tokenizer(model)
        if tokenizer is None:
            return sample
        try:
            both = (sample.prompt_token_ids, sample.token_ids)
            prompt, completion = (tokenizer.decode(list(ids), skip_special_tokens=False) for ids in both)
        except Exception:  # noqa: BLE001 - the library's own kinds, of a tokenizer that does not fit; tokens have numbers
            return sample
        return replace(sample, prompt=prompt, completion=completion)

    def tokens(self, model: ContentId | None, sample: SampleView) -> list[Token]:
        """Of a completion, at most `MOST_TOKENS`. A token that cannot be decoded shows its number."""
        tokenizer = None if model is None else self._tokenizer(model)
        ids = list(sample.token_ids[:MOST_TOKENS])
        others = sample.top_logprobs or [()] * len(ids)
        written = _written(sample, len(ids))
        return [
            Token(
                token,
                text,
                logprob,
                _level(logprob) if is_own else -1,
                tuple((_decoded(tokenizer, [other])[0], value) for other, value in top),
            )
            for token, text, logprob, top, is_own in zip(
                ids, _decoded(tokenizer, ids), sample.logprobs, others, written, strict=False
            )
        ]


def _level(logprob: float) -> int:
    return next((level for level, least in enumerate(_LEVELS) if math.exp(min(0.0, logprob)) >= least), len(_LEVELS))


def _written(sample: SampleView, count: int) -> list[bool]:
    """Whether the model wrote each token."""
    if sample.written is None:
        return [True] * count
    own = [False] * count
    for begin, end in sample.written:
        own[begin:end] = [True] * len(own[begin:end])
    return own


def _decoded(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """The text that each adds to those before it."""
    if tokenizer is None:
        return [f"[{token}]" for token in ids]
    texts, stream = [], DecodeStream(skip_special_tokens=False)
    for token in ids:
        try:
            texts.append(stream.step(tokenizer, token) or "")
        except Exception:  # noqa: BLE001 - the library's own kinds; what follows is decoded by itself
            texts.append(f"[{token}]")
            stream = DecodeStream(skip_special_tokens=False)
    return texts

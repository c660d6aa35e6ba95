"""Preference data as token ids: prompts and answers apart, so that what a pair shares is known.

Text prompts are tokenised with the special tokens of the tokenizer, answers without, and each answer ends with the EOS
token. Conversations go through the chat template, which ends turns itself. Rows longer than ``max_seq_len`` are cut at
the right, as for SFT; where nothing of an answer is left, or the two of a pair no longer differ, the row is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_core.datasets import ChatMessage
from rollout_core.errors import ConfigError
from rollout_core.preferences import JudgedRow, PairRow, as_messages


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt; an empty prompt means whole sequences."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


@dataclass(frozen=True)
class Judged:
    """An answer to a prompt, and whether it is desirable."""

    prompt: list[int]
    completion: list[int]
    desirable: bool


@dataclass(frozen=True)
class PreferenceReport:
    """What became of the rows of a preference data set."""

    num_rows: int
    num_examples: int
    num_tokens: int
    """Of prompts, each counted once, and answers."""
    num_prompt_tokens: int
    num_truncated: int
    """Rows cut at max_seq_len, those left out for it included."""
    num_left_out: int
    """Rows of which the cut left no answer, or no difference between the two."""
    num_desirable: int | None = None
    num_undesirable: int | None = None


def tokenize_pairs(
    tokenizer: Any, rows: Sequence[PairRow], *, max_seq_len: int, need_prompts: bool
) -> tuple[list[Pair], PreferenceReport]:
    """Tokenise pairs. Raises ConfigError for rows the tokenizer cannot do, or where no pair is left.

    With ``need_prompts`` a row must have a prompt: nothing else could predict an answer's first token.
    """
    encode = _Encoder(tokenizer, (answer for row in rows for answer in (row.chosen, row.rejected)))
    pairs, truncated, left_out = [], 0, 0
    for number, (row, prompt) in enumerate(zip(rows, encode.prompts(rows), strict=True), start=1):
        assert row.chosen is not None and row.rejected is not None
        if not (isinstance(row.chosen, str) and isinstance(row.rejected, str) and isinstance(row.prompt, str | None)):
            prompt, chosen, rejected = encode.conversations(row.prompt, row.chosen, row.rejected, number=number)
        elif row.prompt is None:
            chosen, rejected = encode.whole(row.chosen), encode.whole(row.rejected)
        else:
            chosen, rejected = encode.answer(row.chosen), encode.answer(row.rejected)
        if need_prompts and not prompt:
            raise ConfigError(
                f"row {number} has no prompt{' tokens' if row.prompt is not None else ''}; only a reward model can be "
                "trained on whole sequences"
            )
        if chosen == rejected:
            raise ConfigError(f"row {number}: chosen and rejected give the same tokens; there is nothing to prefer")
        room = max_seq_len - len(prompt)
        truncated += max(len(chosen), len(rejected)) > room
        chosen, rejected = chosen[: max(room, 0)], rejected[: max(room, 0)]
        if chosen and rejected and chosen != rejected:
            pairs.append(Pair(prompt, chosen, rejected, row.margin or 0.0))
        else:
            left_out += 1
    _require_some(pairs, rows, max_seq_len)
    prompt_tokens = sum(len(pair.prompt) for pair in pairs)
    answer_tokens = sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)
    return pairs, PreferenceReport(
        len(rows), len(pairs), prompt_tokens + answer_tokens, prompt_tokens, truncated, left_out
    )


def tokenize_judged(
    tokenizer: Any, rows: Sequence[JudgedRow], *, max_seq_len: int
) -> tuple[list[Judged], PreferenceReport]:
    """Tokenise judged answers. Raises ConfigError as `tokenize_pairs`, and where all are of one kind."""
    encode = _Encoder(tokenizer, (row.completion for row in rows))
    items, truncated, left_out = [], 0, 0
    for number, (row, prompt) in enumerate(zip(rows, encode.prompts(rows), strict=True), start=1):
        assert row.completion is not None and row.label is not None
        if isinstance(row.prompt, str) and isinstance(row.completion, str):
            completion = encode.answer(row.completion)
        else:
            prompt, completion = encode.conversations(row.prompt, row.completion, number=number)
        if not prompt:
            raise ConfigError(f"row {number} has no prompt tokens; give a prompt")
        room = max_seq_len - len(prompt)
        truncated += len(completion) > room
        if room > 0:
            items.append(Judged(prompt, completion[:room], row.label))
        else:
            left_out += 1
    _require_some(items, rows, max_seq_len)
    desirable = sum(item.desirable for item in items)
    if desirable in (0, len(items)):
        raise ConfigError(
            f"all {len(items)} rows have label {str(bool(desirable)).lower()}; KTO needs desirable and undesirable ones"
        )
    prompt_tokens = sum(len(item.prompt) for item in items)
    tokens = prompt_tokens + sum(len(item.completion) for item in items)
    return items, PreferenceReport(
        len(rows), len(items), tokens, prompt_tokens, truncated, left_out, desirable, len(items) - desirable
    )


def _require_some(found: Sequence[Any], rows: Sequence[Any], max_seq_len: int) -> None:
    if not found:
        raise ConfigError(
            f"none of {len(rows)} rows has an answer to judge within packing.max_seq_len {max_seq_len}; "
            "raise it or check the rows"
        )


class _Encoder:
    """From texts and conversations to token ids."""

    def __init__(self, tokenizer: Any, answers: Iterable[Any]) -> None:
        self._tokenizer = tokenizer
        texts = list({answer for answer in answers if isinstance(answer, str)})
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        self._answers = dict(zip(texts, encoded, strict=True))

    def prompts(self, rows: Sequence[PairRow | JudgedRow]) -> list[list[int]]:
        """Ids of every text prompt, all at once; nothing for others."""
        texts = [row.prompt for row in rows if isinstance(row.prompt, str)]
        encoded = iter(self._tokenizer(texts)["input_ids"] if texts else [])
        return [next(encoded) if isinstance(row.prompt, str) else [] for row in rows]

    def answer(self, text: str) -> list[int]:
        return [*self._answers[text], self._tokenizer.eos_token_id]

    def whole(self, text: str) -> list[int]:
        ids = self._tokenizer(text)["input_ids"]
        return ids if ids[-1:] == [self._tokenizer.eos_token_id] else [*ids, self._tokenizer.eos_token_id]

    def conversations(self, prompt: Any, *answers: Any, number: int) -> tuple[list[int], ...]:
        """The prompt as the template renders it before the assistant's turn, and what each answer adds to it."""
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"row {number} holds chat messages, but the tokenizer has no chat template; "
                "give texts, or a tokenizer with a template"
            )
        wholes = [as_messages(answer) for answer in answers]
        if prompt is None:
            prompt = _common_start(wholes)
            wholes = [whole[len(prompt) :] for whole in wholes]
        before = self._render(prompt, generation_prompt=True) if prompt else []
        added = []
        for answer in wholes:
            ids = self._render((*prompt, *answer), generation_prompt=False)
            if ids[: len(before)] != before:
                raise ConfigError(
                    f"row {number}: the chat template renders the prompt differently with and without an answer, "
                    "so the two cannot be told apart; use another template, or texts"
                )
            added.append(ids[len(before) :])
        return before, *added

    def _render(self, messages: Sequence[ChatMessage], *, generation_prompt: bool) -> list[int]:
        plain = [message.model_dump() for message in messages]
        rendered = self._tokenizer.apply_chat_template(
            plain, add_generation_prompt=generation_prompt, tokenize=True, return_dict=True
        )
        return list(rendered["input_ids"])


def _common_start(conversations: Sequence[tuple[ChatMessage, ...]]) -> tuple[ChatMessage, ...]:
    """Messages all begin with, up to the last turn that is not the assistant's."""
    first, *others = conversations
    length = 0
    for length, message in enumerate(first):
        if any(other[length : length + 1] != (message,) for other in others):
            break
    while length and first[length - 1].role == "assistant":
        length -= 1
    return first[:length]

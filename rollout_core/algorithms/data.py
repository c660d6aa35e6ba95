"""Token-level training data: rows become token ids and a mask of what is trained; order follows from a seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollout_core.config import LossOn
from rollout_core.datasets import ChatMessage, SftRow
from rollout_core.errors import ConfigError
from rollout_core.inference.text import render_chat


@dataclass(frozen=True)
class Example:
    """One sequence; ``trained[t]`` is True where token t is a target of the loss."""

    token_ids: list[int]
    trained: list[bool]


@dataclass(frozen=True)
class DataReport:
    """What became of the rows of a data set."""

    num_rows: int
    num_examples: int
    num_tokens: int
    num_trained_tokens: int
    num_truncated: int
    """Rows cut at max_seq_len."""
    num_without_target: int
    """Rows left out because no token of theirs is trained."""


def tokenize_sft(
    tokenizer: Any, rows: Sequence[SftRow], *, loss_on: LossOn, max_seq_len: int
) -> tuple[list[Example], DataReport]:
    """Tokenise rows, mark what is trained, cut at ``max_seq_len``, and leave out rows without a target.

    ``assistant_only`` trains completions, or every assistant turn of a chat, with the token that ends it; ``full``
    trains all tokens. Raises ConfigError when no row has a target, or a conversation does not go through the
    tokenizer's chat template, or the template cannot tell its turns apart.
    """
    pairs = [row for row in rows if row.messages is None]
    prompts = iter(tokenizer([row.prompt for row in pairs])["input_ids"] if pairs else [])
    completions = iter(
        tokenizer([row.completion for row in pairs], add_special_tokens=False)["input_ids"] if pairs else []
    )
    examples, truncated, without_target = [], 0, 0
    for number, row in enumerate(rows, start=1):
        if row.messages is None:
            example = _pair_example(tokenizer, next(prompts), next(completions))
        else:
            example = _chat_example(tokenizer, row.messages, f"row {number}", loss_on)
        if loss_on.kind == "full":
            example = Example(example.token_ids, [True] * len(example.token_ids))
        truncated += len(example.token_ids) > max_seq_len
        example = Example(example.token_ids[:max_seq_len], example.trained[:max_seq_len])
        if any(example.trained[1:]):
            examples.append(example)
        else:
            without_target += 1
    report = DataReport(
        num_rows=len(rows),
        num_examples=len(examples),
        num_tokens=sum(len(example.token_ids) for example in examples),
        num_trained_tokens=sum(sum(example.trained[1:]) for example in examples),
        num_truncated=truncated,
        num_without_target=without_target,
    )
    if not examples:
        raise ConfigError(
            f"none of {len(rows)} rows has a token to train within packing.max_seq_len {max_seq_len}; "
            "raise it or check the rows"
        )
    return examples, report


def _pair_example(tokenizer: Any, prompt_ids: list[int], completion_ids: list[int]) -> Example:
    completion_ids = [*completion_ids, tokenizer.eos_token_id]
    return Example(prompt_ids + completion_ids, [False] * len(prompt_ids) + [True] * len(completion_ids))


def _chat_example(tokenizer: Any, messages: Sequence[ChatMessage], where: str, loss_on: LossOn) -> Example:
    """Masks assistant turns exactly: a turn is what the template adds to the rendering of the turns before it."""
    whole = render_chat(tokenizer, messages, where, generation_prompt=False)
    texts = [whole]
    for turn, message in enumerate(messages):
        if message.role != "assistant" or loss_on.kind == "full":
            continue
        after = render_chat(tokenizer, messages[: turn + 1], where, generation_prompt=False)
        if turn:
            before = render_chat(tokenizer, messages[:turn], where, generation_prompt=True)
        else:
            # Templates need a message. The header of a first turn is the one they would give to another after it.
            header = render_chat(tokenizer, messages[:1], where, generation_prompt=True)[len(after) :]
            before = after[: after.find(header) + len(header)] if header in after else ""
        if not (after.startswith(before) and whole.startswith(after)):
            raise ConfigError(
                f"{where}: the chat template renders turn {turn + 1} differently with and without what follows, "
                "so the assistant's tokens cannot be told apart; use loss_on.kind = 'full' or another template"
            )
        texts += [before, after]
    token_ids, *edges = tokenizer(texts, add_special_tokens=False)["input_ids"]
    trained = [False] * len(token_ids)
    for before_ids, after_ids in zip(edges[::2], edges[1::2], strict=True):
        # A token may straddle the edge of a turn: the line break that ends the header, say, with one after it.
        first, end = _num_common(before_ids, token_ids), _num_common(after_ids, token_ids)
        trained[first:end] = [True] * (end - first)
    return Example(token_ids, trained)


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))


def epoch_order(num_items: int, *, seed: int, epoch: int) -> list[int]:
    """The order of one pass over ``num_items``: a pure function of seed and epoch."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(num_items, generator=generator).tolist()


def positions_at(step: int, *, num_items: int, per_step: int, seed: int) -> list[int]:
    """Items of optimizer step ``step`` (from 0): passes over the data follow each other without a gap.

    This is the whole data cursor: a resumed run needs nothing but its step.
    """
    positions = []
    orders: dict[int, list[int]] = {}
    for item in range(step * per_step, (step + 1) * per_step):
        epoch, offset = divmod(item, num_items)
        if epoch not in orders:
            orders[epoch] = epoch_order(num_items, seed=seed, epoch=epoch)
        positions.append(orders[epoch][offset])
    return positions

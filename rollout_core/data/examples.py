"""Token-level training data: rows become token ids and a mask of what is trained; order follows from a seed alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from rollout_core.base.errors import ConfigError
from rollout_core.config import LossOn
from rollout_core.data.datasets import UNTRAINED_LABEL, SftRow
from rollout_core.data.text import Ask, Encoding, ended, in_step, token_ids_of
from rollout_core.data.tokenized import DataReport, ItemForm, Tally
from rollout_core.models.bounded.tokenizing import Chat, marked_tokens
from rollout_core.models.pretrained import ChatMessage

if TYPE_CHECKING:
    from torch import Tensor

ROWS_AT_ONCE = 500
"""Rows that are tokenised, and in memory, together."""
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

T = TypeVar("T")


@dataclass(frozen=True)
class Example:
    """One sequence; ``trained[t]`` is True where token t is a target of the loss."""

    token_ids: list[int]
    trained: list[bool]


EXAMPLES = ItemForm(Example, lists={"token_ids": "<i4", "trained": "|b1"})


def row_number(row: int) -> str:
    """Place of the row at position ``row`` where no file is known."""
    return f"row {row + 1}"


def in_chunks(rows: Iterable[T], size: int = ROWS_AT_ONCE) -> Iterator[list[T]]:
    """Neighbours in lists of ``size``."""
    source = iter(rows)
    while chunk := list(islice(source, size)):
        yield chunk


def each_example(
    tokenizer: Any,
    rows: Iterable[SftRow],
    keep: Callable[[Example], None],
    *,
    loss_on: LossOn,
    max_seq_len: int,
    place: Callable[[int], str] = row_number,
) -> DataReport:
    """Tokenise rows, mark what is trained, cut at ``max_seq_len``, and call ``keep`` with each that has a target.

    ``assistant_only`` trains completions, or every assistant turn of a chat, with the token that ends it; ``full``
    trains all tokens; ``custom`` what rows themselves say. ``place`` names a row by its position, from 0. Raises
    ConfigError when no row has a target, a conversation does not go through the tokenizer's chat template, the template
    cannot tell its turns apart, or rows and ``loss_on`` do not fit.
    """
    tally = Tally()
    for chunk in in_chunks(rows):
        pairs = [row for row in chunk if row.prompt is not None]
        prompts = iter(token_ids_of(tokenizer, [row.prompt or "" for row in pairs], special_tokens=True))
        completions = iter(token_ids_of(tokenizer, [row.completion or "" for row in pairs], special_tokens=False))
        chats = iter(_chat_examples(tokenizer, chunk, loss_on, tally, lambda row: place(tally.num_rows + row)))
        for row in chunk:
            where = place(tally.num_rows)
            _check_mask(row, loss_on, where)
            if row.prompt is not None:
                example = _pair_example(tokenizer, next(prompts), next(completions))
            elif row.messages is not None:
                example = next(chats)
                if isinstance(example, ConfigError):
                    raise example
            else:
                example = _token_example(tokenizer, row, where)
            if loss_on.kind == "full":
                example = Example(example.token_ids, [True] * len(example.token_ids))
            tally.row(where, len(example.token_ids), max_seq_len)
            example = Example(example.token_ids[:max_seq_len], example.trained[:max_seq_len])
            if any(example.trained[1:]):
                tally.example(len(example.token_ids), sum(example.trained[1:]))
                keep(example)
            else:
                tally.num_left_out += 1
    if not tally.num_examples:
        raise ConfigError(
            f"none of {tally.num_rows} rows has a token to train within sequence.max_length {max_seq_len}; "
            "raise it or check the rows"
        )
    return DataReport(**tally.fields())


def _check_mask(row: SftRow, loss_on: LossOn, where: str) -> None:
    """Raises ConfigError unless ``loss_on`` is what the row was made for."""
    has_mask = row.loss_mask is not None or row.labels is not None
    if loss_on.kind == "custom" and not has_mask:
        raise ConfigError(f"{where} has neither loss_mask nor labels, which loss_on.kind = 'custom' needs")
    if loss_on.kind == "assistant_only" and (has_mask or row.input_ids is not None):
        found = "labels" if row.labels is not None else "a loss_mask" if has_mask else "token ids without roles"
        raise ConfigError(f"{where} has {found}; set loss_on.kind to 'custom' to train what it says, or to 'full'")


def _trained_turns(row: SftRow, loss_on: LossOn) -> list[bool]:
    assert row.messages is not None
    if loss_on.kind == "custom":
        assert row.loss_mask is not None, "checked"
        return list(row.loss_mask)
    return [loss_on.kind == "assistant_only" and message.role == "assistant" for message in row.messages]


def _token_example(tokenizer: Any, row: SftRow, where: str) -> Example:
    assert row.input_ids is not None, "a row has one of three forms"
    highest = max(row.input_ids)
    if highest >= len(tokenizer) and highest > max(tokenizer.get_vocab().values()):
        raise ConfigError(f"{where}: token id {highest} is none of the tokenizer's {len(tokenizer)}")
    if row.labels is not None:
        return Example(list(row.input_ids), [label != UNTRAINED_LABEL for label in row.labels])
    return Example(list(row.input_ids), list(row.loss_mask or [False] * len(row.input_ids)))


def _pair_example(tokenizer: Any, prompt_ids: list[int], completion_ids: list[int]) -> Example:
    completion_ids = ended(completion_ids, tokenizer.eos_token_id)
    return Example(prompt_ids + completion_ids, [False] * len(prompt_ids) + [True] * len(completion_ids))


def _chat_examples(
    tokenizer: Any, rows: Sequence[SftRow], loss_on: LossOn, tally: Tally, place: Callable[[int], str]
) -> list[Example | ConfigError]:
    """Of the rows that are conversations, in order; an error where `_check_mask` or the template refuses one."""
    encodings = []
    for number, row in enumerate(rows):
        if row.messages is not None:
            where = place(number)
            encodings.append((where, _chat_example(tokenizer, row, where, loss_on, tally)))
    return in_step(tokenizer, encodings)


def _chat_example(tokenizer: Any, row: SftRow, where: str, loss_on: LossOn, tally: Tally) -> Encoding[Example]:
    _check_mask(row, loss_on, where)
    return (yield from _Turns(tokenizer, row.messages or (), where, _trained_turns(row, loss_on), tally).example())


@dataclass(frozen=True)
class _Turns:
    """Masks turns exactly: a turn is what the template adds to the rendering of the turns before it."""

    tokenizer: Any
    messages: Sequence[ChatMessage]
    where: str
    trained: Sequence[bool]
    tally: Tally

    def example(self) -> Encoding[Example]:
        messages = self.messages
        turns = [turn for turn in range(len(messages)) if self.trained[turn]]
        whole, *parts = yield Ask(chats=[Chat(messages), *(chat for turn in turns for chat in self._parts(turn))])
        report_omissions(whole, messages, self.where, self.tally)
        texts, rendered = [whole], iter(parts)
        for turn in turns:
            before, after = self._edges(turn, [next(rendered) for _ in self._parts(turn)])
            if not (after.startswith(before) and whole.startswith(after)):
                if _marks_every(self.trained, messages) and _GENERATION_MARK.search(str(self.tokenizer.chat_template)):
                    return Example(*marked_tokens(self.tokenizer, Chat(messages)))
                raise ConfigError(
                    f"{self.where}: the chat template renders turn {turn + 1} differently with and without what "
                    f"follows, so the {messages[turn].role}'s tokens cannot be told apart; use loss_on.kind = 'full' "
                    "or another template, such as one with {% generation %} marks"
                )
            texts += [before, after]
        token_ids, *edges = yield Ask(texts=texts)
        trained = [False] * len(token_ids)
        for before_ids, after_ids in zip(edges[::2], edges[1::2], strict=True):
            # A token may straddle the edge of a turn: the line break that ends the header, say, with one after it.
            first, end = _num_common(before_ids, token_ids), _num_common(after_ids, token_ids)
            trained[first:end] = [True] * (end - first)
        return Example(token_ids, trained)

    def _parts(self, turn: int) -> list[Chat]:
        """What is rendered to find the edges of a turn: the conversation up to its end, and what tells where it begins.

        Templates need a message. The header of a first turn is the one they would give to another after it.
        """
        messages, answers = self.messages, self.messages[turn].role == "assistant"
        upto = [Chat(messages[: turn + 1])]
        if turn:
            return [*upto, Chat(messages[:turn], generation_prompt=answers)]
        return [*upto, Chat(messages[:1], generation_prompt=True)] if answers else upto

    def _edges(self, turn: int, rendered: Sequence[str]) -> tuple[str, str]:
        """The conversation up to where a turn begins, after its header, and up to its end."""
        after, *others = rendered
        if not others:
            return "", after
        if turn:
            return others[0], after
        header = others[0][len(after) :]
        return after[: after.find(header) + len(header)] if header in after else "", after


def _marks_every(trained_turns: Sequence[bool], messages: Sequence[ChatMessage]) -> bool:
    return list(trained_turns) == [message.role == "assistant" for message in messages]


def report_omissions(rendered: str, messages: Sequence[ChatMessage], where: str, tally: Tally) -> None:
    """Tell of messages whose text the chat template leaves out or rewrites."""
    for turn, message in enumerate(messages, start=1):
        if message.content.strip() not in rendered:
            tally.problem(f"{where}: the chat template leaves out or rewrites turn {turn}, the {message.role}'s")
            return


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))


def epoch_order(num_items: int, *, seed: int, epoch: int) -> list[int]:
    """The order of one pass over ``num_items``: a pure function of seed and epoch."""
    return _epoch_order(num_items, seed, epoch).tolist()


@lru_cache(maxsize=2)  # a step may end one pass and begin the next
def _epoch_order(num_items: int, seed: int, epoch: int) -> Tensor:
    import torch  # here, because inference has use for the functions below and none for torch

    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(num_items, generator=generator)


@dataclass(frozen=True)
class Cursor:
    """Where training is in its passes over the data: optimizer step ``step`` (from 0) begins with item number ``item``
    of all passes."""

    step: int = 0
    item: int = 0

    def numbers(self, step: int, per_step: int, end: int | None = None) -> tuple[int, int]:
        """First item of ``step``, which is this one or later, and first of the next: ``per_step`` further, or ``end``,
        where the passes end."""
        first = self.item + (step - self.step) * per_step
        return first, first + per_step if end is None else min(first + per_step, end)

    def steps(self, end: int, per_step: int) -> int:
        """Steps of training that ends before item number ``end``; the last one may have fewer items."""
        return self.step + max(0, math.ceil((end - self.item) / per_step))


def positions_at(step: int, *, num_items: int, per_step: int, seed: int, epochs: int | None = None) -> list[int]:
    """Items of optimizer step ``step`` (from 0): passes over the data follow each other without a gap.

    With ``epochs`` they end after so many, and the last step has the items that are left. This is the whole data
    cursor: a resumed run needs nothing but its step.
    """
    end = None if epochs is None else epochs * num_items
    return positions_between(*Cursor().numbers(step, per_step, end), num_items=num_items, seed=seed)


def positions_between(first: int, last: int, *, num_items: int, seed: int) -> list[int]:
    """Items number ``first`` up to ``last`` of endless passes over the data, each in an order of its own."""
    positions: list[int] = []
    while first + len(positions) < last:
        epoch, offset = divmod(first + len(positions), num_items)
        end = offset + last - first - len(positions)
        positions += _epoch_order(num_items, seed, epoch)[offset:end].tolist()
    return positions

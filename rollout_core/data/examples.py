"""Token-level training data: rows become token ids and a mask of what is trained; order follows from a seed alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rollout_core.base.errors import ConfigError
from rollout_core.config import LossOn
from rollout_core.data.datasets import UNTRAINED_LABEL, SftRow
from rollout_core.data.text import Ask, Encoding, ended, in_step, token_ids_of
from rollout_core.data.tokenized import DataReport, ItemForm, ItemTable, Tally
from rollout_core.data.turns import Ends, Turn, common_length, omission, shows_tools, written_after
from rollout_core.models.bounded.tokenizing import Chat, marked_tokens, template_text
from rollout_core.models.messages import ChatMessage

if TYPE_CHECKING:
    from torch import Tensor

ROWS_AT_ONCE = 500
"""Rows that are tokenised, and in memory, together."""
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

T = TypeVar("T")
Turns = Literal["all", "each", "last"] | None
"""How a conversation is trained, as `SequenceConfig` has it."""


@dataclass(frozen=True)
class Example:
    """One sequence; ``trained[t]`` is True where token t is a target of the loss."""

    token_ids: list[int]
    trained: list[bool]
    lengths: list[int] = field(default_factory=list)
    """Of the sequences that ``token_ids`` holds one after the other, where they are several: turns of one row, each
    with its own prompt before it."""

    def sequences(self) -> list[tuple[list[int], list[bool]]]:
        """Token ids and what is trained of each sequence."""
        found, start = [], 0
        for length in self.lengths or [len(self.token_ids)]:
            found.append((self.token_ids[start : start + length], self.trained[start : start + length]))
            start += length
        return found

    def cut(self, max_seq_len: int) -> Example:
        """The same with each sequence cut at the right, and without those of which nothing is trained then."""
        kept = [(ids[:max_seq_len], trained[:max_seq_len]) for ids, trained in self.sequences()]
        if self.lengths:
            kept = [(ids, trained) for ids, trained in kept if any(trained[1:])]
        return Example(
            [token for ids, _ in kept for token in ids],
            [target for _, trained in kept for target in trained],
            [len(ids) for ids, _ in kept] if len(kept) > 1 else [],
        )


EXAMPLES = ItemForm(Example, lists={"token_ids": "<i4", "trained": "|b1", "lengths": "<i4"})


def longest_sequence(table: ItemTable[Example]) -> int:
    """Tokens of the longest sequence of all examples."""
    alone = table.lengths("token_ids")[table.lengths("lengths") == 0]
    return int(max(alone.max(initial=0), table.values("lengths").max(initial=0)))


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
    turns: Turns = None,
    place: Callable[[int], str] = row_number,
) -> DataReport:
    """Tokenise rows, mark what is trained, cut at ``max_seq_len``, and call ``keep`` with each that has a target.

    ``assistant_only`` trains completions, or every assistant turn of a chat, with the token that ends it; ``full``
    trains all tokens; ``custom`` what rows themselves say. ``turns`` is that of `SequenceConfig`. ``place`` names a row
    by its position, from 0. Raises ConfigError when no row has a target, a conversation does not go through the
    tokenizer's chat template, the template cannot tell its turns apart, or rows and ``loss_on`` do not fit.
    """
    tally = Tally()
    for chunk in in_chunks(rows):
        pairs = [row for row in chunk if row.prompt is not None]
        prompts = iter(token_ids_of(tokenizer, [row.prompt or "" for row in pairs], special_tokens=True))
        completions = iter(token_ids_of(tokenizer, [row.completion or "" for row in pairs], special_tokens=False))
        first = tally.num_rows
        chats = iter(_chat_examples(tokenizer, chunk, loss_on, turns, tally, lambda row: place(first + row)))  # noqa: B023 - called at once
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
            tally.row(where, max(example.lengths, default=len(example.token_ids)), max_seq_len)
            example = example.cut(max_seq_len)
            if any(example.trained[1:]):
                tally.example(len(example.token_ids), sum(example.trained[1:]))
                if example.lengths:
                    tally.num_longest_by_turn = max(tally.num_longest_by_turn, len(example.token_ids))
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
    is_asked = loss_on.kind == "assistant_only"
    return [is_asked and message.role == "assistant" and message.weight != 0 for message in row.messages]


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
    tokenizer: Any,
    rows: Sequence[SftRow],
    loss_on: LossOn,
    turns: Turns,
    tally: Tally,
    place: Callable[[int], str],
) -> list[Example | ConfigError]:
    """Of the rows that are conversations, in order; an error where `_check_mask` or the template refuses one."""
    ends = Ends.of(tokenizer)
    encodings = []
    for number, row in enumerate(rows):
        if row.messages is not None:
            where = place(number)
            encodings.append((where, _chat_example(tokenizer, row, where, loss_on, turns, ends, tally)))
    return in_step(tokenizer, encodings)


def _chat_example(
    tokenizer: Any, row: SftRow, where: str, loss_on: LossOn, turns: Turns, ends: Ends, tally: Tally
) -> Encoding[Example]:
    _check_mask(row, loss_on, where)
    trained = _trained_turns(row, loss_on)
    conversation = _Conversation(tokenizer, row.messages or (), row.tools or (), where, trained, turns, ends, tally)
    return (yield from conversation.example())


@dataclass(frozen=True)
class _Conversation:
    """Masks turns exactly: a turn is what the template adds to the rendering of the turns before it."""

    tokenizer: Any
    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]]
    where: str
    trained: Sequence[bool]
    turns: Turns
    ends: Ends
    tally: Tally

    def example(self) -> Encoding[Example]:
        numbers = [number for number in range(len(self.messages)) if self.trained[number]]
        parts = [self._parts(number) for number in numbers]
        whole, *rendered = yield Ask(chats=[self._chat(self.messages), *(chat for part in parts for chat in part)])
        answers = iter(rendered)
        edges = [self._edges(turn, [next(answers) for _ in part]) for turn, part in zip(numbers, parts, strict=True)]
        is_within = self._is_within(whole, numbers, edges)
        if is_within and (self.turns in (None, "all") or not numbers):
            self._report(whole, numbers, [Turn(before, after[len(before) :]).text for before, after in edges])
            return (yield from self._as_one(whole, [text for edge in edges for text in edge]))
        if self.turns in (None, "all") and self._has_marks():
            self._report(whole, [], [])
            return Example(*marked_tokens(self.tokenizer, self._chat(self.messages)))
        if self.turns == "all":
            raise ConfigError(
                f"{self.where}: the chat template renders a turn differently with and without what follows, or ends "
                "it with no token, so the assistant's turns cannot be trained within the whole conversation; leave "
                "out sequence.turns, or set it to 'each' or 'last'"
            )
        each = self._each(numbers, edges)
        self._report(whole, numbers, [turn.text for turn in each])
        self.tally.num_turn_by_turn += 1
        return (yield from self._apart(each[-1:] if self.turns == "last" else each))

    def _report(self, whole: str, numbers: Sequence[int], texts: Sequence[str]) -> None:
        """Tell of what the template leaves out: of turns in their own text where they have one, else in the whole."""
        own = dict(zip(numbers, texts, strict=True))
        found = [own.get(turn, whole) for turn in range(len(self.messages))]
        report_omissions(whole, found, self.messages, self.tools, self.where, self.tally)

    def _chat(self, messages: Sequence[ChatMessage], generation_prompt: bool = False) -> Chat:
        return Chat(messages, generation_prompt, self.tools)

    def _parts(self, turn: int) -> list[Chat]:
        """What is rendered to find the edges of a turn: the conversation up to its end, and what tells where it begins.

        Templates need a message. The header of a first turn is the one they would give to another after it.
        """
        messages, answers = self.messages, self.messages[turn].role == "assistant"
        upto = [self._chat(messages[: turn + 1])]
        if turn:
            return [*upto, self._chat(messages[:turn], answers)]
        return [*upto, self._chat(messages[:1], True)] if answers else upto

    def _edges(self, turn: int, rendered: Sequence[str]) -> tuple[str, str]:
        """The conversation up to where a turn begins, after its header, and up to its end."""
        after, *others = rendered
        if not others:
            return "", after
        if turn:
            return others[0], after
        header = others[0][len(after) :]
        return after[: after.find(header) + len(header)] if header in after else "", after

    def _is_within(self, whole: str, numbers: Sequence[int], edges: Sequence[tuple[str, str]]) -> bool:
        """Whether all turns stand in the rendering of the whole as the model would write them, ended each."""
        for number, (before, after) in zip(numbers, edges, strict=True):
            if not (after.startswith(before) and whole.startswith(after)):
                return False
            written, message = after[len(before) :], self.messages[number]
            is_as_written = written_after(before, after, message) == written and self.ends.end(written)
            if message.role == "assistant" and not is_as_written:
                return False
        return True

    def _as_one(self, whole: str, edges: Sequence[str]) -> Encoding[Example]:
        token_ids, *cuts = yield Ask(texts=[whole, *edges])
        trained = [False] * len(token_ids)
        for before_ids, after_ids in zip(cuts[::2], cuts[1::2], strict=True):
            # A token may straddle the edge of a turn: the line break that ends the header, say, with one after it.
            first, end = common_length(before_ids, token_ids), common_length(after_ids, token_ids)
            trained[first:end] = [True] * (end - first)
        return Example(token_ids, trained)

    def _has_marks(self) -> bool:
        assistants = [message.role == "assistant" for message in self.messages]
        template = template_text(self.tokenizer, bool(self.tools))
        return list(self.trained) == assistants and bool(_GENERATION_MARK.search(template))

    def _each(self, numbers: Sequence[int], edges: Sequence[tuple[str, str]]) -> list[Turn]:
        """Each trained turn behind its own prompt, ended in any case."""
        turns = []
        for number, (before, after) in zip(numbers, edges, strict=True):
            message = self.messages[number]
            written = written_after(before, after, message) if message.role == "assistant" else None
            if written is None:
                raise ConfigError(
                    f"{self.where}: the chat template renders turn {number + 1} differently with and without what "
                    f"precedes it, so the {message.role}'s tokens cannot be found; use loss_on.kind = 'full' or "
                    "another template, such as one with {% generation %} marks"
                )
            if not self.ends.end(written):
                if number == numbers[-1]:
                    self.tally.ended(self.where)
                written += self.ends.eos
            turns.append(Turn(before, written))
        return turns

    def _apart(self, turns: Sequence[Turn]) -> Encoding[Example]:
        ids = yield Ask(texts=[text for turn in turns for text in (turn.prompt + turn.written, turn.prompt)])
        token_ids: list[int] = []
        trained: list[bool] = []
        lengths: list[int] = []
        for whole, prompt in zip(ids[::2], ids[1::2], strict=True):
            first = common_length(prompt, whole)
            token_ids += whole
            trained += [False] * first + [True] * (len(whole) - first)
            lengths.append(len(whole))
        return Example(token_ids, trained, lengths if len(lengths) > 1 else [])


def report_omissions(
    whole: str,
    texts: Sequence[str],
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    where: str,
    tally: Tally,
) -> None:
    """Tell of messages and tools that the chat template leaves out of the ``whole``, or rewrites there; each message is
    looked for in its own of ``texts``."""
    for turn, (text, message) in enumerate(zip(texts, messages, strict=True), start=1):
        if problem := omission(text, message):
            tally.problem(f"{where}: the chat template {problem} turn {turn}, the {message.role}'s")
            return
    if not shows_tools(whole, tools):
        tally.problem(f"{where}: the chat template shows the model none of the row's tools, or not all")


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


def positions_between(first: int, last: int, *, num_items: int, seed: int | None) -> list[int]:
    """Items number ``first`` up to ``last`` of endless passes over the data, each in an order of its own; without a
    seed all are in the order of the data."""
    if seed is None:
        return [number % num_items for number in range(first, last)]
    positions: list[int] = []
    while first + len(positions) < last:
        epoch, offset = divmod(first + len(positions), num_items)
        end = offset + last - first - len(positions)
        positions += _epoch_order(num_items, seed, epoch)[offset:end].tolist()
    return positions

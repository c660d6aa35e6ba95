"""Preference data as token ids: prompts and answers apart, so that what a pair shares is known.

Text prompts are tokenised with the special tokens of the tokenizer, answers without, and each answer ends with one EOS
token. Conversations go through the chat template, which ends turns itself. Rows longer than ``max_seq_len`` are cut at
the right, as for SFT; where nothing of an answer is left, or the two of a pair no longer differ, the row is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rollout_core.base.errors import ConfigError
from rollout_core.data.datasets import PairRow, UnpairedRow, as_messages
from rollout_core.data.examples import in_chunks, report_omissions, row_number
from rollout_core.data.text import Ask, Encoding, ended, in_step, token_ids_of
from rollout_core.data.tokenized import DataReport, ItemForm, Tally
from rollout_core.data.turns import Ends, written_after
from rollout_core.models.bounded.tokenizing import Chat
from rollout_core.models.messages import ChatMessage


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt; an empty prompt means whole sequences."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


@dataclass(frozen=True)
class UnpairedPreference:
    """An answer to a prompt, and whether it is desirable."""

    prompt: list[int]
    completion: list[int]
    desirable: bool


PAIRS = ItemForm(Pair, lists={"prompt": "<i4", "chosen": "<i4", "rejected": "<i4"}, scalars={"margin": "<f8"})
UNPAIRED = ItemForm(UnpairedPreference, lists={"prompt": "<i4", "completion": "<i4"}, scalars={"desirable": "|b1"})


@dataclass(frozen=True, kw_only=True)
class PreferenceReport(DataReport):
    """The rows of a preference data set by outcome. Prompts count once, answers are what is trained."""

    num_prompt_tokens: int
    num_desirable: int | None = None
    num_undesirable: int | None = None


def each_pair(
    tokenizer: Any,
    rows: Iterable[PairRow],
    keep: Callable[[Pair], None],
    *,
    max_seq_len: int,
    need_prompts: bool,
    place: Callable[[int], str] = row_number,
) -> PreferenceReport:
    """Tokenise pairs and call ``keep`` with each that has a difference left. ``place`` names a row by its position.

    With ``need_prompts`` a row must have a prompt: nothing else could predict an answer's first token. Raises
    ConfigError for rows the tokenizer cannot do, or where no pair is left.
    """
    tally, prompt_tokens = Tally(), 0
    for chunk in in_chunks(rows):
        encode = _Encoder(tokenizer, (answer for row in chunk for answer in (row.chosen, row.rejected)), tally)
        talks = iter(
            encode.conversations(
                (place(tally.num_rows + number), row, (row.chosen, row.rejected))
                for number, row in enumerate(chunk)
                if not _is_text(row.prompt, row.chosen, row.rejected)
            )
        )
        for row, prompt in zip(chunk, encode.prompts(chunk), strict=True):
            where = place(tally.num_rows)
            assert row.chosen is not None and row.rejected is not None
            if not (isinstance(row.chosen, str) and isinstance(row.rejected, str) and _is_text(row.prompt)):
                prompt, chosen, rejected = _sound(next(talks))
            elif row.prompt is None:
                chosen, rejected = encode.whole(row.chosen), encode.whole(row.rejected)
            else:
                chosen, rejected = encode.answer(row.chosen), encode.answer(row.rejected)
            if need_prompts and not prompt:
                raise ConfigError(
                    f"{where} has no prompt{' tokens' if row.prompt is not None else ''}; only a reward model can be "
                    "trained on whole sequences"
                )
            if chosen == rejected:
                raise ConfigError(f"{where}: chosen and rejected give the same tokens; there is nothing to prefer")
            tally.row(where, len(prompt) + max(len(chosen), len(rejected)), max_seq_len)
            room = max_seq_len - len(prompt)
            chosen, rejected = chosen[: max(room, 0)], rejected[: max(room, 0)]
            if chosen and rejected and chosen != rejected:
                keep(Pair(prompt, chosen, rejected, row.margin or 0.0))
                answers = len(chosen) + len(rejected)
                tally.example(len(prompt) + answers, answers)
                prompt_tokens += len(prompt)
            else:
                tally.num_left_out += 1
    _require_some(tally, max_seq_len)
    return PreferenceReport(**tally.fields(), num_prompt_tokens=prompt_tokens)


def each_unpaired(
    tokenizer: Any,
    rows: Iterable[UnpairedRow],
    keep: Callable[[UnpairedPreference], None],
    *,
    max_seq_len: int,
    place: Callable[[int], str] = row_number,
) -> PreferenceReport:
    """Tokenise labelled answers and call ``keep`` with each. Raises ConfigError as `each_pair`, and where all have
    one label."""
    tally, prompt_tokens, desirable = Tally(), 0, 0
    for chunk in in_chunks(rows):
        encode = _Encoder(tokenizer, (row.completion for row in chunk), tally)
        talks = iter(
            encode.conversations(
                (place(tally.num_rows + number), row, (row.completion,))
                for number, row in enumerate(chunk)
                if row.prompt is None or not _is_text(row.prompt, row.completion)
            )
        )
        for row, prompt in zip(chunk, encode.prompts(chunk), strict=True):
            where = place(tally.num_rows)
            assert row.completion is not None and row.label is not None
            if isinstance(row.prompt, str) and isinstance(row.completion, str):
                completion = encode.answer(row.completion)
            else:
                prompt, completion = _sound(next(talks))
            if not prompt:
                raise ConfigError(f"{where} has no prompt tokens; give a prompt")
            tally.row(where, len(prompt) + len(completion), max_seq_len)
            room = max_seq_len - len(prompt)
            if room > 0:
                completion = completion[:room]
                keep(UnpairedPreference(prompt, completion, row.label))
                tally.example(len(prompt) + len(completion), len(completion))
                prompt_tokens += len(prompt)
                desirable += row.label
            else:
                tally.num_left_out += 1
    _require_some(tally, max_seq_len)
    if desirable in (0, tally.num_examples):
        raise ConfigError(
            f"all {tally.num_examples} rows have label {str(bool(desirable)).lower()}; KTO needs desirable and "
            "undesirable ones"
        )
    return PreferenceReport(
        **tally.fields(),
        num_prompt_tokens=prompt_tokens,
        num_desirable=desirable,
        num_undesirable=tally.num_examples - desirable,
    )


def _require_some(tally: Tally, max_seq_len: int) -> None:
    if not tally.num_examples:
        raise ConfigError(
            f"none of {tally.num_rows} rows has an answer to judge within sequence.max_length {max_seq_len}; "
            "raise it or check the rows"
        )


def _is_text(*values: Any) -> bool:
    return all(isinstance(value, str | None) for value in values)


def _sound(found: list[list[int]] | ConfigError) -> list[list[int]]:
    if isinstance(found, ConfigError):
        raise found
    return found


class _Encoder:
    """From texts and conversations to token ids."""

    def __init__(self, tokenizer: Any, answers: Iterable[Any], tally: Tally) -> None:
        self._tokenizer = tokenizer
        self._tally = tally
        self._ends = Ends.of(tokenizer)
        texts = list({answer for answer in answers if isinstance(answer, str)})
        self._answers = dict(zip(texts, token_ids_of(tokenizer, texts, special_tokens=False), strict=True))

    def prompts(self, rows: Sequence[PairRow | UnpairedRow]) -> list[list[int]]:
        """Ids of every text prompt, all at once; nothing for others."""
        texts = [row.prompt for row in rows if isinstance(row.prompt, str)]
        encoded = iter(token_ids_of(self._tokenizer, texts, special_tokens=True))
        return [next(encoded) if isinstance(row.prompt, str) else [] for row in rows]

    def answer(self, text: str) -> list[int]:
        return ended(self._answers[text], self._tokenizer.eos_token_id)

    def whole(self, text: str) -> list[int]:
        [ids] = token_ids_of(self._tokenizer, [text], special_tokens=True)
        return ended(ids, self._tokenizer.eos_token_id)

    def conversations(
        self, rows: Iterable[tuple[str, PairRow | UnpairedRow, Sequence[Any]]]
    ) -> list[list[list[int]] | ConfigError]:
        """Of the name and answers of each row: the prompt as the template renders it before the assistant's turn, and
        what the model writes behind it to give each answer."""
        return in_step(
            self._tokenizer, [(where, self._conversation(row, answers, where)) for where, row, answers in rows]
        )

    def _conversation(
        self, row: PairRow | UnpairedRow, answers: Sequence[Any], where: str
    ) -> Encoding[list[list[int]]]:
        prompt, tools = cast(Any, row.prompt), row.tools or ()
        wholes = [as_messages(answer) for answer in answers]
        if prompt is None:
            prompt = _common_start(wholes)
            wholes = [whole[len(prompt) :] for whole in wholes]
        if any(message.role != "assistant" for answer in wholes for message in answer):
            self._tally.shared_answer(where)
        before_chat = [Chat(prompt, True, tools)] if prompt else []
        chats = [*before_chat, *(Chat((*prompt, *answer), tools=tools) for answer in wholes)]
        rendered = yield Ask(chats=chats)
        before_text, texts = (rendered[0], rendered[1:]) if prompt else ("", rendered)
        written = []
        for text, answer in zip(texts, wholes, strict=True):
            said = written_after(before_text, text, answer[0])
            if said is None:
                raise ConfigError(
                    f"{where}: the chat template renders the prompt differently with and without an answer, "
                    "so the two cannot be distinguished; use another template, or texts"
                )
            written.append(said if self._ends.end(said) else said + self._ends.eos)
            messages = (*prompt, *answer)
            report_omissions(text, [text] * len(messages), messages, tools, where, self._tally)
        before, *encoded = yield Ask(texts=[before_text, *(before_text + said for said in written), *written])
        added = []
        for whole, alone in zip(encoded[: len(written)], encoded[len(written) :], strict=True):
            # A token may straddle the edge: a line break of the header, say, with one that the answer begins with. An
            # engine has the prompt's tokens alone, and so has the policy here.
            added.append(whole[len(before) :] if whole[: len(before)] == before else alone)
        return [before, *added]


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

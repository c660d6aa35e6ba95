"""Tokenised rows: a report of their outcomes, and tables of items larger than memory.

Items are columns of numbers in .npy files, mapped into memory, an item decoded at a time. What tokenising made is a
folder of the object store, found again under a key of all it was made from. So a second run on the same rows, tokenizer
and settings tokenises nothing.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Generic, Self, TypeVar, overload

import numpy as np

from rollout_core.base.errors import CorruptObject, NotFound
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.locks import scratch_folder
from rollout_core.objects import ObjectStore

SHOWN_LONGEST = 5
SHOWN_PROBLEMS = 5
_NAMES = {
    "num_truncated": "truncated rows",
    "num_left_out": "skipped rows",
    "num_turn_by_turn": "rows trained turn by turn",
    "num_ended": "rows ended with EOS, as the template ends no turn",
    "num_longest_by_turn": "tokens of the longest row trained turn by turn",
    "num_shared_answers": "rows whose answers hold turns of others, which count as the answer",
}
_ROW_NUMBER = re.compile(r"^row (\d+)")
log = logging.getLogger(__name__)
ItemT = TypeVar("ItemT")
OtherT = TypeVar("OtherT")
ReportT = TypeVar("ReportT", bound="DataReport")
REPORT_FILE = "report.json"
_REFS = "tokenized"
_LENGTH_REFS = "prompt-lengths"


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What learners from data sets report before they train."""

    num_rows: int
    num_examples: int
    num_tokens: int
    num_trained_tokens: int
    num_truncated: int
    """Rows cut at max_seq_len, those left out for it included."""
    num_left_out: int = 0
    """Rows of which nothing is trained: no assistant token, or nothing that the cut left."""
    num_turn_by_turn: int = 0
    """Conversations whose turns are trained each behind a prompt of its own, or only their last turn."""
    num_ended: int = 0
    """Of these, those whose turns the chat template ends with no token: the EOS token is trained there."""
    first_ended: str | None = None
    """The first of them."""
    num_longest_by_turn: int = 0
    """Tokens of the longest row among them, all its sequences together, which are computed together."""
    longest: tuple[tuple[str, int], ...] = ()
    """Place and tokens, before the cut, of the longest rows, longest first."""
    num_template_problems: int = 0
    template_problems: tuple[str, ...] = ()
    """The first of them: where the chat template or the tokenizer does what was hardly meant."""
    num_shared_answers: int = 0
    """Rows of preference data with answers in which others speak, too, such as a user or a tool: the probability of an
    answer is that of all its tokens."""
    first_shared_answer: str | None = None
    """The first of them."""
    reading: tuple[str, ...] = ()
    """What was changed, or found out, to make rows of what the files hold; known before rows are imported."""

    @property
    def trained_share(self) -> float:
        """Trained tokens among all."""
        return self.num_trained_tokens / max(self.num_tokens, 1)

    def figures(self) -> dict[str, Any]:
        """Names and values for people to read."""
        plain = {name: value for name, value in asdict(self).items() if value is not None}
        del plain["longest"], plain["template_problems"], plain["reading"]
        firsts = {
            "num_ended": plain.pop("first_ended", None),
            "num_shared_answers": plain.pop("first_shared_answer", None),
        }
        for name in ("num_turn_by_turn", "num_ended", "num_longest_by_turn", "num_shared_answers"):  # that few have
            if not plain[name]:
                del plain[name]
        named = {_NAMES.get(name, name.removeprefix("num_").replace("_", " ")): value for name, value in plain.items()}
        named |= {
            _NAMES[name]: f"{plain[name]}, {first} the first" for name, first in firsts.items() if first is not None
        }
        named["trained share"] = f"{self.trained_share:.1%}"
        named["longest rows"] = ", ".join(f"{place} ({tokens} tokens)" for place, tokens in self.longest)
        if self.template_problems:
            named["first template problems"] = "; ".join(self.template_problems)
        if self.reading:
            named["reading"] = "; ".join(self.reading)
        return named

    def document(self) -> dict[str, Any]:
        """The report as JSON, without later additions that are empty: its bytes are part of what a checkpoint is."""
        later = ("first_ended", "num_shared_answers", "first_shared_answer")
        return {name: value for name, value in asdict(self).items() if name not in later or value}

    def placed(self, place: Callable[[int], str]) -> Self:
        """The same of rows that were numbered, with each named by its position, from 0."""

        def named(text: str) -> str:
            return _ROW_NUMBER.sub(lambda match: place(int(match[1]) - 1), text)

        return replace(
            self,
            longest=tuple((named(row), tokens) for row, tokens in self.longest),
            first_ended=None if self.first_ended is None else named(self.first_ended),
            template_problems=tuple(map(named, self.template_problems)),
        )

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of `document`."""
        known = {item.name: document[item.name] for item in fields(cls) if item.name in document}
        known["longest"] = tuple((place, tokens) for place, tokens in document["longest"])
        known["template_problems"] = tuple(document["template_problems"])
        known["reading"] = tuple(document.get("reading", ()))
        return cls(**known)


@dataclass
class Tally:
    """A report in the making."""

    num_rows: int = 0
    num_examples: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_truncated: int = 0
    num_left_out: int = 0
    num_turn_by_turn: int = 0
    num_ended: int = 0
    first_ended: str | None = None
    num_longest_by_turn: int = 0
    num_shared_answers: int = 0
    first_shared_answer: str | None = None
    num_template_problems: int = 0
    template_problems: list[str] = field(default_factory=list)
    _longest: list[tuple[int, int, str]] = field(default_factory=list)

    def row(self, place: str, num_tokens: int, max_seq_len: int) -> None:
        """Count a row of ``num_tokens`` before the cut."""
        self.num_rows += 1
        self.num_truncated += num_tokens > max_seq_len
        entry = (num_tokens, -self.num_rows, place)  # of equal ones the first
        if len(self._longest) < SHOWN_LONGEST:
            heapq.heappush(self._longest, entry)
        elif entry > self._longest[0]:
            heapq.heapreplace(self._longest, entry)

    def example(self, num_tokens: int, num_trained_tokens: int) -> None:
        """Count what is trained on."""
        self.num_examples += 1
        self.num_tokens += num_tokens
        self.num_trained_tokens += num_trained_tokens

    def ended(self, place: str) -> None:
        """Count a row whose turns are ended with EOS."""
        self.num_ended += 1
        self.first_ended = self.first_ended or place

    def shared_answer(self, place: str) -> None:
        """Count a row with an answer in which others speak, too."""
        self.num_shared_answers += 1
        self.first_shared_answer = self.first_shared_answer or place

    def problem(self, problem: str) -> None:
        """Count a problem of the template, and remember the first."""
        self.num_template_problems += 1
        if len(self.template_problems) < SHOWN_PROBLEMS:
            self.template_problems.append(problem)

    def fields(self) -> dict[str, Any]:
        """Those of `DataReport`."""
        return {
            "num_rows": self.num_rows,
            "num_examples": self.num_examples,
            "num_tokens": self.num_tokens,
            "num_trained_tokens": self.num_trained_tokens,
            "num_truncated": self.num_truncated,
            "num_left_out": self.num_left_out,
            "num_turn_by_turn": self.num_turn_by_turn,
            "num_ended": self.num_ended,
            "first_ended": self.first_ended,
            "num_longest_by_turn": self.num_longest_by_turn,
            "num_shared_answers": self.num_shared_answers,
            "first_shared_answer": self.first_shared_answer,
            "longest": tuple((place, tokens) for tokens, _, place in sorted(self._longest, reverse=True)),
            "num_template_problems": self.num_template_problems,
            "template_problems": tuple(self.template_problems),
        }


class _Lazy(Sequence[ItemT]):
    """A sequence whose items are made when they are asked for; a slice is a list."""

    def _item(self, position: int) -> ItemT:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> ItemT: ...
    @overload
    def __getitem__(self, index: slice) -> list[ItemT]: ...
    def __getitem__(self, index: int | slice) -> ItemT | list[ItemT]:
        positions = range(len(self))[index]
        return self._item(positions) if isinstance(positions, int) else [self._item(place) for place in positions]

    def __iter__(self) -> Iterator[ItemT]:
        return map(self._item, range(len(self)))


class Mapped(_Lazy[OtherT], Generic[ItemT, OtherT]):
    """``function`` of each of ``items``."""

    def __init__(self, items: Sequence[ItemT], function: Callable[[ItemT], OtherT]) -> None:
        self._items = items
        self._function = function

    def __len__(self) -> int:
        return len(self._items)

    def _item(self, position: int) -> OtherT:
        return self._function(self._items[position])


@dataclasses.dataclass(frozen=True)
class ItemForm(Generic[ItemT]):
    """How items of a dataclass are kept: the numpy type of each field."""

    item: type[ItemT]
    lists: Mapping[str, str]
    """Fields that hold a list of numbers."""
    scalars: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Fields that hold one number."""


class ItemTable(_Lazy[ItemT]):
    """The items that an `ItemWriter` wrote into ``folder``."""

    def __init__(self, form: ItemForm[ItemT], folder: Path) -> None:
        self._form = form
        self._lists = {name: (_map(folder, name), _map(folder, f"{name}-ends")) for name in form.lists}
        self._scalars = {name: _map(folder, name) for name in form.scalars}
        first, *_ = form.lists
        self._length = len(self._lists[first][1])

    def __len__(self) -> int:
        return self._length

    def lengths(self, name: str) -> np.ndarray:
        """[N] int64: length of one list of every item."""
        return np.diff(self._lists[name][1], prepend=0)

    def values(self, name: str) -> np.ndarray:
        """[M]: one list of every item, one after the other."""
        return self._lists[name][0]

    def _item(self, position: int) -> ItemT:
        fields: dict[str, Any] = {name: column[position].item() for name, column in self._scalars.items()}
        for name, (values, ends) in self._lists.items():
            fields[name] = values[int(ends[position - 1]) if position else 0 : int(ends[position])].tolist()
        return self._form.item(**fields)


def _map(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)


# Not Arrow's IPC files, which read as fast here and are a sixth smaller: their bytes depend on the size of batches and
# may change with pyarrow's version, and folders of equal items are to have one content id.
class ItemWriter(Generic[ItemT]):
    """Appends items to the columns of a folder; what is in memory does not grow. Use it as a context manager."""

    def __init__(self, form: ItemForm[ItemT], folder: Path) -> None:
        self._form = form
        self._folder = folder
        self._stack = ExitStack()
        self._columns: dict[str, _Column] = {}
        self._ends = dict.fromkeys(form.lists, 0)

    def __enter__(self) -> ItemWriter[ItemT]:
        types = {**self._form.lists, **{f"{name}-ends": "<i8" for name in self._form.lists}, **self._form.scalars}
        for name, dtype in types.items():
            file = self._stack.enter_context((self._folder / f"{name}.npy").open("wb"))
            self._columns[name] = _Column(file, np.dtype(dtype))
        return self

    def append(self, item: ItemT) -> None:
        """Add one item."""
        for name in self._form.lists:
            values = getattr(item, name)
            self._columns[name].extend(values)
            self._ends[name] += len(values)
            self._columns[f"{name}-ends"].extend([self._ends[name]])
        for name in self._form.scalars:
            self._columns[name].extend([getattr(item, name)])

    def __exit__(self, *exc_info: object) -> None:
        for column in self._columns.values():
            column.finish()
        self._stack.close()


class _Column:
    """One growing .npy file. numpy leaves room in its header for any length, so that it can be written again."""

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self._file = file
        self._dtype = dtype
        self._length = 0
        self._write_header()

    def extend(self, values: Sequence[Any]) -> None:
        self._file.write(np.asarray(values, dtype=self._dtype).tobytes())
        self._length += len(values)

    def finish(self) -> None:
        self._file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        described = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._length,),
        }
        np.lib.format.write_array_header_1_0(self._file, described)


def open_items(
    objects: ObjectStore,
    cache: Path,
    key: ContentId,
    form: ItemForm[ItemT],
    report: type[ReportT],
    make: Callable[[Callable[[ItemT], None]], ReportT],
) -> tuple[ItemTable[ItemT], ReportT]:
    """Items kept under ``key``, and the report of how they were made.

    Where there are none, ``make`` makes them, calling its argument with each; they are kept from then on.
    """
    kept = objects.cached_ref(f"{_REFS}/{key}")
    if kept is not None:
        try:
            return _open(objects.local_tree(kept, cache), form, report)
        except (CorruptObject, NotFound) as error:
            log.warning("rows are tokenised again: what was kept of them cannot be read (%s)", error)
    kept, _ = keep_items(objects, key, form, make)
    return _open(objects.local_tree(kept, cache), form, report)


def keep_items(
    objects: ObjectStore,
    key: ContentId,
    form: ItemForm[ItemT],
    make: Callable[[Callable[[ItemT], None]], ReportT],
) -> tuple[ContentId, ReportT]:
    """Have ``make`` make items, calling its argument with each, and keep them under ``key``."""
    with scratch_folder("tokenized") as folder:
        with ItemWriter(form, folder) as writer:
            made = make(writer.append)
        (folder / REPORT_FILE).write_text(json.dumps(made.document()), encoding="utf-8")
        kept = objects.put_tree(folder)
    objects.set_ref(f"{_REFS}/{key}", kept)
    return kept, made


def known_longest(objects: ObjectStore, prompts: ContentId, tokenizer: ContentId) -> int | None:
    """Tokens of the longest prompt of rows of this content, if all of them were tokenised before."""
    kept = objects.cached_bytes(_lengths(prompts, tokenizer))
    return int(kept) if kept is not None and kept.isdigit() else None


def remember_longest(objects: ObjectStore, prompts: ContentId, tokenizer: ContentId, num_tokens: int) -> None:
    """Note what `known_longest` answers from then on."""
    objects.set_ref(_lengths(prompts, tokenizer), objects.put_bytes(b"%d" % num_tokens))


def _lengths(prompts: ContentId, tokenizer: ContentId) -> str:
    return f"{_LENGTH_REFS}/{content_id('prompt-lengths/1', [prompts, tokenizer])}"


def kept_report(objects: ObjectStore, key: ContentId, report: type[ReportT]) -> ReportT | None:
    """The report of what is kept under ``key``, if anything is."""
    kept = objects.cached_ref(f"{_REFS}/{key}")
    if kept is None or not objects.tree_is_present(kept):
        return None
    try:
        file = next(file for file in objects.manifest(kept).files if file.path == REPORT_FILE)
        return report.from_document(objects.get_json(file.content_id))
    except (CorruptObject, NotFound) as error:
        log.warning("rows are tokenised again: what was kept of them cannot be read (%s)", error)
        return None


def _open(folder: Path, form: ItemForm[ItemT], report: type[ReportT]) -> tuple[ItemTable[ItemT], ReportT]:
    document = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    return ItemTable(form, folder), report.from_document(document)

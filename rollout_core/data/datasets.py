"""Rows, read strictly: what is wrong with a file is said once, as ``path:line: reason``, before any work starts.

A JSONL file is UTF-8 with one JSON object a line; blank lines are skipped but counted. A null is an absent key.
`to_jsonl` writes the one canonical form of rows, so that a data set has a content id that ignores key order, spacing
and how its files were split. Other forms of files are read by `files`, other kinds of data sets by `dataset_sources`.
"""

from __future__ import annotations

import base64
import codecs
import difflib
import glob
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar
from uuid import UUID

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import to_jsonable_python

from rollout_core.base.errors import ConfigError, DataError
from rollout_core.base.ids import canonical_json
from rollout_core.base.trusted import trusted
from rollout_core.config import ColumnSource
from rollout_core.data.row_forms import FORMS, NAMES, form_of, of_type, shown
from rollout_core.models.messages import NOT_GIVEN, ChatMessage, strict_json

MAX_VIOLATIONS = 20
"""Problems of one data set that are shown together; reading stops there."""
SHOWN_KEYS = 50
"""Keys of a data set that an error lists at most."""
SHOWN_PLACES_OF = 20
"""Keys whose numbers are left out, or columns read as integers, that a report names at most."""
MAX_LINE_BYTES = 1 << 28
"""A longer line is refused, as a small compressed file may hold one that no memory does."""


def _at_least_one(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    if not messages:
        raise ValueError("expected at least one message")
    return messages


Conversation = Annotated[tuple[ChatMessage, ...], AfterValidator(_at_least_one)]


def _tools(given: Any) -> Any:
    """A list of tools, or its JSON text; none of an empty one."""
    if isinstance(given, str):
        try:
            given = strict_json(given or "[]")
        except ValueError as error:
            raise ValueError(f"expected a list of tools, or the JSON text of one: {error}") from error
    return given or None


Tools = Annotated[tuple[dict[str, Any], ...] | None, BeforeValidator(_tools)]
"""That the assistant may call, each as OpenAI's API describes it; a chat template shows them to the model."""


def _refuse_tools_of_texts(tools: Any, *texts: Any) -> None:
    if tools and any(isinstance(text, str) for text in texts):
        raise ValueError("has tools but a text prompt, which shows none; give the prompt as messages")


class Row(BaseModel):
    """What rows share: the keys they know, and ``extras`` for all others, in the order of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    own_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of a line that are fields; every other key is an extra."""
    extras: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.own_keys = frozenset(cls.model_fields) - {"extras"}

    @field_validator("extras")
    @classmethod
    def _extras_hide_no_field(cls, extras: dict[str, Any]) -> dict[str, Any]:
        if not cls.own_keys.isdisjoint(extras):
            raise ValueError(f"{', '.join(sorted(cls.own_keys & extras.keys()))} would hide the row's own; rename it")
        return extras

    @classmethod
    def quick(cls, line: bytes) -> Self | None:
        """The row of a line in its most usual form, without the cost of full validation; None where it has another."""
        return None

    def document(self) -> dict[str, Any]:
        """The row as one flat JSON object."""
        return {**self.model_dump(mode="json", exclude={"extras"}, exclude_none=True), **self.extras}

    def missing(self, wanted: str, *keys: str) -> ValueError:
        """The error for a row that lacks what is ``wanted``, with the nearest of its other keys to ``keys``."""
        found = ", ".join(self.extras) or "none"
        for key in keys:
            for near in difflib.get_close_matches(key, self.extras, n=1):
                return ValueError(f"{wanted}; did you mean {key!r} by {near!r}?")
        return ValueError(f"{wanted}; other keys found: {found}")


class PromptRow(Row):
    """A prompt to complete: a text or a conversation."""

    prompt: str | None = None
    messages: Conversation | None = None
    tools: Tools = None
    id: str | None = None
    """The caller's own name of the row; it comes back in outputs."""

    @model_validator(mode="before")
    @classmethod
    def _messages_as_prompt(cls, given: Any) -> Any:
        """With messages that stand in ``prompt``, as TRL has them, in their own place."""
        if isinstance(given, dict) and isinstance(given.get("prompt"), list | tuple) and given.get("messages") is None:
            return {**given, "prompt": None, "messages": given["prompt"]}
        return given

    @classmethod
    def quick(cls, line: bytes) -> Self | None:
        try:
            document = orjson.loads(line)
        except orjson.JSONDecodeError:
            return None  # the full reading says what is wrong
        if type(document) is not dict or type(document.get("prompt")) is not str:
            return None
        if "messages" in document or "tools" in document:
            return None
        # This parser takes the last of two equal keys. Without a space before a colon, each key has one `":`.
        if line.count(b'":') != len(document) or any(spaced in line for spaced in (b" :", b"\t:", b"\r:")):
            return None
        if type(document.get("id", "")) not in (str, int):
            return None
        prompt, row_id = document.pop("prompt"), document.pop("id", None)
        # A float may have been an integer too large for this parser; what is nested may hold one, or a null.
        if not all(type(value) in (str, int, bool) for value in document.values()):
            return None
        row_id = str(row_id) if type(row_id) is int else row_id
        return trusted(cls, {"extras": document, "prompt": prompt, "messages": None, "tools": None, "id": row_id})

    @model_validator(mode="after")
    def _exactly_one_form(self) -> PromptRow:
        if self.prompt is None and self.messages is None:
            raise self.missing("needs prompt or messages", "prompt", "messages")
        if self.prompt is not None and self.messages is not None:
            raise ValueError("has both prompt and messages; give one of them")
        _refuse_tools_of_texts(self.tools, self.prompt)
        return self


class TaskRow(Row):
    """What an agent is given: an object of any keys."""

    @property
    def task(self) -> dict[str, Any]:
        """The row as the agent gets it."""
        return self.extras

    @model_validator(mode="after")
    def _not_empty(self) -> TaskRow:
        if not self.extras:
            raise ValueError("a task needs at least one key")
        return self


def _says_anything(message: ChatMessage) -> bool:
    return bool(message.content or message.tool_calls or message.reasoning_content)


UNTRAINED_LABEL = -100
"""In ``labels``: this token is no target."""
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class SftRow(Row):
    """A demonstration to imitate: a prompt with its completion, a conversation that ends with the assistant, or tokens.

    ``loss_mask`` or ``labels`` say what of it is trained where ``loss_on.kind`` is ``custom``.
    """

    prompt: str | None = None
    completion: str | None = None
    messages: Conversation | None = None
    input_ids: tuple[TokenId, ...] | None = None
    """Token ids, taken as they are."""
    labels: tuple[int, ...] | None = None
    """For each of ``input_ids`` the same id, or -100 where it is not trained."""
    loss_mask: tuple[bool, ...] | None = None
    """For each of ``input_ids``, or each of ``messages``: whether it is trained."""
    tools: Tools = None

    @model_validator(mode="before")
    @classmethod
    def _as_conversation(cls, given: Any) -> Any:
        """A prompt and completion of messages, as TRL has them: a conversation of which the completion is trained."""
        if not isinstance(given, dict) or not isinstance(given.get("prompt"), list | tuple):
            return given
        if given.get("messages") is not None:
            raise ValueError("has both messages and prompt or completion; give one form")
        prompt = [
            {**message, "weight": 0} if isinstance(message, dict) and message.get("role") == "assistant" else message
            for message in given["prompt"]
        ]
        answer = given.get("completion") or []
        answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else list(answer)
        if not answer:
            raise ValueError("has prompt but no completion")
        return {**given, "prompt": None, "completion": None, "messages": [*prompt, *answer]}

    @model_validator(mode="after")
    def _exactly_one_form(self) -> SftRow:
        if self.input_ids is not None:
            self._check_tokens(self.input_ids)
        elif self.labels is not None:
            raise ValueError("has labels but no input_ids")
        elif self.messages is not None:
            self._check_conversation(self.messages)
        elif self.loss_mask is not None:
            raise ValueError("has loss_mask but neither messages nor input_ids, whose parts it would name")
        elif self.prompt is None and self.completion is None:
            raise self.missing("needs prompt and completion, or messages", "prompt", "completion", "messages")
        elif self.prompt is None:
            raise self.missing("has completion but no prompt", "prompt")
        elif self.completion is None:
            raise self.missing("has prompt but no completion", "completion")
        elif not self.completion:
            raise ValueError("completion is empty; there is nothing to train")
        _refuse_tools_of_texts(self.tools, self.prompt)
        return self

    def _check_conversation(self, messages: tuple[ChatMessage, ...]) -> None:
        if self.prompt is not None or self.completion is not None:
            raise ValueError("has both messages and prompt or completion; give one form")
        if self.loss_mask is not None:
            if len(self.loss_mask) != len(messages):
                raise ValueError(f"loss_mask has {len(self.loss_mask)} entries for {len(messages)} messages")
            return
        if messages[-1].role != "assistant":
            raise ValueError(
                f"the last message is the {messages[-1].role}'s; a demonstration ends with the assistant's"
            )
        if any(message.role == "assistant" and not _says_anything(message) for message in messages):
            raise ValueError("an assistant message is empty; there is nothing to train")

    def _check_tokens(self, input_ids: tuple[int, ...]) -> None:
        if self.prompt is not None or self.completion is not None or self.messages is not None:
            raise ValueError("has both input_ids and prompt, completion or messages; give one form")
        if not input_ids:
            raise ValueError("input_ids is empty; there is nothing to train")
        if self.labels is not None and self.loss_mask is not None:
            raise ValueError("has both labels and loss_mask; give one of them")
        mask = self.labels if self.labels is not None else self.loss_mask
        if mask is not None and len(mask) != len(input_ids):
            name = "labels" if self.labels is not None else "loss_mask"
            raise ValueError(f"{name} has {len(mask)} entries for {len(input_ids)} input_ids")
        for place, (token, label) in enumerate(zip(input_ids, self.labels or input_ids, strict=True)):
            if label not in (token, UNTRAINED_LABEL):
                raise ValueError(
                    f"labels.{place} is {label}; expected {token}, as in input_ids, or {UNTRAINED_LABEL} (labels are "
                    "not shifted)"
                )


RowT = TypeVar("RowT", bound=Row)
PlacedDocument = tuple[str, int, bytes | dict[str, Any]]
"""What comes before the number in the name of a place, such as ``file.jsonl:``; the number, from 1; and a line of JSON,
or what one would hold."""
PlacedRow = tuple[str, int, RowT]


class Reading:
    """How the rows of one data set are taken from what its files hold, and what was seen since `begin`."""

    def __init__(self, columns: Mapping[str, str | ColumnSource] | None = None, form: str | None = None) -> None:
        sources = {ours: ColumnSource(column=of) if isinstance(of, str) else of for ours, of in (columns or {}).items()}
        self._columns = {ours: (of.column or ours, of.type) for ours, of in sources.items()}
        self._form = form
        self.begin()

    def begin(self) -> None:
        """Forget what was seen."""
        self._unseen = {theirs for theirs, _ in self._columns.values()}
        self._keys: dict[str, None] = {}
        self._detected: dict[str, int] = {}
        self._left_out: dict[str, tuple[int, str]] = {}
        self._whole: dict[str, None] = {}
        self._notes: list[str] = []

    @property
    def takes_rows_as_they_are(self) -> bool:
        """Whether a row that has a prompt needs no change."""
        return not self._columns and self._form is None

    def see(self, keys: Iterable[str]) -> None:
        """Keys that there are, of a row or a table."""
        if self._unseen:
            keys = list(keys)
            self._unseen.difference_update(keys)
            for key in keys[: SHOWN_KEYS - len(self._keys)]:
                self._keys[key] = None

    def see_whole(self, columns: Iterable[str]) -> None:
        """Columns of floats that are read as integers."""
        self._whole |= dict.fromkeys(columns)

    def leave_out(self, key: str, place: str) -> None:
        """Count a number that JSON cannot hold, in a key that is left out of its row."""
        count, first = self._left_out.get(key, (0, place))
        if key in self._left_out or len(self._left_out) < SHOWN_PLACES_OF:
            self._left_out[key] = (count + 1, first)

    def note(self, sentence: str) -> None:
        """Keep a remark of what the rows are made of."""
        self._notes.append(sentence)

    def check_columns(self) -> None:
        """Raises ConfigError where rows were seen, and a column that the configuration names in none of them."""
        if self._unseen and self._keys:
            wanted = ", ".join(map(repr, sorted(self._unseen)))
            raise ConfigError(f"columns: the rows have no {wanted}; they have {', '.join(map(repr, self._keys))}")

    def shaped(self, document: dict[str, Any], own_keys: frozenset[str]) -> dict[str, Any]:
        """A row with the names that are used here. Raises ValueError for one that has another form."""
        if self._columns:
            self.see(document)
            document = self._renamed(document)
        form = self._form or form_of(document, own_keys)
        if form is None:
            return document
        if self._form is None:
            self._detected[form] = self._detected.get(form, 0) + 1
        return FORMS[form](document, own_keys)

    def _renamed(self, document: dict[str, Any]) -> dict[str, Any]:
        moved = {theirs for theirs, _ in self._columns.values()}
        kept = {key: value for key, value in document.items() if key not in moved}
        found = {}
        for ours, (theirs, kind) in self._columns.items():
            if ours in kept:
                raise ValueError(f"has {ours!r} and {theirs!r}, which columns also calls so; rename or remove one")
            if theirs in document:
                found[ours] = document[theirs] if kind is None else of_type(ours, kind, document[theirs])
        return {**found, **kept}

    def remarks(self) -> tuple[str, ...]:
        """What was changed, or found out, as sentences."""
        return tuple(self._remarks())

    def _remarks(self) -> Iterator[str]:
        yield from self._notes
        for form, count in self._detected.items():
            yield f"{count} rows are read as {NAMES[form]}, by their keys"
        for column in [*self._whole][:SHOWN_PLACES_OF]:
            yield f"column {column!r} is read as integers: it holds floats and nulls, and all its numbers are whole"
        for key, (count, first) in self._left_out.items():
            yield f"key {key!r} is left out of {count} rows, where it holds NaN or an infinite number; first at {first}"


def parse_rows(data: bytes, name: str, model: type[RowT]) -> list[RowT]:
    """Rows of one kind from JSONL bytes; none is fine. Raises DataError that calls the bytes ``name``."""
    return [row for _, _, row in parse_documents(numbered_lines(name, data.split(b"\n")), model)]


def to_jsonl(rows: Iterable[Row]) -> bytes:
    """The canonical bytes of rows: `canonical_json` a line. Raises ConfigError for extras that are not JSON."""
    return b"".join(map(to_line, rows))


def to_line(row: Row) -> bytes:
    """The canonical bytes of one row."""
    return canonical_json(row.document()) + b"\n"


def matching_files(pattern_or_path: str | Path, base: Path | None) -> list[Path]:
    """The file of that path, or those that match the pattern, sorted; none is fine. Raises ConfigError for a folder."""
    base, pattern = base or Path(), str(pattern_or_path)
    if "*" in pattern or "?" in pattern:
        only_those_are_special = pattern.replace("[", "[[]")
        matches = (base / match for match in glob.glob(only_those_are_special, root_dir=base, recursive=True))
        return sorted((path for path in matches if not path.is_dir()), key=str)
    path = base / pattern
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file, or a pattern such as {path / '*.jsonl'}")
    return [path] if path.exists() else []


class LineTooLong(ConfigError):
    """A line of a file has more bytes than a row may have."""


def split_lines(chunks: Iterable[bytes], end: bytes = b"\n") -> Iterator[bytes]:
    """Lines of a file that comes in chunks, without their ends; the last one is what follows the last end. Raises
    LineTooLong."""
    begun: list[bytes] = []
    size = 0
    for chunk in chunks:
        first, *others = chunk.split(end)
        begun.append(first)
        size += len(first)
        if others:
            yield b"".join(begun)
            yield from others[:-1]
            begun, size = [others[-1]], len(others[-1])
        if size > MAX_LINE_BYTES:
            raise LineTooLong(f"a line of more than {MAX_LINE_BYTES} bytes; expected one row a line")
    yield b"".join(begun)


def numbered_lines(name: str, lines: Iterable[bytes]) -> Iterator[PlacedDocument]:
    """Lines of one file, without a byte order mark."""
    for number, line in enumerate(lines, start=1):
        yield f"{name}:", number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def parse_documents(
    documents: Iterable[PlacedDocument], model: type[RowT], reading: Reading | None = None
) -> Iterator[PlacedRow[RowT]]:
    """Yields rows up to the first malformed one; from there on only collects what is wrong, then raises DataError.

    ``reading`` takes rows to our names first, and raises ConfigError where the rows have none of a column it names.
    """
    reading = reading or Reading()
    violations: list[tuple[str, str]] = []
    for name, number, document in documents:
        try:
            row = _parse(document, model, reading, f"{name}{number}")
            if row is not None and not violations:
                yield name, number, row
        except (ValueError, RecursionError) as error:
            violations += [(f"{name}{number}", reason) for reason in _reasons(error)]
        if len(violations) >= MAX_VIOLATIONS:
            break
    reading.check_columns()
    if violations:
        found = list(_once(violations[:MAX_VIOLATIONS]))
        more = [f"stopped at {MAX_VIOLATIONS} problems; there may be more"] if len(violations) >= MAX_VIOLATIONS else []
        raise DataError("\n".join([*found, *more]), found)


def _once(violations: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Each kind of problem once, with its first place and its last; values and positions make no other kind."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for place, reason in violations:
        kinds.setdefault(re.sub(r"\d+", "0", reason.partition(", got ")[0]), []).append((place, reason))
    for (place, reason), *others in kinds.values():
        again = f" (and {len(others)} more like it, the last at {others[-1][0]})" if others else ""
        yield f"{place}: {reason}{again}"


def _parse(document: bytes | dict[str, Any], model: type[RowT], reading: Reading, place: str) -> RowT | None:
    if isinstance(document, dict):
        return _row(_as_json(reading.shaped(document, model.own_keys), model, reading, place), model)
    if reading.takes_rows_as_they_are and (quick := model.quick(document)) is not None:
        return quick
    text = document.decode("utf-8").strip(" \t\r\n")
    if not text:
        return None
    try:
        found, is_json = _DECODER.decode(text), True
    except _NotFinite:
        found, is_json = _DECODER_OF_ANY_NUMBER.decode(text), False
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {shown(found)}")
    found = reading.shaped(without_nulls(found, _MEANT_NULLS) if "null" in text else found, model.own_keys)
    # An escape may be half a surrogate pair, which no UTF-8 file could hold.
    return _row(found if is_json and "\\u" not in text else _as_json(found, model, reading, place), model)


_MEANT_NULLS = frozenset({"arguments", "tools"})
"""Keys below which a null of JSON says something: what a tool is called with, and the schema of what it takes."""


def without_nulls(value: Any, but: Set[str] = frozenset()) -> Any:
    """The same without keys that hold null, at any depth ``but`` below these. Tables have every column in every row."""
    if isinstance(value, dict):
        return {
            key: item if key in but else without_nulls(item, but) for key, item in value.items() if item is not None
        }
    return [without_nulls(item, but) for item in value] if isinstance(value, list) else value


def _as_json(document: dict[str, Any], model: type[Row], reading: Reading, place: str) -> dict[str, Any]:
    """A row in JSON's types. An extra that holds NaN or an infinite number is left out; raises ValueError for such a
    key of the row's own, and for what has no form in JSON."""
    try:
        canonical_json(document)
        return document
    except ConfigError:
        pass
    found = {}
    for key, given in document.items():
        is_own = key in model.own_keys
        value = json_value(given, bytes_as_text=not is_own)
        number = _not_finite(value)
        if number is not None and is_own:
            raise ValueError(f"{key}: expected a finite number, got {number}; correct it or leave the key out")
        if number is not None:
            reading.leave_out(key, place)
            continue
        try:
            canonical_json(value)
        except ConfigError as error:
            raise ValueError(f"{key}: {error}") from None
        found[key] = value
    return found


def _not_finite(value: Any) -> float | None:
    """The first number in a value that JSON cannot hold."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return next((found for item in inner if (found := _not_finite(item)) is not None), None)
    return value if isinstance(value, float) and not math.isfinite(value) else None


def json_value(value: Any, *, bytes_as_text: bool = True) -> Any:
    """What stands in JSON for a value of a table: ISO 8601 for times and durations, all digits of a decimal number, the
    text of a UUID, base64 for bytes unless they are to stay."""
    if isinstance(value, dict):
        return {key: json_value(item, bytes_as_text=bytes_as_text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item, bytes_as_text=bytes_as_text) for item in value]
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode() if bytes_as_text else value
    if hasattr(value, "isoformat"):  # of pandas too, which counts nanoseconds
        return value.isoformat()
    return to_jsonable_python(value) if isinstance(value, timedelta) else value


def _row(document: dict[str, Any], model: type[RowT]) -> RowT:
    fields = {key: document.pop(key) for key in model.own_keys if key in document}
    if type(fields.get("id")) is int:
        fields["id"] = str(fields["id"])  # it only comes back in outputs
    return model.model_validate({**fields, "extras": document})


class _NotFinite(ValueError):
    """A number of a line is NaN or infinite."""


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _NotFinite(text)
    return number


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} stands twice in one object; remove one")
    return found


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite, object_pairs_hook=_no_key_twice)
_DECODER_OF_ANY_NUMBER = json.JSONDecoder(object_pairs_hook=_no_key_twice)


def _reasons(error: ValueError | RecursionError) -> Iterator[str]:
    if isinstance(error, ValidationError):
        for item in error.errors(include_url=False):
            yield _field_reason(item)
    elif isinstance(error, UnicodeDecodeError):
        yield f"not valid UTF-8 at byte {error.start + 1}"
    elif isinstance(error, json.JSONDecodeError):
        line = f" of line {error.lineno} of the row" if error.lineno > 1 else ""
        yield f"not valid JSON: {error.msg} at column {error.colno}{line}"
    elif isinstance(error, RecursionError):
        yield "nested too deeply"
    else:
        yield str(error)


_EXPECTED = {
    "string_type": "expected a string",
    "model_type": "expected an object with role and content",
}


def _field_reason(item: Any) -> str:
    place = ".".join(str(part) for part in item["loc"])
    reason = item["msg"].removeprefix("Value error, ")
    if not place:
        return reason
    if item["type"] == "missing" or reason == NOT_GIVEN:
        return f"{place}: {NOT_GIVEN}"
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(item["loc"][-1]), ChatMessage.model_fields, n=1)
        return f"{place}: unknown key" + (
            f"; did you mean {near[0]!r}?" if near else "; a message has role and content"
        )
    if item["type"] == "literal_error":
        reason = f"expected {item['ctx']['expected']}"
    if item["type"] == "tuple_type":
        reason = f"expected a list of {'numbers' if place in ('input_ids', 'labels', 'loss_mask') else 'messages'}"
    return f"{place}: {_EXPECTED.get(item['type'], reason)}, got {shown(item['input'])}"


Text = Annotated[str, Tag("text")]
Messages = Annotated[Conversation, Tag("messages")]
TextOrMessages = Annotated[
    Text | Messages, Discriminator(lambda value: "messages" if isinstance(value, list | tuple) else "text")
]


class PairRow(Row):
    """Two answers to one prompt, or without ``prompt`` two whole sequences; the chosen one is better.

    With a text prompt both answers are texts. With a conversation they are texts or the messages that follow it.
    """

    prompt: TextOrMessages | None = None
    chosen: TextOrMessages | None = None
    rejected: TextOrMessages | None = None
    margin: float | None = None
    """By how much the chosen one is better; counts in the reward model's loss only."""
    tools: Tools = None

    @model_validator(mode="before")
    @classmethod
    def _prompt_within_conversations(cls, given: Any) -> Any:
        """Without the text prompt that both conversations begin with, as many published sets repeat it."""
        if isinstance(given, dict) and isinstance(given.get("prompt"), str):
            firsts = [
                next(iter(answer), None)
                for answer in map(given.get, ("chosen", "rejected"))
                if isinstance(answer, list | tuple)
            ]
            users = [first for first in firsts if isinstance(first, dict) and first.get("role") in ("user", "system")]
            if len(users) == 2 and any(
                isinstance(message, dict)
                and message.get("role") == "user"
                and message.get("content") == given["prompt"]
                for message in given["chosen"]
            ):
                return {**given, "prompt": None}
        return given

    @model_validator(mode="after")
    def _two_different_answers(self) -> PairRow:
        for name in ("chosen", "rejected"):
            if getattr(self, name) is None:
                raise self.missing(f"needs chosen and rejected, but has no {name}", name)
            check_answer(name, getattr(self, name), self.prompt)
        if isinstance(self.chosen, str) is not isinstance(self.rejected, str):
            raise ValueError("one of chosen and rejected is a text, the other a list of messages; give one form")
        if self.chosen == self.rejected:
            raise ValueError("chosen and rejected are the same; there is nothing to prefer")
        _refuse_tools_of_texts(self.tools, self.prompt)
        return self


class UnpairedRow(Row):
    """An answer to a prompt, and whether it is desirable."""

    prompt: TextOrMessages | None = None
    completion: TextOrMessages | None = None
    label: bool | None = None
    tools: Tools = None

    @model_validator(mode="after")
    def _a_labelled_answer(self) -> UnpairedRow:
        for name in ("prompt", "completion", "label"):
            if getattr(self, name) is None:
                raise self.missing(f"needs prompt, completion and label, but has no {name}", name)
        check_answer("completion", self.completion, self.prompt)
        _refuse_tools_of_texts(self.tools, self.prompt)
        return self


def check_answer(name: str, answer: Any, prompt: Any) -> None:
    """Raises ValueError for an answer that is empty, or of another form than its prompt."""
    if isinstance(answer, str):
        if not answer:
            raise ValueError(f"{name} is empty; there is nothing to judge")
        return
    if isinstance(prompt, str):
        raise ValueError(f"prompt is a text, but {name} is a list of messages; give one form")
    if answer[-1].role != "assistant" or not _says_anything(answer[-1]):
        raise ValueError(f"{name} must end with an assistant's message that is not empty")


def as_messages(answer: str | tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """An answer in a conversation: a text is the assistant's."""
    return (ChatMessage(role="assistant", content=answer),) if isinstance(answer, str) else answer

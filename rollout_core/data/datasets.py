"""Rows, read strictly: what is wrong with a file is said once, as ``path:line: reason``, before any work starts.

A JSONL file is UTF-8 with one JSON object a line; blank lines are skipped but counted. `to_jsonl` writes the one
canonical form of rows, so that a data set has a content id that ignores key order, spacing and how its files were
split. Other kinds of data sets are read by `dataset_sources`.
"""

from __future__ import annotations

import base64
import codecs
import difflib
import glob
import json
import math
from collections.abc import Iterable, Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Self, TypeVar

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
from rollout_core.base.watching import current_amount
from rollout_core.models.messages import NOT_GIVEN, ChatMessage

MAX_VIOLATIONS = 20
"""Problems of one data set that are shown together; reading stops there."""


def _at_least_one(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    if not messages:
        raise ValueError("expected at least one message")
    return messages


Conversation = Annotated[tuple[ChatMessage, ...], AfterValidator(_at_least_one)]


def _tools(given: Any) -> Any:
    """A list of tools, or its JSON text; none of an empty one."""
    if isinstance(given, str):
        try:
            given = json.loads(given or "[]")
        except json.JSONDecodeError as error:
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
        if type(document.get("id", "")) is not str:
            return None
        prompt, row_id = document.pop("prompt"), document.pop("id", None)
        # A float may have been an integer too large for this parser; what is nested may hold one.
        if not all(type(value) in (str, int, bool, NoneType) for value in document.values()):
            return None
        return trusted(cls, {"extras": document, "prompt": prompt, "messages": None, "tools": None, "id": row_id})

    @model_validator(mode="after")
    def _exactly_one_form(self) -> PromptRow:
        if self.prompt is None and self.messages is None:
            raise self.missing("needs prompt or messages", "prompt", "messages")
        if self.prompt is not None and self.messages is not None:
            raise ValueError("has both prompt and messages; give one of them")
        if self.messages is not None and self.messages[-1].role == "assistant":
            raise ValueError(
                "the last message is the assistant's: nothing is asked; leave the answer out of the prompt"
            )
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


def jsonl_documents(files: Iterable[tuple[str, Path]]) -> Iterator[PlacedDocument]:
    """Lines of JSONL files, each given as name and path. Raises ConfigError for a file that cannot be read."""
    for name, path in files:
        try:
            with path.open("rb") as file:
                yield from numbered_lines(name, counted(file))
        except OSError as error:
            raise ConfigError(f"{name}: not readable: {error.strerror or error}") from error


def counted(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same, told to whoever watches."""
    amount = current_amount()
    for chunk in chunks:
        amount.add(len(chunk))
        yield chunk


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of a file that comes in chunks, without their ends; the last one is what follows the last end."""
    begun: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        begun.append(first)
        if others:
            yield b"".join(begun)
            yield from others[:-1]
            begun = [others[-1]]
    yield b"".join(begun)


def numbered_lines(name: str, lines: Iterable[bytes]) -> Iterator[PlacedDocument]:
    """Lines of one file, without a byte order mark."""
    for number, line in enumerate(lines, start=1):
        yield f"{name}:", number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def parse_documents(documents: Iterable[PlacedDocument], model: type[RowT]) -> Iterator[PlacedRow[RowT]]:
    """Yields rows up to the first malformed one; from there on only collects what is wrong, then raises DataError."""
    violations: list[str] = []
    for name, number, document in documents:
        try:
            row = _parse(document, model)
            if row is not None and not violations:
                yield name, number, row
        except (ValueError, RecursionError) as error:
            violations += [f"{name}{number}: {reason}" for reason in _reasons(error)]
        if len(violations) >= MAX_VIOLATIONS:
            break
    if violations:
        shown = violations[:MAX_VIOLATIONS]
        more = [f"stopped at {MAX_VIOLATIONS} problems; there may be more"] if len(violations) >= MAX_VIOLATIONS else []
        raise DataError("\n".join([*shown, *more]), shown)


def _parse(document: bytes | dict[str, Any], model: type[RowT]) -> RowT | None:
    if isinstance(document, dict):
        return _row(_as_json(document, model), model)
    if (quick := model.quick(document)) is not None:
        return quick
    text = document.decode("utf-8").strip(" \t\r\n")
    if not text:
        return None
    found = _DECODER.decode(text)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {_shown(found)}")
    if "\\u" in text:
        canonical_json(found)  # refuses half a surrogate pair, which no UTF-8 file could hold
    return _row(found, model)


def _as_json(document: dict[str, Any], model: type[Row]) -> dict[str, Any]:
    """A row of a table, its extras in JSON's types; the row's own keys have to be of their types as they are."""
    try:
        canonical_json(document)
        return document
    except ConfigError:
        own = model.own_keys
        document = {key: value if key in own else json_value(value) for key, value in document.items()}
    canonical_json(document)
    return document


def json_value(value: Any) -> Any:
    """What stands in JSON for a value of a table: ISO 8601 for times and durations, all digits of a decimal number,
    base64 for bytes."""
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "isoformat"):  # of pandas too, which counts nanoseconds
        return value.isoformat()
    return to_jsonable_python(value) if isinstance(value, timedelta) else value


def _row(document: dict[str, Any], model: type[RowT]) -> RowT:
    fields = {key: document.pop(key) for key in model.own_keys if key in document}
    return model.model_validate({**fields, "extras": document})


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text} is out of range")
    return number


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON; write null or leave the key out")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)


def _reasons(error: ValueError | RecursionError) -> Iterator[str]:
    if isinstance(error, ValidationError):
        for item in error.errors(include_url=False):
            yield _field_reason(item)
    elif isinstance(error, UnicodeDecodeError):
        yield f"not valid UTF-8 at byte {error.start + 1}"
    elif isinstance(error, json.JSONDecodeError):
        yield f"not valid JSON: {error.msg} at column {error.colno}"
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
    return f"{place}: {_EXPECTED.get(item['type'], reason)}, got {_shown(item['input'])}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


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

"""Messages of a conversation, in the forms that people have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator


def strict_json(text: str) -> Any:
    """What a JSON text holds. Raises ValueError also for NaN, infinite numbers and half a surrogate pair."""
    found = json.loads(text, parse_constant=_refuse)
    if "\\u" in text:
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


class CalledFunction(BaseModel):
    """Which function a tool call names, and with what."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    """By name; given as an object, or as the JSON text of one, as OpenAI's API has it."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _from_text(cls, arguments: Any) -> Any:
        if not isinstance(arguments, str):
            return arguments or {}
        try:
            return strict_json(arguments or "{}")
        except ValueError as error:
            raise ValueError(f"not the JSON text of an object: {error}") from error


class ToolCall(BaseModel):
    """A call of a tool, as OpenAI's API describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    function: CalledFunction
    type: Literal["function"] = "function"
    id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_other_forms(cls, given: Any) -> Any:
        """Without nulls and the index of a stream; name and arguments may stand in the call itself."""
        if not isinstance(given, Mapping):
            return given
        call = {key: value for key, value in given.items() if value is not None and key != "index"}
        if "function" not in call and "name" in call:
            call["function"] = {key: call.pop(key) for key in ("name", "arguments") if key in call}
        return call


NOT_GIVEN = "required, but not given"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's thoughts have; the first is ours."""


class ChatMessage(BaseModel):
    """One turn of a conversation, as OpenAI's API and chat templates have it. Null and empty keys are left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    reasoning_content: str | None = None
    """What the assistant thought before it answered."""
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None
    """Of the call that a tool answers."""
    name: str | None = None
    weight: Literal[0, 1] | None = None
    """0: this turn of the assistant is not trained."""
    content: str | None = Field(default=None, validate_default=True)
    """Text, given whole or in parts; None only with tool calls."""

    @model_validator(mode="before")
    @classmethod
    def _without_empty_keys(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        message = {key: value for key, value in given.items() if value is not None}
        for key in ("tool_calls", "tool_call_id", "name", *_THOUGHTS):
            if message.get(key) in ("", [], ()):
                del message[key]
        for key in _THOUGHTS[1:]:
            if key in message and _THOUGHTS[0] not in message:
                message[_THOUGHTS[0]] = message.pop(key)
        return message

    @field_validator("tool_calls")
    @classmethod
    def _of_the_assistant(cls, calls: Any, info: ValidationInfo) -> Any:
        if calls is not None and info.data.get("role", "assistant") != "assistant":
            raise ValueError(f"only the assistant calls tools, not the {info.data['role']}")
        return calls

    @field_validator("content", mode="before")
    @classmethod
    def _as_text(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("tool_calls", ()) is None:
            raise ValueError(NOT_GIVEN)
        return "".join(map(_text_of_part, content)) if isinstance(content, list | tuple) else content

    def document(self) -> dict[str, Any]:
        """As JSON, without keys that it has not."""
        return self.model_dump(mode="json", exclude_none=True)

    def plain(self) -> dict[str, Any]:
        """As a chat template gets it."""
        if self.model_fields_set <= {"role", "content"}:
            return {"role": self.role, "content": self.content}
        return {"content": None, **self.model_dump(mode="json", exclude_none=True, exclude={"weight"})}


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    what = f"a part of type {kind!r}" if isinstance(kind, str) else "such a part"
    raise ValueError(f"{what} cannot be read; expected text, or parts of type 'text'")


def openai_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as OpenAI's API has them: arguments of calls are JSON texts."""
    sent = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or ()
        ]
        sent.append({**message, "tool_calls": calls} if calls else dict(message))
    return sent

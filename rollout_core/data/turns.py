"""What the assistant writes in a conversation: which part of a chat template's rendering is its own, turn by turn.

A turn is trained as the model would write it when it is its turn: behind the prompt that an engine sends, and with what
ends it. Where a template renders a whole conversation so that each turn stands behind its own prompt, that is one
sequence. Some templates rewrite earlier turns once others follow (they drop thoughts, or end the last turn with
another token), begin a thought in the prompt, or end no turn: there each turn is a sequence of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_core.models.messages import ChatMessage

_OPENED = re.compile(r"<((?:\w+:)?think\w*)>\s*$")
"""The end of a prompt that has begun the assistant's thought."""
_ENDED = re.compile(r"<((?:\w+:)?think\w*)>\s*</\1>\s*$")
"""The end of a prompt that has begun and ended it."""
_EMPTY = re.compile(r"\s*</((?:\w+:)?think\w*)>\s*")


@dataclass(frozen=True)
class Turn:
    """One turn of the assistant: the text before it, and what it writes."""

    prompt: str
    written: str

    @property
    def text(self) -> str:
        """What it writes, with the beginning of its thought where the prompt has that."""
        opened = _OPENED.search(self.prompt)
        return self.prompt[opened.start() :] + self.written if opened else self.written


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the longest common beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))


def written_after(prompt: str, rendered: str, message: ChatMessage) -> str | None:
    """What the model writes behind ``prompt`` to say ``message``, as the template renders both together.

    Where the prompt has begun a thought, the message's own thought is written, or an empty one; where the prompt has
    also ended it, none. Returns None where the rendering does not continue the prompt.
    """
    if rendered.startswith(prompt):
        return _without_empty_thought(rendered[len(prompt) :]) if _OPENED.search(prompt) else rendered[len(prompt) :]
    shared = common_length(prompt, rendered)
    if not prompt[shared:].strip():
        return rendered[shared:]
    opened, ended = _OPENED.search(prompt), _ENDED.search(prompt)
    if opened is not None and rendered.startswith(prompt[: opened.start()]):
        rest = rendered[opened.start() :]
        return f"{_thought(message, opened[1])}\n</{opened[1]}>\n\n" + rest.lstrip("\n")
    if ended is not None and rendered.startswith(prompt[: ended.start()]):
        thought, closed, answer = rendered[ended.start() :].partition(f"</{ended[1]}>")
        return answer.lstrip("\n") if closed and thought.startswith(f"<{ended[1]}>") else None
    return None


def _without_empty_thought(written: str) -> str:
    """Without the empty thought that a template puts before one that stands in the content."""
    empty = _EMPTY.match(written)
    if empty is None or f"</{empty[1]}>" not in written[empty.end() :]:
        return written
    return written[empty.end() :].removeprefix(f"<{empty[1]}>").removeprefix("\n")


def _thought(message: ChatMessage, tag: str) -> str:
    before, closed, _ = (message.content or "").partition(f"</{tag}>")
    return (message.reasoning_content or (before if closed else "")).removeprefix(f"<{tag}>").strip("\n")


def omission(text: str, message: ChatMessage) -> str | None:
    """In words, what of a message a chat template's text leaves out or rewrites, if anything."""
    called = [call.function.name for call in message.tool_calls or ()]
    if not all(part.strip() in text for part in (message.content or "", *called)):
        return "leaves out or rewrites"
    return "leaves out the thought of" if (message.reasoning_content or "").strip() not in text else None


def shows_tools(text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a chat template's text names all the tools."""
    return all(str(tool.get("function", tool).get("name", "")) in text for tool in tools)


@dataclass(frozen=True)
class Ends:
    """The tokens of a tokenizer that may end a turn."""

    eos: str
    tokens: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> Ends:
        """Its EOS and its added tokens but those that close what is within a turn, such as ``</think>``."""
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        eos = str(tokenizer.eos_token)
        return cls(eos, tuple(sorted({eos, *(token for token in added if not token.startswith("</"))})))

    def end(self, written: str) -> bool:
        """Whether a turn is ended by one of them."""
        return self.found(written) is not None

    def found(self, written: str) -> str | None:
        """The one that ends a turn."""
        text = written.rstrip()
        return max((token for token in self.tokens if text.endswith(token)), key=len, default=None)

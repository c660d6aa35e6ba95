"""Rows of preference data: pairs of answers of which one was preferred, and single answers judged good or bad.

Texts and conversations are both taken. A conversation's prompt may be given apart, or be the messages that both of a
pair begin with.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Tag, model_validator

from rollout_core.data.datasets import Conversation, Row, parse_rows
from rollout_core.models.chat import ChatMessage

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
        return self


class UnpairedRow(Row):
    """An answer to a prompt, and whether it is desirable."""

    prompt: TextOrMessages | None = None
    completion: TextOrMessages | None = None
    label: bool | None = None

    @model_validator(mode="after")
    def _a_labelled_answer(self) -> UnpairedRow:
        for name in ("prompt", "completion", "label"):
            if getattr(self, name) is None:
                raise self.missing(f"needs prompt, completion and label, but has no {name}", name)
        check_answer("completion", self.completion, self.prompt)
        return self


def check_answer(name: str, answer: Any, prompt: Any) -> None:
    """Raises ValueError for an answer that is empty, or of another form than its prompt."""
    if isinstance(answer, str):
        if not answer:
            raise ValueError(f"{name} is empty; there is nothing to judge")
        return
    if isinstance(prompt, str):
        raise ValueError(f"prompt is a text, but {name} is a list of messages; give one form")
    if answer[-1].role != "assistant" or not answer[-1].content:
        raise ValueError(f"{name} must end with an assistant's message that is not empty")


def as_messages(answer: str | tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """An answer in a conversation: a text is the assistant's."""
    return (ChatMessage(role="assistant", content=answer),) if isinstance(answer, str) else answer


def parse_pairs(data: bytes, name: str) -> list[PairRow]:
    """Pairs of JSONL bytes, perhaps none. Raises DataError that calls the bytes ``name``."""
    return parse_rows(data, name, PairRow)


def parse_unpaired(data: bytes, name: str) -> list[UnpairedRow]:
    """Labelled answers of JSONL bytes, perhaps none. Raises DataError that calls the bytes ``name``."""
    return parse_rows(data, name, UnpairedRow)

"""Token ids of conversations that grow: what the model wrote stays as it wrote it, and only what follows is tokenised.

A chat template writes whole conversations. What it writes behind an answer is found by having it write a short one: a
question, an answer that is a mark, and the new messages. All behind the mark continues every answer. So a template that
rewrites earlier turns, such as one that drops their thoughts, does not rewrite what was trained on here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.data.turn_ends import all_ends
from rollout_core.environments.protocol import EnvironmentFailed
from rollout_core.inference.chat_api import ApiError, BareText
from rollout_core.inference.served_engine import Encoder, Tokenized
from rollout_core.models.bounded.tokenizing import Chat, render

_QUESTION = "Hello."
_MARK = "~~answer~~"
"""A text that no template writes by itself."""


class Turns:
    """Conversations with the tokenizer of the model in a folder; in one event loop."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ends = all_ends(folder, tokenizer)
        self._encoder = Encoder()

    async def first(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Tokenized:
        """Text and token ids of the messages that an episode begins with, up to where the model answers; ``tools`` that
        it is shown are as OpenAI's API describes them. Raises EnvironmentFailed where the chat template cannot write
        them."""
        return await self._encoded(Chat(messages, True, tools))

    async def behind(self, answer: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> Tokenized:
        """Text and token ids that follow those of an ``answer`` in the conversation: the turn's end, where the answer
        has not written it, ``messages``, and what begins the next answer. Raises EnvironmentFailed as `first` does."""
        text = (await self._encoded(_around(messages))).text
        _, mark, following = text.partition(_MARK)
        if not mark:
            raise EnvironmentFailed("the chat template leaves out what the assistant said before; choose another one")
        ids = (await self._encoded(BareText(following))).token_ids
        if not answer or answer[-1] not in self._ends:
            return Tokenized(following, ids)
        ended = next((place for place, token in enumerate(ids) if token in self._ends), None)
        return Tokenized(following, ids if ended is None else ids[ended + 1 :])

    async def _encoded(self, prompt: Chat | BareText) -> Tokenized:
        try:
            return await self._encoder.encode(self._tokenizer, prompt)
        except ApiError as error:
            if error.status == 503:  # it lies with this machine
                raise Recoverable(error.message) from error
            raise EnvironmentFailed(error.message) from error

    def close(self) -> None:
        """Tokenise nothing more."""
        self._encoder.close()


def _around(messages: Sequence[Mapping[str, Any]]) -> Chat:
    question, answer = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _MARK}
    return Chat([question, answer, *messages], True)


def check_turns(tokenizer: Any, tools: Sequence[Mapping[str, Any]], tool_role: str) -> str | None:
    """Whether a chat template can write episodes with these tools: raises ConfigError where it cannot, and returns a
    remark where the model does not see what tools there are."""
    calls = [{"role": "tool", "content": "42", "name": "tool", "tool_call_id": f"call_{n}"} for n in range(2)]
    answers = (calls if tool_role == "tool" else [{"role": "user", "content": "42"}]) if tools else []
    following = [*answers, *([] if answers else [{"role": "user", "content": _QUESTION}])]
    shown, text = render(
        tokenizer, [Chat([{"role": "user", "content": _QUESTION}], True, [dict(tool) for tool in tools]),
                    _around(following)]
    )  # fmt: skip
    for found in (shown, text):
        if not isinstance(found, str):
            hint = (
                ' (tool_role = "user" sends what tools answer as the user\'s)' if tools and tool_role == "tool" else ""
            )
            raise ConfigError(f"{found.reason}, of which an episode is made{hint}")
    assert isinstance(text, str) and isinstance(shown, str)
    if _MARK not in text:
        raise ConfigError("the chat template leaves out what the assistant said before; choose another one")
    names = [str(tool["function"]["name"]) for tool in tools]
    if answers and "42" not in text.partition(_MARK)[2]:
        raise ConfigError(
            f'the chat template leaves out messages of role "{tool_role}", so the model does not see what tools '
            'answer; set tool_role = "user", or choose another template'
        )
    hidden = [name for name in names if name not in shown]
    if hidden:
        return (
            f"the chat template does not show the model its tools ({', '.join(hidden)}); have the first messages "
            "describe them and how they are called"
        )
    return None

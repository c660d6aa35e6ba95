"""Where engines stop: at the ends of the model, and in a conversation where the template ends a turn, too.

A base model whose EOS ends a document may have a template, or be given one, that ends turns by a token of their own. It
is trained to write that token, and a prompt that the template wrote asks for one turn. Prompts of plain text are not
the template's, and end as before.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from rollout_core.base.errors import ConfigError
from rollout_core.data.turns import Ends
from rollout_core.models.bounded.tokenizing import Chat, render, template_text
from rollout_core.models.facts import end_ids

_QUESTION, _ANSWER = "Hello.", "Good morning."
_PROBE = Chat([{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}])
_known: WeakKeyDictionary[Any, tuple[str, str | None]] = WeakKeyDictionary()


def turn_end(tokenizer: Any) -> str | None:
    """The token by which the tokenizer's chat template ends the assistant's last turn; None where there is none."""
    return _end(tokenizer) or None


def ends_no_turn(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template writes an answer with no token behind it that could end it."""
    return _end(tokenizer) == ""


def _end(tokenizer: Any) -> str | None:
    """The token; an empty text where there is none, None without a template that writes conversations."""
    if not tokenizer.chat_template:
        return None
    template = template_text(tokenizer)
    found = _known.get(tokenizer)
    if found is None or found[0] != template:
        found = _known[tokenizer] = (template, _rendered_end(tokenizer))
    return found[1]


def _rendered_end(tokenizer: Any) -> str | None:
    [text] = render(tokenizer, [_PROBE])
    if not isinstance(text, str) or _ANSWER not in text:
        return None
    return Ends.of(tokenizer).found(text.rpartition(_ANSWER)[2]) or ""


def turn_ends(folder: Path, tokenizer: Any) -> list[int]:
    """Ids of the tokens that end a turn by the chat template, where the model of the folder has them not among its
    ends."""
    end = turn_end(tokenizer)
    found = None if end is None else tokenizer.convert_tokens_to_ids(end)
    return [] if not isinstance(found, int) or found in end_ids(folder, tokenizer) else [found]


def all_ends(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Every token at which engines stop in a conversation with the model of a folder."""
    return end_ids(folder, tokenizer) | {*turn_ends(folder, tokenizer)}


def as_engines_end(folder: Path, tokenizer: Any) -> Callable[[list[int]], list[int]]:
    """What cuts an answer that a chat template wrote to what an engine with the model of the folder gives of it."""
    ends = all_ends(folder, tokenizer)
    return lambda token_ids: until_end(token_ids, ends, lambda token: not tokenizer.decode([token]).strip())


def until_end(token_ids: list[int], ends: Set[int], is_blank: Callable[[int], bool]) -> list[int]:
    """The tokens up to the one at which an engine ends the last answer, if there is one, whatever a chat template adds
    behind.

    A template may write several of its ends with blanks between them, such as Phi 3's ``<|end|>\\n<|endoftext|>``; an
    engine stops at the first of these.
    """
    places = [place for place, token in enumerate(token_ids) if token in ends]
    if not places:
        return token_ids
    first = places.pop()
    while places and all(is_blank(token) for token in token_ids[places[-1] + 1 : first]):
        first = places.pop()
    return token_ids[: first + 1]


def check_template(tokenizer: Any) -> None:
    """Raises ConfigError unless the tokenizer's chat template writes a conversation of one question."""
    [text] = render(tokenizer, [Chat(_PROBE.messages[:1], True)])
    if not isinstance(text, str):
        raise ConfigError(f"{text.reason}, which are one of a user, {_QUESTION!r}")
    if _QUESTION not in text:
        raise ConfigError("the chat template leaves out what a user says; expected one that writes messages")

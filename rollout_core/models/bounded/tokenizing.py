"""Chat templates and tokenizers at work under limits: many conversations or texts at once, and the outcome of each."""

from __future__ import annotations

import re
from array import array
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from blake3 import blake3

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.isolation.child import Ended, KeptChild
from rollout_core.base.processes import Limits
from rollout_core.models.bounded.texts import characters
from rollout_core.models.messages import ChatMessage

REQUEST_ITEMS = 512
REQUEST_CHARACTERS = 2**21
LIMITS = Limits(seconds=120.0, memory_bytes=2 * 2**30, address_space=True)
"""For so many texts, or one conversation, on a busy machine; processor time is limited besides."""
RENDER_SECONDS = 5.0
"""Of processor time, for one conversation: a thousand times what one takes."""
BEYOND_LIMITS = 3
"""Rows that may go beyond the limits before their template or tokenizer is given up."""
_CHANCE = re.compile(r"\blipsum\b|\|\s*random\b|['\"]random['\"]")
_CLOCK = re.compile(r"\bstrftime_now\b")

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables that every rendering gives."""

_child = KeptChild("rollout_core.models.bounded.texts:handle", LIMITS)
InT = TypeVar("InT")
OutT = TypeVar("OutT")


@dataclass(frozen=True)
class Chat:
    """A conversation to render."""

    messages: Sequence[ChatMessage | Mapping[str, Any]]
    """As mappings they reach the template with all that they hold, tool calls say; of JSON values."""
    generation_prompt: bool = False
    """Whether what begins the assistant's next turn is added."""
    tools: Sequence[Mapping[str, Any]] = ()
    """That the assistant may call, as OpenAI's API describes them."""

    def plain(self) -> list[dict[str, Any]]:
        """Messages as a chat template gets them."""
        return [turn.plain() if isinstance(turn, ChatMessage) else dict(turn) for turn in self.messages]


@dataclass(frozen=True)
class Problem:
    """Why there is no text, or are no token ids."""

    reason: str


@dataclass
class _Known:
    """What is remembered of a tokenizer object."""

    key: str = ""
    """Of its content, under which the child knows it."""
    size: int = -1
    beyond_limits: int = 0

    def count(self, problem: Problem) -> Problem:
        """The problem, unless there were too many of the kind."""
        self.beyond_limits += 1
        if self.beyond_limits >= BEYOND_LIMITS:
            others = f"as did {BEYOND_LIMITS - 1} earlier rows"
            raise ConfigError(f"{problem.reason}, {others}; choose another template or tokenizer")
        return problem


_known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


def how_prompts_vary(template: str) -> str | None:
    """In words, where the same messages do not always give the same prompt."""
    if _CLOCK.search(template):
        return "the chat template asks for the date (strftime_now): the same messages may give another prompt tomorrow"
    if _CHANCE.search(template):
        return "the chat template draws at random: what it draws here is the same each time, and elsewhere it is not"
    return None


def render(tokenizer: Any, chats: Sequence[Chat]) -> list[str | Problem]:
    """Each conversation as the tokenizer's chat template writes it. Raises ConfigError where that takes too much time
    or memory for too many."""
    with_tools = [bool(chat.tools) for chat in chats]
    if len({*with_tools}) == 2 and template_text(tokenizer, True) != template_text(tokenizer):
        of_kind = {kind: [chat for chat in chats if bool(chat.tools) == kind] for kind in (False, True)}
        texts = {kind: iter(render(tokenizer, some)) for kind, some in of_kind.items()}
        return [next(texts[kind]) for kind in with_tools]
    known = _known.setdefault(tokenizer, _Known())
    shared = _template_of(tokenizer, any(with_tools)) | {"operation": "render"}

    def ask(some: Sequence[Chat]) -> list[str | Problem]:
        request = shared | {"chats": [[chat.plain(), chat.generation_prompt, list(chat.tools)] for chat in some]}
        found: list[str | Problem] = []
        for text, reason, is_beyond in _child.call(request):
            problem = Problem(f"the chat template {reason}")
            found.append(text if reason is None else known.count(problem) if is_beyond else problem)
        return found

    def size(chat: Chat) -> int:
        return sum(map(characters, chat.plain())) + sum(map(characters, chat.tools))

    return _in_requests(chats, size, ask, known, "the chat template")


def template_text(tokenizer: Any, has_tools: bool = False) -> str:
    """The chat template of a tokenizer that has one; of several, the one for these conversations."""
    try:
        return tokenizer.get_chat_template(tools=[] if has_tools else None)
    except ValueError as error:
        names = ", ".join(sorted(tokenizer.chat_template))
        raise ConfigError(
            f"the tokenizer has chat templates by name ({names}) and none is 'default'; give one as chat_template"
        ) from error


def look_into(template: str, where: str) -> frozenset[str]:
    """Names of the variables that a chat template reads. Raises ConfigError, which begins with ``where``, for what is
    no template."""
    try:
        line, problem, names = _child.call({"operation": "look", "template": template, "seconds": RENDER_SECONDS})
    except (Ended, Fatal) as error:
        raise ConfigError(f"{where} cannot be compiled: {error}") from error
    if problem is not None:
        place = "" if line is None else f", line {line}"
        raise ConfigError(f"{where}{place}: not a Jinja template: {problem}")
    return frozenset(names) - _GIVEN


def encode(tokenizer: Any, texts: Sequence[str], *, special_tokens: bool) -> list[list[int] | Problem]:
    """Token ids of each text. Raises ConfigError where that takes too much time or memory for too many."""
    if not _is_plain(tokenizer):
        options = {"return_attention_mask": False, "return_token_type_ids": False}
        return tokenizer(list(texts), add_special_tokens=special_tokens, **options)["input_ids"] if texts else []

    def ask(some: Sequence[str]) -> list[list[int] | Problem]:
        request = {"operation": "encode", "texts": list(some), "special_tokens": special_tokens}
        counts, blob = _ask_about(tokenizer, request)
        ids, found, place = array("i"), [], 0
        ids.frombytes(b64decode(blob))
        whole = ids.tolist()
        for count in counts:
            found.append(whole[place : place + count])
            place += count
        return found

    return _in_requests(texts, len, ask, _known.setdefault(tokenizer, _Known()), "the tokenizer")


def marked_tokens(tokenizer: Any, chat: Chat) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which of them its template marks as the assistant's."""
    request = {"operation": "mark", "messages": chat.plain(), "tools": list(chat.tools)}
    request |= _template_of(tokenizer, bool(chat.tools))
    ids, marked = _ask_about(tokenizer, request)
    return ids, marked


def _template_of(tokenizer: Any, has_tools: bool) -> dict[str, Any]:
    template = template_text(tokenizer, has_tools)
    variables = {
        name: value if isinstance(value, list) else str(value) for name, value in tokenizer.special_tokens_map.items()
    }
    is_random = _CHANCE.search(template) is not None
    return {"template": template, "variables": variables, "is_random": is_random, "seconds": RENDER_SECONDS}


def _ask_about(tokenizer: Any, request: dict[str, Any]) -> Any:
    """The answer about a tokenizer, which is sent along where the child does not know it.

    In one request: between two, other threads may have the child forget it.
    """
    request = request | {"key": _key(tokenizer)}
    answer = _child.call(request)
    if answer is None:
        sent = {"tokenizer": tokenizer.backend_tokenizer.to_str()}
        sent["split_special_tokens"] = bool(tokenizer.split_special_tokens)
        answer = _child.call(request | sent)
    return answer


def _key(tokenizer: Any) -> str:
    known = _known.setdefault(tokenizer, _Known())
    if known.size != len(tokenizer):
        content = tokenizer.backend_tokenizer.to_str().encode(errors="surrogatepass")
        known.key = f"{blake3(content).hexdigest()}-{bool(tokenizer.split_special_tokens)}"
        known.size = len(tokenizer)
    return known.key


def _is_plain(tokenizer: Any) -> bool:
    """Whether it tokenises by the tokenizers library alone."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and kind.__call__ is PreTrainedTokenizerBase.__call__
    )


def _in_requests(
    items: Sequence[InT],
    size: Callable[[InT], int],
    ask: Callable[[Sequence[InT]], list[OutT | Problem]],
    known: _Known,
    what: str,
) -> list[OutT | Problem]:
    """Answers about all items; where a request fails, those that made it fail have a problem. Raises Recoverable where
    the machine is to blame and not an item."""
    return [answer for some in _requests(items, size) for answer in _answers(some, ask, known, what)]


def _answers(
    items: Sequence[InT], ask: Callable[[Sequence[InT]], list[OutT | Problem]], known: _Known, what: str
) -> list[OutT | Problem]:
    if not items:
        return []
    try:
        return ask(items)
    except Ended as error:
        reason, place = str(error), error.place
        if "SIGXCPU" in reason:
            reason = "took too much processor time"
    except Fatal as error:
        reason, place = f"fails: {error}", None
    if place is None and len(items) > 1:
        return [answer for item in items for answer in _answers([item], ask, known, what)]
    place = place or 0
    before = ask(items[:place]) if place else []
    return [*before, known.count(Problem(f"{what} {reason}")), *_answers(items[place + 1 :], ask, known, what)]


def _requests(items: Sequence[InT], size: Callable[[InT], int]) -> Iterator[Sequence[InT]]:
    """Neighbours, up to the size of a request."""
    start = characters = 0
    for place, item in enumerate(items):
        characters += size(item)
        if place > start and (place - start >= REQUEST_ITEMS or characters > REQUEST_CHARACTERS):
            yield items[start:place]
            start, characters = place, size(item)
    if start < len(items):
        yield items[start:]

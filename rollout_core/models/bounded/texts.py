"""The child that renders chat templates and tokenises: both are programs that came with a model.

Templates are rendered by transformers' own function, and texts tokenised as its tokenizers do.
"""

from __future__ import annotations

import json
import math
import random
import resource
import signal
from array import array
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollout_core.base.errors import in_words, well_formed

ENCODE_SECONDS = 60.0
"""Of processor time, for the texts of one request: ten times what they take."""
_OWN_CHARACTERS = 2**20
_GROWTH = 64
"""A rendering has at most so many characters of its own, and so many for each character of the messages."""
_TOKENIZERS = 2
"""Of different models, kept at a time."""

Step = Callable[[int], None]
_tokenizers: OrderedDict[str, Any] = OrderedDict()


class _TooSlow(Exception):
    """A rendering has had its time."""


def handle(request: dict[str, Any], step: Step) -> Any:
    """Answer one request; ``step`` gets the place of each item before it."""
    operation = {"render": _render, "encode": _encode, "mark": _mark, "look": _look}[request["operation"]]
    return operation(request, step)


def _render(request: dict[str, Any], step: Step) -> list[Any]:
    """Each conversation as text, or why there is none; with whether that took too much."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: list[Any], generation_prompt: bool, tools: list[Any]) -> str:
        texts, _ = render_jinja_template(
            conversations=[messages],
            tools=tools or None,
            chat_template=request["template"],
            add_generation_prompt=generation_prompt,
            **request["variables"],
        )
        return texts[0]

    found = []
    for place, (messages, generation_prompt, tools) in enumerate(request["chats"]):
        step(place)
        if request["is_random"]:
            random.seed(0)
        given = sum(map(characters, [*messages, *tools]))
        found.append(
            _tried(lambda: _rendered(messages, tools, generation_prompt, render), given, request["seconds"])  # noqa: B023 - called at once
        )
    return found


def _rendered(
    messages: list[Any], tools: list[Any], generation_prompt: bool, render: Callable[[list[Any], bool, list[Any]], str]
) -> str:
    """The text of the form of the messages that the template writes as it is meant.

    Templates differ in what they expect of a message that calls tools: its arguments as an object or as JSON text, its
    content as none or as an empty text. With the other they fail, or write Python's words for an object or nothing: of
    several forms the first with the fewest of these is taken.
    """
    forms = _forms(messages)
    refusal, text, fewest = None, None, math.inf
    for form in forms:
        try:
            found = render(form, generation_prompt, tools)
        except (_TooSlow, MemoryError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            refusal = error  # in the end that of the most lenient form
            continue
        words = _python_words(found, messages) if len(forms) > 1 else 0
        if words == 0:
            return found
        if words < fewest:
            text, fewest = found, words
    if text is None:
        assert refusal is not None, "there is a form at least"
        raise refusal
    return text


def _forms(messages: list[Any]) -> list[list[Any]]:
    """The messages as they are, then with arguments as text, each once more with empty content for none."""
    forms = [messages]
    if any(message.get("tool_calls") for message in messages):
        forms.append([_with_arguments_as_text(message) for message in messages])
    if any("content" in message and message["content"] is None for message in messages):
        forms += [[{**turn, "content": turn.get("content") or ""} for turn in form] for form in list(forms)]
    return forms


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        if isinstance(function.get("arguments"), dict):
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else message


def _python_words(text: str, messages: list[Any]) -> int:
    """How often the text has an argument object as Python writes it, or where a message has no content, nothing."""
    called = [call["function"].get("arguments") for message in messages for call in message.get("tool_calls") or ()]
    count = sum(text.count(repr(arguments)) for arguments in called if isinstance(arguments, dict) and arguments)
    if any("content" in message and message["content"] is None for message in messages):
        count += text.count("None") + text.count("null")
    return count


def characters(value: Any) -> int:
    """Of all texts in a JSON value but the keys."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = value.values()
    return sum(map(characters, value)) if isinstance(value, Iterable) else 0


def _tried(render: Callable[[], str], given: int, seconds: float) -> list[Any]:
    try:
        with _time_limit(seconds):
            text = render()
    except _TooSlow:
        return [None, f"takes more than {seconds:g} s for these messages", True]
    except MemoryError:
        return [None, "takes more memory than it may have for these messages", True]
    except RecursionError:
        return [None, "refuses these messages: it calls itself without end", False]
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        return [None, f"refuses these messages: {_words(error)}", False]
    if len(text) > _OWN_CHARACTERS + _GROWTH * given:
        return [None, f"makes {len(text)} characters of these messages", True]
    return [text, None, False]


def _words(error: Exception) -> str:
    from jinja2 import TemplateError

    text = str(error) if isinstance(error, TemplateError | TypeError) else in_words(error)
    return " ".join(well_formed(text).split())[:500]


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Ends what runs in Python; what hangs in native code is ended with the process a second later."""

    def out_of_time(*_: object) -> None:
        raise _TooSlow

    signal.signal(signal.SIGPROF, out_of_time)
    _limit_processor_time(seconds + 1.0)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _limit_processor_time(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _tokenizer_of(request: dict[str, Any]) -> Any:
    """The tokenizer of the request's key: one of an earlier request, or the one that came along, as JSON. Else None."""
    from tokenizers import Tokenizer

    if request["key"] in _tokenizers:
        _tokenizers.move_to_end(request["key"])
        return _tokenizers[request["key"]]
    if "tokenizer" not in request:
        return None
    while len(_tokenizers) >= _TOKENIZERS:
        _tokenizers.popitem(last=False)
    tokenizer = Tokenizer.from_str(request["tokenizer"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = request["split_special_tokens"]
    _tokenizers[request["key"]] = tokenizer
    return tokenizer


def _encode(request: dict[str, Any], step: Step) -> list[Any] | None:
    """Numbers of tokens of the texts, and all their ids as 32-bit integers; None for an unknown tokenizer."""
    tokenizer = _tokenizer_of(request)
    if tokenizer is None:
        return None
    texts, special_tokens = request["texts"], request["special_tokens"]
    _limit_processor_time(ENCODE_SECONDS)
    found = [item.ids for item in tokenizer.encode_batch_fast(texts, add_special_tokens=special_tokens)]
    blob = b"".join(array("i", ids).tobytes() for ids in found)
    return [[len(ids) for ids in found], b64encode(blob).decode("ascii")]


def _mark(request: dict[str, Any], step: Step) -> list[Any] | None:
    """Token ids of one conversation, and which of them the template marks as the assistant's."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer = _tokenizer_of(request)
    if tokenizer is None:
        return None
    with _time_limit(request["seconds"]):
        [text], [spans] = render_jinja_template(
            conversations=[request["messages"]],
            tools=request["tools"] or None,
            chat_template=request["template"],
            return_assistant_tokens_mask=True,
            **request["variables"],
        )
    encoding = tokenizer.encode(text, add_special_tokens=False)
    marked = [False] * len(encoding.ids)
    for first, end in spans:
        start, last = encoding.char_to_token(first), encoding.char_to_token(end - 1)  # pyright: ignore[reportOperatorIssue] - the mask was asked for
        if start is None:
            break
        stop = last + 1 if last else len(marked)
        marked[start:stop] = [True] * (stop - start)
    return [encoding.ids, marked]


def _look(request: dict[str, Any], step: Step) -> list[Any]:
    """Line and words of what is wrong with a template, if anything; and the names that it reads."""
    from jinja2 import TemplateSyntaxError, meta
    from transformers.utils.chat_template_utils import (
        _compile_jinja_template,  # pyright: ignore[reportPrivateUsage] - the environment that it is rendered in
    )

    try:
        with _time_limit(request["seconds"]):
            environment = _compile_jinja_template(request["template"]).environment
            names = meta.find_undeclared_variables(environment.parse(request["template"]))
    except TemplateSyntaxError as error:
        return [error.lineno, " ".join(well_formed(str(error.message)).split())[:500], []]
    except _TooSlow:
        return [None, f"it takes more than {request['seconds']:g} s to compile", []]
    except Exception as error:  # noqa: BLE001 - whatever compiling raises
        return [None, _words(error), []]
    return [None, None, sorted(names)]

"""OpenAI's API and an engine: requests become prompts and sampling parameters, completions become answers.

Of OpenAI's fields and vLLM's additional ones some are honoured; those that would change what is generated and are not
honoured are refused by name, and all others are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
from blake3 import blake3
from pydantic import ValidationError

from rollout_core.config import SamplingParams
from rollout_core.data.samples import Completion
from rollout_core.data.text import decode_completions, text_tokens
from rollout_core.inference.backend import Request
from rollout_core.models.bounded.tokenizing import Chat
from rollout_core.store.codec import ordered_json, read_json

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
UNLIMITED_TOKENS = 4096
"""Of a completion, where neither request nor backend knows a limit."""
DEFAULT_TOKENS = 16
"""Of a completion that is no chat's and of which nobody says a length: OpenAI's default, and vLLM's."""
MOST_CHOICES = 256
NO_ROOM = "context_length_exceeded"
"""Code of the error where a prompt leaves no room for its completion."""
RULED = (
    "temperature",
    "top_p",
    "top_k",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Fields that are the server's where it has sampling parameters."""
_TAKEN = (*RULED, "min_tokens", "stop_token_ids")
_REFUSED = {
    "audio",
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "echo",
    "function_call",
    "functions",
    "guided_whitespace_pattern",
    "include_stop_str_in_output",
    "length_penalty",
    "logit_bias",
    "logits_processors",
    "media_io_kwargs",
    "min_p",
    "mm_processor_kwargs",
    "modalities",
    "moderation",
    "prediction",
    "prompt_embeds",
    "prompt_logprobs",
    "reasoning_effort",
    "repetition_detection",
    "suffix",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "truncation_side",
    "use_beam_search",
    "verbosity",
    "vllm_xargs",
    "watermarking",
    "web_search_options",
}
"""They would change what is generated."""
_HARMLESS = {"best_of": (1,), "length_penalty": (1,), "modalities": (["text"],), "verbosity": ("medium",)}
"""Values of refused fields that change nothing, in addition to empty ones."""
_ONLY_TRUE = {
    "add_generation_prompt": "the chat template always begins the assistant's turn",
    "skip_special_tokens": "texts have no special tokens; return_token_ids gives them",
    "spaces_between_special_tokens": "texts have no special tokens",
}
"""Fields whose default, true, is all that there is."""
_CONSTRAINTS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_CONSTRAINT_FIELDS = {"json_schema": "definition", "regex": "pattern", "choice": "choices", "grammar": "grammar"}
_TOOL_CALL, _TOOL_CALL_END = "<tool_call>", "</tool_call>"
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_THOUGHT_OR_CALL = re.compile(f"{_THOUGHT}|{_TOOL_CALL}")


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form. ``param`` names the field that is to blame."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> bytes:
        """The error as JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


@dataclass(frozen=True)
class BareText:
    """A text that is tokenised without the special tokens which the tokenizer puts around one."""

    text: str


Prompt = Chat | str | BareText | Sequence[int]


@dataclass(frozen=True)
class Ask:
    """What a request asks for."""

    is_chat: bool
    prompts: Sequence[Prompt]
    params: SamplingParams
    """But for ``max_tokens``, which depends on the prompt."""
    max_tokens: int | None
    count: int
    """Completions of each prompt."""
    seed: int | None
    wants_logprobs: bool
    wants_ids: bool
    has_tools: bool
    max_calls: int | None
    """Tool calls of an answer; None: any number."""
    is_stream: bool
    wants_usage: bool
    """At the end of a stream."""
    ruled: Sequence[str] = ()
    """Fields that ask for another distribution than the server's."""

    def params_of(self, num_prompt_tokens: int, limit: int | None, most: int | None) -> SamplingParams:
        """Sampling parameters for a prompt of so many tokens, where prompt and completion have at most ``limit``, and
        completions ``most`` tokens. Raises ApiError where it is too long."""
        room = UNLIMITED_TOKENS if limit is None else limit - num_prompt_tokens
        if limit is not None and room < 1:
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, your prompt contains "
                f"{num_prompt_tokens} input tokens, which leaves no room for output tokens. Please reduce the length "
                "of the input prompt.",
                "messages" if self.is_chat else "prompt",
                NO_ROOM,
            )
        asked = self.max_tokens if most is None or self.max_tokens is None else min(self.max_tokens, most)
        if asked is not None and limit is not None and asked > room:
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested {asked} output tokens "
                f"and your prompt contains {num_prompt_tokens} input tokens, for a total of "
                f"{asked + num_prompt_tokens} tokens. Please reduce the length of the input prompt or the number of "
                "requested output tokens.",
                "max_tokens",
                NO_ROOM,
            )
        # A default is cut to what fits: the last turns of a long conversation have less room.
        max_tokens = asked or min(room, most or (room if self.is_chat else DEFAULT_TOKENS))
        if self.params.min_tokens > max_tokens:
            raise ApiError(400, f"min_tokens is {self.params.min_tokens}, and max_tokens {max_tokens}", "min_tokens")
        return self.params.model_copy(update={"max_tokens": max_tokens})


# What is asked


def read_ask(body: Mapping[str, Any], *, is_chat: bool, sampling: SamplingParams | None, vocab_size: int) -> Ask:
    """What a request's JSON asks for; ``sampling`` rules what `RULED` names and adds its stops. Raises ApiError."""
    for name in sorted(_REFUSED & body.keys()):
        if body[name] and body[name] not in _HARMLESS.get(name, ()):
            raise ApiError(400, f"{name} is not supported by this server; leave it out", name, "unsupported_parameter")
    for name, reason in _ONLY_TRUE.items():
        if body.get(name) not in (None, True):
            raise ApiError(400, f"{name} can only be true here: {reason}", name, "unsupported_parameter")
    tools, special_tokens = _tools(body) if is_chat else [], _special_tokens(body, is_chat)
    max_tokens = body.get("max_completion_tokens") if is_chat else None
    if max_tokens is None:
        max_tokens = body.get("max_tokens")
    wanted, logprobs = _logprobs(body, is_chat)
    stream_options = body.get("stream_options") or {}
    if max_tokens is not None:
        max_tokens = _integer("max_tokens", max_tokens, least=1)
    params, ruled = _params(body, sampling, logprobs, max_tokens)
    if tools and params.structured is not None:
        of = "of the server's sampling parameters" if _structured(body) is None else "that is asked for"
        raise ApiError(
            400,
            f"the model could call none of the tools: its whole answer would have the form {of} "
            f"({params.structured.kind}). Leave the form out of requests with tools, and ask for the answer in that "
            "form by a request of its own, with tool_choice 'none'",
            "response_format",
            "unsupported_parameter",
        )
    return Ask(
        is_chat=is_chat,
        prompts=[_chat(body, tools)] if is_chat else _prompts(body.get("prompt"), vocab_size, special_tokens),
        params=params,
        max_tokens=max_tokens,
        count=_integer("n", body.get("n") or 1, least=1, most=MOST_CHOICES),
        seed=None if body.get("seed") is None else _integer("seed", body["seed"]),
        wants_logprobs=wanted,
        wants_ids=body.get("return_token_ids") is True,
        has_tools=bool(tools),
        max_calls=None if _flag(body, "parallel_tool_calls", True) else 1,
        is_stream=body.get("stream") is True,
        wants_usage=isinstance(stream_options, dict) and stream_options.get("include_usage") is True,
        ruled=ruled,
    )


def _special_tokens(body: Mapping[str, Any], is_chat: bool) -> bool:
    """Whether the tokenizer puts its special tokens around texts; a chat template writes them itself."""
    asked = _flag(body, "add_special_tokens", not is_chat)
    if is_chat and asked:
        message = "add_special_tokens: the chat template writes them, and none are added; leave it out"
        raise ApiError(400, message, "add_special_tokens", "unsupported_parameter")
    return asked


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} is {value!r:.100}; expected true or false", name)
    return value


def _integer(name: str, value: Any, *, least: int | None = None, most: int | None = None) -> int:
    if type(value) is not int or (least is not None and value < least) or (most is not None and value > most):
        bounds = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"
        raise ApiError(400, f"{name} is {value!r:.100}; expected an integer{bounds}", name)
    return value


def _logprobs(body: Mapping[str, Any], is_chat: bool) -> tuple[bool, int]:
    """Whether log-probabilities are wanted, and of how many of the likeliest tokens."""
    asked = body.get("logprobs")
    if is_chat:
        count = _integer("top_logprobs", body.get("top_logprobs") or 0, least=0, most=20)
        if count and not asked:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        return bool(asked), count
    if asked is None or asked is False:
        return False, 0
    return True, _integer("logprobs", int(asked) if asked is True else asked, least=0, most=20)


def _params(
    body: Mapping[str, Any], sampling: SamplingParams | None, logprobs: int, max_tokens: int | None
) -> tuple[SamplingParams, list[str]]:
    given = {name: body[name] for name in _TAKEN if body.get(name) is not None}
    if given.get("top_k") == 0:
        given["top_k"] = -1  # both switch it off
    stop = body.get("stop") or ()
    given["stop"] = (stop,) if isinstance(stop, str) else stop
    given |= {"logprobs": logprobs, "structured": _structured(body), "max_tokens": max_tokens or 2**31}
    try:
        params = SamplingParams.model_validate(given)
    except ValidationError as error:
        [first, *_] = error.errors()
        name = str(first["loc"][0]) if first["loc"] else None
        raise ApiError(400, f"{name or 'the request'}: {first['msg']}", name) from None
    if sampling is None:
        return params, []
    own = {name: getattr(sampling, name) for name in RULED}
    ruled = [name for name in given if name in own and getattr(params, name) != own[name]]
    stops = {
        "stop": tuple(dict.fromkeys((*params.stop, *sampling.stop))),
        "stop_token_ids": tuple(sorted({*params.stop_token_ids, *sampling.stop_token_ids})),
        "min_tokens": max(params.min_tokens, sampling.min_tokens),
        "structured": params.structured or sampling.structured,
    }
    return params.model_copy(update=own | stops), ruled


def _structured(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The form that the answer must have, as `SamplingParams` has it."""
    wanted = body.get("response_format")
    given = body.get("structured_outputs") or {}
    if not isinstance(given, dict):
        raise ApiError(400, f"structured_outputs is {given!r:.100}; expected an object", "structured_outputs")
    for name in sorted(given.keys() - _CONSTRAINTS.keys() - {"json_object"}):
        if given[name]:
            message = f"structured_outputs.{name} is not supported by this server; leave it out"
            raise ApiError(400, message, f"structured_outputs.{name}", "unsupported_parameter")
    constraints = {kind: given[kind] for kind in _CONSTRAINTS if given.get(kind)}
    if given.get("json_object"):
        if "json" in constraints:
            raise ApiError(400, "structured_outputs: give json or json_object, not both", "structured_outputs")
        constraints["json"] = {"type": "object"}
    constraints |= {kind: body[f"guided_{kind}"] for kind in _CONSTRAINTS if body.get(f"guided_{kind}")}
    if isinstance(wanted, dict) and wanted.get("type") != "text":
        schema = wanted.get("json_schema")
        if wanted.get("type") == "json_object":
            constraints["json"] = {"type": "object"}
        elif wanted.get("type") == "json_schema" and isinstance(schema, dict) and schema.get("schema"):
            constraints["json"] = schema["schema"]
        else:
            raise ApiError(400, "response_format: expected type text, json_object or json_schema", "response_format")
    if len(constraints) > 1:
        raise ApiError(400, f"the answer can have one form, not {' and '.join(constraints)}", "response_format")
    for kind, value in constraints.items():
        name = _CONSTRAINTS[kind]
        return {"kind": name, _CONSTRAINT_FIELDS[name]: value}
    return None


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tools that the model is shown."""
    choice, tools = body.get("tool_choice"), body.get("tools") or []
    if choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice: only 'none' and 'auto' are supported", "tool_choice", "unsupported_parameter")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ApiError(400, "tools: expected a list of objects", "tools")
    return [] if choice == "none" else tools


def _chat(body: Mapping[str, Any], tools: Sequence[dict[str, Any]]) -> Chat:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: expected a list of at least one message", "messages")
    return Chat([_message(message, place) for place, message in enumerate(messages)], True, tools)


def _message(message: Any, place: int) -> dict[str, Any]:
    """A message as chat templates expect it: content as text, arguments of tool calls as objects."""
    where = f"messages[{place}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where}: expected an object with a role", "messages")
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        found = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [text for text in found if isinstance(text, str)]
        if len(texts) < len(found):
            raise ApiError(400, f"{where}: only parts of type text are supported", "messages")
        content = "".join(texts)
    if content is not None and not isinstance(content, str):
        raise ApiError(400, f"{where}: content is neither text nor a list of parts", "messages")
    calls = message.get("tool_calls")
    message["content"] = content if calls else content or ""
    if calls:
        message["tool_calls"] = [_called(call, where) for call in (calls if isinstance(calls, list) else [calls])]
    else:
        message.pop("tool_calls", None)
    return message


def _called(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ApiError(400, f"{where}: a tool call has no function", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Templates write arguments as JSON themselves; a text would be quoted once more.
        with suppress(ValueError):
            arguments = read_json((arguments or "{}").encode())
    return {**call, "function": {**function, "arguments": arguments}}


def _prompts(prompt: Any, vocab_size: int, special_tokens: bool) -> Sequence[Prompt]:
    prompts: Sequence[Any] = (
        prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    )
    for one in prompts:
        if isinstance(one, list) and one:
            if all(type(token) is int and 0 <= token < vocab_size for token in one):
                continue
            raise ApiError(400, f"prompt: token ids are integers from 0 to {vocab_size - 1}", "prompt")
        if not isinstance(one, str) or not one:
            raise ApiError(400, "prompt: expected text, a list of token ids, or a list of one kind of these", "prompt")
    return [BareText(one) if isinstance(one, str) and not special_tokens else one for one in prompts]


# What is answered


@dataclass(frozen=True)
class Answered:
    """One completion with the request that it answers."""

    request: Request
    completion: Completion


@dataclass
class Writer:
    """Writes answers with one tokenizer's tokens.

    Args:
        parses_tools: whether tool calls in Hermes' form are read from texts.
    """

    tokenizer: Any
    name: str
    parses_tools: bool
    _names: dict[int, tuple[str, list[int]]] = field(default_factory=dict)

    def answer(self, ask: Ask, answered: Sequence[Answered], response_id: str, created: int) -> dict[str, Any]:
        """The whole answer; completions of one prompt stand together."""
        num_prompt = sum(len(one.request.prompt_token_ids) for one in answered[:: ask.count])
        num_tokens = sum(len(one.completion.token_ids) for one in answered)
        answer: dict[str, Any] = {
            "id": response_id,
            "object": "chat.completion" if ask.is_chat else "text_completion",
            "created": created,
            "model": self.name,
            "choices": [self._choice(ask, one, index) for index, one in enumerate(answered)],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt + num_tokens,
            },
        }
        if ask.wants_ids and ask.is_chat:
            answer["prompt_token_ids"] = list(answered[0].request.prompt_token_ids)
        return answer

    def _choice(self, ask: Ask, answered: Answered, index: int) -> dict[str, Any]:
        completion = answered.completion
        choice: dict[str, Any] = {"index": index, "finish_reason": completion.finish_reason, "stop_reason": None}
        if ask.is_chat:
            message = self.message(answered, has_tools=ask.has_tools, max_calls=ask.max_calls)
            choice["message"] = message
            choice["logprobs"] = {"content": self._entries(completion)} if ask.wants_logprobs else None
            if "tool_calls" in message and completion.finish_reason == "stop":
                choice["finish_reason"] = "tool_calls"
        else:
            choice["text"] = completion.text
            choice["logprobs"] = self._columns(completion) if ask.wants_logprobs else None
            if ask.wants_ids:
                choice["prompt_token_ids"] = list(answered.request.prompt_token_ids)
        if ask.wants_ids:
            choice["token_ids"] = list(completion.token_ids)
        return choice

    def message(self, answered: Answered, *, has_tools: bool, max_calls: int | None = None) -> dict[str, Any]:
        """The assistant's message, with the calls of tools that are read from its text where it ``has_tools``."""
        text = answered.completion.text
        if not (self.parses_tools and has_tools):
            return {"role": "assistant", "content": text}
        request = answered.request
        opened = (request.prompt_text or "").rstrip().endswith(_THOUGHT)
        content, calls = hermes_calls(self._text_with_markers(answered), in_thought=opened)
        if not calls:
            return {"role": "assistant", "content": text}
        for marker in (_THOUGHT, _THOUGHT_END):
            content = content if marker in text else content.replace(marker, "")
        origin = blake3(orjson.dumps([list(request.prompt_token_ids), request.seed]))
        listed = []
        for place, (name, arguments) in enumerate(calls[:max_calls]):
            digest = blake3(origin.digest() + place.to_bytes(4, "big")).hexdigest()
            function = {"name": name, "arguments": arguments}
            listed.append({"id": f"call_{digest[:24]}", "type": "function", "function": function})
        return {"role": "assistant", "content": content or None, "tool_calls": listed}

    def _text_with_markers(self, answered: Answered) -> str:
        """The completion's text, with the markers of tool calls and thoughts where they are special tokens, which
        texts leave out."""
        completion, request = answered.completion, answered.request
        markers = {
            token: marker
            for marker in (_TOOL_CALL, _TOOL_CALL_END, _THOUGHT, _THOUGHT_END)
            if (token := self.tokenizer.convert_tokens_to_ids(marker)) in self.tokenizer.all_special_ids
            and self.tokenizer.convert_ids_to_tokens(token) == marker
        }
        if not markers.keys() & set(completion.token_ids):
            return completion.text
        ids, texts, begin = list(text_tokens(completion.token_ids, request.params, request.ends)), [], 0
        for place in [*(place for place, token in enumerate(ids) if token in markers), len(ids)]:
            before = [*request.prompt_token_ids, *ids[:begin]]
            texts += decode_completions(self.tokenizer, [before], [ids[begin:place]])
            texts += [markers[token] for token in ids[place : place + 1]]
            begin = place + 1
        text = "".join(texts)
        ends = [place for stop in request.params.stop if (place := text.find(stop)) >= 0]
        return text[: min(ends, default=len(text))]

    def _entries(self, completion: Completion) -> list[dict[str, Any]]:
        top = completion.top_logprobs or [()] * len(completion.token_ids)
        return [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(*likely) for likely in likeliest]}
            for token, logprob, likeliest in zip(completion.token_ids, completion.logprobs, top, strict=True)
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._name(token)
        return {"token": text, "logprob": logprob, "bytes": data}

    def _columns(self, completion: Completion) -> dict[str, Any]:
        tokens = [self._name(token)[0] for token in completion.token_ids]
        offsets, length = [], 0
        for token in tokens:
            offsets.append(length)
            length += len(token)
        top = completion.top_logprobs or [()] * len(tokens)
        likeliest = [
            {self._name(other)[0]: logprob for other, logprob in [*likely, (drawn, own)]}
            for likely, drawn, own in zip(top, completion.token_ids, completion.logprobs, strict=True)
        ]
        logprobs = list(completion.logprobs)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likeliest, "text_offset": offsets}

    def _name(self, token: int) -> tuple[str, list[int]]:
        """A token's text and its bytes."""
        found = self._names.get(token)
        if found is None:
            text = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
            found = self._names[token] = (text, list(text.encode("utf-8", "replace")))
        return found


def hermes_calls(text: str, *, in_thought: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """What stands around the tool calls in a text, and name and arguments (as JSON) of each. What is no whole call
    stays text, and so does one inside a thought; ``in_thought``: the text begins inside of one."""
    parts, calls, place = [], [], 0
    if in_thought:
        place = _behind(text, _THOUGHT_END, 0)
        parts.append(text[:place])
    while found := _THOUGHT_OR_CALL.search(text, place):
        parts.append(text[place : found.start()])
        if found[0] == _THOUGHT:
            call, place = None, _behind(text, _THOUGHT_END, found.end())
        else:
            call, place = _hermes_call(text, found.end())
        if call is None:
            parts.append(text[found.start() : place])
        else:
            calls.append(call)
    parts.append(text[place:])
    return "".join(parts).strip() if calls else text, calls


def _behind(text: str, marker: str, place: int) -> int:
    """Where the text continues behind the next marker; its end where there is none."""
    found = text.find(marker, place)
    return len(text) if found < 0 else found + len(marker)


def _hermes_call(text: str, place: int) -> tuple[tuple[str, str] | None, int]:
    """The call whose JSON begins here, if it is one, and where the text continues. The last one may lack its end."""
    none = None, _behind(text, _TOOL_CALL_END, place)
    try:
        # Not up to the next marker, which may stand in an argument.
        _, end = _DECODER.raw_decode(text, _behind_blanks(text, place))
        found = read_json(text[place:end].encode())
    except (ValueError, RecursionError):
        return none
    end = _behind_blanks(text, end)
    if (end < len(text) and not text.startswith(_TOOL_CALL_END, end)) or not isinstance(found, dict):
        return none
    call = _name_and_arguments(found)
    return (call, _behind(text, _TOOL_CALL_END, end)) if call is not None else none


def _behind_blanks(text: str, place: int) -> int:
    found = _BLANKS.match(text, place)
    return place if found is None else found.end()


_BLANKS = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def _name_and_arguments(found: Mapping[str, Any]) -> tuple[str, str] | None:
    """Of a call as models write it: Llama's have ``parameters``, some have the arguments' JSON as a text."""
    given = [found[name] for name in ("arguments", "parameters") if name in found]
    if not isinstance(found.get("name"), str) or len(given) > 1:
        return None
    [arguments] = given or [{}]
    if isinstance(arguments, str):
        try:
            return (found["name"], arguments) if isinstance(read_json(arguments.encode()), dict) else None
        except ValueError:
            return None
    return (found["name"], ordered_json(arguments).decode()) if isinstance(arguments, dict) else None


def stream_of(answer: dict[str, Any], *, with_usage: bool) -> Iterator[bytes]:
    """The events of an answer as a stream."""
    head = {name: answer[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if answer["object"] == "chat.completion" else answer["object"]
    prompt = {"prompt_token_ids": answer["prompt_token_ids"]} if "prompt_token_ids" in answer else {}

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if with_usage else {}
        return b"data: " + orjson.dumps(head | {"choices": choices} | usage | more) + b"\n\n"

    for choice in answer["choices"]:
        index, message, end = choice["index"], choice.pop("message", None), choice.pop("finish_reason")
        if message is None:
            yield event([choice | {"finish_reason": end}])
            continue
        delta = {"role": "assistant", "content": ""}
        yield event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], **prompt)
        prompt = {}
        delta = {"content": message["content"]} if message["content"] else {}
        if "tool_calls" in message:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
        yield event([choice | {"delta": delta, "finish_reason": None}])
        yield event([{"index": index, "delta": {}, "logprobs": None, "finish_reason": end}])
    if with_usage:
        yield event([], usage=answer["usage"])
    yield b"data: [DONE]\n\n"

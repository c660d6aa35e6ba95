"""What an OpenAI-compatible endpoint is asked, and what its answers mean.

Nothing in an answer is believed that cannot be so. An answer that is malformed, or contradicts itself or the request,
is an error of one sample: what another program says must neither enter a data set unchecked nor end a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.config import JsonSchemaOutput, OpenAIBackend
from rollout_core.data.continuations import moved_spaces
from rollout_core.data.samples import Completion, Failure, FinishReason, Outcome, TopLogprobs
from rollout_core.data.text import decode_as_streamed, decode_completions, text_tokens
from rollout_core.inference.backend import (
    LOGPROB_NOISE,
    Request,
    problem_with,
    problem_with_text,
    scored_completion,
    vllm_constraint,
)
from rollout_core.inference.endpoint import Malformed, counted_tokens
from rollout_core.models.messages import openai_messages

_IMPOSSIBLE = -9999.0
"""vLLM's server writes this for minus infinity."""
_SUM_NOISE = 0.01
"""Probabilities may add to so much more than 1: rounding their logarithms to bfloat16 does less."""
_TOKEN_ID = "token_id:"
_JSON_KINDS = {
    type(None): "null",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}
_REST_BYTES = 2**20
"""Room for what an answer holds in addition to its tokens, such as usage and the prompt's own text."""
_TOKEN_BYTES = 1024
"""Room for a token: its text, its id, its log-probability, and the same once more as a list of bytes."""


def path_of(config: OpenAIBackend) -> str:
    """Where requests are posted, below the endpoint's url."""
    return "/chat/completions" if config.api == "chat" else "/completions"


def body_of(config: OpenAIBackend, served: str, tokenizer: Any, request: Request) -> dict[str, Any]:
    """The JSON body of a request. Every value that a server could have another default for is given."""
    params = request.params
    if request.continuation:
        return _scoring_body(config, served, tokenizer, request)
    body: dict[str, Any] = {
        "model": served,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        **_prompt(config, tokenizer, request),
    }
    if params.temperature > 0:
        body["seed"] = request.seed
    if params.stop:
        body["stop"] = list(params.stop)
    if config.dialect == "vllm":
        return body | _vllm_fields(config, tokenizer, request)
    if isinstance(params.structured, JsonSchemaOutput):
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "completion", "schema": json.loads(params.structured.definition), "strict": True},
        }
    return body


def _prompt(config: OpenAIBackend, tokenizer: Any, request: Request) -> dict[str, Any]:
    if config.api == "chat":
        tools = {"tools": list(request.tools)} if request.tools else {}
        return {"messages": openai_messages(request.messages) or _one_user(request.prompt_text), **tools}
    if config.dialect == "vllm":
        return {"prompt": list(request.prompt_token_ids)}
    return {"prompt": request.prompt_text or tokenizer.decode(list(request.prompt_token_ids))}


def _scoring_body(config: OpenAIBackend, served: str, tokenizer: Any, request: Request) -> dict[str, Any]:
    """The prompt with its continuation, to be repeated with log-probabilities; no server takes 0 tokens to draw of all
    that repeat."""
    body = {"model": served, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}
    if config.dialect == "vllm":
        named = {"return_tokens_as_token_ids": True}
        return {**body, **named, "prompt": list(request.prompt_token_ids)}
    prompt, continuation = _scored_text(tokenizer, request)
    return {**body, "prompt": prompt + continuation}


def _scored_text(tokenizer: Any, request: Request) -> tuple[str, str]:
    """The prompt and its continuation, as they are tokenised at an endpoint."""
    prompt = request.prompt_text
    if not prompt and request.scored:  # a conversation
        prompt = tokenizer.decode(list(request.prompt_token_ids[: -request.scored]))
    return moved_spaces(prompt, request.continuation)


def _one_user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _vllm_fields(config: OpenAIBackend, tokenizer: Any, request: Request) -> dict[str, Any]:
    params = request.params
    ends = [] if params.ignore_eos else [tokenizer.eos_token_id, *request.ends]
    fields: dict[str, Any] = {
        "top_k": max(params.top_k, 0),
        "min_p": 0.0,
        "repetition_penalty": params.repetition_penalty,
        "min_tokens": params.min_tokens,
        "ignore_eos": params.ignore_eos,
        "stop_token_ids": [*ends, *params.stop_token_ids],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if config.api == "chat":
        # One more than asked for: a chat's list is that long with the token drawn in it, likely or not.
        fields |= {"logprobs": True, "top_logprobs": params.logprobs and params.logprobs + 1}
    else:
        fields["logprobs"] = params.logprobs
    if params.structured is not None:
        fields["structured_outputs"] = vllm_constraint(params.structured)
    return fields


class NoPromptLogprobs(Exception):
    """The answer does not repeat the prompt with log-probabilities."""


class OtherDialect(Exception):
    """The answer lacks what every answer in the configured dialect has."""


def longest_answer(request: Request) -> int:
    """Bytes that no honest answer to ``request`` exceeds."""
    params = request.params
    tokens = params.max_tokens * (2 + params.logprobs) + len(request.prompt_token_ids)
    if request.continuation:  # each token of the prompt comes with the likeliest one; a token has a byte or more
        tokens = 3 * max(len(request.prompt_token_ids), len((request.prompt_text + request.continuation).encode()))
    return _REST_BYTES + tokens * _TOKEN_BYTES


def outcome_of(
    config: OpenAIBackend, tokenizer: Any, request: Request, answer: Mapping[str, Any], vocab_size: int
) -> Outcome:
    """The outcome of a whole answer. It may take a second to compute: not for an event loop. Without a tokenizer it has
    a text alone.

    Raises Malformed where the answer is none, OtherDialect where the endpoint does not speak the configured dialect,
    NoPromptLogprobs where it cannot score a continuation.
    """
    choice = _only_choice(answer)
    if request.continuation:
        return _scored(config, tokenizer, request, choice)
    reason = _text(choice.get("finish_reason"), "finish_reason")
    if reason not in ("stop", "length"):
        # An abort is the server's doing and may go away; a filter will answer the same again.
        return Failure(request.key, f"the endpoint ended it with {reason!r}", passing=reason in ("abort", "error"))
    if config.dialect == "vllm" and (choice.get("token_ids") is None or choice.get("logprobs") is None):
        raise OtherDialect
    num_tokens = _completion_length(config, answer, choice)
    if num_tokens is not None and num_tokens > request.params.max_tokens:
        raise Malformed(f"{num_tokens} tokens, but sampling.max_tokens is {request.params.max_tokens}")
    if reason == "length" and num_tokens is not None and num_tokens < request.params.max_tokens:
        # Servers shorten what would not fit into their context, without a word.
        return Failure(
            request.key,
            f"the endpoint cut it after {num_tokens} tokens, before sampling.max_tokens {request.params.max_tokens}: "
            "prompt and completion exceed its context; shorten the prompt or lower sampling.max_tokens",
        )
    text = _content(config, choice)
    if text is None and _object(choice.get("message"), "message").get("refusal"):
        return Failure(request.key, "the model refuses to answer it")
    if tokenizer is None:
        _refuse(problem_with_text(text or "", request.params))
        return Completion(request.key, (), (), text or "", reason)
    if config.dialect == "openai":
        return _retokenised(tokenizer, request, text or "", reason, vocab_size)
    return _sampled(config, tokenizer, request, choice, text, vocab_size)


def _scored(config: OpenAIBackend, tokenizer: Any, request: Request, choice: Mapping[str, Any]) -> Completion:
    """The log-probabilities of the continuation's tokens among those of all that was sent, and one that was drawn."""
    if choice.get("logprobs") is None:
        raise NoPromptLogprobs
    found = _object(choice["logprobs"], "logprobs")
    names = _names(_list(found.get("tokens"), "logprobs.tokens"))
    logprobs = _list(found.get("token_logprobs"), "token_logprobs")
    tops = _list(found.get("top_logprobs"), "top_logprobs")
    if not len(names) == len(logprobs) == len(tops):
        raise Malformed(f"{len(names)} tokens, log-probabilities of {len(logprobs)}, likeliest ones of {len(tops)}")
    if config.dialect == "vllm":
        end = len(request.prompt_token_ids)
        if names[:end] != [f"{_TOKEN_ID}{token}" for token in request.prompt_token_ids]:
            raise NoPromptLogprobs
        places = range(end - request.scored, end)
    else:
        offsets = _list(found.get("text_offset"), "text_offset")
        places = _places_behind(_scored_text(tokenizer, request), offsets, names)
    scored = _numbers(logprobs[place] for place in places)
    if not scored or max(scored) > LOGPROB_NOISE:
        raise Malformed("no log-probability of the continuation" if not scored else "a log-probability above 0")
    likeliest = [max(_numbers(_object(tops[place], "top_logprobs").values()), default=0.0) for place in places]
    return scored_completion(
        request, scored, greedy=all(own >= most for own, most in zip(scored, likeliest, strict=True))
    )


def _places_behind(texts: tuple[str, str], offsets: Sequence[Any], names: Sequence[str]) -> list[int]:
    """Places of the tokens that write the second text, which begins within the first of them.

    Offsets of servers such as vLLM's are sums of the tokens' lengths: special tokens and spaces that tokenizers put
    before the text count, so places are counted from the end, where the drawn token follows. Raises NoPromptLogprobs
    where the tokens found do not write that text.
    """
    if not names or len(offsets) != len(names) or any(type(offset) is not int for offset in offsets):
        raise NoPromptLogprobs
    text, begin = "".join(texts), len(texts[0])
    behind = offsets[-1] + len(names[-1])
    # Some servers do not return a drawn token that ends the text.
    before = (behind if "".join(names) == text else offsets[-1]) - len(text)
    starts = [offset - before for offset in offsets]
    ends = [*starts[1:], behind - before]
    # An empty first token is a special one. Others of no width begin a character of several tokens.
    found = [
        place
        for place in range(0 if names[0] else 1, len(names))
        if ends[place] > begin or starts[place] == begin
        if starts[place] < len(text)
    ]
    if before < 0 or not found or starts[found[0]] > begin:
        raise NoPromptLogprobs
    if not all(_writes(names[place], text[max(0, starts[place]) : ends[place]], starts[place]) for place in found):
        raise NoPromptLogprobs
    return found


def _writes(name: str, text: str, start: int) -> bool:
    """Whether a token that starts at ``start`` of a text has this part of it. A tokenizer's own space may precede the
    text, and OpenAI's API names bytes of a character by their numbers."""
    if start == -1 and name.startswith(" "):
        return name[1:] == text
    return name == text or (name.startswith("bytes:") and len(text) <= 1)


def _retokenised(tokenizer: Any, request: Request, text: str, reason: FinishReason, vocab_size: int) -> Completion:
    """A completion of which the answer gives the text alone."""
    _refuse(problem_with_text(text, request.params))
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    _refuse(problem_with(token_ids, [], request.params, vocab_size))
    return Completion(request.key, token_ids, [], text, reason)


def _sampled(
    config: OpenAIBackend,
    tokenizer: Any,
    request: Request,
    choice: Mapping[str, Any],
    text: str | None,
    vocab_size: int,
) -> Completion:
    """A completion with tokens and log-probabilities, as a vLLM server gives it."""
    params, token_ids = request.params, _token_ids(choice["token_ids"])
    found = _object(choice["logprobs"], "logprobs")
    read = _chat_logprobs if config.api == "chat" else _logprobs
    names, logprobs, tops = read(found, likely=params.logprobs > 0)
    if not token_ids or not logprobs:
        raise Malformed(f"{len(token_ids)} tokens, and log-probabilities of {len(logprobs)}")
    _refuse(problem_with(token_ids, logprobs, params, vocab_size))
    if min(logprobs) <= _IMPOSSIBLE:
        raise Malformed("a token was drawn that has no probability")
    _check_names(names, token_ids)
    drawn = list(zip(token_ids, logprobs, strict=True))
    likely = _likeliest(tops, drawn, params.logprobs, vocab_size) if params.logprobs else []
    text = _text_of(tokenizer, request, text_tokens(token_ids, params, request.ends), text)
    reason = choice["finish_reason"]
    return Completion(request.key, token_ids, [min(logprob, 0.0) for logprob in logprobs], text, reason, likely)


def _text_of(tokenizer: Any, request: Request, token_ids: Sequence[int], text: str | None) -> str:
    """The same decoding as for every other backend; with stop strings it ends where the server says."""
    [whole] = decode_completions(tokenizer, [request.prompt_token_ids], [token_ids])
    if not request.params.stop:
        return whole
    if text is None:
        raise Malformed("the text is null")
    # Decoding token by token is slow, and its result differs only where bytes make no character.
    if _begins(whole, text) or _begins(decode_as_streamed(tokenizer, request.prompt_token_ids, token_ids), text):
        return text
    raise Malformed("the text is not that of its tokens")


def _begins(whole: str, text: str) -> bool:
    """Whether a text is cut from a whole. Decoded behind another prompt, such as a chat's, a first space may differ."""
    return any(one.startswith(text) for one in (whole, f" {whole}", whole.removeprefix(" ")))


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise Malformed(problem)


def _only_choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = _list(answer.get("choices"), "choices")
    if len(choices) != 1:
        raise Malformed(f"{len(choices)} choices, but one was asked for")
    choice = _object(choices[0], "a choice")
    if (index := choice.get("index", 0)) != 0 or isinstance(index, bool):
        raise Malformed("the only choice has an index other than 0")
    return choice


def _content(config: OpenAIBackend, choice: Mapping[str, Any]) -> str | None:
    """The text of a choice; null where a chat has none."""
    if config.api == "chat":
        content = _object(choice.get("message"), "message").get("content")
        return None if content is None else _text(content, "content")
    return _text(choice.get("text"), "text")


def _completion_length(config: OpenAIBackend, answer: Mapping[str, Any], choice: Mapping[str, Any]) -> int | None:
    """Length of the completion, if the answer has it."""
    if config.dialect == "vllm":
        return len(_list(choice["token_ids"], "token_ids"))
    usage = answer.get("usage")
    length = None if usage is None else _object(usage, "usage").get("completion_tokens")
    if length is not None and (type(length) is not int or length < 0):
        raise Malformed("usage.completion_tokens is no number of tokens")
    return length


def usage_of(request: Request, answer: Mapping[str, Any], completion: Completion) -> tuple[int, int]:
    """Tokens of prompt and completion as the endpoint counts them, which may be more than come back; where it counts
    none, our own."""
    prompt, given = counted_tokens(answer, "openai")
    return (
        len(request.prompt_token_ids) if prompt is None else prompt,
        len(completion.token_ids) if given is None else given,
    )


def _token_ids(value: Any) -> list[int]:
    token_ids = _list(value, "token_ids")
    for token in token_ids:
        if type(token) is not int:  # a truth value is an int, too
            raise Malformed(f"a token id is {_kind(token)}" + (" but not a whole one" if type(token) is float else ""))
    return token_ids


def _logprobs(found: Mapping[str, Any], *, likely: bool) -> tuple[list[str], list[float], list[Any]]:
    """Names of the tokens, where there are any; their log-probabilities; and the likeliest tokens of each place."""
    names = _names(_list(found.get("tokens") or [], "logprobs.tokens"))
    top = _list(found.get("top_logprobs"), "top_logprobs") if likely else []
    entries = [list(_object(item, "an item of top_logprobs").items()) for item in top]
    return names, _numbers(_list(found.get("token_logprobs"), "token_logprobs")), entries


def _chat_logprobs(found: Mapping[str, Any], *, likely: bool) -> tuple[list[str], list[float], list[Any]]:
    content = _list(found.get("content") or [], "logprobs.content")
    items = [_object(item, "an item of logprobs.content") for item in content]
    names = _names(item.get("token") for item in items)
    logprobs = _numbers(item.get("logprob") for item in items)
    tops = [_list(item.get("top_logprobs"), "top_logprobs") if likely else [] for item in items]
    return names, logprobs, [[_entry(item) for item in top] for top in tops]


def _entry(value: Any) -> tuple[Any, Any]:
    entry = _object(value, "a likely token")
    return entry.get("token"), entry.get("logprob")


def _names(values: Iterable[Any]) -> list[str]:
    return [_text(name, "the name of a token") for name in values]


def _check_names(names: Sequence[str], token_ids: Sequence[int]) -> None:
    """The names are those of these tokens, unless the server writes the texts of all of them, or none."""
    if names and len(names) != len(token_ids):
        raise Malformed(f"{len(token_ids)} tokens, but names of {len(names)}")
    are_ids = any(name.startswith(_TOKEN_ID) for name in names)
    if are_ids and names != [f"{_TOKEN_ID}{token}" for token in token_ids]:
        raise Malformed("the log-probabilities are those of other tokens than token_ids")


def _numbers(values: Iterable[Any]) -> list[float]:
    logprobs = list(values)
    for logprob in logprobs:
        if type(logprob) is not float and type(logprob) is not int:
            raise Malformed(f"a log-probability is {_kind(logprob)}")
    return [float(logprob) for logprob in logprobs]


def _likeliest(
    tops: Sequence[Any], drawn: Sequence[tuple[int, float]], count: int, vocab_size: int
) -> list[TopLogprobs]:
    """The ``count`` likeliest tokens of each place, most likely first.

    The server puts the token drawn before them, one more where it is not among them.
    """
    if len(tops) != len(drawn):
        raise Malformed(f"top_logprobs of {len(tops)} tokens, but there are {len(drawn)}")
    likely: list[TopLogprobs] = []
    for entries, (token, logprob) in zip(tops, drawn, strict=True):
        found = _by_token(entries, vocab_size)
        _check_place(found, token, logprob)
        possible = [(other, min(p, 0.0)) for other, p in found.items() if p > _IMPOSSIBLE]
        likely.append(sorted(possible, key=lambda entry: (-entry[1], entry[0]))[:count])
    return likely


def _check_place(found: Mapping[int, float], token: int, logprob: float) -> None:
    """Log-probabilities of a place are of one distribution, and that is the one that the token was drawn from."""
    if max(found.values(), default=_IMPOSSIBLE) <= _IMPOSSIBLE:
        raise Malformed("top_logprobs names no token that could be drawn")
    if max(found.values()) > LOGPROB_NOISE:
        raise Malformed(f"a log-probability of {max(found.values()):g}, above 0")
    if abs(found.get(token, logprob) - logprob) > LOGPROB_NOISE:
        raise Malformed(f"token {token} has a log-probability of {logprob:g}, and {found[token]:g} in top_logprobs")
    total = sum(math.exp(p) for p in {**found, token: logprob}.values())
    if total > 1 + _SUM_NOISE:
        raise Malformed(f"top_logprobs of tokens whose probabilities add to {total:.3g}")


def _by_token(entries: Sequence[tuple[Any, Any]], vocab_size: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for name, logprob in entries:
        token = _id_named(_text(name, "a likely token"), vocab_size)
        if token in found:
            raise Malformed(f"top_logprobs names token {token} twice")
        [found[token]] = _numbers([logprob])
    return found


def _id_named(name: str, vocab_size: int) -> int:
    number = name.removeprefix(_TOKEN_ID)
    # Without the prefix it is a token's text, which may be a number, too.
    is_id = number != name and number.isascii() and number.isdecimal() and len(number) < 12
    if not is_id or int(number) >= vocab_size:
        raise Malformed("top_logprobs names a token that is no id of the model's vocabulary")
    return int(number)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise Malformed(f"{what} is {_kind(value)}, not a list")
    return value


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"{what} is {_kind(value)}, not an object")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{what} is {_kind(value)}, not a text")
    return value


def _kind(value: Any) -> str:
    return _JSON_KINDS.get(type(value), type(value).__name__)


def no_scores(url: str) -> ConfigError:
    """The error for an endpoint that has never scored a continuation."""
    return ConfigError(
        f"{url} answers without log-probabilities of the prompt (echo = true, logprobs = 1), by which choices are "
        "scored, or its tokens do not write the prompt; vllm serve gives them under /v1/completions. Evaluate the "
        "model's own files, or leave the suites of choices out"
    )


def no_vllm(config: OpenAIBackend) -> ConfigError:
    """The error for an endpoint that has never answered in vLLM's dialect."""
    return ConfigError(
        f"{config.url} answers without token ids or log-probabilities, so it is no vLLM server; set "
        "backend.dialect = 'openai', which does without them"
    )

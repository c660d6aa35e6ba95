"""What an OpenAI-compatible endpoint is asked, and what its answers mean."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_core.config import JsonSchemaOutput, OpenAIBackend, SamplingParams
from rollout_core.errors import ConfigError
from rollout_core.inference.base import Completion, Failure, Outcome, Request, TopLogprobs
from rollout_core.inference.structured import vllm_constraint
from rollout_core.inference.text import decode_completions, told_tokens

_IMPOSSIBLE = -9999.0
"""vLLM's server writes this for minus infinity."""
_TOKEN_ID = "token_id:"


def path_of(config: OpenAIBackend) -> str:
    """Where requests are posted, below the endpoint's url."""
    return "/chat/completions" if config.api == "chat" else "/completions"


def body_of(config: OpenAIBackend, served: str, tokenizer: Any, request: Request) -> dict[str, Any]:
    """The JSON body of a request. Every value that a server could have another default for is given."""
    params = request.params
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
        return body | _vllm_fields(config, tokenizer, params)
    if isinstance(params.structured, JsonSchemaOutput):
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "completion", "schema": json.loads(params.structured.definition), "strict": True},
        }
    return body


def _prompt(config: OpenAIBackend, tokenizer: Any, request: Request) -> dict[str, Any]:
    if config.api == "chat":
        return {"messages": [dict(message) for message in request.messages] or _one_user(request.prompt_text)}
    if config.dialect == "vllm":
        return {"prompt": list(request.prompt_token_ids)}
    return {"prompt": request.prompt_text or tokenizer.decode(list(request.prompt_token_ids))}


def _one_user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _vllm_fields(config: OpenAIBackend, tokenizer: Any, params: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "top_k": max(params.top_k, 0),
        "min_p": 0.0,
        "repetition_penalty": params.repetition_penalty,
        "min_tokens": params.min_tokens,
        "ignore_eos": params.ignore_eos,
        "stop_token_ids": [*([] if params.ignore_eos else [tokenizer.eos_token_id]), *params.stop_token_ids],
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


def outcome_of(config: OpenAIBackend, tokenizer: Any, request: Request, answer: Mapping[str, Any]) -> Outcome:
    """The outcome that a whole answer tells.

    Raises ConfigError where the endpoint does not speak the configured dialect, LookupError, TypeError or ValueError
    where the answer is none.
    """
    [choice] = answer["choices"]
    text = choice["message"]["content"] if config.api == "chat" else choice["text"]
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        # An aborted request has fallen to something at the server; a filter will answer alike again.
        return Failure(request.key, f"the endpoint ended it with {reason!r}", passing=reason in ("abort", "error"))
    cut_at = _tokens_told(answer, choice)
    if reason == "length" and cut_at is not None and cut_at < request.params.max_tokens:
        # Servers shorten what would not fit into their context, without a word.
        return Failure(
            request.key,
            f"the endpoint cut it after {cut_at} tokens, before sampling.max_tokens {request.params.max_tokens}: "
            "prompt and completion exceed its context; shorten the prompt or lower sampling.max_tokens",
        )
    if config.dialect == "openai":
        text = text or ""
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return Completion(request.key, token_ids, [], text, reason)
    if choice.get("token_ids") is None or choice.get("logprobs") is None:
        raise ConfigError(
            f"{config.url} answers without token ids or log-probabilities, so it is no vLLM server; set "
            "backend.dialect = 'openai', which does without them"
        )
    token_ids = choice["token_ids"]
    logprobs, top = (_chat_logprobs if config.api == "chat" else _logprobs)(choice["logprobs"])
    if len(logprobs) != len(token_ids):
        raise ValueError(f"{len(token_ids)} token ids and {len(logprobs)} log-probabilities")
    if not request.params.stop:
        # The same decoding as for every other backend; with stop strings the server knows where the text ends.
        [text] = decode_completions(tokenizer, [request.prompt_token_ids], [told_tokens(token_ids, request.params)])
    cut = [entries[: request.params.logprobs] for entries in top] if request.params.logprobs else []
    return Completion(request.key, token_ids, logprobs, text, reason, cut)


def _tokens_told(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> int | None:
    """Length of the completion, if the answer tells."""
    if choice.get("token_ids") is not None:
        return len(choice["token_ids"])
    return (answer.get("usage") or {}).get("completion_tokens")


def _logprobs(told: Mapping[str, Any]) -> tuple[list[float], list[TopLogprobs]]:
    top = [_ordered(entries.items()) for entries in told["top_logprobs"]]
    return _finite(told["token_logprobs"]), top


def _chat_logprobs(told: Mapping[str, Any]) -> tuple[list[float], list[TopLogprobs]]:
    content: Sequence[Mapping[str, Any]] = told["content"] or []
    top = [_ordered((entry["token"], entry["logprob"]) for entry in item["top_logprobs"]) for item in content]
    return _finite(item["logprob"] for item in content), top


def _finite(logprobs: Any) -> list[float]:
    return [-math.inf if logprob <= _IMPOSSIBLE else float(logprob) for logprob in logprobs]


def _ordered(entries: Any) -> TopLogprobs:
    """Most likely first; the server puts the token drawn before them, once more where it is not among them."""
    found = {int(token.removeprefix(_TOKEN_ID)): p for token, p in entries if p > _IMPOSSIBLE}
    return sorted(found.items(), key=lambda entry: (-entry[1], entry[0]))

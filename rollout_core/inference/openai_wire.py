"""What an OpenAI-compatible endpoint is asked."""

from __future__ import annotations

import json
from typing import Any

from rollout_core.config import JsonSchemaOutput, OpenAIBackend, SamplingParams
from rollout_core.inference.base import Request
from rollout_core.inference.structured import vllm_constraint


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

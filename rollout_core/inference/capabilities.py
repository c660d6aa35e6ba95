"""What of the sampling parameters each backend can do. The rest is refused before any work, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_core.config import (
    BackendConfig,
    JsonSchemaOutput,
    OpenAIBackend,
    SamplingParams,
    ScriptedBackend,
    TransformersBackend,
    VLLMBackend,
)

_SCRIPTED = SamplingParams.identity_without_default
"""A scripted text is not sampled; the oldest fields say nothing of it either way."""
_NOT_OPENAI = ("top_k", "min_tokens", "stop_token_ids", "ignore_eos", "repetition_penalty", "logprobs")
_MAX_TEMPERATURE = 2.0
_MAX_CHAT_LOGPROBS = 19


def unsupported(params: SamplingParams, backend: BackendConfig) -> Iterator[tuple[str, str]]:
    """Fields of ``params`` that the backend cannot honour, and why."""
    match backend:
        case VLLMBackend():
            yield from _vllm(params)
        case TransformersBackend():
            for name in _given(params, ("structured",)):
                yield name, "backend 'transformers' has no guided decoding; use 'vllm', or 'openai' with a vLLM server"
        case ScriptedBackend():
            for name in _given(params, sorted(_SCRIPTED)):
                yield name, "backend 'scripted' has its text from the configuration; use a backend with a model"
        case OpenAIBackend(dialect="vllm"):
            yield from _vllm(params)
            if backend.api == "chat" and params.logprobs > _MAX_CHAT_LOGPROBS:
                yield "logprobs", f"backend 'openai' with api 'chat' has at most {_MAX_CHAT_LOGPROBS}"
        case OpenAIBackend():
            yield from _openai(params, backend)


def _vllm(params: SamplingParams) -> Iterator[tuple[str, str]]:
    if params.temperature > _MAX_TEMPERATURE:
        yield "temperature", f"vLLM takes at most {_MAX_TEMPERATURE:g}, got {params.temperature:g}"


def _openai(params: SamplingParams, backend: OpenAIBackend) -> Iterator[tuple[str, str]]:
    for name in _given(params, _NOT_OPENAI):
        yield name, "backend 'openai' with dialect 'openai' knows no such field; dialect 'vllm' does, at a vLLM server"
    if params.structured is not None and not (
        backend.api == "chat" and isinstance(params.structured, JsonSchemaOutput)
    ):
        yield (
            "structured",
            "backend 'openai' with dialect 'openai' has guided decoding for kind 'json_schema' with api 'chat' only",
        )
    if len(params.stop) > 4:
        yield "stop", f"backend 'openai' with dialect 'openai' takes at most 4 strings, got {len(params.stop)}"


def _given(params: SamplingParams, names: tuple[str, ...] | list[str]) -> list[str]:
    fields = SamplingParams.model_fields
    return [name for name in names if getattr(params, name) != fields[name].get_default()]

"""Where completions come from.

Each kind says of itself: ``batch_invariant``, whether a request's tokens and logprobs are bitwise the same whatever
else is in its batch; and ``owns_batches``, whether the batches are ours to form, so that a set of requests that is
generated again as a whole gives the same again. Where both are false nothing can be repeated to the last bit, and every
sample is kept as it comes.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rollout_core.base.devices import probe_device
from rollout_core.base.numerics import default_threads, numerics_identity
from rollout_core.config.base import Settings


class VLLMBackend(Settings):
    """vLLM in this process (the engine itself is a child process); device found by an explicit probe."""

    owns_batches: ClassVar[bool] = True

    kind: Literal["vllm"] = "vllm"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """``auto``: the model's own type on a GPU, float32 on a CPU."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion, in tokens; default: the model's own limit."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences generated together. Changes speed only where the engine is batch-invariant: a CPU in float32."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Key/value cache on a CPU, in GiB. Changes speed only."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of the GPU's memory the engine may take. Changes speed only."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine, on whose number last bits of a logprob may depend. Default: one a core, but for one
    core that is left to the rest, or 1 with portable numerics."""
    enable_prefix_caching: bool = False
    """Off by default: a cache hit may change last bits of a logprob."""
    canary_tolerance: float | None = Field(default=None, gt=0)
    """Largest difference, in nats, between engine and trainer logprobs that a weight update may show; default: 2e-3 in
    float32, 5e-2 in half precision."""
    start_timeout_seconds: float = Field(default=900.0, gt=0)
    """Longest time an engine may take to start, loading the model included. Then the run fails."""

    @property
    def concrete_dtype(self) -> str:
        """The dtype on this machine; ``auto`` is left on a GPU only, and means the model's own there."""
        return "float32" if self.dtype == "auto" and probe_device() == "cpu" else self.dtype

    @property
    def fixed_threads(self) -> int | None:
        """CPU threads of the engine; None where vLLM chooses, or computes on a GPU."""
        return (self.num_threads or default_threads()) if probe_device() == "cpu" else None

    @property
    def batch_invariant(self) -> bool:
        """Whether a request's tokens and logprobs are bitwise the same whatever else is in its batch."""
        if probe_device() == "cpu":
            return self.concrete_dtype == "float32" and not self.enable_prefix_caching
        return os.environ.get("VLLM_BATCH_INVARIANT") == "1" and not self.enable_prefix_caching

    def cache_identity(self) -> Any:
        named = {
            "kind": self.kind,
            "device": probe_device(),
            "dtype": self.concrete_dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_prefix_caching": self.enable_prefix_caching,
            **({} if self.fixed_threads is None else {"num_threads": self.fixed_threads}),
            **numerics_identity(),
        }
        if (probe_device(), self.concrete_dtype) == ("cpu", "float32"):
            return named
        return {**named, "max_num_seqs": self.max_num_seqs, "batch_invariant": self.batch_invariant}


class TransformersBackend(Settings):
    """Plain ``transformers`` generation: slow, needs nothing else."""

    batch_invariant: ClassVar[bool] = True
    owns_batches: ClassVar[bool] = True

    kind: Literal["transformers"] = "transformers"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: int | None = Field(default=None, ge=2)
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of generation, whatever the trainer uses: last bits of a logprob depend on their number."""
    start_timeout_seconds: float = Field(default=900.0, gt=0)
    """Longest time an engine may take to start, loading the model included. Then the run fails."""

    def cache_identity(self) -> Any:
        return {
            "kind": self.kind,
            "device": probe_device(),
            "dtype": self.dtype,
            "num_threads": self.num_threads,
            **numerics_identity(),
        }


class ScriptedBackend(Settings):
    """Deterministic answers without a model, for trying out a pipeline."""

    batch_invariant: ClassVar[bool] = True
    owns_batches: ClassVar[bool] = True

    kind: Literal["scripted"] = "scripted"
    text: str = "SCRIPTED:{prompt}"
    """Completion of every prompt; ``{prompt}`` is replaced."""
    delay_seconds: float = Field(default=0.0, ge=0)
    """Pretended time per sample. Changes speed only."""

    def cache_identity(self) -> Any:
        return {"kind": self.kind, "text": self.text}


class OpenAIBackend(Settings):
    """An endpoint with OpenAI's API, such as one of ``vllm serve``. Its answers are taken for those of the configured
    model, whose tokenizer is used; that it serves this model is for its operator to see to."""

    batch_invariant: ClassVar[bool] = False
    owns_batches: ClassVar[bool] = False

    kind: Literal["openai"] = "openai"
    url: str
    """Up to and with the version, such as ``http://127.0.0.1:8000/v1``."""
    served_model: str | None = Field(default=None, min_length=1)
    """Name of the model at the endpoint; default: the only one that it lists. Give it where it may serve another one
    later, whose answers would else pass for this one's."""
    api: Literal["completions", "chat"] = "completions"
    """``completions`` sends the prompt's token ids; ``chat`` the messages (of a plain prompt: one of a user), which the
    endpoint puts through its own chat template."""
    dialect: Literal["vllm", "openai"] = "vllm"
    """``vllm``: token ids and log-probabilities come back as they were sampled, all sampling fields are understood.
    ``openai``: only what OpenAI documents is sent; what comes back is text, token ids are made of it by the model's
    tokenizer, log-probabilities are not kept, so nothing can be trained on it."""
    api_key: str | None = Field(default=None, pattern=r"^[A-Z][A-Z0-9_]*$")
    """NAME of the secret that is the endpoint's key, sent as a bearer token: ``ROLLOUT_SECRET_<NAME>`` in the worker's
    environment, where ``ROLLOUT_SECRETS`` must list it."""
    max_concurrency: int = Field(default=64, ge=1)
    """Requests under way together. Changes speed only."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for an answer. Then the request is tried again."""
    max_retries: int = Field(default=6, ge=0)
    """Further tries after answers 408, 425, 429 and 5xx and lost connections."""
    backoff_seconds: float = Field(default=1.0, gt=0)
    """Wait before the first further try; doubled for each one after, up to a minute, less up to half of it at random.
    Where the endpoint asks for a longer wait (Retry-After), that counts."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion, in tokens; default: the model's own limit."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError where it is no port
        if parts.scheme not in ("http", "https") or not parts.hostname or " " in url:
            raise ValueError("expected an address such as http://127.0.0.1:8000/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("an address is kept and shown, so it holds no key; name a secret as api_key")
        return url.rstrip("/")

    def cache_identity(self) -> Any:
        return {
            "kind": self.kind,
            "url": self.url,
            "served_model": self.served_model,
            "api": self.api,
            "dialect": self.dialect,
        }


EngineConfig = VLLMBackend | TransformersBackend | ScriptedBackend
"""Backends whose weights are ours to replace; training needs one of these."""
BackendConfig = EngineConfig | OpenAIBackend

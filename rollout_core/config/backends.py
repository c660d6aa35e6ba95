"""Where completions come from."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Literal

from pydantic import Field

from rollout_core.config.base import Settings
from rollout_core.devices import probe_device


class VLLMBackend(Settings):
    """vLLM in this process (the engine itself is a child process); device found by an explicit probe."""

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
    enable_prefix_caching: bool = False
    """Off by default: a cache hit may change last bits of a logprob."""
    canary_tolerance: float | None = Field(default=None, gt=0)
    """Largest difference, in nats, between engine and trainer logprobs that a weight update may show; default: 2e-3 in
    float32, 5e-2 in half precision."""

    @property
    def concrete_dtype(self) -> str:
        """The dtype on this machine; ``auto`` is left on a GPU only, and means the model's own there."""
        return "float32" if self.dtype == "auto" and probe_device() == "cpu" else self.dtype

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
        }
        if (probe_device(), self.concrete_dtype) == ("cpu", "float32"):
            return named
        return {**named, "max_num_seqs": self.max_num_seqs}


class TransformersBackend(Settings):
    """Plain ``transformers`` generation: slow, needs nothing else."""

    batch_invariant: ClassVar[bool] = True

    kind: Literal["transformers"] = "transformers"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: int | None = Field(default=None, ge=2)
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of generation, whatever the trainer uses: last bits of a logprob depend on their number."""

    def cache_identity(self) -> Any:
        return {
            "kind": self.kind,
            "device": probe_device(),
            "dtype": self.dtype,
            "num_threads": self.num_threads,
        }


class ScriptedBackend(Settings):
    """Deterministic answers without a model, for trying out a pipeline."""

    batch_invariant: ClassVar[bool] = True

    kind: Literal["scripted"] = "scripted"
    text: str = "SCRIPTED:{prompt}"
    """Completion of every prompt; ``{prompt}`` is replaced."""
    delay_seconds: float = Field(default=0.0, ge=0)
    """Pretended time per sample. Changes speed only."""

    def cache_identity(self) -> Any:
        return {"kind": self.kind, "text": self.text}


BackendConfig = VLLMBackend | TransformersBackend | ScriptedBackend

"""Where completions come from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rollout_core.config.base import Settings


class VLLMBackend(Settings):
    """vLLM in this process (the engine itself is a child process); device found by an explicit probe."""

    kind: Literal["vllm"] = "vllm"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """``auto``: the model's own type on a GPU, float32 on a CPU."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion, in tokens; default: the model's own limit."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences generated together. Changes speed only."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Key/value cache on a CPU, in GiB. Changes speed only."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of the GPU's memory the engine may take. Changes speed only."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    enable_prefix_caching: bool = False
    """Off by default: a cache hit may change last bits of a logprob."""
    canary_tolerance: float = Field(default=2e-3, gt=0)
    """Largest difference, in nats, between engine and trainer logprobs that a weight update may show."""

    def cache_identity(self) -> Any:
        return {"kind": self.kind, "dtype": self.dtype, "tensor_parallel_size": self.tensor_parallel_size}


class TransformersBackend(Settings):
    """Plain ``transformers`` generation: slow, needs nothing else."""

    kind: Literal["transformers"] = "transformers"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: int | None = Field(default=None, ge=2)
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of generation, whatever the trainer uses: last bits of a logprob depend on their number."""

    def cache_identity(self) -> Any:
        return {"kind": self.kind, "dtype": self.dtype, "num_threads": self.num_threads}


class ScriptedBackend(Settings):
    """Deterministic answers without a model, for trying out a pipeline."""

    kind: Literal["scripted"] = "scripted"
    text: str = "SCRIPTED:{prompt}"
    """Completion of every prompt; ``{prompt}`` is replaced."""
    delay_seconds: float = Field(default=0.0, ge=0)
    """Pretended time per sample. Changes speed only."""

    def cache_identity(self) -> Any:
        return {"kind": self.kind, "text": self.text}


BackendConfig = VLLMBackend | TransformersBackend | ScriptedBackend

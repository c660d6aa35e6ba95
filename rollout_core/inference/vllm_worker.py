"""Runs inside vLLM's own processes: the engine's and the worker's."""

from __future__ import annotations

from pathlib import Path

import torch

from rollout_core.base.determinism import check_numerics, hide_wider_instructions, is_portable_here
from rollout_core.base.errors import ConfigError

if is_portable_here():
    # Before vLLM loads the kernels that it was built with for the CPU it finds.
    hide_wider_instructions()

import vllm._custom_ops
import vllm.model_executor.layers.utils as layer_utils
from vllm.v1.executor.multiproc_executor import WorkerProc

worker_main = WorkerProc.worker_main
"""vLLM's own, which the engine's process has its workers run through `rollout_core.inference.engine_process`."""

# On a CPU, linear layers keep pre-packed oneDNN copies of their weights, which a reload in place does not refresh: the
# engine would silently keep using the old weights. Without oneDNN they use the weights themselves.
vllm._custom_ops._supports_onednn = False

KERNELS = "_C_AVX2.abi3.so"
MIN_ROWS = 16
_gemm = layer_utils.cpu_unquantized_gemm


def batch_invariant_gemm(
    layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A linear layer whose rows do not depend on how many there are.

    For a few rows the CPU library takes other kernels, which add up in another order: a sequence that ends alone would
    get other last bits than one that ends among others. So a small batch is filled up with zeros.
    """
    rows = x.numel() // x.shape[-1]
    wanted = _filled(rows)
    if rows == wanted:
        return _gemm(layer, x, weight, bias)
    filled = x.new_zeros(wanted, x.shape[-1])
    filled[:rows] = x.reshape(rows, -1)
    return _gemm(layer, filled, weight, bias)[:rows].reshape(*x.shape[:-1], -1)


def _filled(rows: int) -> int:
    """MKL's portable branch takes four rows at a time and adds up the rest in another order, however many there are."""
    return -(-rows // MIN_ROWS) * MIN_ROWS if is_portable_here() else max(rows, MIN_ROWS)


layer_utils.cpu_unquantized_gemm = batch_invariant_gemm


class InPlaceReload:
    """Marks the worker as safe for `reload_weights`; importing this module, before the model loads, is what matters."""


def prepare_worker() -> None:
    """Before a process computes: portable arithmetic is in force where it was requested. Raises ConfigError if not."""
    if is_portable_here():
        from rollout_core.inference.vllm_attention import attend_in_pieces

        check_kernels()
        attend_in_pieces()


def check_kernels() -> None:
    """Raises ConfigError where this process computes otherwise than portable arithmetic does."""
    check_numerics()
    mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines()}
    own = Path(vllm._custom_ops.__file__).resolve().parent
    loaded = {file.name for file in mapped if file.parent == own and file.name.startswith("_C")}
    if loaded != {KERNELS}:
        raise ConfigError(
            f"portable numerics need vLLM's kernels in {KERNELS}; it has loaded {sorted(loaded) or 'none'}"
        )

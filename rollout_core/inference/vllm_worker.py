"""Runs inside vLLM's own processes: the engine's and the worker's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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

if is_portable_here():
    # oneDNN has kernels of its own for each kind of CPU; MKL's portable branch has one.
    vllm._custom_ops._supports_onednn = False

KERNELS = "_C_AVX2.abi3.so"
MIN_ROWS = 16
_gemm = layer_utils.cpu_unquantized_gemm
_dispatch = layer_utils.dispatch_cpu_unquantized_gemm
_fewest: dict[tuple[torch.Size, torch.dtype], int] = {}


def dispatch_tried_out(layer: Any, remove_weight: bool) -> None:
    """vLLM's choice of kernels for a linear layer on a CPU, and how many rows these take at the least."""
    shape, dtype = layer.weight.shape, layer.weight.dtype
    _dispatch(layer, remove_weight)
    if len(shape) == 2 and not layer.weight.is_meta:
        if (shape, dtype) not in _fewest:
            _fewest[shape, dtype] = fewest_rows(lambda x: _gemm(layer, x, layer.weight), shape[1], dtype)
        layer.fewest_rows = _fewest[shape, dtype]


def fewest_rows(linear: Callable[[torch.Tensor], torch.Tensor], width: int, dtype: torch.dtype) -> int:
    """How many rows ``linear`` has to have, at most `MIN_ROWS`, for the bits of each not to depend on how many there
    are. It takes [R,width]. Tried out on noise: oneDNN takes another kernel for one row of some widths."""
    x = torch.randn(4 * MIN_ROWS, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    many = linear(x)
    for rows in range(MIN_ROWS - 1, 0, -1):
        if not torch.equal(linear(x[:rows]), many[:rows]):
            return rows + 1
    return 1


def batch_invariant_gemm(
    layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A linear layer whose rows do not depend on how many there are.

    For a few rows the CPU library takes other kernels, which add up in another order: a sequence that ends alone would
    get other last bits than one that ends among others. So a small batch is filled up with zeros.
    """
    rows = x.numel() // x.shape[-1]
    wanted = _filled(rows, getattr(layer, "fewest_rows", MIN_ROWS))
    if rows == wanted:
        return _gemm(layer, x, weight, bias)
    filled = x.new_zeros(wanted, x.shape[-1])
    filled[:rows] = x.reshape(rows, -1)
    return _gemm(layer, filled, weight, bias)[:rows].reshape(*x.shape[:-1], -1)


def _filled(rows: int, fewest: int) -> int:
    """MKL's portable branch takes four rows at a time and adds up the rest in another order, however many there are."""
    return -(-rows // MIN_ROWS) * MIN_ROWS if is_portable_here() else max(rows, fewest)


layer_utils.dispatch_cpu_unquantized_gemm = dispatch_tried_out
layer_utils.cpu_unquantized_gemm = batch_invariant_gemm


class InPlaceReload:
    """What the worker does in addition. Importing this module before the model loads is what makes it safe."""

    def reload_in_place(self, folder: str) -> None:
        """Other weights of the same model, from ``folder``.

        On a CPU, linear layers compute with a copy of their weights that is packed for the kernels. vLLM packs anew
        what it reads from files, and so not an output layer that shares the embeddings' weights: it would keep the old
        ones without a word.
        """
        worker: Any = self
        worker.reload_weights(weights_path=folder)
        for layer in worker.model_runner.get_model().modules():
            is_packed = hasattr(layer, "cpu_linear") and not getattr(layer, "_cpu_skip_gemm_dispatch", False)
            if is_packed and layer.weight.ndim == 2 and layer.weight.numel():
                dispatch_tried_out(layer, remove_weight=False)


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

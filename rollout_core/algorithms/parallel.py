"""Training in several processes: which rows a rank takes, what is summed over ranks, where a sharded tensor is whole.

Every rank knows every minibatch of a step, and losses are normalised over the whole step. So ranks split the
minibatches among themselves and *sum* gradients and figures; nothing is averaged, and the sum is that of one process to
rounding. In a process by itself all of this does nothing. Functions that say so are collective: every rank has to call
them, in the same order.

With tensor parallelism the ranks are one data rank: all of them see every row, compute a part of each layer, and have
the same figures and the same gradients of what is whole on each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rollout_core.config import LearnerSettings, ParallelConfig
from rollout_core.models.architecture import SUMMED, cut_layers
from rollout_core.models.deferred import load_deferred, read_deferred
from rollout_core.models.pretrained import load_causal_lm

T = TypeVar("T")
SettingsT = TypeVar("SettingsT", bound=LearnerSettings)
ModuleT = TypeVar("ModuleT", bound=nn.Module)
TensorT = TypeVar("TensorT", bound=Tensor)
BUCKET_BYTES = 2**25
SLICE_NUMBERS = 2**20
_PARTIAL = "_rollout_partial_gradient"
"""Attribute of a whole parameter that works on a rank's part of a row: so its gradient is a part, too."""
_all_see_each_row = False
"""Whether the ranks of the update that is computed now are one data rank."""


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's number among them, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this process writes what all of them made."""
    return rank() == 0


def arrange_ranks(config: ParallelConfig | None) -> None:
    """Say how the ranks share the work of the update that begins, before it deals out any."""
    global _all_see_each_row
    _all_see_each_row = config is not None and config.kind == "tensor"


def data_ranks() -> int:
    """Among how many the rows of a step are shared out."""
    return 1 if _all_see_each_row else world_size()


def data_rank() -> int:
    """Whose share of the rows this process has, from 0."""
    return 0 if _all_see_each_row else rank()


def parts_per_minibatch(minibatch_size: int, gradient_accumulation: int, processes: int) -> int:
    """Into how many equal parts each minibatch is cut, so that the busiest of ``processes`` has the fewest rows."""

    def busiest(parts: int) -> tuple[int, int]:
        rounds = math.ceil(gradient_accumulation * parts / processes)
        return rounds * (minibatch_size // parts), parts

    return min((parts for parts in range(1, minibatch_size + 1) if minibatch_size % parts == 0), key=busiest)


def divided(settings: SettingsT) -> SettingsT:
    """The same rows a step, in minibatches that can be shared evenly."""
    size, count = settings.minibatch_size, settings.gradient_accumulation
    parts = parts_per_minibatch(size, count, data_ranks())
    return settings.model_copy(update={"minibatch_size": size // parts, "gradient_accumulation": count * parts})


def token_microbatches(sizes: Sequence[int], max_tokens: int, processes: int) -> list[list[int]]:
    """Numbers of the items of each microbatch, the longest microbatch first, for items of so many tokens.

    As few as hold at most ``max_tokens`` each, where ``processes`` have equally many and there are items enough; one
    item that is longer is by itself. They are about equally long: items go, the longest first, where the fewest
    tokens are (Graham, *Bounds on Multiprocessing Timing Anomalies*, 1969). So neighbours, which processes compute
    next to each other, are alike.
    """
    order = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    too_long = [size for size in sizes if size > max_tokens]
    count = max(1, len(too_long) + math.ceil((sum(sizes) - sum(too_long)) / max_tokens))
    while True:
        count = math.ceil(count / processes) * processes
        heap = [(0, number) for number in range(min(count, len(sizes)))]
        parts: list[list[int]] = [[] for _ in heap]
        for item in order:
            load, number = heapq.heappop(heap)
            parts[number].append(item)
            heapq.heappush(heap, (load + sizes[item], number))
        if all(load <= max_tokens or len(parts[number]) == 1 for load, number in heap):
            loads = dict((number, load) for load, number in heap)
            longest_first = sorted(range(len(parts)), key=lambda number: (-loads[number], number))
            return [sorted(parts[number]) for number in longest_first]
        count += 1


def split_across_ranks(items: Sequence[T]) -> Iterator[tuple[T, bool]]:
    """This rank's share of ``items``, and whether each counts.

    All ranks get equally many, for sharded weights are gathered by all or none: where a share is short, it ends in an
    item that counts elsewhere already.
    """
    for start in range(0, len(items), data_ranks()):
        place = start + data_rank()
        yield items[min(place, len(items) - 1)], place < len(items)


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum of the data ranks' tensors, in place. Collective."""
    if data_ranks() > 1:
        dist.all_reduce(tensor)
    return tensor


def broadcast_from_rank0(value: float, device: torch.device) -> float:
    """The first rank's value, on all of them. Collective."""
    if world_size() == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(tensor, src=0)
    return float(tensor)


def broadcast_text_from_rank0(text: str, device: torch.device) -> str:
    """The first rank's text, on all of them. Collective."""
    if world_size() == 1:
        return text
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    length = int(broadcast_from_rank0(len(data), device))
    if not is_first():
        data = torch.empty(length, dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    return bytes(data.tolist()).decode()


def all_ranks_equal(value: float, device: torch.device) -> bool:
    """Whether all ranks hold the same value. Collective."""
    if world_size() == 1:
        return True
    bounds = torch.tensor([value, -value], dtype=torch.float64, device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    return float(bounds.sum()) == 0


def differing_replicas(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of those ``tensors`` that every rank has whole and that are not the same on all of them, bit for bit.
    Collective.

    Sums of the bit patterns of a slice are compared, which any one change changes. Two in one slice may cancel each
    other, so weights that drift apart are noticed by some of their many sums, not by each.
    """
    names = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    if world_size() == 1 or not names:
        return []
    # On the host, for Adam's counts of steps may be there while its moments are on a GPU.
    parts = [_sums_of_bits(tensors[name]).cpu() for name in names]
    sums = torch.cat(parts)
    bounds = torch.stack([sums, -sums])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    widths = bounds.sum(0).split([len(part) for part in parts])
    return [name for name, width in zip(names, widths, strict=True) if width.any()]


def _sums_of_bits(tensor: Tensor) -> Tensor:
    """One for each slice: torch makes a copy in int64 of what it sums."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    slices = tensor.detach().view(integers).reshape(-1).split(SLICE_NUMBERS)
    return torch.stack([part.sum(dtype=torch.int64) for part in slices])


def all_ranks(here: bool, device: torch.device) -> bool:
    """Whether ``here`` is true on all ranks. Collective."""
    return not any_rank(not here, device)


def any_rank(here: bool, device: torch.device) -> bool:
    """Whether ``here`` is true on any rank. Collective."""
    count = torch.tensor(int(here), device=device)
    if world_size() > 1:
        dist.all_reduce(count)
    return int(count) > 0


def seed_step(seed: int, step: int) -> None:
    """Dropout of a step follows from seed, step and data rank alone, so a resumed run needs no rank's generator but
    one's.

    A single process keeps the generator it has.
    """
    if world_size() > 1:
        torch.manual_seed(((seed * 1_000_003 + step) * data_ranks() + data_rank()) % 2**63)


def is_sharded(config: ParallelConfig) -> bool:
    """Whether each rank has a part of the weights."""
    return world_size() > 1 and config.kind != "ddp"


def is_gathered(config: ParallelConfig) -> bool:
    """Whether each rank has a part of the weights, and all of a layer's while it computes with them."""
    return world_size() > 1 and config.kind == "fsdp2"


def load_to_train(folder: Path, config: ParallelConfig, device: torch.device) -> Any:
    """The causal language model of a folder on ``device``, deferred where it is to be cut among the ranks."""
    return load_deferred(folder, device) if is_sharded(config) else load_causal_lm(folder).to(device)


def shard(module: ModuleT, settings: LearnerSettings, device: torch.device) -> ModuleT:
    """Cut the weights of ``module`` among the ranks if ``settings`` say so.

    ``module`` must be what is called in training; parameters become DTensors in place, so this comes before the
    optimizer. Of a deferred model a layer is read and cut before the next is, so no rank ever holds it whole. Raises
    ConfigError as `cut_layers` does. Collective.
    """
    if is_gathered(settings.parallel):
        _shard_to_gather(module, settings, device)
    elif is_sharded(settings.parallel):
        _cut_matrices(module, device)
    return module


def _cut_matrices(module: nn.Module, device: torch.device) -> None:
    """Tensor parallelism (Megatron-LM, arXiv:1909.08053, section 3): what comes into a layer is whole on every rank,
    the first matrix of attention and MLP makes a part of its columns there, the second takes these and the parts' sums
    come out. Embeddings, norms and output layer stay whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import PreTrainedModel

    assert data_ranks() == 1, "arrange_ranks comes first, or ranks share out rows that they compute together"
    mesh = init_device_mesh(device.type, (world_size(),))
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    trunks = [part for part in module.modules() if isinstance(part, PreTrainedModel) and part.base_model is part]
    for trunk in trunks:
        for name, how in cut_layers(trunk, world_size()).items():
            layer = trunk.get_submodule(name)
            read_deferred(layer)
            if how == SUMMED:
                for parameter in layer.parameters():
                    setattr(parameter, _PARTIAL, True)
            else:
                parallelize_module(layer, mesh, styles[how](), src_data_rank=None)  # all have read the same
    read_deferred(module)


def _shard_to_gather(module: nn.Module, settings: LearnerSettings, device: torch.device) -> None:
    """ZeRO stage 3 (arXiv:1910.02054): layers that transformers marks are gathered one at a time, what is left with the
    call itself. The shards stay float32; with ``weights = "bfloat16"`` what is gathered of them is in bfloat16, and
    gradients are summed in float32; with ``offload`` they, their gradients and the optimizer's state are in the host's
    memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    mesh = init_device_mesh(device.type, (world_size(),))
    rounds = settings.weights == "bfloat16"
    options: Any = {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32) if rounds else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu") if settings.offload else OffloadPolicy(),
    }
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for part in (*layers, module):
        read_deferred(part)
        # Also the outermost part gives its whole weights up after each call: a pass without gradient, as for a
        # reference or an evaluation, is followed by no backward pass that would do it, and by a change of the shards.
        fully_shard(part, mesh=mesh, reshard_after_forward=True, **options)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other


def on_host(tensors: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
    """Contiguous tensors on the host, whole where they are sharded, on the first rank; nothing elsewhere. Collective.

    With ``copy`` they share no memory with ``tensors``; without, those do that are on the host as they are to be. Names
    of one tensor, such as tied weights, stay names of one tensor.
    """
    made: dict[int, Tensor] = {}
    for number, tensor in {id(tensor): tensor for tensor in tensors.values()}.items():
        plain = whole(tensor)
        if is_first():
            # What is a part of other memory is not written to a file by itself.
            is_part = plain.untyped_storage().nbytes() != plain.nbytes
            made[number] = plain.to("cpu", copy=copy or is_part).contiguous()
    return {name: made[id(tensor)] for name, tensor in tensors.items()} if is_first() else {}


def whole(tensor: Tensor) -> Tensor:
    """The whole of ``tensor``, which may be sharded, without gradient. Collective."""
    plain = tensor.detach()
    return plain.full_tensor() if isinstance(plain, DTensor) else plain


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``, which may be all of it; shares its memory, without gradient."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def laid_out_like(tensor: Tensor, other: Tensor) -> Tensor:
    """This rank's part of the whole ``tensor``, where ``other`` has only a part; all ranks hold the same whole."""
    if not isinstance(other, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(
        tensor.to(other.device, other.dtype), other.device_mesh, other.placements, src_data_rank=None
    )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to the global L2 norm ``max_norm``; the norm before, over all ranks. Collective."""
    parts = replicated_and_sharded(parameters)
    norms: list[Any] = [torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in parts]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for part in parts:
        torch.nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    return float(norm)


def replicated_and_sharded(parameters: Iterable[TensorT]) -> list[list[TensorT]]:
    """``parameters`` that every rank has, and those that each has a part of, as far as there are any: torch's kernels
    for many tensors at once take one kind or the other."""
    parts: list[list[TensorT]] = [[], []]
    for parameter in parameters:
        parts[isinstance(parameter, DTensor)].append(parameter)
    return [part for part in parts if part]


class GradientSum:
    """Sums the gradients of ``parameters`` over all ranks, once a step, while the backward pass still runs
    (arXiv:2006.15704).

    torch's own wrapper averages, renames the module it wraps, and wants every rank to have rows; here gradients are
    summed in place and the model stays the plain module that snapshots know.

    Buckets go out in one fixed order, from the last layer to the first: what is added in which order, and so the last
    bits, do not depend on which gradient was ready first. Sharded parameters are left alone: they are summed by
    whoever sharded them. With tensor parallelism whole parameters have the same gradient on every rank, and only those
    of `SUMMED` layers are summed.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [
            p for p in parameters if not isinstance(p, DTensor) and (data_ranks() > 1 or hasattr(p, _PARTIAL))
        ]
        self._buckets: list[list[nn.Parameter]] | None = None
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._missing: list[int] = []
        self._sent: list[tuple[Tensor, Any]] = []
        self._armed = False
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def before_last_backward(self) -> None:
        """From here on a gradient is final as soon as it is there."""
        self._armed = self._buckets is not None
        if self._buckets is not None:
            self._missing = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Every gradient is that of all ranks. Collective."""
        if not self._parameters:
            return
        self._armed = False
        if self._buckets is None:
            self._make_buckets()
        assert self._buckets is not None
        for bucket in self._buckets[len(self._sent) :]:
            self._send(bucket)
        for bucket, (flat, work) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            for parameter, summed in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                assert parameter.grad is not None, "sent"
                parameter.grad.copy_(summed.view_as(parameter))
        self._sent = []

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._armed or self._buckets is None or parameter not in self._bucket_of:
            return
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] == 0:
            self._send(self._buckets[len(self._sent)])

    def _send(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in bucket])
        self._sent.append((flat, dist.all_reduce(flat, async_op=True)))

    def _make_buckets(self) -> None:
        """After the first step's passes: parameters that no rank has a gradient of are never sent, and keep none."""
        device = self._parameters[0].device
        here = torch.tensor([float(p.grad is not None) for p in self._parameters], device=device)
        dist.all_reduce(here)
        used = here.tolist()
        self._buckets, size = [], BUCKET_BYTES
        last: nn.Parameter | None = None
        for parameter, ranks in reversed(list(zip(self._parameters, used, strict=True))):
            if not ranks:
                continue
            if size >= BUCKET_BYTES or last is None or last.dtype != parameter.dtype:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(parameter)
            self._bucket_of[parameter] = len(self._buckets) - 1
            size += parameter.numel() * parameter.element_size()
            last = parameter


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad

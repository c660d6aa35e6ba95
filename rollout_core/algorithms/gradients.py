"""Gradients added up over ranks while the backward pass still runs, as in arXiv:2006.15704.

torch's own wrapper averages, renames the module it wraps, and wants every rank to have rows; here gradients are summed
in place and the model stays the plain module that snapshots know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollout_core.algorithms.parallel import all_reduce_sum, world_size

BUCKET_BYTES = 2**25


class GradientSum:
    """Sums the gradients of ``parameters`` over all ranks, once a step.

    Buckets go out in one fixed order, from the last layer to the first: what is added in which order, and so the last
    bits, do not depend on which gradient was ready first. Sharded parameters are left alone: they are summed by
    whoever sharded them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if world_size() > 1 and not isinstance(p, DTensor)]
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
        used = all_reduce_sum(here).tolist()
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

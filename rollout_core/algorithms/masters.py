"""Weights that a device computes with, next to the float32 ones that the optimizer changes (master weights,
arXiv:1710.03740, section 3.1), and both of these in the host's memory (arXiv:2101.06840).

A parameter with a master is only computed with. Its gradient goes to the master as soon as a backward pass has it, in
float32, so sums over minibatches and processes are float32 and no gradient stays on the device. After each step the
parameter is the master, rounded. Masters are what training states hold.

Where weights are cut among processes to be gathered FSDP2 does both by itself: the shards are the masters. With tensor
parallelism each part of a matrix has the same part of its master.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollout_core.algorithms.parallel import is_gathered
from rollout_core.algorithms.state import MASTER, master_of
from rollout_core.config import LearnerSettings


def lay_out(model: nn.Module, settings: LearnerSettings) -> None:
    """Give the parameters of ``model`` the dtype and the masters that ``settings`` ask for, in place.

    With ``weights = "bfloat16"`` matrices become bfloat16; vectors, such as norms and biases, stay float32, and so do
    adapters, which are trained as they are. What is trained and rounded has a master, with ``offload`` all that is
    trained, there on the CPU. Comes before the optimizer. What is laid out already stays as it is.
    """
    if is_gathered(settings.parallel):
        return
    rounds = settings.weights == "bfloat16"
    for name, parameter in model.named_parameters():
        if hasattr(parameter, MASTER):
            continue
        is_rounded = rounds and parameter.dim() > 1 and ".lora_" not in name
        master: nn.Parameter | None = None
        if parameter.requires_grad and (is_rounded or settings.offload):
            device = torch.device("cpu") if settings.offload else parameter.device
            master = nn.Parameter(parameter.detach().to(device, torch.float32, copy=True))
        if is_rounded:
            _round(parameter)
        if master is not None:
            setattr(parameter, MASTER, master)
        if master_of(parameter) is not parameter:
            parameter.register_post_accumulate_grad_hook(_hand_over)


def _round(parameter: nn.Parameter) -> None:
    rounded = parameter.detach().to(torch.bfloat16)
    if isinstance(parameter, DTensor):  # whose data is in another tensor than the one that ``data`` would change
        torch.utils.swap_tensors(parameter, nn.Parameter(rounded, requires_grad=parameter.requires_grad))
    else:
        parameter.data = rounded


def _hand_over(parameter: Tensor) -> None:
    """Add a gradient to the master's, and release it."""
    master, gradient = getattr(parameter, MASTER), parameter.grad
    assert gradient is not None, "just accumulated"
    own = gradient.to(master.device, torch.float32)
    master.grad = own if master.grad is None else master.grad.add_(own)
    parameter.grad = None

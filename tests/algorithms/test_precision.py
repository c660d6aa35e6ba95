"""Under autocast: in which precision things are multiplied, and that scoring passes and losses see the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from updates import grpo, ppo, rows_of, update_context

from rollout_core.algorithms.loop import build_accelerator
from rollout_core.algorithms.policy import Policy, PolicyOutput, ValueModel
from rollout_core.algorithms.supervised import RewardModel, load_reward_model
from rollout_core.config import ImportanceCorrection
from rollout_core.data.packing import Document, pack, pack_completions
from rollout_core.models.pretrained import load_causal_lm
from rollout_core.objects.records import Checkpoint

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product")
HIDDEN = 64
DRAWN = [[5, 6, 7], [5, 6, 7], [9, 8]], [[10, 11], [12, 13, 14], [15]]


class Products(TorchDispatchMode):
    """Records name, dtype and shapes of every product of matrices, of a backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(PRODUCTS):
            least = 4 if "attention" in name else 2  # sums over the keys are float32, with one axis less
            matrices = [item for item in args if isinstance(item, Tensor) and item.dim() >= least]
            self.seen += [(name, item.dtype, [tuple(other.shape) for other in matrices]) for item in matrices]
        return func(*args, **(kwargs or {}))

    def outside(self, dtype: torch.dtype) -> list[tuple[str, torch.dtype, list[tuple[int, ...]]]]:
        """Products in another dtype; not those of one row or column, such as the angles of rotary embeddings and
        heads of one output."""
        return [item for item in self.seen if item[1] != dtype and not any(1 in shape[-2:] for shape in item[2])]


@contextmanager
def bfloat16() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def losses(tiny_model: Any) -> dict[str, tuple[torch.nn.Module, Callable[[], Tensor]]]:
    """Modules with float32 weights, and what of them is trained."""

    def logprobs() -> Tensor:
        found = with_values(tokens, temperature=0.7, entropy=True)
        assert isinstance(found, PolicyOutput) and found.values is not None
        return found.logprobs.sum() + found.entropy.sum() + found.values.sum()

    documents = pack([Document(list(range(3, 40))), Document(list(range(5, 20)))])
    tokens = pack_completions(*DRAWN)
    plain = Policy(load_causal_lm(tiny_model))
    with_values = Policy(load_causal_lm(tiny_model), ValueModel(load_causal_lm(tiny_model).base_model))
    reward = RewardModel(load_reward_model(tiny_model, new_head=True))
    weights = torch.full((documents.num_targets,), 0.1)
    return {
        "nll": (plain, lambda: plain(documents, nll_weights=weights).loss),
        "logprobs and values": (with_values, logprobs),
        "scores": (reward, lambda: reward(documents).sum()),
    }


@pytest.mark.parametrize("what", ["nll", "logprobs and values", "scores"])
def test_every_product_of_forward_and_backward_pass_is_in_the_dtype_of_autocast(tiny_model, what):
    """The output layer's too, though the last norm gives float32; sums, and what is trained, are float32."""
    module, loss = losses(tiny_model)[what]
    with Products() as products:
        with bfloat16():
            total = loss()
        total.backward()
    assert products.outside(torch.bfloat16) == []
    assert len(products.seen) > 20 and total.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in module.parameters() if parameter.grad is not None} == {torch.float32}


def test_updates_of_one_process_may_differ_in_precision():
    found = [build_accelerator(precision).mixed_precision for precision in ("bfloat16", "float32", "bfloat16")]
    assert found == ["bf16", "no", "bf16"]


@pytest.mark.parametrize("update", [ppo, grpo])
def test_in_mixed_precision_an_update_starts_at_a_ratio_of_one_and_a_divergence_of_zero(tiny_model, tmp_path, update):
    """Old log-probabilities, values and the reference's are scored as the loss will compute its own: bit for bit."""
    place = update_context(tmp_path)
    checkpoints: list[Checkpoint] = []
    settings = {"precision": "bfloat16", "correction": ImportanceCorrection(), "on_checkpoint": checkpoints.append}
    update(place, tiny_model, **settings)
    rows = [rows_of(checkpoint, place.objects) for checkpoint in checkpoints]
    assert [row["approx_kl"] for row in (rows[0][0], rows[1][0])] == [0.0, 0.0], "in every iteration"
    assert all(row["approx_kl"] > 0 for row in (*rows[0][1:], *rows[1][1:]))
    assert rows[0][0]["objective/kl" if update is ppo else "kl"] == 0.0, "the reference is the policy itself"
    if update is ppo:
        assert rows[1][0]["clip_ratio/value"] == 0.0

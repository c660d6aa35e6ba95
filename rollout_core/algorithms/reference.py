"""Log-probabilities under a reference policy: computed once, kept in the object store by content.

The key names the reference model, the precision and the very tokens, so that epochs, runs and algorithms share what
any of them computed. Documents are taken in chunks, and each chunk is kept as soon as it is done: a run that is killed
here goes on here. How a chunk is batched follows from its tokens alone, so its bits do not depend on whose run it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from rollout_core.algorithms.parallel import all_ranks, all_reduce_sum, is_first, split_across_ranks
from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId, content_id
from rollout_core.data.packing import Document, pack_branches
from rollout_core.objects import ObjectStore

CHUNK_DOCUMENTS = 512
BATCH_TOKENS = 4096


def reference_logprobs(
    objects: ObjectStore,
    reference: ContentId,
    documents: Sequence[Document],
    load: Callable[[], nn.Module],
    *,
    precision: str,
    autocast: Callable[[], AbstractContextManager[None]],
    device: torch.device,
) -> Tensor:
    """[R] float32: summed log-probability (nats) of every branch after its prefix, in order.

    ``load`` gives the policy with content id ``reference``; it is called only where something is not in the store yet.
    Collective. Raises Fatal where a log-probability is not finite.
    """
    policy: nn.Module | None = None
    found: list[float] = []
    for start in range(0, len(documents), CHUNK_DOCUMENTS):
        chunk = documents[start : start + CHUNK_DOCUMENTS]
        tokens = [[document.prefix, *document.branches] for document in chunk]
        ref = f"reference-logprobs/{content_id('reference-logprobs/2', [reference, precision, tokens])}"
        values = _kept(objects, ref)
        if not all_ranks(values is not None, device):
            policy = policy or load()
            with torch.no_grad(), autocast():
                values = _computed(policy, list(_batches(chunk)), device)
            if not all(map(math.isfinite, values)):
                raise Fatal(f"reference model {reference.short} gives log-probabilities that are not finite")
            if is_first():
                objects.set_ref(ref, objects.put_json(values))
        assert values is not None, "kept everywhere, or computed"
        found += values
    return torch.tensor(found, dtype=torch.float32)


def _kept(objects: ObjectStore, ref: str) -> list[float] | None:
    kept = objects.cached_bytes(ref)
    return None if kept is None else json.loads(kept)


def _computed(policy: nn.Module, batches: Sequence[Sequence[Document]], device: torch.device) -> list[float]:
    """Of all batches in order; each is computed by one rank."""
    parts = [torch.zeros(sum(len(document.branches) for document in batch), device=device) for batch in batches]
    for number, counts in split_across_ranks(range(len(batches))):
        sums = _sums(policy, batches[number], device)
        if counts:
            parts[number] = sums
    return all_reduce_sum(torch.cat(parts)).tolist()


def _sums(policy: nn.Module, documents: Sequence[Document], device: torch.device) -> Tensor:
    batch = pack_branches(documents).to(device)
    return batch.row_sums(policy(batch).logprobs).float()


def _batches(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Neighbours of up to BATCH_TOKENS together, at least one document each."""
    batch: list[Document] = []
    tokens = 0
    for document in documents:
        size = len(document.prefix) + sum(map(len, document.branches))
        if batch and tokens + size > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(document)
        tokens += size
    if batch:
        yield batch

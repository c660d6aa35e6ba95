"""Causal attention within packed documents, registered with transformers under the name ``rollout_packed``.

Everything else in a decoder works token by token; only attention has to know where documents begin and end. Each
document is attended to by itself with torch's own fused kernels, never under a dense mask over the whole row: on a GPU
in half precision by one variable-length call (arXiv:2205.14135) over all of them, else by one call for each bucket of
documents of similar length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from rollout_core.base.errors import ConfigError
from rollout_core.data.packing import Document, Layout, pack

PACKED_ATTENTION = "rollout_packed"
PADDING_WORTH_A_CALL = 2**15
"""Pairs of query and key that may be computed in vain to spare a call."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it.

    query, key: [1,H,N,D] and [1,G,N,D] with G dividing H; value: [1,G,N,E]. Returns ([1,N,H,E], None).
    ``layout`` comes from the call of the model. Raises ConfigError for what the kernels cannot do.
    """
    unknown = [name for name in ("softcap", "s_aux", "head_mask", "position_bias") if options.get(name) is not None]
    if unknown or attention_mask is not None:
        raise ConfigError(
            f"packed attention cannot do {unknown or 'a given mask'} of {type(module).__name__}; choose another model"
        )
    groups, dtype = query.shape[1] // key.shape[1], product_dtype(query)
    # [N,H,D], which is how the projections laid them out. Not item[0]: its backward pass would copy into zeros.
    q, k, v = (item.to(dtype).squeeze(0).transpose(0, 1) for item in (query, key, value))
    is_able = q.is_cuda and dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1]
    if is_able and not dropout and not sliding_window:
        return _attend_varlen(q, k, v, layout, scaling, groups)[None], None
    if groups > 1:
        k, v = (item.repeat_interleave(groups, dim=1) for item in (k, v))
    plan = layout.cached(
        ("buckets", q.device, sliding_window), lambda: BucketPlan.of(layout, q.device, window=sliding_window)
    )
    parts = [
        F.scaled_dot_product_attention(
            _batched(q, bucket.queries, bucket.count),
            _batched(k, bucket.keys, bucket.count),
            _batched(v, bucket.keys, bucket.count),
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            scale=scaling,
            dropout_p=dropout,
        )
        .transpose(1, 2)
        .reshape(-1, *v.shape[1:])
        for bucket in plan.buckets
    ]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    if plan.order is not None:
        whole = whole.index_select(0, plan.order)
    return whole[None], None


def _batched(tokens: Tensor, index: Tensor | None, count: int) -> Tensor:
    """[N,H,D] to [count,H,T,D]: chosen tokens, or all of them without a copy."""
    chosen = tokens if index is None else tokens.index_select(0, index)
    return chosen.view(count, -1, *tokens.shape[1:]).transpose(1, 2)


@dataclass(frozen=True)
class _Bucket:
    """Segments of similar length that are attended to in one call."""

    count: int
    queries: Tensor | None
    """[count * T] int64: their tokens, padded at the right; None for all tokens of the batch."""
    keys: Tensor | None
    """[count * (P + T)] int64: the prefix before each, padded at the left, and its own tokens."""
    mask: Tensor | None
    """[count,1,T,P+T] or [T,P+T] bool, True = may attend; None for plain causality."""


@dataclass(frozen=True)
class BucketPlan:
    """Which segments are batched with which, so that little padding is attended to in few calls."""

    buckets: tuple[_Bucket, ...]
    order: Tensor | None
    """[N] int64: where each packed token's output lies among those of all buckets; None if it is in place."""

    @classmethod
    def of(cls, layout: Layout, device: torch.device, *, window: int | None) -> BucketPlan:
        """The plan of a batch. A segment is a prefix by itself, or a branch after its prefix."""
        segments = sorted(_segments(layout), key=lambda item: (item.earlier, item.length, item.start))
        if len({(item.earlier, item.length) for item in segments}) == 1 and not segments[0].earlier:
            length = segments[0].length
            mask = None if window is None or length <= window else _mask([0], 0, length, window, device)[0, 0]
            return cls((_Bucket(len(segments), None, None, mask),), None)
        buckets, order, offset = [], torch.empty(sum(item.length for item in segments), dtype=torch.int64), 0
        for chosen in _similar(segments):
            width, earlier = max(item.length for item in chosen), max(item.earlier for item in chosen)
            queries = torch.stack([_padded(item.start, item.length, width) for item in chosen])
            own_and_earlier = [torch.stack([_padded_left(item, earlier) for item in chosen]), queries]
            plain = not earlier and (window is None or width <= window)
            mask = None if plain else _mask([item.earlier for item in chosen], earlier, width, window, device)
            keys = torch.cat(own_and_earlier, dim=1).flatten().to(device)
            buckets.append(_Bucket(len(chosen), queries.flatten().to(device), keys, mask))
            for number, item in enumerate(chosen):
                first = offset + number * width
                order[item.start : item.start + item.length] = torch.arange(first, first + item.length)
            offset += len(chosen) * width
        return cls(tuple(buckets), order.to(device))


@dataclass(frozen=True)
class _Segment:
    start: int
    length: int
    earlier: int
    """Length of the prefix it continues; 0 for a prefix itself."""
    prefix_start: int


def _segments(layout: Layout) -> Iterator[_Segment]:
    start = 0
    for prefix, branches in layout.documents:
        prefix_start = start
        yield _Segment(start, prefix, 0, start)
        start += prefix
        for length in branches:
            yield _Segment(start, length, prefix, prefix_start)
            start += length


def _similar(segments: Sequence[_Segment]) -> list[list[_Segment]]:
    """Cut sorted segments where padding would cost more than another call."""
    runs: list[list[_Segment]] = []
    for item in segments:
        if runs and bool(item.earlier) == bool(runs[-1][0].earlier):
            longest = max(item.length, *(other.length for other in runs[-1]))
            widest = max(item.earlier, *(other.earlier for other in runs[-1]))
            area = longest * (longest + widest)
            cells = sum(other.length * (other.length + other.earlier) for other in (*runs[-1], item))
            if area * (len(runs[-1]) + 1) <= cells + PADDING_WORTH_A_CALL:
                runs[-1].append(item)
                continue
        runs.append([item])
    return runs


def _padded(start: int, length: int, width: int) -> Tensor:
    """Tokens of a segment and repetitions of its last one, whose outputs nobody reads."""
    return torch.arange(start, start + width).clamp(max=start + length - 1)


def _padded_left(item: _Segment, width: int) -> Tensor:
    return torch.arange(item.earlier - width, item.earlier).clamp(min=0) + item.prefix_start


def _mask(lengths: Sequence[int], earlier: int, width: int, window: int | None, device: torch.device) -> Tensor:
    """[B,1,width,earlier + width] bool: the last ``lengths[b]`` places of the prefix, and the own past."""
    seen = torch.ones(width, earlier + width, dtype=torch.bool, device=device).tril(diagonal=earlier)
    if window is not None:
        seen = seen.triu(diagonal=earlier - window + 1)
    first = earlier - torch.tensor(lengths, device=device)
    return (seen & (torch.arange(earlier + width, device=device) >= first[:, None, None]))[:, None]


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scaling: float | None, groups: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q_ends, k_ends, k_index, longest_q, longest_k = layout.cached(
        ("varlen", q.device), lambda: _varlen_index(layout, q.device)
    )
    if k_index is not None:
        k, v = k[k_index], v[k_index]
    # Queries are aligned with the last keys, and a window of (-1, 0) is causality.
    out = varlen_attn(
        q, k, v, q_ends, k_ends, longest_q, longest_k, scale=scaling, window_size=(-1, 0), enable_gqa=groups > 1
    )
    assert isinstance(out, Tensor)
    return out


def _varlen_index(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """Ends of queries and of keys of every segment, and the keys' places where a branch needs its prefix's too."""
    segments = list(_segments(layout))
    q_lengths = [item.length for item in segments]
    k_lengths = [item.earlier + item.length for item in segments]
    index = None
    if any(item.earlier for item in segments):
        places = [
            place
            for item in segments
            for part in ((item.prefix_start, item.earlier), (item.start, item.length))
            for place in range(part[0], part[0] + part[1])
        ]
        index = torch.tensor(places, device=device)

    def ends(lengths: list[int]) -> Tensor:
        return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)

    return ends(q_lengths), ends(k_lengths), index, max(q_lengths), max(k_lengths)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


@torch.no_grad()
def as_in_training(model: Any) -> torch.autocast:
    """Autocast, which is on where weights are in half precision."""
    halves = {parameter.dtype for parameter in model.parameters()} & {torch.bfloat16, torch.float16}
    return torch.autocast(model.device.type, dtype=next(iter(halves), torch.bfloat16), enabled=bool(halves))


def try_packed(model: Any, **options: Any) -> None:
    """Two tiny documents through ``model``, with autocast where weights are in half precision, as in training; further
    arguments go to its trunk. Raises what that raises."""
    batch = pack([Document([1, 2]), Document([1])]).to(model.device)
    with as_in_training(model):
        model.base_model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            layout=batch.layout,
            **options,
        )


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype for matrix products of ``tensor``: that of autocast where it is on, else its own, as torch has it.

    With float32 weights, much of what passes through a model under autocast is float32: norms and rotary embeddings
    give it whatever they get. So the dtype of a tensor does not say in which dtype a product of it belongs.
    """
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return tensor.dtype

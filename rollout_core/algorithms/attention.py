"""Causal attention within packed documents, registered with transformers under the name ``rollout_packed``.

Everything else in a decoder works token by token; only attention has to know where documents begin and end. Each
document is attended to by itself with torch's own fused kernels, so neither padding nor a dense mask over the whole row
is ever computed: on a CPU by one call for each run of equally long documents, on a GPU in half precision by one
variable-length call (arXiv:2205.14135) over all of them.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from rollout_core.algorithms.packing import Layout
from rollout_core.errors import ConfigError

PACKED_ATTENTION = "rollout_packed"


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

    query: [1,H,N,D]; key, value: [1,G,N,D] with G dividing H. Returns ([1,N,H,D], None).
    ``layout`` comes from the call of the model. Raises ConfigError for what the kernels cannot do.
    """
    unknown = [name for name in ("softcap", "s_aux", "head_mask", "position_bias") if options.get(name) is not None]
    if unknown or attention_mask is not None:
        raise ConfigError(
            f"packed attention cannot do {unknown or 'a given mask'} of {type(module).__name__}; "
            "set packing.enabled = false for this model"
        )
    groups = query.shape[1] // key.shape[1]
    varlen = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and not dropout and not sliding_window
    if varlen:
        return _attend_varlen(query, key, value, layout, scaling, groups), None
    if groups > 1:
        key, value = (item.repeat_interleave(groups, dim=1) for item in (key, value))
    return _attend_by_document(query, key, value, layout, scaling, dropout, sliding_window), None


def _attend_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    # split, because its backward is one concatenation; that of a slice fills a whole row with zeros.
    parts: list[Tensor] = []
    runs = [(document, len(list(same))) for document, same in groupby(layout.documents)]
    lengths = [length for (prefix, branches), count in runs for length in _run_lengths(prefix, branches, count)]
    pieces = list(zip(*(item.split(lengths, dim=2) for item in (query, key, value)), strict=True))
    pieces.reverse()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        earlier, own = k.shape[2] - q.shape[2], q.shape[2]
        mask = None
        if earlier or (window is not None and own > window):
            mask = layout.branch_mask(earlier, own, q.device)
            if window is not None and earlier + own > window:
                mask = mask & mask.new_ones(mask.shape).triu(diagonal=earlier - window + 1)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout
        )
        return out.transpose(1, 2).reshape(1, -1, *out.shape[1::2])

    for (_, branches), count in runs:
        if not branches:
            parts.append(attend(*(_stack(item, count) for item in pieces.pop())))
            continue
        for _ in range(count):
            q, prefix_k, prefix_v = pieces.pop()
            parts.append(attend(q, prefix_k, prefix_v))
            for _ in branches:
                q, k, v = pieces.pop()
                parts.append(attend(q, torch.cat((prefix_k, k), dim=2), torch.cat((prefix_v, v), dim=2)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _run_lengths(prefix: int, branches: tuple[int, ...], count: int) -> list[int]:
    """How a run of ``count`` equal documents is cut: plain ones stay together as one batch."""
    return [prefix * count] if not branches else [prefix, *branches] * count


def _stack(tokens: Tensor, count: int) -> Tensor:
    """[1,H,count*T,D] to [count,H,T,D] without a copy."""
    return tokens.view(tokens.shape[1], count, -1, tokens.shape[3]).transpose(0, 1)


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None, groups: int
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q_ends, k_ends, k_index, longest_q, longest_k = _varlen_index(layout, query.device)
    q, k, v = (item[0].transpose(0, 1) for item in (query, key, value))
    if k_index is not None:
        k, v = k[k_index], v[k_index]
    # Queries are aligned with the last keys, and a window of (-1, 0) is causality.
    out = varlen_attn(
        q,
        k,
        v,
        q_ends,
        k_ends,
        longest_q,
        longest_k,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=groups > 1,
    )
    assert isinstance(out, Tensor)
    return out[None]


def _varlen_index(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """Ends of queries and of keys of every segment, and the keys' places where a branch needs its prefix's too."""
    q_lengths, k_lengths, places, start, branched = [], [], [], 0, False
    for prefix, branches in layout.documents:
        prefix_places = range(start, start + prefix)
        q_lengths.append(prefix)
        k_lengths.append(prefix)
        places.extend(prefix_places)
        start += prefix
        for length in branches:
            branched = True
            q_lengths.append(length)
            k_lengths.append(prefix + length)
            places.extend([*prefix_places, *range(start, start + length)])
            start += length

    def ends(lengths: list[int]) -> Tensor:
        return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)

    index = torch.tensor(places, device=device) if branched else None
    return ends(q_lengths), ends(k_lengths), index, max(q_lengths), max(k_lengths)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)

"""vLLM's attention on a CPU, made the same on every machine.

Its kernel works through queries and keys in tiles that it sizes by the CPU's L2 cache, and other tiles round otherwise.
One piece of a query that fills the registers and no more meets all keys in a single tile, up to a length that even the
smallest cache leaves room for. So longer queries are handed to it in such pieces, as if they were requests.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

ROWS = 8
"""Query heads that the kernel holds in registers; 16 for heads whose size 32 does not divide."""
SMALLEST_CACHE = 256 * 1024
"""L2 cache of the smallest CPUs with AVX2, in bytes; the kernel takes half of it."""
_FLOAT = 4

_build = CPUAttentionMetadataBuilder.build


def longest_context(head_size: int) -> int:
    """Tokens whose keys are a single tile on every machine."""
    rows = ROWS if head_size % 32 == 0 else 2 * ROWS
    room = SMALLEST_CACHE // 2 - rows * head_size * 2 * _FLOAT
    return room // (rows * _FLOAT) // 32 * 32


def attend_in_pieces() -> None:
    """From now on, in this process."""
    CPUAttentionMetadataBuilder.build = build  # pyright: ignore[reportAttributeAccessIssue]


def build(self: CPUAttentionMetadataBuilder, prefix: int, common: Any, *args: Any, **kwargs: Any) -> Any:
    """Metadata of pieces in place of requests."""
    tokens = max(1, ROWS // (self.num_heads // self.num_kv_heads))
    if common.causal is True and common.max_query_len > tokens:
        common = in_pieces(common, tokens)
    return _build(self, prefix, common, *args, **kwargs)


def in_pieces(common: Any, tokens: int) -> Any:
    """The same queries as requests of at most ``tokens`` tokens, each of which ends where the next one begins."""
    starts, lengths = common.query_start_loc, common.query_start_loc.diff()
    counts = (lengths + tokens - 1) // tokens
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
    offsets = ((torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]) * tokens).to(starts.dtype)
    own_lengths = (lengths[owners] - offsets).clamp(max=tokens)
    pieces = copy.copy(common)
    pieces.num_reqs = len(owners)
    pieces.max_query_len = tokens
    pieces.query_start_loc = torch.cat([starts[owners] + offsets, starts[-1:]])
    pieces.seq_lens = common.seq_lens[owners] - lengths[owners] + offsets + own_lengths
    pieces.block_table_tensor = common.block_table_tensor[owners]
    return pieces

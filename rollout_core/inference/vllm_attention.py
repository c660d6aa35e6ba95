"""vLLM's attention on a CPU: made the same on every machine, and where it does not matter which tokens of a sequence
are queries of one step.

Its kernel works through queries and keys in tiles that it sizes by the CPU's L2 cache, and other tiles round otherwise.
One piece of a query that fills the registers and no more meets all keys in a single tile, up to a length that even the
smallest cache leaves room for. So longer queries are handed to it in such pieces, as if they were requests.

Without that, keys are a single tile for any number of queries up to a length that this CPU's cache leaves room for. A
row of queries is computed for itself, in the order of the keys, so up to that length its bits are the same whether the
tokens before it are queries of the same step or were cached.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from rollout_core.base.determinism import is_portable_here
from rollout_core.models.pretrained import read_config, read_object

ROWS = 8
"""Query heads that the kernel holds in registers; 16 for heads whose size 32 does not divide."""
SMALLEST_CACHE = 256 * 1024
"""L2 cache of the smallest CPUs with AVX2, in bytes; the kernel takes half of it."""
_FLOAT = 4
_MOST_PIECES = 128
"""Of queries, in a tile of the kernel."""
PLAIN = ("llama", "qwen2", "qwen3")
"""Types of models whose layers all attend to all keys, each in the one way that is described here."""

_build = CPUAttentionMetadataBuilder.build


def longest_context(head_size: int) -> int:
    """Tokens whose keys are a single tile on every machine."""
    rows = ROWS if head_size % 32 == 0 else 2 * ROWS
    room = SMALLEST_CACHE // 2 - rows * head_size * 2 * _FLOAT
    return room // (rows * _FLOAT) // 32 * 32


def one_tile(head_size: int, cache_bytes: int) -> int:
    """Tokens whose keys are a single tile for any number of queries, on a CPU with an L2 cache of ``cache_bytes``."""
    rows, step = (ROWS, 32) if head_size % 32 == 0 else (2 * ROWS, 16)
    half = cache_bytes // 2
    queries = half // (head_size * 4 * _FLOAT + rows * _FLOAT)
    queries = max(rows, min(queries, _MOST_PIECES * rows) // rows * rows)
    keys = (half - queries * head_size * 2 * _FLOAT) // (rows * _FLOAT + head_size * 2 * _FLOAT)
    return max(0, keys // step * step)


def hits_change_no_bit(folder: Path, max_model_len: int | None) -> bool:
    """Whether float32 completions of the model in ``folder``, computed by one thread, are bitwise the same whatever
    beginning of their prompts is taken from the prefix cache."""
    if read_object(folder / "config.json").get("model_type") not in PLAIN:
        return False
    config = read_config(folder)
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return False
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    longest = min(max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    if is_portable_here():
        return longest <= longest_context(head_size)
    return longest <= one_tile(head_size, torch.cpu.get_capabilities().get("l2_cache_size", 0))


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

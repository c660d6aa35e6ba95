"""Models whose vocabulary is padded."""

from __future__ import annotations

from pathlib import Path

import torch

from rollout_core.models.pretrained import copy_tokenizer, load_causal_lm, load_tokenizer

PADDED_TO = 512


def pad_vocabulary(source: Path, target: Path, *, seed: int) -> None:
    """A copy of a model with `PADDED_TO` outputs, where those beyond its tokenizer's ids have the largest weights."""
    model, known = load_causal_lm(source), len(load_tokenizer(source))
    model.resize_token_embeddings(PADDED_TO, mean_resizing=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[known:] = torch.randn(PADDED_TO - known, layer.weight.shape[1], generator=generator)
    model.save_pretrained(target)
    copy_tokenizer(source, target)

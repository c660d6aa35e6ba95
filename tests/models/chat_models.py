"""A base model for conversations: its EOS ends documents, and its chat template ends turns by a token of their own."""

from __future__ import annotations

from pathlib import Path

import torch

from rollout_core.models.pretrained import load_causal_lm, load_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|im_start|>", "<|im_end|>")


def make_chat_base(source: Path, target: Path, *, template: str | None = CHATML) -> None:
    """A copy of a model with ChatML's marks among its tokens, and ``template``."""
    model, tokenizer = load_causal_lm(source), load_tokenizer(source)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = template
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # new rows are drawn: the model is the same whatever was drawn before
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)

"""What GGUF files and model folders call the same things; used to write files and to read them.

Names and meanings are llama.cpp's, as its ``convert_hf_to_gguf.py`` writes and its loader reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Models that are written: what GGUF calls them, by the configuration's ``model_type``."""
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"{_WORD}*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+|{_WORD}+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Split:
    """How a byte-level BPE tokenizer cuts texts before it merges bytes."""

    expression: str | None = None
    """Of the pieces; None: GPT-2's."""
    digits: bool = False
    """Whether each digit is a piece, before the pieces are cut."""
    nfc: bool = False
    """Whether texts are brought into Unicode's form NFC first."""
    ignore_merges: bool = False
    """Whether a piece that is a token by itself is taken as such, whatever its merges make of it."""

    def steps(self) -> list[dict[str, Any]]:
        """As ``pre_tokenizer`` of a tokenizer.json has them."""
        first: list[dict[str, Any]] = []
        if self.digits:
            first = [{"type": "Digits", "individual_digits": True}]
        if self.expression is not None:
            pattern = {"Regex": self.expression}
            first = [{"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}]
        by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        return [*first, {**by_bytes, "use_regex": self.expression is None}]


SPLITS: Mapping[str, Split] = {
    "gpt-2": Split(),
    "smollm": Split(digits=True),
    "qwen2": Split(QWEN2, nfc=True),
    "deepseek-r1-qwen": Split(QWEN2),
    "llama-bpe": Split(LLAMA3, ignore_merges=True),
    "smaug-bpe": Split(LLAMA3),
    "tekken": Split(TEKKEN, ignore_merges=True),
}
"""By what GGUF calls them (``tokenizer.ggml.pre``)."""
OTHER_NAMES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "dbrx": "smaug-bpe",
    "phi-2": "gpt-2",
}
"""Of the same splits, in files of others."""
BEGIN_WITH_BOS = ("llama-bpe", "tekken")
"""Splits of tokenizers that put BOS before a text where the file says nothing of it."""


def split_name(document: Mapping[str, Any]) -> str | None:
    """What GGUF calls the split of a tokenizer.json; None for one that it has no name for."""
    model, steps = document["model"], document.get("pre_tokenizer") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        return None
    normalizer = document.get("normalizer") or {}
    found = [_plain(step) for step in steps.get("pretokenizers", [steps])]
    for name, split in SPLITS.items():
        same = found == [_plain(step) for step in split.steps()]
        merges = bool(model.get("ignore_merges")) == split.ignore_merges
        if same and merges and normalizer == ({"type": "NFC"} if split.nfc else {}):
            return name
    return None


def _plain(step: Mapping[str, Any]) -> dict[str, Any]:
    """A step with its defaults, without what does not change the pieces."""
    defaults = {"ByteLevel": {"add_prefix_space": True, "use_regex": True}, "Split": {"invert": False}}
    whole = {**defaults.get(str(step.get("type")), {}), **step}
    return {key: value for key, value in whole.items() if key != "trim_offsets"}


def rotated_heads(kind: str, name: str, num_heads: int, num_key_value_heads: int) -> int | None:
    """Into how many heads the rows of a tensor (by its name in a model folder) are cut, whose order differs in GGUF.

    The rotary embedding of ``kind = "llama"`` turns neighbouring rows there, and the two halves of a head in
    Transformers. None: the rows of this tensor have one order.
    """
    heads = {"q_proj": num_heads, "k_proj": num_key_value_heads}
    return heads.get(name.split(".")[-2]) if kind == "llama" and "." in name else None

"""A model folder as one GGUF file, for llama.cpp and what is built on it.

The `gguf` package (llama.cpp's own) knows the names and the format; which settings, tensors and tokenizers mean what
is here, after llama.cpp's ``convert_hf_to_gguf.py``. What would come out as another model is refused. Nothing is
quantized: matrices keep their type, and vectors are float32, which llama.cpp expects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from rollout_core.base.errors import ConfigError
from rollout_core.models.gguf_format import ARCHITECTURES, rotated_heads, split_name
from rollout_core.models.gguf_header import need_gguf
from rollout_core.models.pretrained import read_config

FILE = "model.gguf"
_FILE_TYPES = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}


def write_gguf(folder: Path, file: Path, *, name: str) -> None:
    """Write the model and tokenizer of a Hugging Face folder to ``file``, a tensor at a time; ``name`` is its title.

    Raises ConfigError for a model or tokenizer that GGUF would hold as another, and where the package is missing.
    """
    gguf = need_gguf("--gguf")
    config = read_config(folder)
    _require_plain(config)
    kind = ARCHITECTURES[config.model_type]
    splits = _split_of(folder)
    writer = gguf.GGUFWriter(file, kind)
    names = gguf.get_tensor_name_map(
        next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == kind), config.num_hidden_layers
    )
    _add_settings(writer, config, name)
    _add_tokenizer(writer, folder, splits, config.vocab_size)
    types: set[torch.dtype] = set()
    for tensor_name, tensor in _tensors(folder, config):
        found = names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ConfigError(f"tensor {tensor_name} has no name in GGUF; a {config.model_type} model has none like it")
        data = _as_array(tensor)
        types |= {tensor.dtype} if tensor.ndim > 1 else set()
        raw = gguf.GGMLQuantizationType.BF16 if data.dtype == np.uint8 else None
        writer.add_tensor_info(found, data.shape, data.dtype, data.nbytes, raw_dtype=raw)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[max(types, key=lambda dtype: dtype.itemsize)]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in _tensors(folder, config):
        writer.write_tensor_data(_as_array(tensor))
    writer.close()


def _require_plain(config: Any) -> None:
    """Raises ConfigError for what this file would leave out of a model."""
    if config.model_type not in ARCHITECTURES:
        raise ConfigError(f"--gguf takes models of type {', '.join(ARCHITECTURES)}; this is one of {config.model_type}")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    slides = getattr(config, "use_sliding_window", config.model_type == "mistral") and config.sliding_window is not None
    unknown = {
        f"rope_type {rope!r}": rope != "default",
        "a sliding window": slides,
        f"hidden_act {config.hidden_act!r}": config.hidden_act != "silu",
        "attention_bias": config.model_type != "qwen2" and getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
    }
    if found := [what for what, is_there in unknown.items() if is_there]:
        raise ConfigError(
            f"--gguf does not write models with {', '.join(found)}; llama.cpp's convert_hf_to_gguf.py may"
        )


def _split_of(folder: Path) -> str:
    """How llama.cpp calls the way a tokenizer cuts texts before it merges bytes. Raises ConfigError for other ones."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_bytes()) if path.is_file() else {"model": {}}
    if (found := split_name(document)) is not None:
        return found
    model, steps = document["model"], document.get("pre_tokenizer") or {}
    kinds = [step.get("type") for step in steps.get("pretokenizers", [steps])]
    before = (document.get("normalizer") or {}).get("type")
    raise ConfigError(
        "--gguf takes byte-level BPE tokenizers that cut texts as GPT-2, SmolLM, Qwen 2, Llama 3 or Tekken do; "
        f"{path} has a {model.get('type')} model after {' and '.join(map(str, kinds))}"
        + (f", and brings texts into another form first ({before})" if before else "")
    )


def _add_settings(writer: Any, config: Any, name: str) -> None:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base((config.rope_parameters or {}).get("rope_theta", 10_000.0))
    writer.add_rope_dimension_count(width)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: Any, folder: Path, split: str, size: int) -> None:
    from gguf import SpecialVocab, TokenType

    document = json.loads((folder / "tokenizer.json").read_bytes())
    added = document.get("added_tokens", ())
    largest = max((*document["model"]["vocab"].values(), *(token["id"] for token in added)))
    if largest >= size:
        raise ConfigError(
            f"the tokenizer has token {largest}, and the model rows for {size} tokens only: a GGUF file has "
            "one of each; resize the model's embeddings to its tokenizer"
        )
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [TokenType.UNUSED] * size  # rows of the embedding that no token has
    for token, number in document["model"]["vocab"].items():
        tokens[number], types[number] = token, TokenType.NORMAL
    for token in added:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    words = SpecialVocab(folder, load_merges=True, n_vocab=size)
    # What a file does not say is taken from its split, which is that of another tokenizer.
    words.add_special_token = {"bos": False, "eos": False, **words.add_special_token}
    words.add_to_gguf(writer, quiet=True)


def _tensors(folder: Path, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor with its name, as GGUF orders rows, read one at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue
                yield name, _reordered(name, file.get_tensor(name), config)


def _reordered(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Llama's rotary embedding turns neighbours in GGUF, and halves of a head in Transformers."""
    kind = ARCHITECTURES[config.model_type]
    heads = rotated_heads(kind, name, config.num_attention_heads, config.num_key_value_heads)
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Its bytes; numpy has no bfloat16, so such a matrix is one of bytes."""
    if tensor.ndim == 1:
        return tensor.float().numpy()
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()

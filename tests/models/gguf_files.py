"""GGUF files of tiny models, written as llama.cpp's converter writes them, by the writer of the `gguf` package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFWriter, TokenType
from sentencepiece import SentencePieceProcessor
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SCALED = {"rope_theta": 500_000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = [1.0 + 0.25 * step for step in range(2)], [2.0 + 0.5 * step for step in range(2)]
FAMILIES: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama 3.1": (
        "llama",
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, **SCALED}},
    ),
    "llama, linear": (
        "llama",
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    ),
    "mistral": ("mistral", "llama", {"sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": (
        "qwen2",
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 1_000_000.0,
            }
        },
    ),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 16}),
    "gemma": ("gemma", "gemma", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        "gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi2": ("phi", "phi2", {"num_key_value_heads": 4, "rope_parameters": {"partial_rotary_factor": 0.5}}),
    "phi3": ("phi3", "phi3", {"sliding_window": 8}),
    "phi3, long": (
        "phi3",
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": FACTORS[0],
                "long_factor": FACTORS[1],
                "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 16,
            },
        },
    ),
}
"""By a name for people: model type of Transformers, architecture of GGUF, and configuration."""


def make_model(family: str, **sizes: int) -> Any:
    """A random model. Norms have numbers of few digits, of which 1 + weight loses none."""
    kind, _, settings = FAMILIES[family]
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = AutoConfig.for_model(kind, **{"num_hidden_layers": 2, **SIZES, **HEADS, **special, **settings, **sizes})
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
        if parameter.ndim == 1:
            parameter.data = torch.round(parameter.data * 32) / 256
    return model.eval()


def write_model(
    file: Path,
    family: str,
    model: Any,
    *,
    without: tuple[str, ...] = (),
    settings: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    tokenizer: SentencePieceProcessor | None = None,
    matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    blocks: Mapping[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]] | None = None,
    **options: Any,
) -> None:
    """Write ``model``, without some tensors or with others; ``settings`` are added, those of None left out.
    ``matrices``: what they are quantized to; ``blocks``: of tensors that are written as they are, bytes and kind.
    ``options`` are the writer's."""
    _, architecture, _ = FAMILIES[family]
    writer = GGUFWriter(file, architecture, **options)
    values = _settings(architecture, model.config) | _tokenizer(tokenizer, model.config.vocab_size)
    for name, value in (values | dict(settings or {})).items():
        _add(writer, architecture, name, value)
    for name, array in (_tensors(architecture, model) | dict(tensors or {})).items():
        if name in without:
            continue
        if blocks is not None and name in blocks:
            raw, kind = blocks[name]
            writer.add_tensor(name, raw, raw_dtype=kind)
        elif array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, matrices), raw_dtype=matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: GGUFWriter, architecture: str, name: str, value: Any) -> None:
    whole = name if name.partition(".")[0] in ("tokenizer", "general") else f"{architecture}.{name}"
    if value is None or whole == "general.architecture":
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(whole, value)


def _settings(architecture: str, config: Any) -> dict[str, Any]:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(width * rope.get("partial_rotary_factor", 1.0)),
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "vocab_size": config.vocab_size,
    }
    eps = "attention.layer_norm_epsilon" if architecture == "phi2" else "attention.layer_norm_rms_epsilon"
    found[eps] = getattr(config, "layer_norm_eps", None) or config.rms_norm_eps
    if "gemma" in architecture or architecture in ("llama", "qwen3"):
        found |= {"attention.key_length": width, "attention.value_length": width}
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        known = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / known
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(known))
    return found


def _tokenizer(tokenizer: SentencePieceProcessor | None, size: int) -> dict[str, Any]:
    """SentencePiece's, or one of GGUF's kind ``gpt2`` that knows bytes and no merges but one."""
    named = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 2}
    if tokenizer is not None:
        return named | sentence_piece(tokenizer, size)
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    tokens = ["<unk>", "<s>", "</s>", *letters, letters[ord("a")] + letters[ord("b")]]
    types = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3)
    return named | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{number}]" for number in range(len(tokens), size))],
        "tokenizer.ggml.token_type": [int(t) for t in types] + [int(TokenType.UNUSED)] * (size - len(tokens)),
        "tokenizer.ggml.merges": [f"{letters[ord('a')]} {letters[ord('b')]}"],
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}",
    }


def sentence_piece(tokenizer: SentencePieceProcessor, size: int, own: tuple[str, ...] = ()) -> dict[str, Any]:
    """Settings of a tokenizer with a user's ``own`` tokens, in which spaces are spaces in GGUF."""
    count = tokenizer.vocab_size()
    pieces = [tokenizer.id_to_piece(number) for number in range(count)]
    types = [
        TokenType.UNKNOWN
        if tokenizer.is_unknown(number)
        else TokenType.CONTROL
        if tokenizer.is_control(number)
        else TokenType.BYTE
        if tokenizer.is_byte(number)
        else TokenType.USER_DEFINED
        if pieces[number] in own
        else TokenType.NORMAL
        for number in range(count)
    ]
    tokens = [piece.replace("\u2581", " ") if piece in own else piece for piece in pieces]
    scores = [tokenizer.get_score(number) for number in range(count)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{number}]" for number in range(count, size))],
        "tokenizer.ggml.scores": [*scores, *[-10_000.0] * (size - count)],
        "tokenizer.ggml.token_type": [int(t) for t in types] + [int(TokenType.UNUSED)] * (size - count),
        "tokenizer.ggml.add_bos_token": False,
    }


def _tensors(architecture: str, model: Any) -> dict[str, np.ndarray[Any, Any]]:
    config = model.config
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if architecture == "llama" and heads is not None:
            tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if "gemma" in architecture and name.endswith("norm.weight"):
            tensor = tensor + 1
        found[stored] = tensor.numpy()
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        found["rope_factors_short.weight"] = np.array(rope["short_factor"], np.float32)
        found["rope_factors_long.weight"] = np.array(rope["long_factor"], np.float32)
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _llama3(rope, config.head_dim)
    return found


def _llama3(rope: Mapping[str, Any], width: int) -> np.ndarray[Any, Any]:
    """As the converter has it, frequency by frequency."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    known, factors = rope["original_max_position_embeddings"], []
    for step in range(0, width, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (step / width)
        smooth = (known / length - low) / (high - low)
        inside = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if length < known / high else rope["factor"] if length > known / low else inside)
    return np.array(factors, np.float32)


# Where a block has its scale, the high byte of a float16: as little there as keeps numbers finite. IQ1_M has it in four
# nibbles, the highest of which is here.
_SCALES = {"Q2_K": (81, 83), "Q3_K": (109,), "Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,), "IQ1_M": (55,)}


def random_blocks(shape: tuple[int, int], kind: gguf.GGMLQuantizationType, seed: int) -> np.ndarray[Any, Any]:
    """Bytes of a matrix as llama.cpp's quantizer could have written them; the `gguf` package writes few kinds."""
    of_block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = shape
    raw = np.random.default_rng(seed).integers(0, 256, (rows * columns // of_block, num_bytes), dtype=np.uint8)
    for place in _SCALES.get(kind.name, (1,)):
        raw[:, place] = 0x20 | (raw[:, place] & 0x07)
    return raw.reshape(rows, -1)

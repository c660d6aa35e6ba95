"""A GGUF file as a model folder: configuration, weights and tokenizer, of the same file always the same bytes.

`rollout_core.models.gguf_writing` writes such files. Nothing is guessed: a setting that changes what a model computes
is understood here or refused by name, and so is a tensor. Quantized weights are made numbers by the `gguf` package,
which is llama.cpp's own, some rows at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollout_core.base.errors import ConfigError
from rollout_core.base.watching import current_amount
from rollout_core.models.gguf_format import rotated_heads
from rollout_core.models.gguf_header import GGUFHeader, StoredTensor, can_read, kinds_of, need_gguf, read_header
from rollout_core.models.gguf_settings import REQUIRED, GGUFSettings, shortest
from rollout_core.models.gguf_tokenizer import rebuild_tokenizer, refuse_unread, special_tokens
from rollout_core.models.pretrained import MOST_FILE_BYTES, copy_tokenizer, read_object

WeightType = Literal["bfloat16", "float16", "float32"]
DEFAULT_TYPE: WeightType = "bfloat16"
READ_VERSION = 2
"""Raised when the same file gives another folder."""
_TOGETHER = 1 << 24
"""Numbers that are made at a time, in float32."""
_MOST_LAYERS = 1000
"""Of one layer `gguf` makes hundreds of names, before anything is known of its tensors."""
_TYPE_NAMES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
_ROPE_FREQUENCIES = "rope_freqs.weight"
_ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True)
class ModelFromGGUF:
    """What was read of a file, for people."""

    architecture: str
    """As GGUF calls it."""
    num_parameters: int
    kinds: Mapping[str, int]
    """How many tensors there are of each type."""
    dtype: WeightType
    tokenizer: str
    has_chat_template: bool

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        template = "a chat template" if self.has_chat_template else "no chat template"
        return (
            f"architecture {self.architecture}, {self.num_parameters:,} parameters; tensors: {kinds}, made {self.dtype}"
            f"; tokenizer: {self.tokenizer}, {template}"
        )


@dataclass(frozen=True)
class Family:
    """Models of one architecture."""

    model_type: str
    """Of their configuration in Transformers."""
    model_class: str
    layer: tuple[str, ...]
    """What a layer has, by names of Transformers."""
    configure: Callable[[_Settings], dict[str, Any]]
    """What of the configuration is not every family's."""
    norm: str = "model.norm"
    biases: Callable[[_Settings], tuple[str, ...]] = lambda settings: ()
    """Of these, those with a bias; of the output layer, too."""
    norms_from_one: bool = False
    """Whether norms multiply by 1 + weight, and GGUF holds the sum."""
    fixed_heads: bool = False
    """Whether a head's width follows from the others."""


@dataclass
class _Settings:
    """Those of the architecture, without its name."""

    of: GGUFSettings
    architecture: str
    tensors: Mapping[str, StoredTensor]
    factors: Callable[[str], list[float]]
    """Numbers of a small tensor."""

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        return self.of.number(self.name(key), default)

    def whole(self, key: str, default: Any) -> Any:
        return self.of.whole(self.name(key), default)

    @property
    def heads(self) -> int:
        return self.of.everywhere(self.name("attention.head_count"))

    @property
    def width(self) -> int:
        return self.of.everywhere(self.name("embedding_length"))

    @property
    def num_layers(self) -> int:
        count = self.of.everywhere(self.name("block_count"))
        if count > len(self.tensors):
            self.of.refuse(f"{self.name('block_count')} is {count}, and there are {len(self.tensors)} tensors")
        if count > _MOST_LAYERS:
            self.of.refuse(f"{self.name('block_count')} is {count}; models of at most {_MOST_LAYERS} layers are read")
        return count

    @property
    def head_width(self) -> int:
        width = self.of.everywhere(self.name("attention.key_length"), self.width // self.heads)
        other = self.of.everywhere(self.name("attention.value_length"), width)
        if other != width:
            self.of.refuse(f"its keys have {width} numbers a head and its values {other}; expected as many")
        return width

    @property
    def rotated_width(self) -> int:
        return self.of.everywhere(self.name("rope.dimension_count"), self.head_width)


def read_gguf(
    file: Path, folder: Path, dtype: WeightType = DEFAULT_TYPE, *, tokenizer: Path | None = None
) -> tuple[ModelFromGGUF, Callable[[], None]]:
    """Write the model of a GGUF file (and of the parts next to it) to ``folder``, but for the numbers of its weights,
    whose files have holes in their place; and what writes them.

    ``tokenizer``: the folder of another tokenizer than the file's. Raises ConfigError for whatever is not understood.
    """
    header = read_header(file)
    settings = GGUFSettings(file, header.settings)
    family, own = _family(settings, header)
    config = {**_common(family, own), **family.configure(own)}
    config |= special_tokens(settings).fields()
    names = _names(family, own, header)
    positions = config["max_position_embeddings"]
    if tokenizer is None:
        rebuilt = rebuild_tokenizer(settings, positions)
        refuse_unread(settings, prefix="tokenizer.", what="a tokenizer")
        _write_json(folder / "tokenizer.json", rebuilt.document)
        _write_json(folder / "tokenizer_config.json", rebuilt.settings)
        said, has_template = rebuilt.kind, "chat_template" in rebuilt.settings
    else:
        copy_tokenizer(tokenizer, folder)
        said, has_template = f"of {tokenizer}", _has_template(tokenizer)
    refuse_unread(settings, prefix=f"{own.architecture}.", what="a model")
    _write_json(folder / "config.json", {**config, "dtype": dtype})
    ends = {name: value for name, value in special_tokens(settings).fields().items() if value is not None}
    _write_json(folder / "generation_config.json", ends)
    weights = [_weight(family, own, header.tensors[stored], name) for stored, name in names.items()]
    placed = _make_files(folder, weights, dtype)
    count = sum(math.prod(weight.tensor.shape) for weight in weights)
    found = ModelFromGGUF(
        own.architecture, count, kinds_of(header.tensors.values()), dtype, said, has_chat_template=has_template
    )
    return found, lambda: _write_weights(placed, dtype)


def _has_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    inside = config.is_file() and bool(read_object(config).get("chat_template"))
    return inside or (folder / "chat_template.jinja").is_file()


def _write_json(file: Path, document: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _family(settings: GGUFSettings, header: GGUFHeader) -> tuple[Family, _Settings]:
    if (what := settings.text("general.type", "model")) != "model":
        settings.refuse(f"it holds no model but what GGUF calls {what!r}")
    architecture = settings.text("general.architecture")
    if architecture not in FAMILIES:
        settings.refuse(f"architecture {architecture!r} is not among those that are read: {', '.join(FAMILIES)}")

    def factors(name: str) -> list[float]:
        return [shortest(number) for number in _numbers(header.tensors[name]).ravel()]

    return FAMILIES[architecture], _Settings(settings, architecture, header.tensors, factors)


def _common(family: Family, own: _Settings) -> dict[str, Any]:
    """What every configuration has."""
    if own.tensors.keys().isdisjoint({"token_embd.weight"}):
        own.of.refuse("tensor token_embd.weight is missing")
    num_tokens = own.tensors["token_embd.weight"].shape[0]
    said, listed = own.whole("vocab_size", num_tokens), len(own.of.words("tokenizer.ggml.tokens"))
    if said != num_tokens or listed > num_tokens:
        own.of.refuse(f"it has {listed} tokens, embeddings of {num_tokens}, and says that there are {said}")
    if not own.of.truth(own.name("attention.causal"), True):
        own.of.refuse(f"{own.name('attention.causal')} is false; expected a model that writes from left to right")
    own.of.skip(own.name("rope.scaling.finetuned"))
    if own.of.values.get(own.name("expert_count")) == 0:
        own.of.skip(own.name("expert_count"))
        own.of.skip(own.name("expert_used_count"))
    config: dict[str, Any] = {
        "architectures": [family.model_class],
        "model_type": family.model_type,
        "vocab_size": num_tokens,
        "hidden_size": own.width,
        "intermediate_size": own.of.everywhere(own.name("feed_forward_length")),
        "num_hidden_layers": own.num_layers,
        "num_attention_heads": own.heads,
        "num_key_value_heads": own.of.everywhere(own.name("attention.head_count_kv"), own.heads),
        "max_position_embeddings": own.of.everywhere(own.name("context_length")),
        "tie_word_embeddings": "output.weight" not in own.tensors,
    }
    usual = own.width // own.heads
    if family.fixed_heads and own.head_width != usual:
        own.of.refuse(f"a head has {own.head_width} numbers; in a {family.model_type} it has {usual}")
    if not family.fixed_heads:
        config["head_dim"] = own.head_width
    return config


def _whole_rotation(own: _Settings) -> None:
    if own.rotated_width != own.head_width:
        own.of.refuse(
            f"{own.name('rope.dimension_count')} is {own.rotated_width}; a {own.architecture} turns all "
            f"{own.head_width} numbers of a head"
        )


def _rope(own: _Settings, theta: float = 10_000.0) -> dict[str, Any]:
    """Of models whose positions may be scaled in one of the ways that Transformers has, too."""
    _whole_rotation(own)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": own.number("rope.freq_base", theta)}
    kind = own.of.text(own.name("rope.scaling.type"), "none")
    if _ROPE_FREQUENCIES in own.tensors:
        if kind != "none":
            own.of.refuse(f"it scales positions by tensor {_ROPE_FREQUENCIES} and as {kind!r} does; expected one way")
        return rope | _llama3_scaling(own, rope["rope_theta"])
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        own.of.refuse(f"{own.name('rope.scaling.type')} is {kind!r}; none, linear and yarn are understood")
    rope |= {"rope_type": kind, "factor": own.number("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        known = own.of.everywhere(own.name("rope.scaling.original_context_length"))
        rope["original_max_position_embeddings"] = known
    return rope


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of Llama 3.1, 3.2 and 3.3; files hold what comes of it, a number for each frequency."""


def _llama3_scaling(own: _Settings, theta: float) -> dict[str, Any]:
    found = np.array(own.factors(_ROPE_FREQUENCIES))
    if len(found) != -(-own.head_width // 2):
        own.of.refuse(
            f"tensor {_ROPE_FREQUENCIES} has {len(found)} numbers; expected half of a head's {own.head_width}"
        )
    factor = shortest(float(found.max()))
    low, high, known = (_LLAMA3[key] for key in _LLAMA3)
    with np.errstate(all="ignore"):
        lengths = 2 * math.pi * theta ** (np.arange(0, own.head_width, 2) / own.head_width)
        smooth = (known / lengths - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(lengths < known / high, 1.0, np.where(lengths > known / low, factor, between))
    if not np.allclose(found, expected, rtol=1e-4):
        own.of.refuse(
            f"tensor {_ROPE_FREQUENCIES} scales positions in another way than Llama 3.1 does, which has no name in "
            "Transformers"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama(own: _Settings) -> dict[str, Any]:
    return {
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(own),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in own.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in own.tensors,
    }


def _llama_biases(own: _Settings) -> tuple[str, ...]:
    attention = _ATTENTION if "blk.0.attn_q.bias" in own.tensors else ()
    return (*attention, *(_MLP if "blk.0.ffn_up.bias" in own.tensors else ()))


def _qwen(own: _Settings) -> dict[str, Any]:
    return {
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(own),
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def _qwen3(own: _Settings) -> dict[str, Any]:
    return {**_qwen(own), "attention_bias": "blk.0.attn_q.bias" in own.tensors}


def _gemma(own: _Settings) -> dict[str, Any]:
    return {
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(own),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _attention_scale(own: _Settings, layers_of_27b: int) -> int:
    """Of the 27B models the attention is scaled by the model's width; files do not say so, and llama.cpp counts layers,
    too."""
    return own.width // own.heads if own.num_layers == layers_of_27b else own.head_width


def _kinds_of_layers(own: _Settings, every: int, window: int) -> list[str]:
    """Each ``every``-th layer attends to all that came before, the others to a window of it."""
    every = own.whole("attention.sliding_window_pattern", every)
    if every < 1:
        own.of.refuse(f"{own.name('attention.sliding_window_pattern')} is {every}; expected a number above 0")
    slides = [window > 0 and (layer + 1) % every != 0 for layer in range(own.num_layers)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in slides]


def _gemma2(own: _Settings) -> dict[str, Any]:
    window = own.whole("attention.sliding_window", 4096)
    return {
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(own),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _attention_scale(own, layers_of_27b=46),
        "attn_logit_softcapping": own.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": own.number("final_logit_softcapping", 30.0),
        "sliding_window": window,
        "layer_types": _kinds_of_layers(own, 2, window),
    }


def _gemma3(own: _Settings) -> dict[str, Any]:
    window = own.whole("attention.sliding_window", 0)
    near = own.number("rope.freq_base_swa", 10_000.0)
    return {
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "full_attention": _rope(own, theta=1_000_000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _attention_scale(own, layers_of_27b=62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": own.number("final_logit_softcapping", None),
        "sliding_window": window or 4096,
        "layer_types": _kinds_of_layers(own, 6, window),
    }


def _part_turned(own: _Settings) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": own.number("rope.freq_base", 10_000.0)}
    return {**rope, "partial_rotary_factor": own.rotated_width / own.head_width}


def _phi2(own: _Settings) -> dict[str, Any]:
    return {
        "layer_norm_eps": own.number("attention.layer_norm_epsilon"),
        "rope_parameters": _part_turned(own),
        "hidden_act": "gelu_new",
        "qk_layernorm": False,
    }


def _phi3(own: _Settings) -> dict[str, Any]:
    rope = _part_turned(own)
    known = own.whole("rope.scaling.original_context_length", own.whole("context_length", 0))
    factor = own.number("rope.scaling.attn_factor", None)
    if there := [name for name in _ROPE_FACTORS if name in own.tensors]:
        if len(there) != len(_ROPE_FACTORS):
            own.of.refuse(f"it has tensor {there[0]} alone; expected {' and '.join(_ROPE_FACTORS)}")
        short, long = (own.factors(name) for name in _ROPE_FACTORS)
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope["original_max_position_embeddings"] = known
        rope |= {} if factor is None else {"attention_factor": factor}
    elif factor not in (None, 1.0):
        own.of.refuse(
            f"{own.name('rope.scaling.attn_factor')} is {factor}, and there are no {' and '.join(_ROPE_FACTORS)}"
        )
    return {
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "original_max_position_embeddings": known,
        "hidden_act": "silu",
        "sliding_window": own.whole("attention.sliding_window", 0) or None,
    }


_ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (*_TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_PHI2 = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense", "mlp.fc1", "mlp.fc2")

FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", (*_TWO_NORMS, *_ATTENTION, *_MLP), _llama, biases=_llama_biases),
    "qwen2": Family(
        "qwen2", "Qwen2ForCausalLM", (*_TWO_NORMS, *_ATTENTION, *_MLP), _qwen, biases=lambda own: _ATTENTION[:3]
    ),
    "qwen3": Family(
        "qwen3",
        "Qwen3ForCausalLM",
        (*_TWO_NORMS, *_HEAD_NORMS, *_ATTENTION, *_MLP),
        _qwen3,
        biases=lambda own: _ATTENTION if "blk.0.attn_q.bias" in own.tensors else (),
    ),
    "gemma": Family("gemma", "GemmaForCausalLM", (*_TWO_NORMS, *_ATTENTION, *_MLP), _gemma, norms_from_one=True),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", (*_FOUR_NORMS, *_ATTENTION, *_MLP), _gemma2, norms_from_one=True),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (*_FOUR_NORMS, *_HEAD_NORMS, *_ATTENTION, *_MLP),
        _gemma3,
        norms_from_one=True,
    ),
    "phi2": Family(
        "phi",
        "PhiForCausalLM",
        ("input_layernorm", *_PHI2),
        _phi2,
        norm="model.final_layernorm",
        biases=lambda own: ("input_layernorm", *_PHI2, "model.final_layernorm", "lm_head"),
        fixed_heads=True,
    ),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        (*_TWO_NORMS, "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
        _phi3,
        fixed_heads=True,
    ),
}
"""By what GGUF calls them. A Mistral is a llama there."""


def _names(family: Family, own: _Settings, header: GGUFHeader) -> dict[str, str]:
    """Of each tensor of the file its name in a model folder. Raises ConfigError for one that is missing, or that the
    model has no place for, or whose type of numbers is not known."""
    gguf = need_gguf("reading a GGUF file")
    number = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == own.architecture)
    names = gguf.get_tensor_name_map(number, own.num_layers)
    tied, biases = "output.weight" not in own.tensors, family.biases(own)
    ends = ["model.embed_tokens", family.norm, *([] if tied else ["lm_head"])]
    layers = [(part, f"model.layers.{layer}.{part}") for layer in range(own.num_layers) for part in family.layer]
    expected: dict[str, str] = {}
    for part, name in [*((end, end) for end in ends), *layers]:
        stored = names.get_name(name)
        assert stored is not None, f"gguf knows {name}"
        kinds = ["weight", *(["bias"] if part in biases else [])]
        expected |= {f"{stored}.{kind}": f"{name}.{kind}" for kind in kinds}
    settings = {_ROPE_FREQUENCIES} if own.architecture == "llama" else set()
    settings |= set(_ROPE_FACTORS) if own.architecture == "phi3" else set()
    missing, extra = expected.keys() - own.tensors.keys(), own.tensors.keys() - expected.keys() - settings
    for what, found in (("is missing", missing), (f"is none of a {own.architecture}'s", extra)):
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            own.of.refuse(f"tensor {min(found)} {what}{more}; expected the tensors of {own.num_layers} layers")
    for kind in kinds_of(own.tensors.values()):
        if not can_read(kind):
            example = next(tensor.name for tensor in own.tensors.values() if tensor.kind == kind)
            own.of.refuse(f"tensor {example} is of type {kind}, which the installed gguf makes no numbers of")
    return expected


@dataclass(frozen=True)
class _Weight:
    """A tensor of the folder."""

    name: str
    tensor: StoredTensor
    order: np.ndarray[Any, Any] | None
    """Which row of the file is each row."""
    less: float
    """What is taken from each number."""


def _weight(family: Family, own: _Settings, tensor: StoredTensor, name: str) -> _Weight:
    num_key_values = own.of.everywhere(own.name("attention.head_count_kv"), own.heads)
    heads = rotated_heads(own.architecture, name, own.heads, num_key_values)
    order = None
    if heads is not None:
        rows = tensor.shape[0]
        if rows % (2 * heads):
            own.of.refuse(f"tensor {tensor.name} has {rows} rows, which {heads} heads cannot share")
        order = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).ravel()
    return _Weight(name, tensor, order, 1.0 if family.norms_from_one and name.endswith("norm.weight") else 0.0)


def _make_files(folder: Path, weights: Sequence[_Weight], dtype: WeightType) -> list[tuple[Path, int, _Weight]]:
    """Files of safetensors with holes in place of the numbers; and where each weight belongs."""
    kind, width = _TYPE_NAMES[dtype]
    files: list[list[_Weight]] = [[]]
    size = 0
    for weight in sorted(weights, key=lambda weight: weight.name):
        num_bytes = width * math.prod(weight.tensor.shape)
        if files[-1] and size + num_bytes > MOST_FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(weight)
        size += num_bytes
    placed: list[tuple[Path, int, _Weight]] = []
    names: dict[str, str] = {}
    for number, held in enumerate(files, start=1):
        file = folder / (
            "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        )
        document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for weight in held:
            start, end = end, end + width * math.prod(weight.tensor.shape)
            shape = list(weight.tensor.shape)
            document[weight.name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(document, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(file, "xb") as made:
            made.write(len(text).to_bytes(8, "little") + text)
            made.truncate(8 + len(text) + end)
        for weight in held:
            placed.append((file, 8 + len(text) + document[weight.name]["data_offsets"][0], weight))
            names[weight.name] = file.name
    if len(files) > 1:
        total = width * sum(math.prod(weight.tensor.shape) for weight in weights)
        index = {"metadata": {"total_size": total}, "weight_map": names}
        _write_json(folder / "model.safetensors.index.json", index)
    return placed


def _write_weights(placed: Sequence[tuple[Path, int, _Weight]], dtype: WeightType) -> None:
    amount = current_amount()
    amount.expect(sum(weight.tensor.num_bytes for _, _, weight in placed))
    for file, start, weight in placed:
        with open(file, "r+b") as made:
            made.seek(start)
            for numbers in _read_rows(weight):
                made.write(_as_type(numbers - weight.less if weight.less else numbers, dtype, weight).tobytes())
        amount.add(weight.tensor.num_bytes)


def _read_rows(weight: _Weight) -> Iterator[np.ndarray[Any, Any]]:
    """Its rows in the folder's order as float32, some at a time."""
    tensor = weight.tensor
    if len(tensor.shape) == 1:
        numbers = _numbers(tensor)
        yield numbers if weight.order is None else numbers.ravel()[weight.order]
        return
    rows = tensor.rows()
    step = max(1, _TOGETHER // tensor.shape[-1])
    for first in range(0, len(rows), step):
        chosen = slice(first, first + step)
        yield _dequantized(rows[chosen if weight.order is None else weight.order[chosen]], tensor.kind)


def _numbers(tensor: StoredTensor) -> np.ndarray[Any, Any]:
    return _dequantized(tensor.rows(), tensor.kind)


def _dequantized(rows: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    found = dequantize(np.array(rows), GGMLQuantizationType[kind])
    return np.asarray(found, dtype=np.float32)


def _as_type(numbers: np.ndarray[Any, Any], dtype: WeightType, weight: _Weight) -> np.ndarray[Any, Any]:
    """Rounded to the nearest, to even ones between two. Raises ConfigError for what is no number of that type."""
    where = f"{weight.tensor.file}: tensor {weight.tensor.name}"
    if not np.isfinite(numbers).all():
        raise ConfigError(f"{where} holds what is no finite number; is the file damaged?")
    if dtype == "float32":
        return numbers.astype("<f4")
    if dtype == "float16":
        with np.errstate(over="ignore"):
            halves = numbers.astype("<f2")
        if not np.isfinite(halves).all():
            raise ConfigError(f"{where} holds numbers beyond those of float16; take bfloat16 or float32")
        return halves
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")

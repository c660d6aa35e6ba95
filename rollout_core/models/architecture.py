"""What training asks of a model's architecture, found out without its weights (on the meta device in a plan, and by the
same code before training); and low-rank adapters (LoRA, arXiv:2106.09685) through peft: the model's own weights stay,
small matrices are trained.

The adapters are put into the model's own layers, so it stays the transformers model it was. A checkpoint holds the
merged weights, usable as they are; a train state the adapters too, because merging rounds.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from rollout_core.base.errors import ConfigError
from rollout_core.config import LoRAConfig, ParallelConfig
from rollout_core.models.facts import blank_model
from rollout_core.models.pretrained import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter_config, read_object
from rollout_core.models.quantized import NF4Linear

_TOKENS = 4
_LARGEST_LOGIT = 100.0
"""A cap on logits shows in large ones."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Keys of configurations that give a cap."""


class LogitTransform(NamedTuple):
    """What a model makes of its output layer's product: cap * tanh(scale * product / cap), or scale * product."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, product: Tensor) -> Tensor:
        """The logits; ``product`` may be overwritten."""
        if self.scale != 1.0:
            product *= self.scale
        return product if self.cap is None else torch.tanh_(product.div_(self.cap)).mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of ``logits``, which this has made, by the product."""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap) ** 2)


def check_trainable(model: Any) -> None:
    """Raises ConfigError where a language model or reward model cannot be trained here, whatever its weights."""
    if type(model).__name__.endswith("ForSequenceClassification"):
        check_score_head(model)
    else:
        check_decoder(model)
        logit_transform(model)


def check_decoder(model: Any) -> None:
    """Raises ConfigError for models such as BERT where their configuration does not make them decoders."""
    # Not the configuration's own key: GPT-NeoX has it, too, and does not ask it. XLM asks another one.
    is_encoder = any(getattr(module, "is_decoder", None) is False for module in model.modules())
    if is_encoder and not getattr(model.config, "causal", False):
        refuse_not_causal(model, "as its configuration makes it no decoder")


def refuse_not_causal(model: Any, by: str) -> NoReturn:
    """Raises ConfigError: such a model would read the answer that it is to predict, and the padding of its rows."""
    raise ConfigError(
        f"{type(model).__name__} is not causal: its tokens see those behind them, {by}; choose another model"
    )


def check_score_head(model: Any) -> None:
    """Raises ConfigError for a sequence classifier whose score is no linear function of a hidden state."""
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ConfigError(f"{type(model).__name__} has no linear score head; choose a decoder model such as Qwen2")


@torch.no_grad()
def logit_transform(model: Any) -> LogitTransform:
    """How the model's logits follow from its output layer's own product with the trunk's last hidden states. Raises
    ConfigError for a model that makes them in another way: the trainer computes them a chunk of tokens at a time."""
    layer = model.get_output_embeddings()
    name = type(model).__name__
    if layer is None or getattr(layer, "weight", None) is None:
        raise ConfigError(f"{name} has no output layer of its own, which the trainer needs; choose another model")
    vocabulary, width = layer.weight.shape
    device = torch.device("cpu") if layer.weight.is_meta else layer.weight.device
    hidden = torch.linspace(-1.0, 1.0, _TOKENS * width, device=device).view(1, _TOKENS, width)
    logits = torch.linspace(-_LARGEST_LOGIT, _LARGEST_LOGIT, _TOKENS * vocabulary, device=device)
    product = logits.view(1, _TOKENS, vocabulary)
    seen: list[Tensor] = []

    def multiply(states: Tensor) -> Tensor:
        seen.append(states)
        return product.clone()

    input_ids = torch.ones(1, _TOKENS, dtype=torch.int64, device=device)
    try:
        with (
            _standing_in(_trunk(model), lambda *_, **__: _TrunkOutput(hidden.clone())),
            _standing_in(layer, multiply),
        ):
            found = model(input_ids=input_ids, use_cache=False).logits
        is_own = len(seen) == 1 and torch.equal(seen[0].float(), hidden)
        transform = _transform_of(model, product, found.float()) if is_own else None
    except (AttributeError, TypeError, IndexError, RuntimeError, ValueError) as error:
        if layer.weight.is_meta and isinstance(error, RuntimeError) and not seen:  # weights before the output layer
            raise ConfigError(_OTHER_LOGITS.format(name)) from error
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{name} is built in a way that the trainer does not know ({reason}); choose another"
        ) from error
    if transform is None:
        raise ConfigError(_OTHER_LOGITS.format(name))
    return transform


_OTHER_LOGITS = (
    "{} makes its logits in another way than by its output layer, a factor and a cap, which the trainer cannot do; "
    "choose another model"
)


def _transform_of(model: Any, product: Tensor, logits: Tensor) -> LogitTransform | None:
    config = model.config.get_text_config()
    caps = [cap for cap in (getattr(config, key, None) for key in _CAPS) if cap]
    scale = float(logits.flatten()[-1]) / _LARGEST_LOGIT
    known = [LogitTransform(), LogitTransform(scale), *(LogitTransform(cap=cap) for cap in caps)]
    return next((one for one in known if torch.allclose(one(product.clone()), logits, rtol=1e-6, atol=0.0)), None)


def _trunk(model: Any) -> nn.Module:
    """What the model itself calls for hidden states."""
    decoder = model.get_decoder()
    return model.base_model if decoder is None or decoder is model else decoder


class _TrunkOutput:
    """Hidden states, and None of all else that a trunk may return."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]


@contextmanager
def _standing_in(module: nn.Module, forward: Any) -> Iterator[None]:
    """``forward`` instead of the module's own."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


SUMMED = "replicated_with_grad_allreduce"
"""transformers' word for norms of each head by itself: whole on every process, which sees a part of the heads."""
_HOW_CUT = {"colwise": "out_features", "rowwise": "in_features"}
"""transformers' words for what is cut of a linear layer."""
_LEFT_WHOLE = "embedding_rowwise"
_HEADS_OF = ("num_attention_heads", "num_key_value_heads")


def cut_layers(model: Any, processes: int) -> dict[str, str]:
    """The layers that tensor parallelism among ``processes`` cuts in the trunk of ``model``, by their names there:
    those ``colwise`` by their outputs, those ``rowwise`` by their inputs; and norms of `SUMMED` gradients.

    As transformers' plan for the architecture has them (``base_model_tp_plan``). Raises ConfigError where it has none,
    one of other parts than these, or one that does not fit every layer; where heads or widths cannot be shared out
    evenly; and for dropout of attention, whose masks would be the same for heads of different processes.
    """
    trunk = model.base_model
    config, plan = trunk.config.get_text_config(), trunk.config.base_model_tp_plan or {}
    plan = {path: how for path, how in plan.items() if how != _LEFT_WHOLE}
    other = sorted({how for how in plan.values() if how not in _HOW_CUT and how != SUMMED})
    if not plan or other:
        raise _not_cut(model, f"transformers has no plan for it{f' but one with {other[0]}' if other else ''}")
    patterns = {_pattern(key): how for key, how in plan.items()}
    found = {
        path: how
        for path, _ in trunk.named_modules()
        for pattern, how in patterns.items()
        if re.fullmatch(pattern, path)
    }
    for key, how in plan.items():
        matching = sum(re.fullmatch(_pattern(key), path) is not None for path in found)
        if how in _HOW_CUT and "*" in key and matching != config.num_hidden_layers:
            raise _not_cut(model, f"{matching} of its {config.num_hidden_layers} layers have a {key}")
    if alone := _whole_beside_cut(trunk, found):
        raise _not_cut(model, f"{alone} would work on a part of its input, and transformers' plan does not say how")
    shared = {key: getattr(config, key, None) or processes for key in _HEADS_OF}
    for path, how in found.items():
        layer = trunk.get_submodule(path)
        if how != SUMMED and not isinstance(layer, nn.Linear):
            raise _not_cut(model, f"{path} is a {type(layer).__name__}, and only linear layers are cut")
        shared |= {} if how == SUMMED else {f"{_HOW_CUT[how]} of {path}": getattr(layer, _HOW_CUT[how])}
    if uneven := {key: number for key, number in shared.items() if number % processes}:
        key, number = next(iter(uneven.items()))
        raise _not_cut(model, f"{key} is {number}, which {processes} processes cannot share evenly")
    if dropout := getattr(config, "attention_dropout", 0.0):
        raise _not_cut(model, f"attention_dropout is {dropout}, and heads of different processes would have one mask")
    return found


def _pattern(key: str) -> str:
    return re.escape(key).replace(r"\*", r"\d+")


def _whole_beside_cut(trunk: nn.Module, found: Mapping[str, str]) -> str | None:
    """A parameter of an attention or MLP with cut layers that the plan does not name."""
    parents = {path.rpartition(".")[0] for path in found}
    named = (
        (f"{path}.{name}", f"{path}.{name}".rpartition(".")[0])
        for path in sorted(parents)
        for name, _ in trunk.get_submodule(path).named_parameters()
    )
    return next((name for name, layer in named if layer not in found), None)


def _not_cut(model: Any, why: str) -> ConfigError:
    return ConfigError(f'parallel.kind = "tensor" cannot cut a {type(model).__name__}: {why}; use "fsdp2"')


def count_cut(folder: Path, parallel: ParallelConfig) -> int:
    """How many parameters of the model of a folder the processes cut among themselves, none without tensor parallelism.
    Raises ConfigError as `cut_layers` does."""
    if not parallel.cuts_matrices:
        return 0
    model = blank_model(folder)
    layers = cut_layers(model, parallel.nproc)
    return sum(model.base_model.get_submodule(path).weight.numel() for path, how in layers.items() if how != SUMMED)


class AdapterCounts(NamedTuple):
    """Parameters of a model with adapters."""

    trained: int
    quantized: int
    """Stored in four bits."""
    left_out: Mapping[str, int]
    """Those of layers, by their names with ``*`` for a number, that are not adapted, and are no embeddings, output or
    linear layer that could be: experts that are one tensor, their router, convolutions, what kernels read of Mamba."""
    all: int


def count_adapted(folder: Path, lora: LoRAConfig) -> AdapterCounts:
    """How the model of a folder is trained with adapters. Raises ConfigError where the layers for them are not there,
    or cannot be merged."""
    model = blank_model(folder)
    shapes, size = _shapes(model.state_dict()), sum(parameter.numel() for parameter in model.parameters())
    adapted = with_lora(model, lora, seed=0)
    if _shapes(merged_weights(adapted, adapted.state_dict())) != shapes:
        raise ConfigError(
            f"adapters of {type(model).__name__} cannot be merged into its weights; choose other lora.target_modules"
        )
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    return AdapterCounts(trained, quantized_parameters(adapted, lora), _left_out(adapted), size)


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _left_out(model: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    output = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    kernels = _read_by_kernels(model)
    for path, module in model.named_modules():
        matrices = [one for one in module.parameters(recurse=False) if one.ndim > 1]
        is_linear = type(module) is nn.Linear and path not in kernels
        is_known = isinstance(module, nn.Embedding) or is_linear or module is output
        if matrices and not is_known and not path.endswith(_BASE[:-1]):
            name = re.sub(r"\.\d+(?=\.|$)", ".*", path)
            found[name] = found.get(name, 0) + sum(one.numel() for one in matrices)
    return found


_ADAPTER = "default"
_BASE = ".base_layer."
_OWN = ".lora_"
_HEADS = ("score",)
"""Of reward models: new, so trained whole."""
_HELD = "held"

ModelT = TypeVar("ModelT", bound=nn.Module)


def with_lora(model: ModelT, config: LoRAConfig | None, *, seed: int) -> ModelT:
    """``model`` with adapters in it and its own weights frozen, but a reward model's head; None leaves it as it is.

    At first adapters change nothing: B is 0, A follows ``seed``. Raises ConfigError where ``target_modules`` names no
    layer of the model, its output layer, whose weight the trainer reads itself, what is no linear layer, or one whose
    weight a kernel reads; and where peft refuses one.
    """
    if config is None:
        return model
    from peft import LoraConfig, inject_adapter_in_model

    adapted: nn.Module = model
    targets = _targets(model, config.target_modules)
    if _has_experts(model):
        # By the model's configuration peft would take names such as up_proj for those of experts in older checkpoints.
        adapted, targets = nn.ModuleDict({_HELD: model}), [f"{_HELD}.{path}" for path in targets]
    settings = LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        use_rslora=config.rank_stabilized,
        target_modules=targets,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # and then to what is right
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(settings, adapted, adapter_name=_ADAPTER)
        except ValueError as error:
            raise ConfigError(f"lora.target_modules of {type(model).__name__}: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_trained(name))
    if config.quantization == "nf4":
        _quantize(model)
    return model


def _has_experts(model: nn.Module) -> bool:
    """Whether there are experts whose weights are one tensor for all of them, and no layers."""
    return any(name.rpartition(".")[0].endswith("experts") for name, _ in model.named_parameters())


def _targets(model: nn.Module, asked: Sequence[str]) -> list[str]:
    """Paths of the layers that get an adapter: all linear ones but output and heads, or those whose names end with what
    is ``asked`` for."""
    linear, kernels = _linear(model), _read_by_kernels(model)
    output = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    paths = [(path, one) for path, one in model.named_modules() if any(f".{path}".endswith(f".{end}") for end in asked)]
    for path, module in paths:
        if module is output:
            raise ConfigError("lora.target_modules names the output layer, which cannot have an adapter; leave it out")
        if path in kernels:
            raise ConfigError(
                f"lora.target_modules names {path}, whose weight a kernel for the whole Mamba layer takes, so that an "
                f"adapter would do nothing; choose among {', '.join(linear_layers(model))}"
            )
        if path not in linear and path not in _HEADS:  # no W + scale B A to merge it into
            raise ConfigError(
                f"lora.target_modules names {path}, a {type(module).__name__}, and only linear layers can have "
                f"adapters; choose among {', '.join(linear_layers(model))}"
            )
    found = [path for path, _ in paths if path in linear] if asked else list(linear)
    if not found:
        raise ConfigError(
            f"lora.target_modules {list(asked)!r} names no layer of {type(model).__name__}; its linear layers are "
            f"{', '.join(linear_layers(model))}"
        )
    return found


def _quantize(model: nn.Module) -> None:
    """Store the own weights of layers with adapters in four bits; those on the meta device stay. Raises ConfigError for
    layers that are no plain linear ones."""
    for name, layer in _layers(model):
        if not isinstance(layer.base_layer, nn.Linear):
            raise ConfigError(
                f"lora.quantization: {name} is a {type(layer.base_layer).__name__}, and only linear layers are stored "
                "in four bits; leave it out, or name others as lora.target_modules"
            )
        if not layer.base_layer.weight.is_meta:
            layer.base_layer = NF4Linear(layer.base_layer)


def quantized_parameters(model: nn.Module, config: LoRAConfig) -> int:
    """Weights of ``model``, which has adapters, that are stored in four bits."""
    if config.quantization == "none":
        return 0
    return sum(layer.base_layer.weight.numel() for _, layer in _layers(model))


def linear_layers(model: nn.Module) -> list[str]:
    """Last parts of the names of a model's linear layers that can have adapters, each once."""
    return sorted({path.rpartition(".")[2] for path in _linear(model)})


@torch.no_grad()
def _gives_products(layer: Any) -> bool:
    """Whether a layer of a class below linear ones gives what they give, which routers of experts do not."""
    weight = layer.weight
    try:
        found = layer(torch.zeros(_TOKENS, layer.in_features, dtype=weight.dtype, device=weight.device))
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        return False
    return isinstance(found, Tensor) and found.shape == (_TOKENS, layer.out_features)


def _linear(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers that can have adapters, by their paths."""
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    kinds = (nn.Linear, Conv1D)  # GPT-2 has linear layers of the other kind
    found = {
        path: module
        for path, module in model.named_modules()
        if type(module) in kinds or (isinstance(module, kinds) and _gives_products(module))
    }
    left_out = _read_by_kernels(model)
    return {
        path: one
        for path, one in found.items()
        if one is not output and path not in left_out and path.rpartition(".")[2] not in _HEADS
    }


_MIXER = {"A_log", "D"}
"""Parameters by which a Mamba layer, of either version, is known."""
_BY_KERNELS = ("x_proj", "dt_proj", "out_proj")
"""Linear layers in it whose weights its kernels take, and in part also what computes in their place on a CPU. Jamba's
mixer calls the others."""


def _read_by_kernels(model: nn.Module) -> set[str]:
    """Paths of linear layers that are not called, so that an adapter in them would not be either."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if {own for own, _ in module.named_parameters(recurse=False)} >= _MIXER
        for name in (_BY_KERNELS if not type(module).__name__.startswith("Jamba") else ("dt_proj",))
        if isinstance(getattr(module, name, None), nn.Linear)
    }


def has_lora(model: nn.Module) -> bool:
    """Whether `with_lora` put adapters in."""
    return any(_OWN in name for name, _ in model.named_parameters())


class WithoutAdapters(nn.Module):
    """A policy with the adapters of its model switched off while it is called: the model they were put into, to the
    last bit, without a second copy of it in memory. For passes without gradient."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, *arguments: Any, **options: Any) -> Any:
        layers = [layer for _, layer in _layers(self.policy)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            return self.policy(*arguments, **options)
        finally:
            for layer in layers:
                layer.enable_adapters(True)


def merged_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``weights``, a state of ``model``, by the names it had without adapters: W + scale B A where there is one."""
    merged = {name.replace(_BASE, "."): tensor for name, tensor in weights.items() if _OWN not in name}
    for name, layer in _layers(model):
        a, b = (weights[f"{name}.lora_{matrix}.{_ADAPTER}.weight"] for matrix in "AB")
        change = layer.scaling[_ADAPTER] * (b @ a)
        key = f"{name}.weight"
        merged[key] = merged[key] + (change.T if layer.fan_in_fan_out else change).to(merged[key].dtype)
    return merged


def adapter_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of ``weights``, a state of a model with adapters, that are trained."""
    return {name: tensor for name, tensor in weights.items() if _is_trained(name)}


def peft_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`adapter_weights` by the names that peft's own files have."""
    return {f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": tensor for name, tensor in weights.items()}


def peft_config(config: LoRAConfig, weights: Mapping[str, Tensor], **options: Any) -> Any:
    """peft's configuration of adapters with these `peft_names`; ``options`` are its further keys."""
    from peft import LoraConfig

    layers = {name.rpartition(_OWN)[0].rpartition(".")[2] for name in weights if _OWN in name}
    heads = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in weights if _OWN not in name})
    return LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        use_rslora=config.rank_stabilized,
        target_modules=sorted(config.target_modules or layers),
        modules_to_save=heads or None,
        inference_mode=True,
        **options,
    )


def _is_trained(name: str) -> bool:
    return _OWN in name or name.partition(".")[0] in _HEADS


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers with an adapter, by the names they had before."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


_OUTPUTS = ("lm_head", "embed_tokens", "wte", "embed_out")
"""Layers that models with tied embeddings use twice."""


def check_fit(folder: Path, model_folder: Path, *, whole: bool) -> None:
    """Raise ConfigError unless the adapter's configuration fits the model, and with ``whole`` its tensors both."""
    from peft import PeftModel, get_peft_model_state_dict

    config = _adapter_config(folder)
    model = blank_model(model_folder)
    linear = linear_layers(model)
    # Which way they were drawn at first does not matter, and some cannot be drawn without the model's weights.
    config.init_lora_weights = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = PeftModel(model, config, low_cpu_mem_usage=True)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"adapter {folder} does not fit the model: {' '.join(str(error).split())} The linear layers of "
            f"{type(model).__name__} are {', '.join(linear)}"
        ) from error
    expected = {name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(wrapped).items()}
    twice = [name for name in expected if any(f".{layer}." in name for layer in _OUTPUTS)]
    if twice and getattr(model.config, "tie_word_embeddings", False):
        raise ConfigError(
            f"adapter {folder} changes {twice[0]}, but the model's output layer and embeddings are one tensor, which "
            "cannot hold two changes; train the adapter without it"
        )
    if whole:
        _compare_tensors(folder / ADAPTER_WEIGHTS, expected)


def _compare_tensors(file: Path, expected: dict[str, tuple[int, ...]]) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            found = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is no whole safetensors file ({error})") from error
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is of no layer of the model" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(found[name])}, not {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in found and found[name] != shape
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(
            f"{file} does not fit model and {ADAPTER_CONFIG}: {problems[0]}{more}; was it made for this model?"
        )


def _adapter_config(folder: Path) -> Any:
    from peft import LoraConfig

    file = folder / ADAPTER_CONFIG
    document = read_object(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of keys of newer versions that this one does not need
            config = read_adapter_config(folder)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ConfigError(f"{file}: no configuration of an adapter: {' '.join(str(error).split())}") from error
    if not isinstance(config, LoraConfig):
        raise ConfigError(f"{file}: an adapter of type {document.get('peft_type')!r}; only 'LORA' is merged here")
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ConfigError(f"{file}: an adapter for {config.task_type!r}; expected one of a language model, 'CAUSAL_LM'")
    return config

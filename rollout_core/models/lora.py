"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft: the model's own weights stay, small matrices are trained.

The adapters are put into the model's own layers, so it stays the transformers model it was. A checkpoint holds the
merged weights, usable as they are; a train state the adapters too, because merging rounds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rollout_core.base.errors import ConfigError
from rollout_core.config import LoRAConfig

_ADAPTER = "default"
_BASE = ".base_layer."
_OWN = ".lora_"
_HEADS = ("score",)
"""Of reward models: new, so trained whole."""

ModelT = TypeVar("ModelT", bound=nn.Module)


def with_lora(model: ModelT, config: LoRAConfig | None, *, seed: int) -> ModelT:
    """``model`` with adapters in it and its own weights frozen, but a reward model's head; None leaves it as it is.

    At first adapters change nothing: B is 0, A follows ``seed``. Raises ConfigError where ``target_modules`` names no
    layer of the model, or its output layer, whose weight the trainer reads itself.
    """
    if config is None:
        return model
    from peft import LoraConfig, inject_adapter_in_model

    targets = list(config.target_modules) if config.target_modules else "all-linear"
    settings = LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        use_rslora=config.rank_stabilized,
        target_modules=targets,
        exclude_modules=[head for head in _HEADS if hasattr(model, head)] or None,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Of output layers tied to the embeddings, which are refused below.
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # and then to what is right
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
        except ValueError as error:
            raise ConfigError(
                f"lora.target_modules {targets!r} names no layer of {type(model).__name__}; its linear layers are "
                f"{', '.join(linear_layers(model))}"
            ) from error
    output = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    if output is not None and any(output is layer for _, layer in _layers(model)):
        raise ConfigError("lora.target_modules names the output layer, which cannot have an adapter; leave it out")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_trained(name))
    return model


def linear_layers(model: nn.Module) -> list[str]:
    """Last parts of the names of a model's linear layers that can have adapters, each once."""
    output = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    names = {name.rpartition(".")[2] for name, module in linear.items() if module is not output}
    return sorted(names - set(_HEADS))


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


def _is_trained(name: str) -> bool:
    return _OWN in name or name.partition(".")[0] in _HEADS


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers with an adapter, by the names they had before."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))

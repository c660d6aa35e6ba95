"""The one door to what transformers, peft and vLLM load from a model folder.

Whatever a folder holds or names, none of its code is run, and nobody is asked whether it should be: a library that is
not told so asks on standard input. No other module calls these libraries' loading functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_core.base.errors import ConfigError

if TYPE_CHECKING:
    from vllm import LLM

_KERNEL_KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


def read_config(folder: Path) -> Any:
    """The configuration of a model folder, by a class of transformers' own. Raises ConfigError as `refuse_own_code`."""
    from transformers import AutoConfig

    refuse_own_code(folder)
    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def read_tokenizer(folder: Path, *, generic: bool) -> Any:
    """The tokenizer of a model folder; ``generic``: as its tokenizer.json says, whatever its model has of its own."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    refuse_own_code(folder)
    kind = PreTrainedTokenizerFast if generic else AutoTokenizer
    return kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def build_model(kind: Any, config: Any) -> Any:
    """A model of a transformers class (``AutoModelForCausalLM``, say) as a configuration describes it."""
    return kind.from_config(config, trust_remote_code=False)


def load_model(kind: Any, folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model of a folder by a transformers class, from safetensors files alone, and what of it was found."""
    refuse_own_code(folder)
    return kind.from_pretrained(
        folder,
        output_loading_info=True,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        **options,
    )


def start_vllm(folder: Path, **options: Any) -> LLM:
    """vLLM's engine with the model of a folder. Raises ImportError where there is no vLLM."""
    from vllm import LLM

    refuse_own_code(folder)
    return LLM(str(folder), trust_remote_code=False, **options)


def read_adapter_config(folder: Path) -> Any:
    """The configuration of an adapter as peft reads it; of modules that it names peft imports its own alone."""
    from peft import PeftConfig

    return PeftConfig.from_pretrained(str(folder), local_files_only=True)


def adapted(model: Any, folder: Path) -> Any:
    """``model`` with the layers and weights of the adapter in ``folder``."""
    from peft import PeftModel

    config = read_adapter_config(folder)
    return PeftModel.from_pretrained(model, str(folder), config=config, local_files_only=True)


def refuse_own_code(folder: Path) -> None:
    """Raises ConfigError for a folder whose model or tokenizer is of a kind that only its own code knows.

    Code that lies beside a model of a kind transformers knows does no harm: it is neither stored nor run.
    """
    for name in ("config.json", "tokenizer_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        told = read_object(file)
        kernel = next((value for value in _values(told, _KERNEL_KEYS) if isinstance(value, str) and "/" in value), None)
        if kernel is not None:
            raise ConfigError(f"{file} names code on the hub ({kernel!r}), which is never run; remove that key")
        if "auto_map" in told and _needs_own_code(name, told):
            raise ConfigError(
                f"{file}: this {'model' if name == 'config.json' else 'tokenizer'} comes with code of its own "
                "(auto_map), which is never run; choose one that transformers knows without"
            )


def _needs_own_code(name: str, told: dict[str, Any]) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name == "config.json":
        return told.get("model_type") not in CONFIG_MAPPING
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    named = told.get("tokenizer_class")
    return not isinstance(named, str) or all(
        tokenizer_class_from_name(kind) is None for kind in (named, f"{named.removesuffix('Fast')}Fast")
    )


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError where there is none."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ConfigError(f"{file}: not JSON that can be read: nested too deeply") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(told, dict):
        raise ConfigError(f"{file}: not JSON: expected an object")
    return told


def _values(told: Any, keys: tuple[str, ...]) -> Iterator[Any]:
    """What stands under the keys, at any depth."""
    if isinstance(told, dict):
        for key, value in told.items():
            if key in keys:
                yield from value.values() if isinstance(value, dict) else (value,)
            yield from _values(value, keys)
    elif isinstance(told, list):
        for value in told:
            yield from _values(value, keys)

"""The one door to what transformers, peft and vLLM load from a model folder: configuration, weights and tokenizer.

Whatever a folder holds or names, none of its code is run, and nobody is asked whether it should be: a library that is
not configured so asks on standard input. No other module calls these libraries' loading functions.

Weights are read from safetensors files that are whole and hold every tensor the configuration asks for: transformers
draws what is missing at random and continues; here that is an error, before any work and when a model is loaded.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_core.base.errors import ConfigError, Conflict
from rollout_core.base.ids import ContentId, content_id
from rollout_core.objects.trees import hash_file

if TYPE_CHECKING:
    from vllm import LLM


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KERNEL_KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
MOST_TENSORS = 300_000
"""In one file: twice what the largest mixtures of experts have in all."""
MOST_FILE_BYTES = 4 * 2**30
"""Larger files of tensors are not written, but for a tensor that is larger itself. A constant, as a folder's id depends
on what is one file; and less than the 5 GiB that a ``[cloud]`` table lets a file have."""


def read_config(folder: Path) -> Any:
    """The configuration of a model folder, by a class of transformers' own. Raises ConfigError as `refuse_own_code`."""
    from transformers import AutoConfig

    refuse_own_code(folder)
    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json in the form that transformers writes today, with the defaults of their class; unchanged
    where the model type is none of its own. Two files that mean the same configuration are equal then."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return dict(config)
    return CONFIG_MAPPING[kind].from_dict(dict(config)).to_dict()


def read_tokenizer(folder: Path, *, generic: bool) -> Any:
    """The tokenizer of a model folder; ``generic``: as its tokenizer.json says, whatever its model has of its own."""
    refuse_own_code(folder)
    if generic:
        from transformers import PreTrainedTokenizerFast as kind
    else:
        from transformers import AutoTokenizer as kind
    return kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def build_model(kind: Any, config: Any) -> Any:
    """A model of a transformers class (``AutoModelForCausalLM``, say) as a configuration describes it."""
    return _attending(kind.from_config(config, trust_remote_code=False))


def load_model(kind: Any, folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model of a folder by a transformers class, from safetensors files alone, and what of it was found."""
    refuse_own_code(folder)
    model, found = kind.from_pretrained(
        folder,
        output_loading_info=True,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        **options,
    )
    return _attending(model), found


def _attending(model: Any) -> Any:
    """``model`` with attention that caps its logits where the configuration says so, as Gemma 2's does: torch's own
    kernels, which transformers chooses for it, leave the cap out."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    return model


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

    Code that lies next to a model of a kind transformers knows does no harm: it is neither stored nor run.
    """
    for name in ("config.json", "tokenizer_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        document = read_object(file)
        kernel = next(
            (value for value in _values(document, _KERNEL_KEYS) if isinstance(value, str) and "/" in value), None
        )
        if kernel is not None:
            raise ConfigError(f"{file} names code on the hub ({kernel!r}), which is never run; remove that key")
        if "auto_map" in document and _needs_own_code(name, document):
            raise ConfigError(
                f"{file}: this {'model' if name == 'config.json' else 'tokenizer'} comes with code of its own "
                "(auto_map), which is never run; choose one that transformers knows without"
            )


def _needs_own_code(name: str, document: dict[str, Any]) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name == "config.json":
        return document.get("model_type") not in CONFIG_MAPPING
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    named = document.get("tokenizer_class")
    return not isinstance(named, str) or all(
        tokenizer_class_from_name(kind) is None for kind in (named, f"{named.removesuffix('Fast')}Fast")
    )


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError where there is none."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ConfigError(f"{file}: not JSON that can be read: nested too deeply") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: not JSON: expected an object")
    return document


def _values(document: Any, keys: tuple[str, ...]) -> Iterator[Any]:
    """What stands under the keys, at any depth."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key in keys:
                yield from value.values() if isinstance(value, dict) else (value,)
            yield from _values(value, keys)
    elif isinstance(document, list):
        for value in document:
            yield from _values(value, keys)


def check_weights(folder: Path) -> None:
    """Raises ConfigError unless the safetensors files are whole, and the index's shards all there.

    Of the files only the headers are read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model folder {folder} has no *.safetensors weights (pickled weights are not read)")
    for file in files:
        _check_file(file)
    _check_shards(folder)


def check_tensors(folder: Path) -> None:
    """Raises ConfigError naming a tensor that the configuration asks for and the folder lacks, or has in another shape.

    The model is built without memory for its parameters; a reward model as such, any other as a language model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = read_object(folder / "config.json")
    kinds = config.get("architectures") or [""]
    rewards = kinds[0].endswith("ForSequenceClassification")
    # The one device on which transformers matches names and shapes, but reads no tensor.
    load_whole(AutoModelForSequenceClassification if rewards else AutoModelForCausalLM, folder, device_map="meta")


def load_causal_lm(folder: Path, dtype: str = "float32") -> Any:
    """The causal language model of a Hugging Face folder, on the CPU; ``auto`` is its own type of numbers.

    Raises ConfigError as `load_whole` does.
    """
    import torch
    from transformers import AutoModelForCausalLM

    return load_whole(AutoModelForCausalLM, folder, dtype=dtype if dtype == "auto" else getattr(torch, dtype))


def load_whole(kind: Any, folder: Path, **options: Any) -> Any:
    """The model of ``folder`` by a transformers class, from the folder's weights alone.

    Raises ConfigError when it cannot be loaded, or a tensor is missing or of another shape. Tied tensors need to be
    there once.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        with without_load_report():
            # Shapes that do not fit come back in the report; else the error would only point to it.
            model, found = load_model(kind, folder, ignore_mismatched_sizes=True, **options)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model in {folder} cannot be loaded: {' '.join(str(error).split())}") from error
    missing = {name: "is missing" for name in found["missing_keys"]}
    misshapen = {
        name: f"has shape {list(there)}, not {list(wanted)}" for name, there, wanted in found["mismatched_keys"]
    }
    lacking = sorted((missing | misshapen).items())
    if lacking:
        name, problem = lacking[0]
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        raise ConfigError(f"weights in {folder} do not fit its config.json: {name} {problem}{more}")
    return model


@contextmanager
def without_load_report() -> Iterator[None]:
    """transformers would log at length what is said here in a line."""
    reports = logging.getLogger("transformers")
    level = reports.level
    reports.setLevel(logging.ERROR)
    try:
        yield
    finally:
        reports.setLevel(level)


def _check_file(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:  # reads the header, and compares it with the file's size
            count = len(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file} is no whole safetensors file ({error}); was it downloaded to the end, not as a pointer of Git LFS?"
        ) from error
    if count > MOST_TENSORS:
        raise ConfigError(f"{file} names {count} tensors; no model has more than {MOST_TENSORS} in a file")


def _check_shards(folder: Path) -> None:
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index}: not an index of weights: {error!r}") from error
        absent = sorted(name for name in named if not (folder / name).is_file())
        if absent:
            raise ConfigError(f"{index} names {absent[0]}, which is not there; was the model downloaded to the end?")


_VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model")

TOKENIZER_FILES = (
    *_VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)

_OTHER_FILES = ("config.json", "additional_chat_templates/*.jinja")
"""That count for what is loaded, too, and are not the tokenizer's own."""
_KEPT_TOKENIZERS = 4
"""Different ones, those used last: a policy, its reward model, a teacher. A process that stays for weeks gets new
models every night."""

_importing = threading.Lock()
_idle_tokenizers: dict[ContentId, list[Any]] = {}
_using_tokenizers = threading.Lock()


def prepare_transformers(*, generic: bool = False) -> None:
    """Make the names that are used here: transformers does so when they are first asked for, and not for two threads
    at once. A ``generic`` tokenizer, which is all in its tokenizer.json, needs neither the other names nor torch, which
    come with them and take 5 s and 300 MB."""
    with _importing:
        from transformers import PreTrainedTokenizerFast  # noqa: F401

        if not generic:
            from transformers import AutoConfig, AutoTokenizer  # noqa: F401


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a model folder. Raises ConfigError when there is none."""
    generic = is_generic_tokenizer(folder)
    prepare_transformers(generic=generic)
    # Without one, transformers would make up a tokenizer that knows no words.
    if not any(fnmatch(file.name, pattern) for file in tokenizer_files(folder) for pattern in _VOCABULARY_FILES):
        raise ConfigError(f"no tokenizer in {folder}; expected one of {', '.join(_VOCABULARY_FILES)}")
    try:
        # For some types of models transformers has a tokenizer of its own, which it takes even where the folder says
        # that tokenizer.json is all there is; its words would be split in other places.
        return read_tokenizer(folder, generic=generic)
    except ConfigError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConfigError(f"no usable tokenizer in {folder}: {one_line(error)}") from error


@contextmanager
def borrowed_tokenizer(folder: Path) -> Iterator[Any]:
    """The tokenizer of a model folder, which nobody changes; for one thread at a time, as tokenizers are not
    thread-safe. It is loaded once for all folders with the same files, such as those of each iteration of a run."""
    key = _loaded_from(folder)
    with _using_tokenizers:
        idle = _idle_tokenizers[key] = _idle_tokenizers.pop(key, [])
        for unused in [*_idle_tokenizers][:-_KEPT_TOKENIZERS]:
            del _idle_tokenizers[unused]
        tokenizer = idle.pop() if idle else None
    is_new = tokenizer is None
    if is_new:
        tokenizer = load_tokenizer(folder)
    yield tokenizer
    # A folder may change while it is read; and of a caller that fails, the tokenizer may be the reason.
    if not is_new or _loaded_from(folder) == key:
        idle.append(tokenizer)


HeldTokenizer = tuple[Any, ContentId]
"""A tokenizer, and the contents of its files."""


def renewed_tokenizer(folder: Path, held: HeldTokenizer | None) -> HeldTokenizer:
    """The tokenizer of a model folder for whoever keeps it: the one that is ``held``, where that is of the same
    files."""
    key = _loaded_from(folder)
    return held if held is not None and held[1] == key else (load_tokenizer(folder), key)


def _loaded_from(folder: Path) -> ContentId:
    """The contents of all files that tell how a tokenizer is loaded."""
    others = (file for pattern in _OTHER_FILES for file in sorted(folder.glob(pattern)))
    named = {str(file.relative_to(folder)): hash_file(file)[1] for file in (*tokenizer_files(folder), *others)}
    return content_id("tokenizer-files/1", named)


def load_identified_tokenizer(folder: Path) -> tuple[Any, ContentId]:
    """`load_tokenizer` and the `tokenizer_id` of what was loaded. Raises Conflict where the files change meanwhile."""
    before = tokenizer_id(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer_id(folder) != before:
        raise Conflict(f"the tokenizer in {folder} changed while it was read; run again when nobody writes to it")
    return tokenizer, before


def is_generic_tokenizer(folder: Path) -> bool:
    """Whether the tokenizer of a model folder says that tokenizer.json is all there is to it."""
    settings = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").is_file() or not settings.is_file():
        return False
    named = read_object(settings).get("tokenizer_class")
    return named in ("PreTrainedTokenizerFast", "TokenizersBackend")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a model folder that make its tokenizer, sorted by name."""
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in TOKENIZER_FILES)
    ]


def tokenizer_id(folder: Path) -> ContentId:
    """Identity of the tokenizer of a model folder: the contents of its files, chat template included."""
    return content_id("tokenizer/1", {file.name: hash_file(file)[1] for file in tokenizer_files(folder)})


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files of one model folder into another, byte for byte."""
    for file in tokenizer_files(source):
        shutil.copyfile(file, target / file.name)

"""Model folders: found, checked, filed in the object store, and brought back to a local path.

A model travels as one self-contained folder in Hugging Face format (config, safetensors weights, tokenizer). Whether it
came from a folder, a hub id or the object store, everything later knows it only by the content id of that folder.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rollout_core.config import ModelSource
from rollout_core.errors import ConfigError, Conflict, Recoverable
from rollout_core.hub import HubOutOfReach, fetch_from_hub, looks_like_hub_id
from rollout_core.ids import ContentId, content_id, is_content_id
from rollout_core.model_folders import check_entries, check_own_file, near_folder
from rollout_core.objects import ObjectStore, TreeFile, TreeManifest
from rollout_core.objects.folders import hash_file
from rollout_core.pretrained import build_model, read_config, read_object, read_tokenizer
from rollout_core.resources import ModelSize
from rollout_core.scratch import scratch_folder
from rollout_core.short_ids import is_short_id
from rollout_core.weights import check_tensors, check_weights

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model")
_TOKENIZER_FILES = (
    *_VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_OTHER_FILES = ("config.json", "generation_config.json")
MODEL_FILES: tuple[str, ...] = _WEIGHT_FILES + _TOKENIZER_FILES + _OTHER_FILES
"""What belongs to a model folder. Pickled weights (``*.bin``, ``*.pt``) are left behind on purpose."""


@dataclass(frozen=True)
class ModelFacts:
    """What can be known of a model folder without loading its weights."""

    vocab_size: int
    max_positions: int | None
    """Longest sequence the architecture supports, in tokens."""
    tokenizer_size: int
    has_chat_template: bool
    tokenizer_id: ContentId
    is_reward_model: bool
    size: ModelSize
    tokenizer: Any = field(repr=False, compare=False)

    def document(self) -> dict[str, Any]:
        """All but the tokenizer, as JSON."""
        told = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "tokenizer"}
        return told | {"size": dataclasses.asdict(self.size), "tokenizer_id": str(self.tokenizer_id)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], tokenizer: Any = None) -> ModelFacts:
        """Inverse of `document`."""
        size, tokenizer_id = ModelSize(**document["size"]), ContentId(document["tokenizer_id"])
        return cls(**{**document, "size": size, "tokenizer_id": tokenizer_id}, tokenizer=tokenizer)


@dataclass(frozen=True)
class Description:
    """A folder with at least a model's configuration and tokenizer; the model's own, or a copy without the weights."""

    folder: Path
    has_weights: bool

    def inspect(self) -> ModelFacts:
        """`inspect_model` under limits, or as much of it as there is."""
        return inspect_bounded(self.folder, has_weights=self.has_weights)


def locate_model(source: ModelSource, base: Path, *, download: bool = True) -> Path | None:
    """Local folder of ``source``; None for a content id, or for a hub id that is yet to be downloaded.

    ``base`` is the folder relative paths start from. Raises ConfigError when there is nothing at that address.
    """
    if is_content_id(source.uri):
        if source.tokenizer is not None:
            raise ConfigError(
                f"model {source.uri} is a checkpoint with its own tokenizer; leave out tokenizer {source.tokenizer!r}"
            )
        return None
    return _locate(source.uri, source.revision, base, "model", download)


def locate_tokenizer(source: ModelSource, base: Path, *, download: bool = True) -> Path | None:
    """Local folder of the tokenizer that ``source`` names, else of the model; None and errors as `locate_model`."""
    if source.tokenizer is None:
        return locate_model(source, base, download=download)
    return _locate(source.tokenizer, None, base, "tokenizer", download)


def _locate(uri: str, revision: str | None, base: Path, what: str, download: bool) -> Path | None:
    folder = base / uri
    if folder.is_dir():
        check_entries(folder)
        return folder
    if not looks_like_hub_id(uri) or uri.startswith((".", "/")):
        advice = _meant(uri, base) or "give a folder or a hub id"
        raise ConfigError(f"{what} folder {uri!r} does not exist (looked at {folder}); {advice}")
    try:
        return fetch_from_hub(uri, revision, what, MODEL_FILES, download=download)
    except ConfigError as error:
        raise _with_meant(error, uri, base) from error


def _meant(uri: str, base: Path) -> str:
    near = near_folder(uri, base)
    return f"did you mean the folder {near!r}?" if near else ""


def _with_meant(error: ConfigError, uri: str, base: Path) -> ConfigError:
    """The error, with the folder that may have been meant. Who is out of reach cannot say that it was none."""
    meant = _meant(uri, base)
    return ConfigError(f"{error}; {meant}") if meant else error


def inspect_bounded(folder: Path, *, has_weights: bool) -> ModelFacts:
    """`inspect_model`, or `describe_model` of a folder without weights, under limits of time and memory; the tokenizer
    is loaded here, once it was found sound."""
    from rollout_core.bounded import inspecting

    inspecting.prepare()
    prepare_transformers()
    document = inspecting.inspect_folder(folder, has_weights=has_weights)
    tokenizer, its_id = load_identified_tokenizer(folder)
    return ModelFacts.from_document(document | {"tokenizer_id": str(its_id)}, tokenizer)


def inspect_model(folder: Path) -> ModelFacts:
    """Check that ``folder`` is a causal language model with weights and a tokenizer that fit each other.

    Raises ConfigError saying what is missing or does not fit. Loads the tokenizer, and of the weights names and shapes.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json; expected a model saved with save_pretrained")
    check_weights(folder)
    facts = describe_model(folder)
    check_tensors(folder)
    return facts


def describe_model(folder: Path) -> ModelFacts:
    """What configuration and tokenizer of ``folder`` tell, and whether they fit. Raises ConfigError if they do not."""
    config = _text_config(folder)
    tokenizer, its_id = load_identified_tokenizer(folder)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    vocab_size = getattr(config, "vocab_size", None)
    if not isinstance(vocab_size, int):
        raise ConfigError(f"{folder / 'config.json'}: no vocab_size; is this a causal language model?")
    if highest >= vocab_size:
        raise ConfigError(
            f"tokenizer and model in {folder} do not fit: the tokenizer has ids up to {highest}, "
            f"the model embeds {vocab_size}; use the tokenizer the model was trained with"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"tokenizer in {folder} has no end-of-sequence token, so completions could never end")
    return ModelFacts(
        vocab_size=vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
        tokenizer_size=len(tokenizer),
        has_chat_template=bool(tokenizer.chat_template),
        tokenizer_id=its_id,
        is_reward_model=_architecture(folder).endswith("ForSequenceClassification"),
        size=_size(config),
        tokenizer=tokenizer,
    )


_LARGEST = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 100_000,
    "hidden_size": 10_000_000,
    "vocab_size": 100_000_000,
}
"""A hundred times what the largest models have."""


def _check_sizes(told: Mapping[str, Any], file: Path) -> None:
    """Raises ConfigError for sizes that no model has, before anybody makes as many of something."""
    for name, largest in _LARGEST.items():
        value = told.get(name)
        if value is not None and (type(value) is not int or not 0 < value <= largest):
            raise ConfigError(f"{file}: {name} is {value!r:.100}; expected a whole number from 1 to {largest}")


_importing = threading.Lock()


def prepare_transformers() -> None:
    """Make the names that are used here: transformers does so when they are first asked for, and not for two threads
    at once."""
    with _importing:
        from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401


def max_positions(folder: Path) -> int | None:
    """The longest sequence that a model's configuration allows, in tokens, if it says so."""
    return getattr(_text_config(folder), "max_position_embeddings", None)


def vocab_size(folder: Path) -> int:
    """Tokens that the model of a folder has; its token ids are below."""
    return _text_config(folder).vocab_size


def blank_model(folder: Path, *, is_reward_model: bool = False) -> Any:
    """The language model, or the reward model, that a folder's configuration describes, without memory for its
    parameters."""
    return _blank(_text_config(folder), is_reward_model=is_reward_model)


def _blank(config: Any, *, is_reward_model: bool = False) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if is_reward_model:
        config.num_labels = 1
    with torch.device("meta"):
        return build_model(AutoModelForSequenceClassification if is_reward_model else AutoModelForCausalLM, config)


def _size(config: Any) -> ModelSize:
    """Of a language model of this configuration."""
    model = _blank(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    intermediate_size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return ModelSize(num_parameters, config.num_hidden_layers, config.hidden_size, intermediate_size)


def _architecture(folder: Path) -> str:
    config = read_object(folder / "config.json")
    return (config.get("architectures") or ["model of unknown architecture"])[0]


def check_reference(model: Path, reference: Path) -> None:
    """Raises ConfigError unless the two model folders are of one architecture and read the same token ids."""
    kinds = [_text_config(folder).model_type for folder in (model, reference)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"the reference in {reference} is a {kinds[1]!r}, the model a {kinds[0]!r}; give an earlier checkpoint of "
            "the same architecture"
        )
    vocabularies = [load_tokenizer(folder).get_vocab() for folder in (model, reference)]
    if vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"the tokenizer of the reference in {reference} has another vocabulary ({len(vocabularies[1])} tokens) "
            f"than the model's ({len(vocabularies[0])} tokens); give a reference that reads the same token ids"
        )


def check_reward_model(folder: Path) -> None:
    """Raises ConfigError unless the model folder is a sequence classifier of one label."""
    config = read_object(folder / "config.json")
    kind, labels = _architecture(folder), len(config.get("id2label") or "..")
    if not kind.endswith("ForSequenceClassification") or labels != 1:
        raise ConfigError(
            f"{folder} holds a {kind} of {labels} labels, no reward model; train one with `rollout train rm`"
        )


def _text_config(folder: Path) -> Any:
    """Configuration of the text model in ``folder``."""
    prepare_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    file = folder / "config.json"
    told = read_object(file)
    for part in (told, told.get("text_config")):
        if isinstance(part, dict):
            _check_sizes(part, file)
    try:
        config = read_config(folder)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file}: not a model that transformers knows: {_one_line(error)}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(f"{file}: a {config.model_type!r} is not a causal language model")
    return config.get_text_config()


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a model folder. Raises ConfigError when there is none."""
    prepare_transformers()
    # Without one, transformers would make up a tokenizer that knows no words.
    if not any(fnmatch(file.name, pattern) for file in tokenizer_files(folder) for pattern in _VOCABULARY_FILES):
        raise ConfigError(f"no tokenizer in {folder}; expected one of {', '.join(_VOCABULARY_FILES)}")
    try:
        # For some types of models transformers has a tokenizer of its own, which it takes even where the folder says
        # that tokenizer.json is all there is; its words would be split in other places.
        return read_tokenizer(folder, generic=_is_generic_tokenizer(folder))
    except ConfigError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConfigError(f"no usable tokenizer in {folder}: {_one_line(error)}") from error


def load_identified_tokenizer(folder: Path) -> tuple[Any, ContentId]:
    """`load_tokenizer` and the `tokenizer_id` of what was loaded. Raises Conflict where the files change meanwhile."""
    before = tokenizer_id(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer_id(folder) != before:
        raise Conflict(f"the tokenizer in {folder} changed while it was read; run again when nobody writes to it")
    return tokenizer, before


def _is_generic_tokenizer(folder: Path) -> bool:
    settings = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").is_file() or not settings.is_file():
        return False
    named = read_object(settings).get("tokenizer_class")
    return named in ("PreTrainedTokenizerFast", "TokenizersBackend")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class Unchecked(Exception):
    """Something that a plan cannot reach, in words; no fault of the configuration."""


def check_model(source: ModelSource, base: Path, objects: ObjectStore | None = None) -> ModelFacts:
    """All that can be said of ``source`` before any work; of what is elsewhere, by configuration and tokenizer alone.

    Raises ConfigError for what is wrong, Unchecked when neither can be had now.
    """
    with describe(source, base, objects) as found:
        facts = found.inspect()
        if source.adapter is not None:
            from rollout_core.adapters import check_adapter

            check_adapter(source.adapter, found.folder, base, objects)
        return facts


@contextmanager
def describe(source: ModelSource, base: Path, objects: ObjectStore | None) -> Iterator[Description]:
    """Configuration and tokenizer of ``source``, from where it is: this machine, the object store, or the hub.

    Raises ConfigError when there is no such model, Unchecked when that cannot be told now.
    """
    if is_short_id(source.uri) and not (base / source.uri).is_dir():
        # Where the store can be reached it is a whole one by now.
        raise Unchecked(f"model {source.uri}, as the object store cannot be reached")
    model = locate_model(source, base, download=False)
    if model is None and is_content_id(source.uri):
        with _stored_description(ContentId(source.uri), objects) as folder:
            yield Description(folder, has_weights=False)
        return
    own = model or _hub_description(source.uri, source.revision, base, "model")
    if source.tokenizer is None:
        yield Description(own, has_weights=model is not None)
        return
    tokenizer = locate_tokenizer(source, base, download=False) or _hub_description(
        source.tokenizer, None, base, "tokenizer"
    )
    with linked_files(model_files(own, tokenizer)) as folder:
        yield Description(folder, has_weights=model is not None)


def _hub_description(uri: str, revision: str | None, base: Path, what: str) -> Path:
    """The small files of a repository that is not here yet. Raises Unchecked where the hub is out of reach, and
    ConfigError where a folder here was rather meant."""
    try:
        folder = fetch_from_hub(uri, revision, what, _TOKENIZER_FILES + _OTHER_FILES, download=True)
    except (HubOutOfReach, Recoverable) as error:
        if meant := _meant(uri, base):
            raise ConfigError(f"{what} {uri!r} is not a folder here, and the hub cannot be reached; {meant}") from error
        raise Unchecked(f"{what} {uri!r}, as the hub cannot be reached; there is no such folder here") from error
    except ConfigError as error:
        raise _with_meant(error, uri, base) from error
    assert folder is not None, "what was downloaded has a folder"
    check_entries(folder)
    return folder


@contextmanager
def _stored_description(content_id: ContentId, objects: ObjectStore | None) -> Iterator[Path]:
    if objects is None:
        raise Unchecked(f"model {content_id}, as the object store cannot be reached")
    check_stored(content_id, objects)
    files = objects.manifest(content_id).files
    small = tuple(file for file in files if not any(fnmatch(file.path, pattern) for pattern in _WEIGHT_FILES))
    with scratch_folder("model") as scratch:
        objects.get_files(TreeManifest(files=small), scratch)
        yield scratch


def check_stored(content_id: ContentId, objects: ObjectStore) -> None:
    """Raise ConfigError where the object store does not have all of this model."""
    if not objects.tree_is_present(content_id):
        raise ConfigError(f"model {content_id} is not in the object store {objects.url}")


def file_tree(objects: ObjectStore, files: Mapping[str, Path]) -> ContentId:
    """File ``files`` under their names as one folder, wherever they lie and whatever links lead there."""
    hashes = objects.in_parallel(hash_file, files.values())
    manifest = TreeManifest(
        files=tuple(
            TreeFile(path=name, size=size, content_id=content_id)
            for name, (size, content_id) in zip(files, hashes, strict=True)
        )
    )
    return objects.put_files(manifest, files)


def model_files(model: Path, tokenizer: Path) -> dict[str, Path]:
    """Name to path of what makes a whole model: the model's files, with the tokenizer's in place of its own."""
    patterns = _WEIGHT_FILES + _OTHER_FILES
    own = [file for file in model.iterdir() if file.is_file() and any(fnmatch(file.name, item) for item in patterns)]
    files = [*own, *tokenizer_files(tokenizer)]
    for file in files:
        check_own_file(file)
    return dict(sorted((file.name, file) for file in files))


@contextmanager
def linked_files(files: Mapping[str, Path]) -> Iterator[Path]:
    """A temporary folder of links to the files."""
    with scratch_folder("model") as scratch:
        for name, file in files.items():
            (scratch / name).symlink_to(file.resolve())
        yield scratch


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a model folder that make its tokenizer, sorted by name."""
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _TOKENIZER_FILES)
    ]


def tokenizer_id(folder: Path) -> ContentId:
    """Identity of the tokenizer of a model folder: the contents of its files, chat template included."""
    return content_id("tokenizer/1", {file.name: hash_file(file)[1] for file in tokenizer_files(folder)})


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files of one model folder into another, byte for byte."""
    for file in tokenizer_files(source):
        shutil.copyfile(file, target / file.name)

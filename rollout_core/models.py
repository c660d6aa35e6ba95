"""Model folders: found, checked, filed in the object store, and brought back to a local path.

A model travels as one self-contained folder in Hugging Face format (config, safetensors weights, tokenizer). Whether it
came from a folder, a hub id or the object store, everything later knows it only by the content id of that folder.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rollout_core.config import ModelSource
from rollout_core.errors import ConfigError, Recoverable
from rollout_core.ids import CONTENT_ID_PATTERN, ContentId
from rollout_core.objects import ObjectStore

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "chat_template.jinja",
    "chat_template.json",
)
_OTHER_FILES = ("config.json", "generation_config.json")
MODEL_FILES = _WEIGHT_FILES + _TOKENIZER_FILES + _OTHER_FILES
"""What belongs to a model folder. Pickled weights (``*.bin``, ``*.pt``) are left behind on purpose."""


@dataclass(frozen=True)
class ModelFacts:
    """What can be known of a model folder without loading its weights."""

    vocab_size: int
    max_positions: int | None
    """Longest sequence the architecture supports, in tokens."""
    tokenizer_size: int
    has_chat_template: bool


def is_content_id(uri: str) -> bool:
    """Whether ``uri`` names a checkpoint in the object store."""
    return re.fullmatch(CONTENT_ID_PATTERN, uri) is not None


def looks_like_hub_id(uri: str) -> bool:
    """Whether ``uri`` has the form of a hub id (``name`` or ``owner/name``)."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", uri) is not None


def locate_model(source: ModelSource, base: Path, *, download: bool = True) -> Path | None:
    """Local folder of ``source``; None for a content id, or for a hub id while ``download`` is False.

    ``base`` is the folder relative paths start from. Raises ConfigError when there is nothing at that address.
    """
    return None if is_content_id(source.uri) else _locate(source.uri, source.revision, base, "model", download)


def _locate(uri: str, revision: str | None, base: Path, what: str, download: bool) -> Path | None:
    folder = base / uri
    if folder.is_dir():
        return folder
    if not looks_like_hub_id(uri) or uri.startswith((".", "/")):
        raise ConfigError(f"{what} folder {uri!r} does not exist (looked at {folder}); give a folder or a hub id")
    return _download(uri, revision, what) if download else None


def _download(uri: str, revision: str | None, what: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(uri, revision=revision, allow_patterns=list(MODEL_FILES)))
    except RepositoryNotFoundError as error:
        raise ConfigError(f"{what} {uri!r} is neither a folder here nor a hub repository you may read") from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{what} {uri!r} is not a folder here, and the hub could not be reached to look for it there: {error}"
        ) from error
    except HfHubHTTPError as error:
        raise Recoverable(f"{what} {uri!r}: the hub answered with an error: {error}") from error


def inspect_model(folder: Path) -> ModelFacts:
    """Check that ``folder`` is a causal language model with weights and a tokenizer that fit each other.

    Raises ConfigError saying what is missing or does not fit. Loads the tokenizer, never the weights.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json; expected a model saved with save_pretrained")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model folder {folder} has no *.safetensors weights (pickled weights are not read)")
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'}: not JSON: {error}") from error
    text_config = config.get("text_config", config)
    vocab_size = text_config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ConfigError(f"{folder / 'config.json'}: no vocab_size; is this a causal language model?")
    tokenizer = load_tokenizer(folder)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= vocab_size:
        raise ConfigError(
            f"tokenizer and model in {folder} do not fit: the tokenizer has ids up to {highest}, "
            f"the model embeds {vocab_size}; use the tokenizer the model was trained with"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"tokenizer in {folder} has no end-of-sequence token, so completions could never end")
    return ModelFacts(
        vocab_size=vocab_size,
        max_positions=text_config.get("max_position_embeddings"),
        tokenizer_size=len(tokenizer),
        has_chat_template=bool(tokenizer.chat_template),
    )


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a model folder. Raises ConfigError when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no usable tokenizer in {folder}: {error}") from error


def check_model(source: ModelSource, base: Path) -> ModelFacts | None:
    """All that can be said against ``source`` before any work; None when it is not on this machine yet."""
    folder = locate_model(source, base, download=False)
    if folder is None:
        return None
    if source.tokenizer is None:
        return inspect_model(folder)
    tokenizer = _locate(source.tokenizer, None, base, "tokenizer", download=False)
    if tokenizer is None:
        return None
    with tempfile.TemporaryDirectory(prefix="rollout-model-") as scratch:
        return inspect_model(_compose(folder, tokenizer, Path(scratch) / "model"))


def import_model(source: ModelSource, objects: ObjectStore, base: Path) -> ContentId:
    """File the model folder of ``source`` in the object store and return its content id.

    Unchanged files are only hashed, not uploaded again. Raises ConfigError for a folder that is no usable model.
    """
    folder = locate_model(source, base)
    if folder is None:
        content_id = ContentId(source.uri)
        if not objects.tree_is_present(content_id):
            raise ConfigError(f"model {source.uri} is not in the object store {objects.url}")
        return content_id
    with tempfile.TemporaryDirectory(prefix="rollout-model-") as scratch:
        tokenizer = folder
        if source.tokenizer is not None:
            tokenizer = _locate(source.tokenizer, None, base, "tokenizer", download=True)
            assert tokenizer is not None, "a downloaded tokenizer has a folder"
        whole = _compose(folder, tokenizer, Path(scratch) / "model")
        inspect_model(whole)
        return objects.put_tree(whole)


def _compose(model: Path, tokenizer: Path, target: Path) -> Path:
    """A folder of hard or symbolic links: the model's files, and the tokenizer's in place of its own."""
    target.mkdir(parents=True)
    for file in sorted(model.iterdir()):
        patterns = MODEL_FILES if tokenizer == model else _WEIGHT_FILES + _OTHER_FILES
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in patterns):
            _link(file, target / file.name)
    if tokenizer != model:
        copy_tokenizer(tokenizer, target)
    return target


def _link(source: Path, target: Path) -> None:
    # Hub caches hold links into a blob folder; the object store refuses links that leave the folder.
    try:
        target.hardlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, target)


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a model folder that make its tokenizer, sorted by name."""
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _TOKENIZER_FILES)
    ]


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files of one model folder into another, byte for byte."""
    for file in tokenizer_files(source):
        shutil.copyfile(file, target / file.name)

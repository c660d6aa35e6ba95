"""The tokenizer of a model folder: its files, its identity, and how it is loaded; the messages of its chat template."""

from __future__ import annotations

import shutil
import threading
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rollout_core.base.errors import ConfigError, Conflict
from rollout_core.base.ids import ContentId, content_id
from rollout_core.models.pretrained import read_object, read_tokenizer
from rollout_core.objects.folders import hash_file

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

_importing = threading.Lock()


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


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str

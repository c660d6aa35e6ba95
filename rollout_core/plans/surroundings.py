"""What a folder holds that a run can be made of: model folders, and files of rows with their keys."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.data.row_files import FILES_OF_ROWS, ending, first_document, is_array, local_file
from rollout_core.data.row_forms import role_of
from rollout_core.models.gguf_header import parts_of, read_header
from rollout_core.models.locating import is_gguf

MAX_DEPTH = 4
MAX_ENTRIES = 20_000
"""Files and folders that are looked at; a folder that holds more is not a project's."""
_NOT_LOOKED_INTO = frozenset({"node_modules", "__pycache__", "site-packages", "objects", "cache", "prefect"})
_HELD_OUT = ("held", "eval", "test", "valid", "dev")
"""Parts of the names of files that are kept from training."""


@dataclass(frozen=True)
class RowFile:
    """A file of rows."""

    path: str
    """From the folder that was looked at."""
    keys: frozenset[str]
    """Of its first row."""
    is_answered: bool | None = None
    """Whether the conversation of its first row ends with an answer; None where that is not known."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Other names of some of its ``keys``, ours = theirs: the ``columns`` of its table in a configuration."""

    @property
    def format(self) -> str | None:
        """The ``format`` of its table, where its rows are of others' making."""
        if not self.keys.isdisjoint({"prompt", "messages"}):
            return None
        if "conversations" in self.keys:
            return "sharegpt"
        return "alpaca" if "instruction" in self.keys and not self.keys.isdisjoint({"output", "chosen"}) else None

    @property
    def is_held_out(self) -> bool:
        """Whether its name says that it is kept from training."""
        return any(part in Path(self.path).stem.lower() for part in _HELD_OUT)


@dataclass(frozen=True)
class ModelFolder:
    """A model in Hugging Face format, or a GGUF file."""

    path: str
    """From the folder that was looked at."""
    max_positions: int | None
    """Longest sequence by its configuration, in tokens."""


@dataclass(frozen=True)
class Surroundings:
    """What was found, in order of the paths."""

    models: tuple[ModelFolder, ...]
    files: tuple[RowFile, ...]


def look_around(folder: Path) -> Surroundings:
    """Models and files of rows in ``folder`` and the folders below it, but for hidden ones, links, environments, what
    rollout keeps, and what cannot be read. GGUF files count where there is no other model."""
    models: list[ModelFolder] = []
    in_gguf: list[ModelFolder] = []
    files: list[RowFile] = []
    for path in _entries(folder):
        name = path.relative_to(folder).as_posix()
        if path.name == "config.json" and any(path.parent.glob("*.safetensors")):
            models.append(_model_folder(path, folder))
        elif is_gguf(path):
            in_gguf += _in_gguf(path, name)
        elif ending(path.name) in FILES_OF_ROWS:
            found = row_file(path, name)
            files += [found] if found.keys else []
    return Surroundings(tuple(models or in_gguf), tuple(files))


def row_file(path: Path, name: str) -> RowFile:
    """The file at ``path``, called ``name`` in the configuration; without keys where it cannot be read."""
    row = (_first_row(path, name) if path.is_file() else None) or {}
    return RowFile(name, frozenset(row), _is_answered(row))


def _is_answered(row: dict[str, Any]) -> bool | None:
    messages = next((row[key] for key in ("messages", "prompt", "conversations") if isinstance(row.get(key), list)), [])
    last = messages[-1] if messages else None
    if not isinstance(last, dict):
        return None
    return role_of(last.get("from", last.get("role"))) == "assistant"


def model_folder(path: Path, name: str) -> ModelFolder:
    """The model at ``path``, called ``name`` in the configuration; it may as well be on the hub."""
    if is_gguf(path):
        return next(iter(_in_gguf(path, name)), ModelFolder(name, None))
    return ModelFolder(name, _max_positions(path / "config.json"))


def _in_gguf(path: Path, name: str) -> list[ModelFolder]:
    """The model of a GGUF file; none of one that cannot be read, nor of a later part of one."""
    try:
        if parts_of(path)[0] != path:
            return []
        settings = read_header(path).settings
    except ConfigError:
        return []
    found = settings.get(f"{settings.get('general.architecture')}.context_length")
    return [ModelFolder(name, found if isinstance(found, int) and found > 1 else None)]


def _entries(folder: Path) -> Iterator[Path]:
    seen = 0
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        depth = len(here.relative_to(folder).parts)
        folders[:] = sorted(
            name
            for name in folders
            if depth < MAX_DEPTH
            and not name.startswith(".")
            and name not in _NOT_LOOKED_INTO
            and not (here / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            seen += 1
            if seen > MAX_ENTRIES:
                return
            if not name.startswith(".") and (here / name).is_file():  # no pipe, which would be waited for
                yield here / name


def _model_folder(config: Path, folder: Path) -> ModelFolder:
    return ModelFolder(config.parent.relative_to(folder).as_posix(), _max_positions(config))


def _max_positions(config: Path) -> int | None:
    try:
        document = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = document.get("max_position_embeddings") if isinstance(document, dict) else None
    return found if isinstance(found, int) and found > 1 else None


def _first_row(path: Path, name: str) -> dict[str, Any] | None:
    """None where there is none. A ``.json`` file is one of rows where it holds a list of them; others are settings."""
    file = local_file(name, path)
    try:
        if ending(name) == ".json" and not is_array(file):
            return None
        return first_document(file)
    except ConfigError:
        return None

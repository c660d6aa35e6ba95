"""A user's own code, read once: the file that a function is in, and what of the user's files that imports.

What was read (by `rollout_core.rewards.user_sources`) is what counts in ids and what is run (by
`rollout_core.rewards.user_modules`), however the files change meanwhile. Imports little, as each process that runs such
code starts with it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when it was read."""

    path: Path
    code: bytes
    is_package: bool = False
    """Whether it is the ``__init__.py`` of one."""


@dataclass(frozen=True)
class UserCode:
    """What ``module:function`` or ``path/to/file.py:function`` names."""

    callable: str
    main: SourceFile | None
    """None for a module without a source file, such as a built-in."""
    imported: Mapping[str, SourceFile]
    """By module name; only what is the user's own."""
    folders: tuple[str, ...]
    """Where else modules are found, before Python's search path."""

    @property
    def module(self) -> str | None:
        """Dotted name of the module; None where a file is named."""
        source = self.callable.rpartition(":")[0]
        return None if source.endswith(".py") else source

    @property
    def files(self) -> dict[str, SourceFile]:
        """Every module that is the user's, by name, and the one named, where that is a module with source."""
        own = {} if self.module is None or self.main is None else {self.module: self.main}
        return {**self.imported, **{name: file for name, file in own.items() if file.path.suffix == ".py"}}

    def identity(self) -> dict[str, Any]:
        """What stands for the code in an id; where it lies does not count."""
        from rollout_core.base.ids import hash_bytes

        imports = {name: hash_bytes(file.code) for name, file in self.imported.items()}
        source = hash_bytes(self.main.code) if self.main else self.module
        return {"source": source, **({"imports": imports} if imports else {})}

    def changed_file(self) -> Path | None:
        """One that is no longer as it was read."""
        files = [*self.imported.values(), *([self.main] if self.main else [])]
        return next((file.path for file in files if _bytes_of(file.path) != file.code), None)

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "callable": self.callable,
            "main": self.main and _file_document(self.main),
            "imported": {name: _file_document(file) for name, file in self.imported.items()},
            "folders": list(self.folders),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> UserCode:
        """Inverse of `document`."""
        return cls(
            callable=document["callable"],
            main=document["main"] and _file_from(document["main"]),
            imported={name: _file_from(file) for name, file in document["imported"].items()},
            folders=tuple(document["folders"]),
        )


def _file_document(file: SourceFile) -> list[Any]:
    return [str(file.path), base64.b64encode(file.code).decode(), file.is_package]


def _file_from(document: list[Any]) -> SourceFile:
    path, code, is_package = document
    return SourceFile(Path(path), base64.b64decode(code), is_package)


def _bytes_of(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None

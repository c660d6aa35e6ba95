"""Modules under the names that they had in an earlier version, for one release: the modules themselves, with a warning.

A package whose modules moved calls `alias` where it is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, cast


def alias(package: str, moved: Mapping[str, str]) -> None:
    """Have ``package.OLD`` be imported as the module NEW, for each ``OLD: NEW`` of ``moved``. A second call for the
    same package changes nothing."""
    if not any(isinstance(finder, Moved) and finder.package == package for finder in sys.meta_path):
        # First: of a package that moved, Python would find the modules under the old name, as others.
        sys.meta_path.insert(0, Moved(package, {f"{package}.{old}": new for old, new in moved.items()}))


class Moved(MetaPathFinder):
    """Finds modules of a package that moved."""

    def __init__(self, package: str, moved: Mapping[str, str]) -> None:
        self.package = package
        self.moved = moved

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = self.moved.get(fullname)
        return None if new is None else ModuleSpec(fullname, _Alias(fullname, new))


class _Alias(Loader):
    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._spec: Any = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(
            f"{self._old} is {self._new} now; the old name goes with the next release", FutureWarning, stacklevel=2
        )
        module = importlib.import_module(self._new)
        self._spec = module.__spec__
        return module

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m`` and an old name."""
        spec = importlib.util.find_spec(self._new)
        return None if spec is None else cast(InspectLoader, spec.loader).get_code(self._new)

    def exec_module(self, module: ModuleType) -> None:
        """It ran when it was imported. The import system has given it the spec of the old name."""
        module.__spec__ = self._spec

"""Modules made of a user's code as it was read, not of what its files say by now."""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from rollout_core.base.error_messages import in_words
from rollout_core.base.errors import ConfigError
from rollout_core.rewards.user_code import SourceFile, UserCode
from rollout_core.rewards.user_places import is_users


@contextmanager
def importable(code: UserCode, *, alone: bool = False) -> Iterator[None]:
    """Imports inside the block, by any thread, find the user's modules as they were read.

    ``alone``: no other code runs in this process, so that a file of the user's that was not read does not run but
    raises ConfigError: nothing would notice its changes. It may be looked for, as libraries look for their extras.
    """
    finder = _Finder(code, list(sys.path), alone)
    sys.meta_path.insert(0, finder)
    sys.path[:0] = code.folders
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for folder in code.folders:
            sys.path.remove(folder)


def load_module(code: UserCode) -> ModuleType:
    """The module named, run unless the same code was before; inside `importable`. Raises ConfigError if it fails."""
    _forget_other_versions(code)
    name = code.module or f"_rollout_reward_{_mark(code)}"
    told = f"reward file {_main(code).path}" if code.module is None else f"reward module {name}"
    try:
        return importlib.import_module(name) if code.module else _run_file(name, _main(code))
    except (Exception, SystemExit, GeneratorExit) as error:
        raise ConfigError(f"{told} fails on import: {in_words(error)}") from error


def _mark(code: UserCode) -> str:
    """Another for each version of a file, or of what it imports, so that each is a module of its own."""
    return hashlib.sha256(json.dumps(code.document(), sort_keys=True).encode()).hexdigest()


def _main(code: UserCode) -> SourceFile:
    assert code.main is not None, "a file is named"
    return code.main


def _run_file(name: str, file: SourceFile) -> ModuleType:
    if name not in sys.modules:
        spec = _spec(name, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses look their module up
        try:
            _Loader(file).exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, code: UserCode, search_path: list[str], alone: bool) -> None:
        self._code = code
        self._files = code.files
        self._search_path = search_path
        self._alone = alone

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Of a module among the code's files; of another of the user's, one that refuses to run, if ``alone``."""
        if fullname in self._files:
            return _spec(fullname, self._files[fullname])
        if path is None and fullname in sys.stdlib_module_names:
            # A file of the user's that has such a name is not meant, nor in the code's id.
            return importlib.machinery.PathFinder.find_spec(fullname, self._search_path)
        return self._unread(fullname, path) if self._alone else None

    def _unread(self, name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
        folders = [*self._code.folders, *self._search_path]
        spec = importlib.machinery.PathFinder.find_spec(name, folders if path is None else path)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        if not is_users(Path(spec.origin), folders):
            return None
        spec.loader = _Unread(self._code)
        return spec


def _spec(name: str, file: SourceFile) -> importlib.machinery.ModuleSpec:
    folders = [str(file.path.parent)] if file.is_package else None
    spec = importlib.util.spec_from_file_location(
        name, file.path, loader=_Loader(file), submodule_search_locations=folders
    )
    assert spec is not None, "a loader is given"
    return spec


class _Loader(importlib.abc.InspectLoader):
    def __init__(self, file: SourceFile) -> None:
        self.file = file

    def is_package(self, fullname: str) -> bool:
        """Whether the file is an ``__init__.py``."""
        return self.file.is_package

    def get_source(self, fullname: str) -> str:
        """For tracebacks."""
        return importlib.util.decode_source(self.file.code)

    def get_code(self, fullname: str) -> CodeType:
        """The code as it was read."""
        return compile(self.file.code, str(self.file.path), "exec", dont_inherit=True)


class _Unread(importlib.abc.Loader):
    def __init__(self, code: UserCode) -> None:
        self._code = code

    def exec_module(self, module: ModuleType) -> None:
        """Raises ConfigError."""
        raise ConfigError(
            f"reward {self._code.callable} imports {module.__name__} from {module.__file__}, which no import statement "
            "of its files names, so that scores would not follow that file's changes; import it by a plain statement"
        )


def _forget_other_versions(code: UserCode) -> None:
    """Modules of these names that were made of other code are loaded anew, and with them those that use them."""
    loaded = {name: sys.modules[name] for name in code.files if name in sys.modules}
    for name, module in loaded.items():
        _refuse_a_strangers_name(code, name, module)
    if any(_code_of(module) != code.files[name].code for name, module in loaded.items()):
        for name in loaded:
            del sys.modules[name]


def _code_of(module: Any) -> bytes | None:
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return loader.file.code if isinstance(loader, _Loader) else None


def _refuse_a_strangers_name(code: UserCode, name: str, module: Any) -> None:
    place = getattr(module, "__file__", None)
    if _code_of(module) is not None or name not in code.imported or place is None:
        return
    if Path(place).resolve() != code.imported[name].path.resolve():
        raise ConfigError(
            f"reward {code.callable} imports {name} from {code.imported[name].path}, but {place} is loaded under that "
            "name already; rename the file"
        )

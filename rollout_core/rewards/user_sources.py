"""Finds and reads a user's code: a function's file, and what of the user's files that imports. Runs none of it."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import rollout_core
from rollout_core.base.errors import ConfigError
from rollout_core.rewards.functions import near
from rollout_core.rewards.user_code import SourceFile, UserCode


def read_code(name: str, base: Path | None) -> UserCode:
    """Read the code of the function ``name``; relative files and modules start at ``base`` (default: the working
    directory). Raises ConfigError where there is none.

    Only the user's own code counts as imported: what lies in a folder of Python's search path outside its installation,
    beside the file, or under ``base``. The standard library's names are its own. Imports that are computed at run time
    are not seen.
    """
    folder = (base or Path()).resolve()
    source = name.rpartition(":")[0]
    main = _file(source, base) if source.endswith(".py") else _module(source, folder)
    if main is None:
        return UserCode(name, None, {}, (str(folder),))
    file = SourceFile(main.resolve(), _read(main), main.name == "__init__.py")
    folders = _users_folders(file.path, folder)
    package, root = _package_of(file.path)
    imported = {} if source.endswith(".py") else _parents(source, [folder, *folders])
    _add_imported(imported, (file, package), list(dict.fromkeys([*folders, root])))
    imported.pop(source, None)
    beside = [str(file.path.parent)] if source.endswith(".py") else []
    return UserCode(name, file, imported, tuple(dict.fromkeys([*beside, str(folder)])))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"reward file {path} cannot be read: {error.strerror}") from error


def _file(source: str, base: Path | None) -> Path:
    path = (base or Path()) / source
    if not path.is_file():
        found = {file.name for file in path.parent.glob("*.py")}
        raise ConfigError(f"reward file {path} does not exist; {near(path.name, found)}")
    return path


_REMEDY = "install it, run from the folder that holds it, or name its file: path/to/file.py:function"


def _module(name: str, base: Path) -> Path | None:
    """The module's source file; None for one without. Nothing is imported, not even packages that the name leads
    through: what they do to their search path when they are does not count."""
    importlib.invalidate_caches()
    first, *parts = name.split(".")
    spec = None if first in sys.stdlib_module_names else importlib.machinery.PathFinder.find_spec(first, [str(base)])
    spec = spec or _find_spec(first, None)
    for count in range(1, len(parts) + 1):
        inside = spec and spec.submodule_search_locations
        spec = _find_spec(".".join([first, *parts[:count]]), list(inside)) if inside else None
    if spec is None:
        raise ConfigError(f"reward module {name} cannot be found; {_REMEDY}")
    return Path(spec.origin) if spec.has_location and spec.origin else None


def _find_spec(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _users_folders(file: Path, base: Path) -> list[Path]:
    installed = tuple({str(Path(folder).resolve()) for folder in (sys.prefix, sys.base_prefix)})
    places = [file.parent, base, *(Path(entry).resolve() for entry in sys.path)]
    return [place for place in dict.fromkeys(places) if place.is_dir() and not str(place).startswith(installed)]


def _parents(module: str, folders: list[Path]) -> dict[str, SourceFile]:
    """The user's packages that a dotted name leads through, which are run before it is."""
    parts = module.split(".")[:-1]
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return {name: file for name in names if (file := _find(name, folders)) is not None}


def _add_imported(found: dict[str, SourceFile], first: tuple[SourceFile, str], folders: list[Path]) -> None:
    waiting = [first, *((file, _inside(name, file)) for name, file in found.items())]
    while waiting:
        file, package = waiting.pop()
        for name in _imported_names(file.code, package):
            if name in found:
                continue
            imported = _find(name, folders)
            if imported is not None:
                found[name] = imported
                waiting.append((imported, _inside(name, imported)))


def _inside(name: str, file: SourceFile) -> str:
    """The package in which a module's relative imports start."""
    return name if file.is_package else name.rpartition(".")[0]


def _find(name: str, folders: Iterable[Path]) -> SourceFile | None:
    first = name.partition(".")[0]
    if first in sys.stdlib_module_names:
        return None
    for folder in folders:
        if folder == _ROOT and (_ROOT / first) in _OWN:
            continue
        stem = folder.joinpath(*name.split("."))
        for path, is_package in ((stem / "__init__.py", True), (stem.with_suffix(".py"), False)):
            if path.is_file():
                return SourceFile(path, _read(path), is_package)
    return None


_ROOT = Path(rollout_core.__file__).resolve().parents[1]
_OWN = {_ROOT / name for name in ("rollout_core", "blocks", "tasks", "flows", "deployments")}
"""Packages of this project, which are no user's wherever they are installed from."""


def _package_of(file: Path) -> tuple[str, Path]:
    """Dotted name of the package that a file lies in, "" for none, and the folder where that name starts."""
    names: list[str] = []
    folder = file.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names), folder


def _imported_names(code: bytes, package: str) -> Iterator[str]:
    """Dotted names that the code of a module of ``package`` imports, and the packages they lie in."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # said in full when it is loaded
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*filter(None, parents), *filter(None, [node.module])])
            names = [origin, *(f"{origin}.{alias.name}".lstrip(".") for alias in node.names)]
        for name in filter(None, names):
            parts = name.split(".")
            yield from (".".join(parts[: count + 1]) for count in range(len(parts)))

"""Finds and reads a user's code: a function's file, and what of the user's files that imports. Runs none of it."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rollout_core.base.errors import ConfigError
from rollout_core.rewards.functions import near
from rollout_core.rewards.user_code import SourceFile, UserCode
from rollout_core.rewards.user_places import OWN_PACKAGES, PROJECT, is_installed


def read_code(name: str, base: Path | None) -> UserCode:
    """Read the code of the function ``name``; relative files and modules start at ``base`` (default: the working
    directory). Raises ConfigError where there is none.

    Only the user's own code counts as imported: what lies in a folder of Python's search path outside its installation,
    beside the file, or under ``base``. The standard library's names are its own. Imports that are computed at run time
    are not seen; `rollout_core.rewards.user_modules` refuses those of the user's own files.
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
    places = [place for place in (Path(entry).resolve() for entry in sys.path) if not is_installed(place)]
    return [place for place in dict.fromkeys([file.parent, base, *places]) if place.is_dir()]


def _parents(module: str, folders: list[Path]) -> dict[str, SourceFile]:
    """The user's packages that a dotted name leads through, which are run before it is."""
    parts = module.split(".")[:-1]
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return {name: file for name in names if (file := _find(name, folders)) is not None}


def _add_imported(found: dict[str, SourceFile], first: tuple[SourceFile, str], folders: list[Path]) -> None:
    waiting = [first, *((file, _inside(name, file)) for name, file in found.items())]
    while waiting:
        file, package = waiting.pop()
        for name in _with_exported(_imported_names(file.code, package), found):
            if name in found:
                continue
            imported = _find(name, folders)
            if imported is not None:
                found[name] = imported
                waiting.append((imported, _inside(name, imported)))


def _with_exported(names: Iterable[str], found: Mapping[str, SourceFile]) -> Iterator[str]:
    """``names``; in place of ``package.*``, whose package comes before it, the modules which that imports."""
    for name in names:
        package, star, _ = name.partition(".*")
        if not star:
            yield name
        elif package in found and found[package].is_package:
            yield from (f"{package}.{module}" for module in _exported(found[package]))


def _exported(package: SourceFile) -> list[str]:
    """What ``__all__`` lists; where it is computed, all modules that there are."""
    tree = _parsed(package.code)
    if tree is None:
        return []
    values = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and "__all__" in _assigned(node)
    ]
    mentions = sum(isinstance(node, ast.Name) and node.id == "__all__" for node in ast.walk(tree))
    listed = [value.elts for value in values if isinstance(value, ast.List | ast.Tuple)]
    items = [item.value if isinstance(item, ast.Constant) else None for items in listed for item in items]
    if mentions == len(values) == len(listed) and None not in items:
        return [str(item) for item in items]
    folder = package.path.parent
    return sorted({file.stem for file in folder.glob("*.py")} | {file.parent.name for file in folder.glob("*/*.py")})


def _assigned(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _inside(name: str, file: SourceFile) -> str:
    """The package in which a module's relative imports start."""
    return name if file.is_package else name.rpartition(".")[0]


def _find(name: str, folders: Iterable[Path]) -> SourceFile | None:
    first = name.partition(".")[0]
    if first in sys.stdlib_module_names:
        return None
    for folder in folders:
        if folder == PROJECT and first in OWN_PACKAGES:
            continue
        stem = folder.joinpath(*name.split("."))
        for path, is_package in ((stem / "__init__.py", True), (stem.with_suffix(".py"), False)):
            if path.is_file():
                return SourceFile(path, _read(path), is_package)
    return None


def _package_of(file: Path) -> tuple[str, Path]:
    """Dotted name of the package that a file lies in, "" for none, and the folder where that name starts."""
    names: list[str] = []
    folder = file.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names), folder


def _parsed(code: bytes) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # said in full when it is loaded


def _imported_names(code: bytes, package: str) -> Iterator[str]:
    """Dotted names that the code of a module of ``package`` imports, each after the packages it lies in; ``name.*`` for
    all that ``name`` exports."""
    tree = _parsed(code)
    for node in ast.walk(tree) if tree else ():
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

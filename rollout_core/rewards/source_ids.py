"""What scores depend on: the id of a reward and of its code, which is read once, without running it.

A user's function enters cache keys by the content of its source file, so editing it makes new scores.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollout_core.base.errors import ConfigError, near
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config.rewards import (
    CompositeReward,
    ExactMatchReward,
    ExpressionReward,
    FunctionReward,
    RewardSpec,
    plain_rewards,
)
from rollout_core.objects import ObjectStore
from rollout_core.objects.imports import SHOWN_FILES, Source, record_import
from rollout_core.rewards.user_code import OWN_PACKAGES, PROJECT, SourceFile, UserCode, is_installed

HELD_SOURCES = 32
_held: dict[ContentId, RewardSource] = {}
_held_lock = threading.Lock()


@dataclass(frozen=True)
class RewardSource:
    """The code of a reward as it was read, and the id of what its scores depend on."""

    id: ContentId
    codes: Mapping[str, UserCode]
    """Of its functions, by their names."""


def read_source(spec: RewardSpec, base: Path | None = None) -> RewardSource:
    """Read each file of a reward's code once. Runs none of it. Raises ConfigError if it cannot be found."""
    functions = [part.callable for part in plain_rewards(spec) if isinstance(part, FunctionReward)]
    codes = {name: read_code(name, base) for name in dict.fromkeys(functions)}
    return RewardSource(_source_id(spec, codes), codes)


def source_id(spec: RewardSpec, base: Path | None = None) -> ContentId:
    """Content id of what scores depend on: the settings of ``spec``, the function's source file, and what of the user's
    own code that imports (`read_code`). What was read is held, so that this process runs it (`source_of`).

    Where the files lie does not matter. Installed packages, data files and services do not enter. A reward model counts
    by its address, so give its content id. Raises ConfigError if the source cannot be found; runs none of it.
    """
    source = read_source(spec, base)
    _hold(source)
    return source.id


def hold_source(spec: RewardSpec, codes: Mapping[str, UserCode]) -> ContentId:
    """Have this process run such code for a reward, as it was filed, wherever its files are now; the reward's id.

    Raises ConfigError where code of a function is not given.
    """
    functions = [part.callable for part in plain_rewards(spec) if isinstance(part, FunctionReward)]
    if missing := [name for name in functions if name not in codes]:
        raise ConfigError(f"the code of reward {', '.join(missing)} is not filed; runs of earlier versions did not")
    source = RewardSource(_source_id(spec, codes), codes)
    _hold(source)
    return source.id


def _hold(source: RewardSource) -> None:
    with _held_lock:
        _held.pop(source.id, None)
        _held[source.id] = source
        while len(_held) > HELD_SOURCES:
            del _held[next(iter(_held))]


def source_of(spec: RewardSpec, base: Path | None, wanted: ContentId) -> RewardSource:
    """The code that ``wanted`` is the id of: as this process read it when it took the id, else as it is now.

    Raises ConfigError where that is other code.
    """
    with _held_lock:
        held = _held.get(wanted)
    if held is not None and all(
        part.callable in held.codes for part in plain_rewards(spec) if isinstance(part, FunctionReward)
    ):
        return held
    source = read_source(spec, base)
    if source.id != wanted:
        names = ", ".join(source.codes) or spec.kind
        raise ConfigError(
            f"the code of reward {names} is not what it was when the run began (id {source.id.short}, expected "
            f"{wanted.short}): it was edited since, or differs between machines. No score was stored; start the run "
            "again to score with the code as it is now"
        )
    return source


def record_code(objects: ObjectStore, spec: RewardSpec, source: RewardSource) -> None:
    """File the code of a reward, and note where it was read. A reward without code of its own is noted by its kind."""
    for code in source.codes.values():
        file_code(objects, source.id, code, "reward")
    if not source.codes:
        record_import(objects, source.id, Source(kind="reward", address=spec.kind, size_bytes=0, num_files=0))


def file_code(objects: ObjectStore, content: ContentId, code: UserCode, kind: Literal["reward", "agent"]) -> ContentId:
    """File the files of some code as a document, and note where they were read for ``content``; the document's id."""
    filed = objects.put_json(code.document())
    files = [*([code.main] if code.main else []), *code.imported.values()]
    found = Source(
        kind=kind,
        address=code.callable,
        place=str(code.main.path) if code.main else None,
        size_bytes=sum(len(file.code) for file in files),
        num_files=len(files),
        files=tuple(file.path.name for file in files[:SHOWN_FILES]),
        code={code.callable: filed},
    )
    record_import(objects, content, found)
    return filed


def _source_id(spec: RewardSpec, codes: Mapping[str, UserCode]) -> ContentId:
    if isinstance(spec, CompositeReward):
        parts = [[part.weight, _source_id(part.reward, codes)] for part in spec.parts]
        return content_id("reward/1", {"kind": spec.kind, "parts": parts})
    if isinstance(spec, ExpressionReward):
        rewards = {name: _source_id(reward, codes) for name, reward in spec.rewards.items()}
        return content_id("reward/1", {"kind": spec.kind, "expression": spec.expression, "rewards": rewards})
    if isinstance(spec, ExactMatchReward):
        return content_id("reward/2", spec)  # the meaning's version: 2 compares whole floats and after NFC
    if not isinstance(spec, FunctionReward):
        return content_id("reward/1", spec)
    function = spec.callable.rpartition(":")[2]
    identity = {"kind": spec.kind, "function": function, "kwargs": spec.kwargs}
    return content_id("reward/1", {**identity, **codes[spec.callable].identity()})


def read_code(name: str, base: Path | None, *, what: str = "reward") -> UserCode:
    """Read the code of the function ``name``; relative files and modules start at ``base`` (default: the working
    directory). Raises ConfigError where there is none; ``what`` it is, for messages.

    Only the user's own code counts as imported: what lies in a folder of Python's search path outside its installation,
    next to the file, or under ``base``. The standard library's names are its own. Imports that are computed at run time
    are not seen; `rollout_core.rewards.user_code` refuses those of the user's own files.
    """
    folder = (base or Path()).resolve()
    source = name.rpartition(":")[0]
    main = _file(source, base, what) if source.endswith(".py") else _module(source, folder, what)
    if main is None:
        return UserCode(name, None, {}, (str(folder),), what)
    file = SourceFile(main.resolve(), _read(main), main.name == "__init__.py")
    folders = _users_folders(file.path, folder)
    package, root = _package_of(file.path)
    imported = {} if source.endswith(".py") else _parents(source, [folder, *folders])
    _add_imported(imported, (file, package), list(dict.fromkeys([*folders, root])))
    imported.pop(source, None)
    own_folder = [str(file.path.parent)] if source.endswith(".py") else []
    return UserCode(name, file, imported, tuple(dict.fromkeys([*own_folder, str(folder)])), what)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"file {path} cannot be read: {error.strerror}") from error


def _file(source: str, base: Path | None, what: str) -> Path:
    path = (base or Path()) / source
    if not path.is_file():
        found = {file.name for file in path.parent.glob("*.py")}
        raise ConfigError(f"{what} file {path} does not exist; {near(path.name, found)}")
    return path


_REMEDY = "install it, run from the folder that holds it, or name its file: path/to/file.py:function"


def _module(name: str, base: Path, what: str) -> Path | None:
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
        raise ConfigError(f"{what} module {name} cannot be found; {_REMEDY}")
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


def imports(code: bytes, module: str) -> bool:
    """Whether an import statement of ``code`` names ``module``, or what lies in it."""
    return module in _imported_names(code, "")


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

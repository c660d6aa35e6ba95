"""A user's own code, of a reward or an agent: which files it is made of, read once without running any, and modules
made of what was read.

What was read is what counts in ids and what is run, however the files change meanwhile. Imports little, as each process
that runs such code starts with it.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

import rollout_core
from rollout_core.base.errors import ConfigError, in_words, near
from rollout_core.base.own_packages import is_installed


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
    what: str = "reward"
    """For messages."""

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
            "what": self.what,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> UserCode:
        """Inverse of `document`."""
        return cls(
            callable=document["callable"],
            main=document["main"] and _file_from(document["main"]),
            imported={name: _file_from(file) for name, file in document["imported"].items()},
            folders=tuple(document["folders"]),
            what=document["what"],
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


PROJECT = Path(rollout_core.__file__).resolve().parents[1]
OWN_PACKAGES = ("rollout_core", "blocks", "tasks", "flows", "deployments")
"""Packages of this project, which are no user's wherever they are installed from."""


def is_users(file: Path, folders: Iterable[str]) -> bool:
    """Whether a file lies in one of these folders and is neither installed nor this project's."""
    place = file.resolve()
    if is_installed(place) or any(place.is_relative_to(PROJECT / name) for name in OWN_PACKAGES):
        return False
    places = (Path(folder).resolve() for folder in folders)
    return any(place.is_relative_to(folder) for folder in places if not is_installed(folder))


def read_code(name: str, base: Path | None, *, what: str = "reward") -> UserCode:
    """Read the code of the function ``name``; relative files and modules start at ``base`` (default: the working
    directory). Raises ConfigError where there is none; ``what`` it is, for messages.

    Only the user's own code counts as imported: what lies in a folder of Python's search path outside its installation,
    next to the file, or under ``base``. The standard library's names are its own. Imports that are computed at run time
    are not seen; `importable` refuses those of the user's own files.
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
    named = f"{code.what} file {_main(code).path}" if code.module is None else f"{code.what} module {name}"
    try:
        return importlib.import_module(name) if code.module else _run_file(name, _main(code))
    except (Exception, SystemExit, GeneratorExit) as error:
        raise ConfigError(f"{named} fails on import: {in_words(error)}") from error


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
        spec.loader = _Unread(self._code, spec.origin)
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


class _Unread(importlib.abc.InspectLoader, importlib.abc.ResourceLoader):
    """Refuses to run a file, or to hand out what it holds, with ConfigError."""

    def __init__(self, code: UserCode, place: str) -> None:
        self._code = code
        self._place = place

    def exec_module(self, module: ModuleType) -> None:
        self._refuse(module.__name__)

    def get_code(self, fullname: str) -> CodeType:
        self._refuse(fullname)

    def get_source(self, fullname: str) -> str:
        self._refuse(fullname)

    def get_data(self, path: str) -> bytes:
        self._refuse(path)

    def _refuse(self, name: str) -> NoReturn:
        raise ConfigError(
            f"{self._code.what} {self._code.callable} imports {name} from {self._place}, which no import statement of "
            "its files names, so that results would not follow that file's changes; import it by a plain statement"
        )


def _forget_other_versions(code: UserCode) -> None:
    """Modules of these names that were made of other code are loaded anew, and with them those that use them."""
    loaded = {name: sys.modules[name] for name in code.files if name in sys.modules}
    for name, module in loaded.items():
        _refuse_foreign_module(code, name, module)
    if any(_code_of(module) != code.files[name].code for name, module in loaded.items()):
        for name in loaded:
            del sys.modules[name]


def _code_of(module: Any) -> bytes | None:
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return loader.file.code if isinstance(loader, _Loader) else None


def _refuse_foreign_module(code: UserCode, name: str, module: Any) -> None:
    place = getattr(module, "__file__", None)
    if _code_of(module) is not None or name not in code.imported or place is None:
        return
    if Path(place).resolve() != code.imported[name].path.resolve():
        raise ConfigError(
            f"{code.what} {code.callable} imports {name} from {code.imported[name].path}, but {place} is loaded under "
            "that name already; rename the file"
        )

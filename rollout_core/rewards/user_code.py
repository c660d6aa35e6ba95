"""A user's own code as it was read: its files, where they may lie, modules made of them, and the reward function in
one, checked so that what is wrong with it is known before any work.

What was read (by `rollout_core.rewards.source_ids`) is what counts in ids and what is run, however the files change
meanwhile. Imports little, as each process that runs such code starts with it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal, NoReturn

import rollout_core
from rollout_core.base.errors import ConfigError, in_words, near, shown


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
_STANDARD_LIBRARY = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})


def is_installed(place: Path) -> bool:
    """Whether a folder or file is of Python's installation, or of a package that is installed there. A project may
    lie under the interpreter's prefix, as in many containers, and is not installed for that."""
    if {"site-packages", "dist-packages"} & set(place.parts):
        return True
    return any(place.is_relative_to(folder) for folder in _STANDARD_LIBRARY)


def is_users(file: Path, folders: Iterable[str]) -> bool:
    """Whether a file lies in one of these folders and is neither installed nor this project's."""
    place = file.resolve()
    if is_installed(place) or any(place.is_relative_to(PROJECT / name) for name in OWN_PACKAGES):
        return False
    places = (Path(folder).resolve() for folder in folders)
    return any(place.is_relative_to(folder) for folder in places if not is_installed(folder))


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
            "its files names, so that scores would not follow that file's changes; import it by a plain statement"
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


GIVEN_COLUMNS = ("prompts", "completions", "completion_ids")
"""That every sample has, under the names of TRL's reward functions. A parameter of such a name tells TRL's form."""
TRAINER_STATE = "trainer_state"
"""TRL's state of its trainer, which there is none of here: None for a function that must be given it."""


@dataclass(frozen=True)
class CallForm:
    """How a reward function wants to be called, which its signature tells."""

    takes: Literal["sample", "samples", "columns"] = "sample"
    """One sample; the list of them, under ``batch_reward``; or TRL's columns, a list of all samples each."""
    columns: tuple[str, ...] = ()
    """Names of the columns it has parameters for, where it takes columns."""
    required: tuple[str, ...] = ()
    """Those of them that only rows can give."""
    takes_any: bool = False
    """Whether it takes every other column, too (``**kwargs``)."""
    is_async: bool = False

    @property
    def takes_all(self) -> bool:
        """Whether one call is about all samples."""
        return self.takes != "sample"

    @property
    def in_words(self) -> str:
        """For people."""
        if self.takes == "columns":
            columns = [name for name in self.columns if name != TRAINER_STATE]
            names = ", ".join([*columns, *(["every other key of the rows"] if self.takes_any else [])])
            called = f"TRL's form: called with lists over all samples of {names}"
        else:
            called = "called with one sample" if self.takes == "sample" else "called with the list of all samples"
        return f"{called}, awaited" if self.is_async else called

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> CallForm:
        """Inverse of `document`."""
        lists = {name: tuple(document[name]) for name in ("columns", "required")}
        return cls(**{**document, **lists})


def load_function(code: UserCode, kwargs: Mapping[str, Any]) -> tuple[Any, CallForm]:
    """The function that ``code.callable`` names, and how it is called; inside `importable`. Raises ConfigError."""
    name = code.callable
    function = _attribute(load_module(code), name.rpartition(":")[2], name)
    return function, _form_of(function, name, kwargs)


def _form_of(function: Any, name: str, kwargs: Mapping[str, Any]) -> CallForm:
    """Raises ConfigError unless ``function`` can be called in one of the forms, and with ``kwargs``."""
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(
            f"reward {name} is of type {type(function).__name__}; expected a function that returns a number"
        )
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    is_batched = bool(getattr(function, "batch_reward", False))
    try:
        signature = inspect.signature(function)
    except ValueError:
        return CallForm("samples" if is_batched else "sample", is_async=is_async)  # some built-ins have none
    given: dict[str, Any]
    parameters = signature.parameters.values()
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    wanted = {each.name for each in parameters if takes_any or each.default is inspect.Parameter.empty}
    if not is_batched and wanted & set(GIVEN_COLUMNS):
        form = _columns_form(signature, kwargs, is_async)
        called, given = list(form.columns), dict.fromkeys(form.columns)
        arguments: tuple[Any, ...] = ()
    else:
        form = CallForm("samples" if is_batched else "sample", is_async=is_async)
        called, given, arguments = [form.takes], {}, (None,)
    try:
        signature.bind(*arguments, **given, **kwargs)
    except TypeError as error:
        called += [f"{key}={shown(value)}" for key, value in kwargs.items()]
        raise ConfigError(
            f"reward {name} has the signature {signature}, but is called with ({', '.join(called)}): {error}; expected "
            "(sample), (samples) under batch_reward, or TRL's (prompts, completions, **kwargs)"
        ) from None
    return form


def _columns_form(signature: inspect.Signature, kwargs: Mapping[str, Any], is_async: bool) -> CallForm:
    named = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and parameter.name not in kwargs
    ]
    known = {*GIVEN_COLUMNS, TRAINER_STATE}
    columns = [each.name for each in named if each.name != TRAINER_STATE or each.default is each.empty]
    return CallForm(
        takes="columns",
        columns=tuple(columns),
        required=tuple(each.name for each in named if each.default is each.empty and each.name not in known),
        takes_any=any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()),
        is_async=is_async,
    )


def _attribute(module: ModuleType, attribute: str, name: str) -> Any:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            found = [key for key in dir(value) if not key.startswith("_") and callable(getattr(value, key, None))]
            raise ConfigError(f"reward {name}: there is no {part!r}; {near(part, found)}")
        value = getattr(value, part)
    return value

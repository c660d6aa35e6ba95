"""A user's reward function: found, loaded and checked, so that what is wrong with it is known before any work."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rollout_core.errors import ConfigError
from rollout_core.ids import ContentId, hash_bytes


def load_function(name: str, kwargs: Mapping[str, Any], base: Path | None) -> Any:
    """The function that ``module:function`` or ``path/to/file.py:function`` names. Raises ConfigError."""
    source, _, attribute = name.rpartition(":")
    module = _load_file(source, base) if source.endswith(".py") else _load_module(source, base)
    function = _attribute(module, attribute, name)
    _check_callable(function, name, kwargs, bool(getattr(function, "batch_reward", False)))
    return function


def source_file(name: str, base: Path | None) -> Path | None:
    """The file that defines the function ``name``; None for one without, such as a built-in. Raises ConfigError."""
    source = name.rpartition(":")[0]
    return _file(source, base) if source.endswith(".py") else _module_file(source, base)


def imported_sources(path: Path, base: Path | None) -> dict[str, bytes]:
    """Source by module name of what the file imports, and what that imports in turn; nothing of it is run.

    Only the user's own code counts: what lies in a folder of Python's search path outside its installation, beside the
    file, or under ``base``. Imports that are computed at run time are not seen.
    """
    installed = tuple({str(Path(folder).resolve()) for folder in (sys.prefix, sys.base_prefix)})
    places = [path.resolve().parent, (base or Path()).resolve(), *(Path(entry).resolve() for entry in sys.path)]
    folders = [place for place in dict.fromkeys(places) if place.is_dir() and not str(place).startswith(installed)]
    package, root = _package_of(path.resolve())
    folders = list(dict.fromkeys([*folders, root]))
    found: dict[str, bytes] = {}
    waiting = [(path, package)]
    while waiting:
        file, package = waiting.pop()
        for name in _imported_names(file, package):
            for folder in folders:
                stem = folder.joinpath(*name.split("."))
                for candidate, inside in (
                    (stem / "__init__.py", name),
                    (stem.with_suffix(".py"), name.rpartition(".")[0]),
                ):
                    if name not in found and candidate.is_file():
                        found[name] = candidate.read_bytes()
                        waiting.append((candidate, inside))
    return found


def _package_of(file: Path) -> tuple[str, Path]:
    """Dotted name of the package that a file lies in, "" for none, and the folder where that name starts."""
    names: list[str] = []
    folder = file.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names), folder


def _imported_names(file: Path, package: str) -> Iterator[str]:
    """Dotted names that a file of ``package`` imports, and the packages they lie in."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
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


def _file(source: str, base: Path | None) -> Path:
    path = (base or Path()) / source
    if not path.is_file():
        found = {file.name for file in path.parent.glob("*.py")}
        raise ConfigError(f"reward file {path} does not exist; {near(path.name, found)}")
    return path


def _load_file(source: str, base: Path | None) -> ModuleType:
    path = _file(source, base).resolve()
    code = path.read_bytes()
    # Named by its content, so that an edited file is a new module also in a process that has loaded the old one.
    name = f"_rollout_reward_{hash_bytes(str(path).encode() + code)}"
    if name not in sys.modules:
        module = ModuleType(name)
        module.__file__ = str(path)
        sys.modules[name] = module  # where dataclasses look their module up
        try:
            with _importable(path.parent):
                exec(compile(code, path, "exec"), module.__dict__)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise ConfigError(f"reward file {path} fails on import: {type(error).__name__}: {error}") from error
    return sys.modules[name]


_loaded_sources: dict[str, ContentId] = {}
"""Source of each reward module at its import: one that has been edited since is imported anew."""


def _load_module(name: str, base: Path | None) -> ModuleType:
    path = _module_file(name, base)
    source = hash_bytes(path.read_bytes()) if path else None
    try:
        with _importable(base):
            module = importlib.import_module(name)
            if _loaded_sources.get(name, source) != source:
                module = importlib.reload(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"reward module {name} fails on import: {type(error).__name__}: {error}") from error
    if source is not None:
        _loaded_sources[name] = source
    return module


def _module_file(name: str, base: Path | None) -> Path | None:
    """The module's source file; None for one without, such as a built-in."""
    with _importable(base):
        importlib.invalidate_caches()
        try:
            spec = importlib.util.find_spec(name)
        except (Exception, SystemExit) as error:  # finding a dotted name imports the packages before the last dot
            raise ConfigError(f"reward module {name} cannot be found: {error}; {_REMEDY}") from error
    if spec is None:
        raise ConfigError(f"reward module {name} cannot be found; {_REMEDY}")
    return Path(spec.origin) if spec.has_location and spec.origin else None


_REMEDY = "install it, run from the folder that holds it, or name its file: path/to/file.py:function"


@contextmanager
def _importable(base: Path | None) -> Iterator[None]:
    """Modules in ``base`` can be imported, as they could if Python had been started there."""
    folder = str((base or Path()).resolve())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _attribute(module: ModuleType, attribute: str, name: str) -> Any:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            found = [key for key in dir(value) if not key.startswith("_") and callable(getattr(value, key, None))]
            raise ConfigError(f"reward {name}: there is no {part!r}; {near(part, found)}")
        value = getattr(value, part)
    return value


def _check_callable(function: Any, name: str, kwargs: Mapping[str, Any], batched: bool) -> None:
    """Raises ConfigError unless ``function`` can be called with a sample and ``kwargs``."""
    if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if inspect.iscoroutinefunction(function) else f"of type {type(function).__name__}"
        raise ConfigError(f"reward {name} is {kind}; expected a function that returns a number")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some built-ins do not tell
    try:
        signature.bind(None, **kwargs)
    except TypeError as error:
        argument = "samples" if batched else "sample"
        call = ", ".join([argument, *(f"{key}={shown(value)}" for key, value in kwargs.items())])
        raise ConfigError(
            f"reward {name} has the signature {signature}, but is called with ({call}): {error}"
        ) from None


def near(wanted: str, found: Any) -> str:
    """A hint at the nearest of what was found."""
    close = difflib.get_close_matches(wanted, list(found), n=1)
    return f"did you mean {close[0]!r}?" if close else f"found: {', '.join(sorted(found)) or 'nothing'}"


def shown(value: Any) -> str:
    """The value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

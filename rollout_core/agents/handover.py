"""What a runner's process works with, as bytes that a fresh interpreter reads: the agent, the runner, its tracer and
hooks, by the names under which they can be imported.

A fresh interpreter, and not a fork of the calling process: a fork shares that one's open sockets, so that runners would
read each other's answers, and has none of its threads, so that a pool that was used once hangs. An agent that is a
global of a module is made anew by importing the module, with clients of its own, and gets those of its attributes that
can be copied; any other is pickled with what it holds. A process that is started later, in place of one that died,
imports files as they are then: they must be as they were when the run began. Both sides are processes of one program,
by a pipe between them: nothing of it is stored.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import json
import pickle
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from rollout_core.agents.lit_agent import FunctionalLitAgent, LitAgent
from rollout_core.base.errors import ConfigError, in_words

_MAIN = "__main__"
_PREPARED = ("sys_path", "sys_argv", "orig_dir", "dir", "init_main_from_name", "init_main_from_path")
"""Of what `multiprocessing` tells a process that it spawns: where modules are found, and the script."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DEEPEST = 8
"""Attributes of attributes that an error names."""
WAY_OUT = "or have the runners in threads: Trainer(strategy='shm')"

_is_importing = False
"""In a runner's process, while it imports the script and modules."""


class CannotBeImported(ConfigError):
    """A fresh interpreter cannot have what the runners work with."""


def packed(work: Any) -> bytes:
    """``work`` for `unpacked` in another process. Raises CannotBeImported, which names what stands in the way."""
    try:
        body = _pickled(work)
    except CannotBeImported:
        raise
    except Exception as error:  # objects refuse to be pickled by any kind of error
        raise CannotBeImported(_culprit(work)) from error
    prepared = spawn.get_preparation_data("rollout-runner")
    needs_script = _MAIN.encode() in body
    if needs_script:
        _check_script()
    kept = {key: prepared[key] for key in _PREPARED if key in prepared and (needs_script or "init" not in key)}
    head = {"prepared": kept, "digests": {file: _digest(file) for file in _own_files()}}
    return json.dumps(head).encode() + b"\n" + body


def unpacked(data: bytes) -> Any:
    """Inverse of `packed`, once in a process: imports modules, and the script where something is defined there. Raises
    CannotBeImported."""
    head, _, body = data.partition(b"\n")
    prepared, digests = json.loads(head).values()
    try:
        with _importing():
            spawn.prepare(prepared)
            # Of the program that has started this process, over a pipe that nobody else holds; never of what is stored.
            work = pickle.loads(body)  # noqa: S301
        if changed := [file for file in _own_files() if file in digests and digests[file] != _digest(file)]:
            raise CannotBeImported(
                f"{', '.join(sorted(changed))} changed since the run began, and a runner that is started now would run "
                "other code than the rest; start the run again"
            )
        return work
    except CannotBeImported:
        raise
    except Exception as error:
        raise CannotBeImported(
            f"a runner's process cannot import what it works with: {in_words(error)}. It imports modules by name, and "
            f"a script without what stands under `if __name__ == {_MAIN!r}:`"
        ) from error


def check_not_importing() -> None:
    """Raises CannotBeImported where a runner's process has come to this place while it imported the agent's module."""
    if _is_importing:
        raise CannotBeImported(
            "the script or module of the agent starts a run wherever it is imported, as each runner's process does; "
            f"put what starts it into a function, or under `if __name__ == {_MAIN!r}:`, {WAY_OUT}"
        )


def _own_files() -> set[str]:
    """Of the modules that this process has imported, the files that are no installed package's."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    package = str(Path(__file__).resolve().parents[1])
    found = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {
        file
        for file in found
        if isinstance(file, str) and file.endswith(".py") and not file.startswith((*installed, package))
    }


def _digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return "missing"


@contextmanager
def _importing() -> Iterator[None]:
    global _is_importing
    _is_importing = True
    try:
        yield
    finally:
        _is_importing = False


class _Pickler(pickle.Pickler):
    """``by_name``: agents that hold something are imported too, where a module has them."""

    def __init__(self, file: io.BytesIO, *, by_name: bool) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._by_name = by_name

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == _MAIN:
            _check_name(obj.__qualname__.partition(".")[0])
        if not isinstance(obj, LitAgent):
            return NotImplemented
        if isinstance(obj, FunctionalLitAgent) or self._by_name:
            if (place := _place(obj)) is not None:
                return _imported, (*place, None if isinstance(obj, FunctionalLitAgent) else _copied(obj))
            if isinstance(obj, FunctionalLitAgent):
                name = f"{obj.__module__}.{getattr(obj, '__qualname__', '?')}"
                raise CannotBeImported(
                    f"agent {name} is no global of its module, so a fresh process cannot import it; define it at the "
                    f"module's top level, {WAY_OUT}"
                )
        return NotImplemented


def _pickled(work: Any) -> bytes:
    try:
        return _dumped(work, by_name=False)
    except CannotBeImported:
        raise
    except Exception:  # noqa: BLE001 - see `packed`
        return _dumped(work, by_name=True)


def _dumped(value: Any, *, by_name: bool) -> bytes:
    file = io.BytesIO()
    _Pickler(file, by_name=by_name).dump(value)
    return file.getvalue()


def _place(agent: LitAgent[Any]) -> tuple[str, str] | None:
    """The module and the name in it by which ``agent`` is imported; None: there is none. The script comes last, for not
    every script can be imported."""
    first, of_script = [agent.__module__, type(agent).__module__], _names_of_script()
    names = sys.modules.keys() - {"__mp_main__"}  # the script's other name
    for name in sorted(names, key=lambda name: (name == _MAIN, name not in first)):
        module = sys.modules[name]
        for key, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
            if value is agent and (name != _MAIN or of_script is None or key in of_script):
                return name, key
    return None


def _copied(agent: LitAgent[Any]) -> dict[str, Any]:
    """Those of its attributes that can be pickled: the program may have set them since it imported the agent."""
    return {name: value for name, value in vars(agent).items() if _refusal(value) is None}


def _imported(module: str, name: str, attributes: dict[str, Any] | None) -> Any:
    __import__(module)
    try:
        found = getattr(sys.modules[module], name)
    except AttributeError:
        raise CannotBeImported(
            f"module {module} has no {name!r} when a runner's process imports it; define the agent at its top level, "
            f"{WAY_OUT}"
        ) from None
    vars(found).update(attributes or {})
    return found


def _check_name(name: str) -> None:
    """Raises CannotBeImported for what the script defines only where it is run."""
    names = _names_of_script()
    if names is not None and name not in names:
        raise CannotBeImported(
            f"the script defines {name} only under `if __name__ == {_MAIN!r}:`, which a runner's process leaves out; "
            f"define it above, {WAY_OUT}"
        )


@functools.cache
def _source_of_script() -> ast.Module | None:
    """None where no other process can read it: an interactive session."""
    try:
        return ast.parse(inspect.getsource(sys.modules[_MAIN]))
    except (OSError, TypeError):
        return None


@functools.cache
def _names_of_script() -> frozenset[str] | None:
    """What the script binds at its top level outside of the part that is run only; None: that cannot be known."""
    source = _source_of_script()
    if source is None:
        return None
    kept = [node for node in source.body if not (isinstance(node, ast.If) and _is_guard(node.test))]
    names = frozenset(name for node in kept for name in _bound(node))
    return None if "*" in names else names


def _bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement binds where it stands; ``*`` for those of a module that nobody lists."""
    inside = [node] if isinstance(node, _SCOPES) else ast.walk(node)
    for inner in inside:
        if isinstance(inner, _SCOPES):
            yield inner.name
        elif isinstance(inner, ast.alias):
            yield inner.asname or inner.name.partition(".")[0]
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id


def _check_script() -> None:
    """Raises CannotBeImported where importing the script anew is impossible, or would do its work once more."""
    main, source = sys.modules[_MAIN], _source_of_script()
    if source is None:
        raise CannotBeImported(
            "the agent, or what it is made of, is defined in an interactive session, which no other process imports; "
            f"put it into a module, {WAY_OUT}"
        )
    if not any(isinstance(node, ast.If) and _is_guard(node.test) for node in source.body):
        raise CannotBeImported(
            f"the agent is defined in {Path(getattr(main, '__file__', None) or _MAIN).name}, which each runner's "
            "process imports, and there all of it would run once more; put what starts the run under "
            f"`if __name__ == {_MAIN!r}:`, {WAY_OUT}"
        )


def _is_guard(test: ast.expr) -> bool:
    nodes = list(ast.walk(test))
    named = any(isinstance(node, ast.Name) and node.id == "__name__" for node in nodes)
    return named and any(isinstance(node, ast.Constant) and node.value == _MAIN for node in nodes)


def _culprit(work: Any) -> str:
    """What of ``work`` cannot be pickled, and why."""
    path: list[str] = []
    while True:
        error = _refusal(work)
        parts = [("", part) for part in work.args] if isinstance(work, functools.partial) else _attributes(work)
        name, part = next(((name, part) for name, part in parts if _refusal(part) is not None), ("", None))
        if part is None or len(path) > _DEEPEST:
            break
        path += [name] if name else []
        work = part
    what = f"{'.'.join(path)} ({type(work).__name__})" if path else f"a {type(work).__name__}"
    return (
        f"{what} cannot be handed to a runner's process: {error}. Define functions and classes at a module's top "
        "level, and an agent that holds clients, locks or files as a module's global, so that each process makes its "
        f"own; {WAY_OUT}"
    )


def _attributes(value: Any) -> list[tuple[str, Any]]:
    return [] if isinstance(value, type | FunctionType) else list(getattr(value, "__dict__", {}).items())


def _refusal(value: Any) -> str | None:
    try:
        _pickled(value)
    except Exception as error:  # noqa: BLE001 - see `packed`
        return in_words(error)
    return None

"""The process that a Python plugin is imported in, one for it alone: what runs there is `handle`, by `host`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, Fatal, RolloutError, in_words
from rollout_core.base.own_packages import is_installed
from rollout_core.plugins.confinement import confine

_answer: Callable[[Any], Any] | None = None
_answer_bytes = 0


def handle(request: dict[str, Any], report: Callable[[int], None]) -> Any:
    """Import the plugin by the first request; answer each that follows by what the kind's adapter makes of it."""
    if "start" in request:
        _start(**request["start"])
        return {}
    assert _answer is not None, "the caller starts it first"
    try:
        result = _answer(request["payload"])
        size = len(json.dumps(result))
    except RolloutError:
        raise
    except BaseException as error:  # other people's code
        raise Fatal(f"failed: {in_words(error)}") from error
    if size > _answer_bytes:
        raise Fatal(f"answered with {size} bytes; {_answer_bytes} are allowed (limits.answer_bytes)")
    return {"result": result}


def _start(
    *,
    name: str,
    folder: str,
    package: str | None,
    entry: dict[str, str],
    config: dict[str, Any],
    adapter: str,
    network: bool,
    gpu: bool,
    answer_bytes: int,
) -> None:
    global _answer, _answer_bytes
    made = load(name=name, folder=folder, package=package, entry=entry, config=config, network=network, gpu=gpu)
    _answer_bytes = answer_bytes
    module, _, attribute = adapter.partition(":")
    _answer = getattr(importlib.import_module(module), attribute)(name, made)


def load(
    *,
    name: str,
    folder: str,
    package: str | None,
    entry: dict[str, str],
    config: dict[str, Any],
    network: bool,
    gpu: bool,
) -> Any:
    """What the plugin's factory makes of its configuration, in this process, which is the plugin's from here on and has
    one thread. Raises ConfigError."""
    confine(name, network=network, gpu=gpu)
    os.chdir(folder)
    # What it imports is of its own folder, which its id has, or installed; a file next to the run would be neither.
    installed = [place for place in sys.path if is_installed(Path(place).resolve())]
    sys.path[:] = [str(Path(folder).parent) if package else folder, *installed]
    sys.dont_write_bytecode = True
    try:
        factory: Any = importlib.import_module(entry["module"])
        for part in entry["factory"].split("."):
            factory = getattr(factory, part)
        return factory(config)
    except (Exception, SystemExit, GeneratorExit) as error:
        raise ConfigError(f"plugin {name}: {entry['module']}:{entry['factory']} fails: {in_words(error)}") from error

"""The interpreters that have other harnesses."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from rollout_core.base.errors import ConfigError


def python_of(given: str | None, base: Path, *, kind: str, package: str, install: str) -> str | None:
    """The interpreter that a suite names, relative to ``base``; None for the one that runs this.

    Raises ConfigError, which says how to ``install`` the package, where there is none.
    """
    if given is None:
        if find_spec(package) is None:
            raise ConfigError(
                f"kind = {kind!r} needs {package}, which is not installed; {install}, or give python = the interpreter "
                "of an environment that has it"
            )
        return None
    # A name without a folder is looked up in PATH.
    python = given if "/" not in given else str(base.resolve() / given)
    if shutil.which(python) is None:
        raise ConfigError(f"python = {given!r} is no interpreter; expected the path of one that has {package}")
    return python

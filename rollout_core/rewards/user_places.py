"""Which files are the user's own. Imports little, as each process that runs a user's code starts with it."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import rollout_core

PROJECT = Path(rollout_core.__file__).resolve().parents[1]
OWN_PACKAGES = ("rollout_core", "blocks", "tasks", "flows", "deployments")
"""Packages of this project, which are no user's wherever they are installed from."""
_STANDARD_LIBRARY = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})


def is_installed(place: Path) -> bool:
    """Whether a folder or file is of Python's installation, or of a package that is installed there. A project may well
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

"""The packages installed with ``rollout_core``, distinguished from others of the same names; and what is installed,
distinguished from a user's own.

``tasks`` and ``flows`` are names that users' projects have too; Python imports whichever comes first on its path.
"""

from __future__ import annotations

import sysconfig
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rollout_core.base.errors import ConfigError

ROOT = Path(__file__).absolute().parents[2]
"""Not resolved: installed files may be links, each to a place of its own."""
_STANDARD_LIBRARY = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})


def is_installed(place: Path) -> bool:
    """Whether a folder or file is of Python's installation, or of a package that is installed there. A project may
    lie under the interpreter's prefix, as in many containers, and is not installed for that."""
    if {"site-packages", "dist-packages"} & set(place.parts):
        return True
    return any(place.is_relative_to(folder) for folder in _STANDARD_LIBRARY)


def require_own(*names: str) -> None:
    """Raises ConfigError where ``import name`` finds, or has found, another package than the one of this project."""
    for name in names:
        spec, own = find_spec(name), ROOT / name / "__init__.py"
        if spec is None:
            raise ConfigError(
                f"there is no package {name!r}; it belongs next to rollout_core in {ROOT}: install it again"
            )
        if not _is_file(spec.origin, own):
            found = next(iter(spec.submodule_search_locations or ()), spec.origin)
            raise ConfigError(
                f"`import {name}` finds {found}, which is not rollout's package of that name, {own.parent}. Rename "
                "it, or take its folder off the path (PYTHONPATH, or the script's own: `python -P` leaves it out)"
            )


def _is_file(origin: str | None, own: Path) -> bool:
    return origin is not None and own.exists() and Path(origin).exists() and own.samefile(origin)


def run_command() -> None:
    """Where the `rollout` script of an editable installation of an earlier version begins; for one release."""
    import_module("rollout_core.__main__").main()

"""The packages installed beside ``rollout_core``, distinguished from others of the same names.

``tasks`` and ``flows`` are names that users' projects have too; Python imports whichever comes first on its path.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rollout_core.base.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def require_own(*names: str) -> None:
    """Raises ConfigError where ``import name`` finds, or has found, another package than the one of this project."""
    for name in names:
        found = _location(name)
        if found is None:
            raise ConfigError(
                f"there is no package {name!r}; it belongs beside rollout_core in {ROOT}: install it again"
            )
        if found != (ROOT / name).resolve():
            raise ConfigError(
                f"`import {name}` finds {found}, which is not rollout's package of that name, {ROOT / name}. Rename "
                "it, or take its folder off the path (PYTHONPATH, or the script's own: `python -P` leaves it out)"
            )


def _location(name: str) -> Path | None:
    """Folder of a top-level package, or file of a module."""
    spec = find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin or "").resolve()


def run_command() -> None:
    """Entry point of the `rollout` command, which is above this package and so imported by its name."""
    try:
        require_own("flows", "tasks", "blocks")
    except ConfigError as error:
        sys.stderr.write(f"rollout: {error}\n")
        sys.exit(2)
    import_module("flows.cli").main()

"""Entry point of the `rollout` command, which nothing imports.

The command itself is in a package whose name others may have, too, and so is imported once that is known to be ours.
"""

from __future__ import annotations

import sys
from importlib import import_module

from rollout_core.base.collector import collect_seldom
from rollout_core.base.errors import ConfigError
from rollout_core.base.own_packages import require_own


def main() -> None:
    """Run the command, or say which package is in its way."""
    collect_seldom()
    try:
        require_own("deployments", "flows", "tasks", "blocks")
    except ConfigError as error:
        sys.stderr.write(f"rollout: {error}\n")
        sys.exit(2)
    import_module("deployments.cli").main()


if __name__ == "__main__":
    main()

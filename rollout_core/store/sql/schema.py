"""The versions of the schema, which are Alembic's in ``migrations``: those known, and the way to the present one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_core.base.errors import ConfigError

if TYPE_CHECKING:
    from sqlalchemy import Connection

REVISIONS = ("0001", "0002")
"""Every version there has been, the present one last."""

_alembic_lock = threading.Lock()  # Alembic keeps the upgrade under way in a global


def known_revision(found: Sequence[str], where: str) -> str:
    """The version that a database of ours records. Raises ConfigError if this program does not know it."""
    if len(found) == 1 and found[0] in REVISIONS:
        return found[0]
    raise ConfigError(
        f"{where} has schema revision {', '.join(found) or 'none'}, this version of rollout knows {REVISIONS[-1]}; "
        "it was written by a newer version, use that one"
    )


def upgrade(connection: Connection) -> None:
    """Bring the database to the present version, in the transaction under way. The caller locks and commits."""
    # Imported here because only a database that is not at the present version needs it.
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    with _alembic_lock:
        command.upgrade(config, "head")

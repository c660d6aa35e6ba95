"""The LightningStore's database as a Prefect block."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from rollout_core.store import SqlLightningStore


class RolloutDatabase(Block):
    """Where rollouts, attempts, spans and resources live."""

    _block_type_name = "Rollout Database"
    _block_type_slug = "rollout-database"

    url: SecretStr = Field(
        default=SecretStr("sqlite:///./data/rollout.db"),
        description="sqlite:///file or postgresql://user:password@host/database. A secret: it may hold a password.",
    )

    def store(self) -> SqlLightningStore:
        """A store over this database; close it after use."""
        return SqlLightningStore.from_url(self.url.get_secret_value())

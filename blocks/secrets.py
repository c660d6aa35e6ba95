"""Secrets that the Prefect server keeps: one of its own blocks each, or several in a block of ours."""

from __future__ import annotations

import json
from typing import Any, cast

import httpx
from prefect.blocks.core import Block
from prefect.blocks.system import Secret
from prefect.types import SecretDict
from pydantic import Field

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.secret_sources import BLOCK_PREFIX, BLOCKS, add_plugin_sources, add_source, block_name
from rollout_core.plugins.secret_plugins import plugin_source


class RolloutSecrets(Block):
    """Secrets by name, such as those of one team. ``ROLLOUT_SECRETS_FROM`` names the block, and ``ROLLOUT_SECRETS``
    what of it may be read."""

    _block_type_name = "Rollout Secrets"
    _block_type_slug = "rollout-secrets"

    secrets: SecretDict = Field(
        default_factory=lambda: SecretDict({}),
        description='Values by NAME, as configurations have it: {"SERVER_KEY": "sk-..."}. Never logged.',
    )

    def value(self, name: str) -> str | None:
        """The secret of that name; None where the block has none. Raises ConfigError for what is no text."""
        found = self.secrets.get_secret_value().get(name)
        if found is not None and not isinstance(found, str):
            raise ConfigError(f"secret {name!r} of a block {self._block_type_slug} is no text")
        return found


def _in_block(name: str, address: str) -> str | None:
    """That of a block `RolloutSecrets`, which has to be there."""
    slug, _, block = address.removeprefix(BLOCK_PREFIX).partition("/")
    if slug != RolloutSecrets._block_type_slug or not block:
        raise ConfigError(f"{address} is no block of secrets; expected {BLOCK_PREFIX}rollout-secrets/NAME")
    try:
        return cast(RolloutSecrets, RolloutSecrets.load(block, _sync=True)).value(name)  # pyright: ignore[reportCallIssue]
    except ValueError as error:
        if "Unable to find block document" in str(error):
            raise ConfigError(f"{address} names no block of the Prefect server; save one of that name") from None
        raise ConfigError(f"{address} cannot be read as a block of secrets") from None
    except httpx.HTTPError as error:
        raise Recoverable(f"the Prefect server cannot be asked for secrets ({type(error).__name__})") from None


def _secret_block(name: str, secret_id: str) -> str | None:
    """The secret that the Prefect server keeps for this name."""
    try:
        value = cast(Secret[Any], Secret.load(block_name(secret_id), _sync=True)).get()  # pyright: ignore[reportCallIssue]
    except ValueError as error:
        if "Unable to find block document" in str(error):
            return None
        raise ConfigError(f"secret {name!r}: the Prefect server's block {block_name(secret_id)} is no secret") from None
    except httpx.HTTPError as error:
        raise Recoverable(f"the Prefect server cannot be asked for secrets ({type(error).__name__})") from None
    return value if isinstance(value, str) else json.dumps(value)


add_source("prefect", _secret_block)
add_source(BLOCKS, _in_block)
add_plugin_sources(plugin_source)

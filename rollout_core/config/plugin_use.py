"""How a configuration names a plugin, of whatever kind."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from rollout_core.config.described import Described


class PluginUse(Described):
    """A plugin, as a configuration names it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["plugin"]
    name: str = Field(min_length=1)
    """As the plugin's manifest has it. It is looked for in ``path``, the folders of ``--plugin``, ``./plugins``, the
    user's folder of plugins, and installed packages."""
    path: str | None = Field(default=None, min_length=1)
    """The plugin's folder, relative to the working folder. Default: found by its name."""
    config: dict[str, Any] = Field(default={})
    """The plugin's own configuration, by the JSON Schema that it has for it."""

    @property
    def address(self) -> str:
        """Which plugin is meant, as the configuration says it."""
        return self.name if self.path is None else f"{self.path}:{self.name}"

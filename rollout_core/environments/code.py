"""An environment's code: read once, with what of the user's own it imports, known by its content, and run as it was
read, in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config.base import identity
from rollout_core.config.environments import EnvironmentConfig, PluginEnvironment, PythonEnvironment
from rollout_core.config.tools import PluginTools
from rollout_core.environments.adapters import find_adapter
from rollout_core.environments.tools.mcp import Served, ask_servers
from rollout_core.objects import ObjectStore
from rollout_core.objects.plugin_files import file_plugin
from rollout_core.objects.records import EnvironmentSource
from rollout_core.objects.trees import hash_file
from rollout_core.plugins.discovery import find_plugin
from rollout_core.plugins.identity import PluginCode
from rollout_core.plugins.manifest import check_config
from rollout_core.rewards.source_ids import file_code
from rollout_core.rewards.user_code import UserCode, read_code


@dataclass(frozen=True)
class EnvironmentCode:
    """What ``path/to/env.py:Env`` or ``package.module:Env`` names, an adapter of ours, or a plugin."""

    code: UserCode | PluginCode
    adapted: Mapping[str, Any] | None = None
    """What stands for an adapter or a plugin in ids: versions or files, and settings. None: it is a user's own."""
    name: str = ""
    """Of what an adapter or a plugin plays, for people."""
    served: Served = field(default_factory=dict)
    """What the MCP servers of its tools have."""
    tool_plugins: Mapping[str, PluginCode] = field(default_factory=dict)
    """Those that give the tools of the settings, by name."""

    @classmethod
    def of(cls, settings: EnvironmentConfig, base: Path, served: Served | None = None) -> EnvironmentCode:
        """Of any environment. Raises ConfigError where it is not there, or a package, plugin or server that it needs is
        not. ``served``: what the MCP servers of its tools have; None: they are asked."""
        tools = [spec for spec in settings.tools if isinstance(spec, PluginTools)]
        plugins = {spec.name: find_plugin(spec.name, base, spec.path, kind="tool-harness") for spec in tools}
        for spec in tools:
            check_config(plugins[spec.name].manifest, spec.config, plugins[spec.name].files)
        found = cls._of(settings, base)
        served = ask_servers(settings.tools, base) if served is None else served
        return replace(found, served=served, tool_plugins=plugins)

    @classmethod
    def _of(cls, settings: EnvironmentConfig, base: Path) -> EnvironmentCode:
        if isinstance(settings, PythonEnvironment):
            return cls.read(settings.path, base)
        if isinstance(settings, PluginEnvironment):
            plugin = find_plugin(settings.name, base, settings.path, kind="env-harness")
            return cls.of_plugin(plugin, settings)
        found = find_adapter(settings, base)
        return cls(found.code, found.identity, settings.address)

    @classmethod
    def read(cls, path: str, base: Path) -> EnvironmentCode:
        """Read the files, and run none. Raises ConfigError where there are none."""
        return cls(read_code(path, base, what="environment"))

    @classmethod
    def of_plugin(cls, plugin: PluginCode, settings: PluginEnvironment) -> EnvironmentCode:
        """Of a plugin with its configuration. Raises ConfigError where its schema refuses that."""
        check_config(plugin.manifest, settings.config, plugin.files)
        known = {"kind": settings.kind, "name": settings.name, "config": settings.config, "plugin": plugin.id}
        return cls(plugin, identity(known), settings.address)

    @property
    def path(self) -> str:
        """As it was named."""
        return self.name if self.name or isinstance(self.code, PluginCode) else self.code.callable

    def id(self, settings: EnvironmentConfig, base: Path) -> ContentId:
        """Content of the code, of the name in it, of files and plugins of tools, and what MCP servers have; where they
        lie does not count. Raises ConfigError where one cannot be read."""
        of_tools: dict[str, Any] = {}
        if settings.files:
            of_tools["files"] = [_content_of(base / path) for path in settings.files]
        if self.served:
            of_tools["served"] = self.served
        if self.tool_plugins:
            of_tools["plugins"] = {name: plugin.id for name, plugin in self.tool_plugins.items()}
        if self.adapted is not None:
            return content_id("adapted-environment/1", {**self.adapted, **of_tools})
        assert isinstance(self.code, UserCode), "a plugin has settings that stand for it"
        return content_id("environment/1", {"name": self.path.rpartition(":")[2], **self.code.identity(), **of_tools})

    def file(self, objects: ObjectStore, settings: EnvironmentConfig, base: Path) -> EnvironmentSource:
        """File the code, and note where it was read."""
        content = self.id(settings, base)
        if isinstance(self.code, UserCode):
            filed = file_code(objects, content, self.code, "environment")
        else:
            filed = file_plugin(objects, content, self.code.name, self.code, "environment")
        plugins = {
            name: file_plugin(objects, content, name, plugin, "environment")
            for name, plugin in self.tool_plugins.items()
        }
        adapted = None if self.adapted is None else dict(self.adapted)
        served = {name: dict(found) for name, found in self.served.items()} or None
        return EnvironmentSource(
            id=content, path=self.path, code=filed, adapted=adapted, served=served, tool_plugins=plugins
        )

    @classmethod
    def filed(cls, objects: ObjectStore, source: EnvironmentSource) -> EnvironmentCode:
        """Inverse of `file`."""
        document = json.loads(objects.get_bytes(source.code))
        code = PluginCode.from_document(document) if "plugin" in document else UserCode.from_document(document)
        plugins = {
            name: PluginCode.from_document(json.loads(objects.get_bytes(blob)))
            for name, blob in source.tool_plugins.items()
        }
        return cls(code, source.adapted, "" if source.adapted is None else source.path, source.served or {}, plugins)

    def check(self, source: EnvironmentSource, settings: EnvironmentConfig, base: Path) -> None:
        """Raise ConfigError where a file that tools read, or an MCP server, is not what it was when the code was
        filed."""
        for name, found in ask_servers(settings.tools, base).items():
            if found != self.served.get(name):
                raise ConfigError(
                    f"the tools of MCP server {name}, or the files of its command, have changed since the run began, "
                    "or differ between machines; start the run again"
                )
        if self.id(settings, base) != source.id:
            raise ConfigError(
                f"what the tools of environment {self.path} read ({', '.join(settings.files)}) has changed since the "
                "run began, or differs between machines; start the run again"
            )


def _content_of(path: Path) -> ContentId:
    try:
        return hash_file(path).content_id
    except OSError as error:
        raise ConfigError(f"file {path} of a tool cannot be read: {error.strerror}") from error

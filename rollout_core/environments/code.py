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
from rollout_core.config.environments import EnvironmentConfig, PythonEnvironment
from rollout_core.environments.adapters import find_adapter
from rollout_core.environments.tools.mcp import Served, ask_servers
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import EnvironmentSource
from rollout_core.objects.trees import hash_file
from rollout_core.rewards.source_ids import file_code
from rollout_core.rewards.user_code import UserCode, read_code


@dataclass(frozen=True)
class EnvironmentCode:
    """What ``path/to/env.py:Env`` or ``package.module:Env`` names, or an adapter of ours."""

    code: UserCode
    adapted: Mapping[str, Any] | None = None
    """What stands for an adapter in ids, in place of its code: versions and settings. None: it is a user's own."""
    name: str = ""
    """Of what an adapter plays, for people."""
    served: Served = field(default_factory=dict)
    """What the MCP servers of its tools have."""

    @classmethod
    def of(cls, settings: EnvironmentConfig, base: Path, served: Served | None = None) -> EnvironmentCode:
        """Of any environment. Raises ConfigError where it is not there, or a package or server that it needs is not.
        ``served``: what the MCP servers of its tools have; None: they are asked."""
        if isinstance(settings, PythonEnvironment):
            found = cls.read(settings.path, base)
        else:
            adapter = find_adapter(settings, base)
            found = cls(adapter.code, adapter.identity, settings.address)
        return replace(found, served=ask_servers(settings.tools, base) if served is None else served)

    @classmethod
    def read(cls, path: str, base: Path) -> EnvironmentCode:
        """Read the files, and run none. Raises ConfigError where there are none."""
        return cls(read_code(path, base, what="environment"))

    @property
    def path(self) -> str:
        """As it was named."""
        return self.name or self.code.callable

    def id(self, settings: EnvironmentConfig, base: Path) -> ContentId:
        """Content of the code, of the name in it, of files that tools read, and what MCP servers have; where they lie
        does not count. Raises ConfigError where one cannot be read."""
        files: dict[str, Any] = {}
        if settings.files:
            files["files"] = [_content_of(base / path) for path in settings.files]
        if self.served:
            files["served"] = self.served
        if self.adapted is not None:
            return content_id("adapted-environment/1", {**self.adapted, **files})
        return content_id("environment/1", {"name": self.path.rpartition(":")[2], **self.code.identity(), **files})

    def file(self, objects: ObjectStore, settings: EnvironmentConfig, base: Path) -> EnvironmentSource:
        """File the code, and note where it was read."""
        content = self.id(settings, base)
        filed = file_code(objects, content, self.code, "environment")
        adapted = None if self.adapted is None else dict(self.adapted)
        served = {name: dict(found) for name, found in self.served.items()} or None
        return EnvironmentSource(id=content, path=self.path, code=filed, adapted=adapted, served=served)

    @classmethod
    def filed(cls, objects: ObjectStore, source: EnvironmentSource) -> EnvironmentCode:
        """Inverse of `file`."""
        code = UserCode.from_document(json.loads(objects.get_bytes(source.code)))
        return cls(code, source.adapted, "" if source.adapted is None else source.path, source.served or {})

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

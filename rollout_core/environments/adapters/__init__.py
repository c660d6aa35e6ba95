"""Environments of other projects, played as if they were classes of a user's own: a file each for what runs in the
process of the environment, and here what a run knows of them without importing any.

An adapter is a class of the protocol (`rollout_core.environments.protocol`). Its settings are the keyword arguments of
the class. What stands for it in ids is its name, its version, the versions of the packages that it plays, and those
settings: no file of ours, so that moving code changes no key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError
from rollout_core.config.base import identity
from rollout_core.config.environments import EnvironmentConfig, OpenEnvEnvironment
from rollout_core.environments.adapters.openenv import server_identity
from rollout_core.rewards.user_code import UserCode


@dataclass(frozen=True)
class _Adapter:
    """How a kind of environment is played."""

    callable: str
    """In this folder."""
    version: int
    """Raised when the same settings and packages give other episodes, or other rows."""
    package: str | None
    """Distribution that is played; it is an extra of this project, too. None: a server plays."""


_ADAPTERS: Mapping[str, _Adapter] = {
    "reasoning_gym": _Adapter("reasoning_gym:ReasoningGym", 1, "reasoning-gym"),
    "textarena": _Adapter("textarena:TextArena", 1, "textarena"),
    "openenv": _Adapter("openenv:OpenEnv", 1, None),
}


@dataclass(frozen=True)
class Found:
    """An adapter that can be played here."""

    code: UserCode
    identity: Mapping[str, Any]


def find_adapter(settings: EnvironmentConfig, base: Path) -> Found:
    """The adapter of a table ``environment`` of another kind than Python. Raises ConfigError where a package that it
    needs is not installed, or a server does not answer."""
    kind = str(settings.kind)  # pyright: ignore[reportAttributeAccessIssue]
    adapter = _ADAPTERS[kind]
    given = identity(settings.arguments)
    if isinstance(settings, OpenEnvEnvironment):
        played = {"server": server_identity(given.pop("url"))}
    else:
        played = {"packages": {adapter.package: _installed(kind, str(adapter.package))}}
    code = UserCode(f"{__name__}.{adapter.callable}", None, {}, (str(base.resolve()),), "environment")
    return Found(code, {"kind": kind, "version": adapter.version, **played, "settings": given})


def _installed(kind: str, package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise ConfigError(
            f'kind = "{kind}" needs the package {package}, which is not installed: '
            f"pip install '{DISTRIBUTION}[{package}]'"
        ) from None

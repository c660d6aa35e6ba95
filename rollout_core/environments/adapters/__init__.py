"""Environments of other projects, played as if they were classes of a user's own: a file each for what runs in the
process of the environment, and here what a run knows of them without importing any.

An adapter is a class of the protocol (`rollout_core.environments.protocol`). Its settings are the keyword arguments of
the class. What stands for it in ids is its name, its version, the versions of the packages that it plays, and those
settings: no file of ours, so that moving code changes no key.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.isolation.child import Child, Ended
from rollout_core.config.base import identity
from rollout_core.config.environments import EnvironmentConfig, OpenEnvEnvironment, VerifiersEnvironment
from rollout_core.environments.adapters.openenv import server_identity
from rollout_core.evaluation.harnesses import python_of
from rollout_core.rewards.user_code import UserCode

log = logging.getLogger(__name__)

VERIFIERS = "rollout_core.environments.verifiers_process"


@dataclass(frozen=True)
class _Adapter:
    """How a kind of environment is played."""

    callable: str
    """In this folder; by its whole name where other interpreters import it, which lack what this folder imports."""
    version: int
    """Raised when the same settings and packages give other episodes, or other rows."""
    package: str | None
    """Distribution that is played; it is an extra of this project, too. None: a server has it, or another
    interpreter."""


_ADAPTERS: Mapping[str, _Adapter] = {
    "reasoning_gym": _Adapter("reasoning_gym:ReasoningGym", 1, "reasoning-gym"),
    "textarena": _Adapter("textarena:TextArena", 1, "textarena"),
    "openenv": _Adapter("openenv:OpenEnv", 1, None),
    "verifiers": _Adapter(f"{VERIFIERS}:handle", 1, None),
}


@dataclass(frozen=True)
class Found:
    """An adapter that can be played here."""

    code: UserCode
    identity: Mapping[str, Any]


def handler_of(settings: EnvironmentConfig, folder: Path, *, what: str = "handle") -> tuple[str, str] | None:
    """The handler and the interpreter of an environment that is hosted by another Python; None: this one does. Relative
    paths start at ``folder``. Raises ConfigError where there is no such interpreter."""
    if not isinstance(settings, VerifiersEnvironment):
        return None
    install = "install it, or into an environment of its own where its pins are not those of this project"
    python = python_of(settings.python, folder, kind=settings.kind, package="verifiers", install=install)
    return f"{VERIFIERS}:{what}", python or sys.executable


def host_keys(settings: EnvironmentConfig, folder: Path) -> dict[str, Any]:
    """The keys of an environment as its host gets them."""
    keys = settings.arguments
    if isinstance(settings, VerifiersEnvironment):
        path = None if settings.path is None else str(folder / settings.path)
        return {"name": keys["name"], "config": keys["config"], "folder": path}
    return keys


def _verifiers_identity(settings: VerifiersEnvironment, base: Path) -> dict[str, Any]:
    handler, python = handler_of(settings, base.resolve(), what="about") or ("", "")
    with Child(handler, settings.limits(), python=python, on_line=log.debug) as child:
        try:
            return child.call(host_keys(settings, base.resolve()))
        except Ended as error:
            raise ConfigError(f"verifiers in {python}: its process {error}") from error
        except Fatal as error:
            raise error if isinstance(error, ConfigError) else ConfigError(f"verifiers in {python}: {error}") from error


def find_adapter(settings: EnvironmentConfig, base: Path) -> Found:
    """The adapter of a table ``environment`` of another kind than Python. Raises ConfigError where a package that it
    needs is not installed, or a server does not answer."""
    kind = str(settings.kind)  # pyright: ignore[reportAttributeAccessIssue]
    adapter = _ADAPTERS[kind]
    given = identity(settings.arguments)
    if isinstance(settings, OpenEnvEnvironment):
        played = {"server": server_identity(given.pop("url"))}
    elif isinstance(settings, VerifiersEnvironment):
        played = {"hosted": _verifiers_identity(settings, base)}
        for where in ("path", "python"):
            given.pop(where)
    else:
        played = {"packages": {adapter.package: _installed(kind, str(adapter.package))}}
    name = adapter.callable if "." in adapter.callable else f"{__name__}.{adapter.callable}"
    code = UserCode(name, None, {}, (str(base.resolve()),), "environment")
    return Found(code, {"kind": kind, "version": adapter.version, **played, "settings": given})


def _installed(kind: str, package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise ConfigError(
            f'kind = "{kind}" needs the package {package}, which is not installed: '
            f"pip install '{DISTRIBUTION}[{package}]'"
        ) from None

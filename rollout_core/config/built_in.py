"""What this project has itself of the kinds that plugins are. A configuration is parsed by the unions of tables below,
and what is listed is read from them: each is in one place alone, its union, by the name that its ``kind`` has."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from rollout_core.config.base import DemonstrationSource
from rollout_core.config.environments import AnyEnvironment
from rollout_core.config.inference import AnyBackend
from rollout_core.config.learning import PluginTracker, TrackerName
from rollout_core.config.plugin_use import PluginUse
from rollout_core.config.rewards import RewardSpec
from rollout_core.config.tools import AnyTool

TABLES: Mapping[str, Any] = {
    "reward-model": RewardSpec,
    "data-source": DemonstrationSource,
    "env-harness": AnyEnvironment,
    "tool-harness": AnyTool,
    "inference-backend": AnyBackend,
    "tracker": TrackerName | PluginTracker,
}
"""By the kind of a plugin, every table that may stand in its place in a configuration."""


@dataclass(frozen=True)
class BuiltIn:
    """One of them."""

    kind: str
    """As a plugin's manifest has it."""
    name: str
    """As a configuration names it."""
    meaning: str
    """For people; empty where its name says all."""


def built_in() -> Iterator[BuiltIn]:
    """All, in the order in which a configuration's schema has them."""
    for kind, table in TABLES.items():
        for member in _members(table):
            if isinstance(member, str):
                yield BuiltIn(kind, member, "")
            elif not issubclass(member, PluginUse) and not getattr(member, "is_refused", False):
                meaning = " ".join((member.__doc__ or "").split()).partition(". ")[0].removesuffix(".")
                for name in get_args(member.model_fields["kind"].annotation):
                    yield BuiltIn(kind, name, meaning)


def _members(table: Any) -> Iterator[Any]:
    """Classes and names that a union is made of."""
    if get_origin(table) is Literal:
        yield from get_args(table)
    elif inspect.isclass(table):
        yield table
    else:
        for part in get_args(table):
            yield from _members(part)

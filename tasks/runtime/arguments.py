"""Arguments of stages that travel together in a dataclass, and count one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from rollout_core.base.errors import ConfigError


class Arguments:
    """Base of dataclasses that carry arguments of a stage together.

    In the stage's key, lineage and journal each field counts as an argument of the field's name, so no other argument
    of the stage may be called like it.
    """


def spread_arguments(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those in `Arguments` one by one. Raises ConfigError if a name occurs twice."""
    found: dict[str, Any] = {}
    for name, value in inputs.items():
        spread = {name: value}
        if isinstance(value, Arguments) and is_dataclass(value):
            spread = {field.name: getattr(value, field.name) for field in fields(value)}
        if twice := found.keys() & spread.keys():
            raise ConfigError(
                f"argument {name!r} brings {', '.join(sorted(twice))}, which the stage has already; two arguments of "
                "one name would share a place in its key: rename one"
            )
        found |= spread
    return found

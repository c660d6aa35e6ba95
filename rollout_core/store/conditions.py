"""The parts of a collection's queries: conditions on fields, and what fields can be sorted by."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from rollout_core.base.errors import ConfigError


class Condition(NamedTuple):
    """One condition on one field."""

    field: str
    operator: Literal["exact", "within", "contains"]
    operand: Any

    @property
    def keys(self) -> Collection[Any] | None:
        """The values of the field that match, if they can be looked up; else None."""
        if self.operator == "exact":
            return (self.operand,) if isinstance(self.operand, Hashable) else None
        return self.operand if isinstance(self.operand, frozenset) else None

    def holds(self, item: Any) -> bool:
        """Whether the item meets the condition."""
        value = getattr(item, self.field)
        if self.operator == "exact":
            return value == self.operand
        if self.operator == "within":
            return value in self.operand
        return value is not None and self.operand in value


def conditions_of(fields: Mapping[str, Any]) -> list[Condition]:
    """The conditions of a filter's fields. Raises ConfigError for an unknown operator."""
    conditions: list[Condition] = []
    for name, field in fields.items():
        for operator, operand in field.items():
            if operator not in ("exact", "within", "contains"):
                raise ConfigError(f"{name} is filtered by {operator!r}; expected 'exact', 'within' or 'contains'")
            conditions.append(Condition(name, operator, _values(operand, name) if operator == "within" else operand))
    return conditions


def _values(operand: Any, name: str) -> Collection[Any]:
    """The operand of ``within``, as a set if its values can be looked up."""
    if not isinstance(operand, Iterable):
        raise ConfigError(f"{name} is to be within {operand!r}; expected a list of values")
    values = list(operand)
    try:
        return frozenset(values)
    except TypeError:
        return values


def sortable_fields(model: type[BaseModel]) -> dict[str, Any]:
    """Fields that hold one plain value, and what counts where it is missing; None if it never is."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kinds = _plain_kinds(field.annotation)
        if kinds:
            missing = math.inf if name.endswith("_time") else "" if str in kinds else 0
            fields[name] = missing if NoneType in kinds else None
    return fields


def _plain_kinds(annotation: Any) -> set[type]:
    """The types of a field's values; empty if one is not a plain value."""
    if get_origin(annotation) in (Union, UnionType):
        parts = [_plain_kinds(part) for part in get_args(annotation)]
        return set().union(*parts) if all(parts) else set()
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    return {annotation} if annotation in (str, int, float, bool, NoneType) else set()

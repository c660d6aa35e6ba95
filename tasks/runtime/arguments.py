"""Arguments of stages: those that travel together in a dataclass and count one by one, and those read from a record."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast, get_args, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

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


def read_arguments(function: Callable[..., Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``function`` from the JSON values that lineage has of them, spread as above; those
    with a default may be left out. Raises ConfigError where they cannot be read."""
    hints, inputs = get_type_hints(function), {}
    try:
        for name, parameter in inspect.signature(function).parameters.items():
            kind = hints[name]
            if is_dataclass(kind):
                own = get_type_hints(kind)
                values = {field.name: _read(own[field.name], recorded[field.name]) for field in fields(kind)}
                inputs[name] = cast(Any, kind)(**values)
            elif name in recorded:
                inputs[name] = _read(kind, recorded[name])
            elif parameter.default is inspect.Parameter.empty:
                raise ConfigError(f"{name!r} is not recorded")
    except (KeyError, ValidationError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"{error} is not recorded"
        raise ConfigError(f"its settings cannot be read from the record ({what}); earlier versions kept less") from None
    return inputs


def _read(kind: Any, value: Any) -> Any:
    """``value`` as the type that a stage asks for, or as one made of it, such as the settings of a run."""
    problem: ValidationError | None = None
    for one in (kind, *_made_of(kind)):
        try:
            return TypeAdapter(one).validate_json(json.dumps(value))
        except ValidationError as error:
            problem = problem or error
    assert problem is not None, "there is at least one type"
    raise problem


def _made_of(kind: Any) -> Iterator[Any]:
    for member in get_args(kind):
        yield from _made_of(member)
    for own in kind.__subclasses__() if inspect.isclass(kind) and issubclass(kind, BaseModel) else ():
        yield own
        yield from _made_of(own)

"""From a typed Python function to the schema by which a model calls it, and from the model's arguments to values.

A function describes itself: its name, the text above ``Args:`` in its docstring, its parameters' types and defaults,
and what the docstring's ``Args:`` says of each, in Google's style.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic_core import PydanticUndefined

from rollout_core.base.errors import ConfigError, near
from rollout_core.environments.tools.results import ToolError

_SECTIONS = ("Args", "Arguments", "Parameters", "Returns", "Yields", "Raises", "Example", "Examples", "Note", "Notes")
_HEADING = re.compile(rf"^({'|'.join(_SECTIONS)}):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\*{0,2}\w+)\s*(\([^)]*\))?\s*:\s*(.*)$")
MOST_SHOWN = 10
"""Faults of arguments that one message names."""


@dataclass(frozen=True)
class FunctionSchema:
    """How a model calls a function."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments, an object."""
    _names: tuple[str, ...]
    _model: type[BaseModel]

    def schema(self, name: str | None = None, description: str | None = None) -> dict[str, Any]:
        """As a chat API takes it. ``name`` and ``description``: others than the function's own."""
        function = {"name": name or self.name, "description": description or self.description}
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}

    def checked(self, arguments: Any) -> dict[str, Any]:
        """The values that the function is called with. Raises ToolError with each fault of the arguments."""
        if not isinstance(arguments, Mapping):
            raise ToolError(f"the arguments are {_kind(arguments)}; expected a JSON object with {self._expected()}")
        try:
            parsed = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolError(self._explained(error)) from None
        return {
            name: getattr(parsed, field) for field, name in zip(type(parsed).model_fields, self._names, strict=True)
        }

    def _expected(self) -> str:
        return ", ".join(self._names) or "no keys"

    def _explained(self, error: ValidationError) -> str:
        errors = error.errors(include_url=False)
        lines = [self._line(item) for item in errors[:MOST_SHOWN]]
        more = f"; and {len(errors) - MOST_SHOWN} more" if len(errors) > MOST_SHOWN else ""
        return f"wrong arguments: {'; '.join(lines)}{more}. Expected: {self._expected()}"

    def _line(self, item: Any) -> str:
        where = ".".join(map(str, item["loc"]))
        if item["type"] == "missing":
            return f"{where} is required, but not given"
        if item["type"] == "extra_forbidden":
            hint = f"; {near(where, self._names)}" if where.isidentifier() else ""
            return f"{where} is not known{hint}"
        return f"{where}: {item['msg'].removeprefix('Value error, ')}, got {_kind(item['input'])}"


def _kind(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@cache
def function_schema(function: Callable[..., Any]) -> FunctionSchema:
    """How a model calls ``function``: a function, or a method, of a class or of an instance. Raises ConfigError that
    names the function and what to add to it."""
    where = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
    name = getattr(function, "__name__", "")
    summary, meanings = _described(where, function)
    parameters = _parameters(where, function)
    if unknown := [argument for argument in meanings if argument not in parameters]:
        raise ConfigError(
            f"the docstring of tool {where} describes {unknown[0]!r}, which is no parameter of it; "
            f"{near(unknown[0], parameters)}"
        )
    fields: dict[str, Any] = {}
    for number, (parameter, (annotation, default)) in enumerate(parameters.items()):
        # By an alias, as a parameter may have the name of a method of pydantic's.
        described = Field(default=default, alias=parameter, description=meanings.get(parameter))
        fields[f"argument_{number}"] = (annotation, described)
    try:
        model = create_model(name or "Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema(by_alias=True)
    except (PydanticUserError, TypeError, NameError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"a parameter of tool {where} has a type without a JSON Schema: {reason}; use plain values, lists, "
            "dictionaries, Literal, dataclasses or pydantic models"
        ) from None
    schema = _without_titles(schema)
    schema.setdefault("properties", {})
    return FunctionSchema(name, summary, schema, tuple(parameters), model)


def checked_arguments(function: Callable[..., Any], arguments: Any) -> dict[str, Any]:
    """The values that ``function`` is called with, for the arguments that a model gave, parsed from JSON. Raises
    ToolError with each fault of them, and ConfigError as `function_schema`."""
    return function_schema(function).checked(arguments)


def _parameters(where: str, function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Type and default of each parameter that a model gives."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"the types of tool {where} cannot be read: {error}; import what they name at the top of its file, not for "
            "type checkers alone"
        ) from None
    found = {}
    for position, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if position == 0 and name in ("self", "cls"):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
            raise ConfigError(
                f"tool {where} has the parameter {stars}{name}, which a model cannot give by its name; name each "
                "parameter"
            )
        if name not in hints:
            raise ConfigError(f"parameter {name!r} of tool {where} has no type; add one, such as {name}: str")
        default = PydanticUndefined if parameter.default is parameter.empty else parameter.default
        found[name] = (hints[name], default)
    return found


def _described(where: str, function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What the docstring says of the function, and of each of its arguments."""
    text = inspect.cleandoc(function.__doc__ or "")
    parts = _HEADING.split(text)
    summary = parts[0].split("\n\n")[0].strip()
    if not summary:
        raise ConfigError(
            f"tool {where} has no docstring, which is what the model knows of it; add one that begins with what the "
            "tool does"
        )
    meanings: dict[str, str] = {}
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        if heading in ("Args", "Arguments", "Parameters"):
            meanings |= _arguments(body)
    return " ".join(summary.split()), meanings


def _arguments(body: str) -> dict[str, str]:
    meanings: dict[str, str] = {}
    name = None
    # What is indented no more stands after the section.
    lines = textwrap.dedent("\n".join(_indented(body))).splitlines()
    for line in lines:
        match = None if line.startswith(" ") else _ARGUMENT.match(line)
        if match:
            name = match[1].lstrip("*")
            meanings[name] = match[3].strip()
        elif name is not None and line.strip():
            meanings[name] = f"{meanings[name]} {line.strip()}".strip()
    return meanings


def _indented(body: str) -> list[str]:
    kept = []
    for line in body.strip("\n").splitlines():
        if line.strip() and not line.startswith((" ", "\t")):
            break
        kept.append(line)
    return kept


def _without_titles(schema: Any) -> Any:
    """The titles that pydantic makes of names say nothing, and every prompt would hold them."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "patternProperties"):
            kept[key] = {name: _without_titles(item) for name, item in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            kept[key] = value
        elif not (key == "title" and isinstance(value, str)):
            kept[key] = _without_titles(value)
    return kept

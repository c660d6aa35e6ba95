"""Components of a trainer, given as what they are or as how to make them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from rollout_core.base.errors import ConfigError, near

Component = TypeVar("Component")

ComponentSpec = Any
"""An instance; a class; a callable without arguments; ``"module.Name"`` or a registered name; a dict with ``type`` (one
of the last) and the constructor's keywords; None for the default."""


def build_component(
    what: str,
    spec: ComponentSpec,
    expected: type[Component],
    *,
    default: type[Component] | None = None,
    known: Mapping[str, Any] | None = None,
    names: Mapping[str, type] | None = None,
) -> Component | None:
    """The component that ``spec`` describes; None if it is None and there is no ``default``.

    ``known`` values are filled in where a constructor names them and the spec does not, but never into instances and
    callables. ``names`` are short names. Raises ConfigError for a spec that describes nothing, TypeError for one whose
    product is no ``expected``.
    """
    made: Any
    if spec is None:
        made = None if default is None else _construct(what, default, {}, known)
    elif isinstance(spec, expected):
        made = spec
    elif isinstance(spec, Mapping):
        options = {key: value for key, value in spec.items() if key not in ("type", "name")}
        kind = spec.get("type", spec.get("name", default))
        if kind is None:
            raise ConfigError(f"{what}: the dict {dict(spec)!r:.80} has no type; give the class, or its dotted name")
        made = _construct(what, _class(what, kind, names), options, known)
    elif isinstance(spec, str | type):
        made = _construct(what, _class(what, spec, names), {}, known)
    elif callable(spec):
        made = spec()
    else:
        raise ConfigError(
            f"{what} is a {type(spec).__name__}; expected a {expected.__name__}, a class, a callable, a dotted name or "
            "a dict with type"
        )
    if made is not None and not isinstance(made, expected):
        raise TypeError(f"{what}: {spec!r:.80} makes a {type(made).__name__}; expected a {expected.__name__}")
    return made


def _class(what: str, kind: Any, names: Mapping[str, type] | None) -> Any:
    if not isinstance(kind, str):
        return kind
    if names and kind in names:
        return names[kind]
    module, _, name = kind.rpartition(".")
    if not module:
        raise ConfigError(f"{what}: {kind!r} is no dotted name, and {near(kind, names or {})}")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what}: cannot import {kind!r}: {error}") from error


def _construct(what: str, kind: Any, options: dict[str, Any], known: Mapping[str, Any] | None) -> Any:
    if not callable(kind):
        raise ConfigError(f"{what}: {kind!r:.80} is no class")
    try:
        signature = inspect.signature(kind)
    except ValueError:  # some builtins have none
        return kind(**options)
    try:
        parameters = signature.parameters
        filled = {name: value for name, value in (known or {}).items() if name in parameters and name not in options}
        signature.bind(**filled, **options)
    except TypeError as error:
        raise ConfigError(f"{what}: {getattr(kind, '__name__', kind)} cannot be made of {options}: {error}") from error
    return kind(**filled, **options)

"""Jinja templates in configurations: checked when the configuration is read, filled in within Jinja's sandbox."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from rollout_core.base.errors import ConfigError

COMPILED = 64
"""Templates that are kept compiled: compiling takes a hundred times as long as filling in."""


@cache
def _environment() -> Any:
    from jinja2 import StrictUndefined  # slow to import, and few configurations have templates
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


@lru_cache(maxsize=COMPILED)
def compiled(text: str) -> Any:
    """The template, a ``jinja2.Template``. A variable without a value is an error where it is read."""
    return _environment().from_string(text)


def _is_template(text: str) -> str:
    import jinja2

    try:
        compiled(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"is no Jinja template: {error.message} (line {error.lineno})") from None
    return text


JinjaTemplate = Annotated[str, Field(min_length=1), AfterValidator(_is_template)]
"""A template whose variables are named values, such as the keys of a row: ``Question: {{ question }}``."""


@cache
def variables_of(template: str) -> frozenset[str]:
    """All names that the template reads."""
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(_environment().parse(template)) - _environment().globals.keys())


@cache
def required_variables(template: str) -> frozenset[str]:
    """The names that have to have a value: not those that the template gives a default wherever it reads them, and not
    those that it tests (``x is defined``)."""
    from jinja2 import nodes

    tree = _environment().parse(template)
    read = Counter(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
    defaults = (node.node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d"))
    defaulted = Counter(node.name for node in defaults if isinstance(node, nodes.Name))
    tests = (node.node for node in tree.find_all(nodes.Test) if node.name in ("defined", "undefined"))
    tested = {node.name for node in tests if isinstance(node, nodes.Name)}
    return frozenset(name for name in variables_of(template) - tested if read[name] > defaulted[name])


def fill_in(template: str, values: Mapping[str, Any]) -> str:
    """The template with values. Raises ConfigError where it cannot be filled in with these."""
    try:
        return compiled(template).render(values)
    except Exception as error:  # noqa: BLE001 - whatever a template does with values
        raise ConfigError(f"the template cannot be filled in: {type(error).__name__}: {error}") from None

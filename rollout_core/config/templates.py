"""Jinja templates in configurations: checked when the configuration is read, filled in within the bounds of
`rollout_core.base.templates`."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Annotated

from pydantic import AfterValidator, Field

from rollout_core.base.errors import ConfigError
from rollout_core.base.templates import compiled, parsed, variables_of


def _is_template(text: str) -> str:
    try:
        compiled(text)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("the text ")) from None  # behind its key
    return text


JinjaTemplate = Annotated[str, Field(min_length=1), AfterValidator(_is_template)]
"""A template whose variables are named values, such as the keys of a row: ``Question: {{ question }}``."""


@cache
def required_variables(template: str) -> frozenset[str]:
    """The names that have to have a value: not those that the template gives a default wherever it reads them, and not
    those that it tests (``x is defined``)."""
    from jinja2 import nodes

    tree = parsed(template)
    read = Counter(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
    defaults = (node.node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d"))
    defaulted = Counter(node.name for node in defaults if isinstance(node, nodes.Name))
    tests = (node.node for node in tree.find_all(nodes.Test) if node.name in ("defined", "undefined"))
    tested = {node.name for node in tests if isinstance(node, nodes.Name)}
    return frozenset(name for name in variables_of(template) - tested if read[name] > defaulted[name])

"""Models whose fields are described by the string below each of them, read from the source once somebody asks."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue


class Described(BaseModel):
    """A model whose JSON Schema has these descriptions.

    pydantic's own ``use_attribute_docstrings`` reads the source of each class while it is made, and looks through all
    modules for it: 0.7 of 6 s of a processor for the imports of the nightly flow.
    """

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, meaning in field_docs(cls).items():
            if name in properties:
                properties[name].setdefault("description", meaning)
        return schema


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """The strings below the fields of a model, by name (fields have no aliases here); of one that is inherited or
    declared again without a string, that of the nearest class which has one. Classes whose source is not to be had have
    none."""
    found: dict[str, str] = {}
    for ancestor in reversed(model.__mro__):
        found |= _docs_of_module(ancestor.__module__).get(ancestor.__qualname__, {})
    return {name: text for name, text in found.items() if name in model.model_fields}


@cache
def _docs_of_module(name: str) -> dict[str, dict[str, str]]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return {}
    return dict(_docs_of_classes(tree))


def _docs_of_classes(tree: ast.AST, within: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from _docs_of_classes(node, f"{within}{name}.<locals>.")
            case ast.ClassDef(name=name):
                yield f"{within}{name}", dict(_docs_of_fields(node))
                yield from _docs_of_classes(node, f"{within}{name}.")
            case ast.stmt():
                yield from _docs_of_classes(node, within)


def _docs_of_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(node.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)

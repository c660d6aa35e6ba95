"""Schemas of functions against ones written by hand, and what models are told of wrong arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from rollout_core.base.errors import ConfigError
from rollout_core.environments.schemas import checked_arguments, function_schema
from rollout_core.environments.tools.results import ToolError


@dataclass
class Point:
    x: int
    y: int = 0


class Filter(BaseModel):
    field: str
    at_least: float = Field(default=0.0, description="Smallest value that passes.")


class Shop:
    """An environment with tools."""

    def buy(self, item: str, count: int = 1, size: Literal["small", "large"] | None = None) -> str:
        """Buy an item
        of the shop.

        More about it, which the model does not see.

        Args:
            item: Name of the item, as it
                stands in the list.
            count (int): How many.
            size: Which one: small
              or large.

        Returns:
            text: A receipt.
        """
        return f"{item} {count} {size}"

    def move(self, to: Point, along: list[Point], names: dict[str, int]) -> None:
        """Move."""

    def pick(self, where: Filter) -> None:
        """Pick."""

    def nothing(self) -> None:
        """Do nothing."""

    def copy(self, json: str, schema: int, model_config: str = "") -> None:
        """Names that pydantic has, too."""


BUY = {
    "type": "function",
    "function": {
        "name": "buy",
        "description": "Buy an item of the shop.",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "required": ["item"],
            "properties": {
                "item": {"type": "string", "description": "Name of the item, as it stands in the list."},
                "count": {"type": "integer", "default": 1, "description": "How many."},
                "size": {
                    "anyOf": [{"type": "string", "enum": ["small", "large"]}, {"type": "null"}],
                    "default": None,
                    "description": "Which one: small or large.",
                },
            },
        },
    },
}
POINT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["x"],
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
}
MOVE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["to", "along", "names"],
    "properties": {
        "to": {"$ref": "#/$defs/Point"},
        "along": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
        "names": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "$defs": {"Point": POINT},
}


def test_a_schema_is_as_written_by_hand():
    assert function_schema(Shop.buy).schema() == BUY
    assert function_schema(Shop.move).schema()["function"]["parameters"] == MOVE


def test_a_method_of_an_instance_has_the_schema_of_its_class():
    assert function_schema(Shop().buy).schema() == BUY


def test_a_tool_may_have_another_name_and_description():
    found = function_schema(Shop.buy).schema("order", "Order it.")["function"]
    assert (found["name"], found["description"]) == ("order", "Order it.")
    assert found["parameters"] == BUY["function"]["parameters"]


def test_descriptions_of_a_models_fields_are_kept():
    found = function_schema(Shop.pick).schema()["function"]["parameters"]["$defs"]["Filter"]["properties"]
    assert found == {
        "field": {"type": "string"},
        "at_least": {"type": "number", "default": 0.0, "description": "Smallest value that passes."},
    }


def test_a_function_without_parameters_takes_an_empty_object():
    found = function_schema(Shop.nothing).schema()["function"]["parameters"]
    assert found == {"type": "object", "properties": {}, "additionalProperties": False}
    assert checked_arguments(Shop.nothing, {}) == {}


def test_names_that_pydantic_has_are_names_of_parameters():
    assert list(function_schema(Shop.copy).schema()["function"]["parameters"]["properties"]) == [
        "json",
        "schema",
        "model_config",
    ]
    found = checked_arguments(Shop.copy, {"json": "a", "schema": 1})
    assert found == {"json": "a", "schema": 1, "model_config": ""}


def test_values_become_what_the_types_say():
    found = checked_arguments(Shop.move, {"to": {"x": "3"}, "along": [{"x": 1, "y": 2}], "names": {"a": 1.0}})
    assert found == {"to": Point(3, 0), "along": [Point(1, 2)], "names": {"a": 1}}
    assert Shop().buy(**checked_arguments(Shop.buy, {"item": "tea"})) == "tea 1 None"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "wrong arguments: item is required, but not given. Expected: item, count, size"),
        ({"item": "a", "cuont": 2}, "cuont is not known; did you mean 'count'?"),
        ({"item": "a", "count": "many"}, "count: Input should be a valid integer"),
        ({"item": "a", "count": "many"}, "got 'many'"),
        ({"item": "a", "size": "huge"}, "size"),
        ("tea", "the arguments are 'tea'; expected a JSON object with item, count, size"),
        (None, "the arguments are None"),
        ([1], "the arguments are [1]"),
    ],
)
def test_wrong_arguments_are_told_in_words(arguments: Any, message: str):
    with pytest.raises(ToolError) as raised:
        checked_arguments(Shop.buy, arguments)
    assert message in str(raised.value)


def test_a_long_list_of_faults_is_shortened():
    with pytest.raises(ToolError, match="and 41 more") as raised:
        checked_arguments(Shop.buy, {f"k{number}": 1 for number in range(50)})
    assert len(str(raised.value)) < 1000


def no_docstring(a: int) -> None: ...


def only_arguments(a: int) -> None:
    """
    Args:
        a: A number.
    """


def no_type(a) -> None:
    """Do it."""


def many(*texts: str) -> None:
    """Do it."""


def any_key(**keys: str) -> None:
    """Do it."""


def other_argument(amount: int) -> None:
    """Do it.

    Args:
        amuont: A number.
    """


def no_schema(a: Shop) -> None:
    """Do it."""


def unknown_type(a: "Missing") -> None:  # noqa: F821, UP037
    """Do it."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "no_docstring has no docstring"),
        (only_arguments, "only_arguments has no docstring"),
        (no_type, "parameter 'a' of tool tests.environments.test_schemas.no_type has no type; add one, such as a: str"),
        (many, r"many has the parameter \*texts"),
        (any_key, r"any_key has the parameter \*\*keys"),
        (other_argument, "describes 'amuont', which is no parameter of it; did you mean 'amount'"),
        (no_schema, "no_schema has a type without a JSON Schema"),
        (unknown_type, "the types of tool tests.environments.test_schemas.unknown_type cannot be read"),
    ],
)
def test_a_function_that_does_not_describe_itself_says_what_to_add(function: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        function_schema(function)

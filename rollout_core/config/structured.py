"""Guided decoding: forms that a completion must have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from rollout_core.config.base import Settings


def _as_text(value: Any) -> Any:
    # Text, so that the order of keys is kept wherever a configuration travels: properties are generated in that order.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False) if isinstance(value, Mapping) else value


class JsonSchemaOutput(Settings):
    """Completions are JSON that a schema describes."""

    kind: Literal["json_schema"] = "json_schema"
    definition: Annotated[str, BeforeValidator(_as_text)]
    """The JSON Schema, as a table or as text."""

    @field_validator("definition")
    @classmethod
    def _is_a_schema(cls, text: str) -> str:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for

        try:
            schema = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(schema, dict):
            raise ValueError('a JSON Schema is an object here, such as {"type": "object"}')
        try:
            validator_for(schema).check_schema(schema)
        except SchemaError as error:
            where = ".".join(map(str, error.absolute_path)) or "(top level)"
            raise ValueError(f"not a JSON Schema: {where}: {error.message}") from error
        return _as_text(schema)


class RegexOutput(Settings):
    """Completions match a regular expression as a whole."""

    kind: Literal["regex"] = "regex"
    pattern: str = Field(min_length=1)

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern


class ChoiceOutput(Settings):
    """Completions are one of these texts."""

    kind: Literal["choice"] = "choice"
    choices: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)


class GrammarOutput(Settings):
    """Completions are words of a context-free grammar."""

    kind: Literal["grammar"] = "grammar"
    grammar: str = Field(min_length=1)
    """In the EBNF of llama.cpp (GBNF) or Lark's form; the first rule is ``root`` (GBNF) or ``start`` (Lark)."""


StructuredOutput = JsonSchemaOutput | RegexOutput | ChoiceOutput | GrammarOutput

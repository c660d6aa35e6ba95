"""Whether an answer is JSON of a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry

from rollout_core.base.errors import ConfigError, shown
from rollout_core.config.verifiers import SchemaReward
from rollout_core.rewards.verifiers.extraction import code_or_all


def schema_reward(spec: SchemaReward, completion: str, extras: Mapping[str, Any]) -> float:
    """1 where the answer fits the schema; else 0, or with ``share`` half the share of its properties that fit. Raises
    ConfigError for a row's schema that is none."""
    validator = _validator(spec, extras)
    text = code_or_all(completion, spec.extract, "json")
    try:
        value = json.loads(text or "", parse_constant=_no_number)
    except (ValueError, RecursionError):
        return 0.0
    try:
        if validator.is_valid(value):
            return 1.0
        return _share(validator, value) / 2 if spec.share else 0.0
    except (RecursionError, OverflowError):  # too deep to be looked at, or a number beyond all floats
        return 0.0


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _validator(spec: SchemaReward, extras: Mapping[str, Any]) -> Validator:
    schema: Any = spec.json_schema
    if schema is None:
        given = extras[spec.schema_key]
        try:
            schema = json.loads(given) if isinstance(given, str) else given
        except ValueError as error:
            raise ConfigError(f"the row's {spec.schema_key!r} is no JSON: {error}") from None
        if not isinstance(schema, dict):
            raise ConfigError(f"the row's {spec.schema_key!r} is {shown(schema)}; expected a JSON Schema")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"the row's {spec.schema_key!r} is no JSON Schema: {error.message}") from None
    # A registry that retrieves nothing: a "$ref" to an address is never fetched.
    return kind(schema, registry=Registry())


def _share(validator: Validator, value: Any) -> float:
    """Of the properties that the schema names, those that are there and fit."""
    schema = validator.schema
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    if not properties or not isinstance(value, dict):
        return 0.0
    fitting = sum(
        name in value and validator.evolve(schema=part).is_valid(value[name]) for name, part in properties.items()
    )
    return fitting / len(properties)

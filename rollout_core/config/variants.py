"""Algorithms as variants: ``kind`` says which class reads a table, and each class has the keys that its algorithm
knows.

Some of these algorithms were values of ``loss`` before they were kinds: ``kind = "grpo"``, ``loss = "gkd"``. This
module is the one place that still reads such tables, whether a configuration has them, a deployment's parameters, or
the stored inputs of a stage, which name every key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import GetJsonSchemaHandler, TypeAdapter, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue

from rollout_core.config.base import Settings


class Variant(Settings):
    """A member of a family of algorithms. The family's first kind is the one that a table without ``kind`` is of."""

    family: ClassVar[str]
    """Name of the family: that of its stage, its snapshots and its runs."""
    variant: ClassVar[str]
    """Its ``kind``."""

    @classmethod
    def kinds(cls) -> Mapping[str, type[Variant]]:
        """The classes of the family by kind."""
        raise NotImplementedError

    @classmethod
    def _own_kinds(cls) -> Mapping[str, type[Variant]]:
        """The kinds that have keys of their own: not those that are another one with other defaults."""
        kinds = cls.kinds()
        return {
            kind: one
            for kind, one in kinds.items()
            if not any(one is not other and issubclass(one, other) for other in kinds.values())
        }

    @model_validator(mode="before")
    @classmethod
    def _keys_of_its_kind(cls, data: Any) -> Any:
        """Without what a table of the former form says of other kinds. Raises ValueError for their other keys."""
        if not isinstance(data, Mapping):
            return data
        kinds, meant = cls.kinds(), variant_of(data, cls.kinds())
        if meant not in kinds:
            return data  # what is wrong is its kind
        if meant != cls.variant:
            raise ValueError(
                f'"{meant}" is an algorithm of its own, read by {kinds[meant].__name__}: kind = "{meant}". These are '
                f'settings of kind = "{cls.variant}"'
            )
        if "kind" in cls.model_fields and data.get("kind") == cls.family:
            data = {**data, "kind": cls.variant}
        if "kind" not in cls.model_fields and data.get("kind") == cls.variant:
            data = {name: value for name, value in data.items() if name != "kind"}
        of_family = kinds[cls.family].model_fields.get("loss")
        if (
            cls.variant != cls.family
            and of_family is not None
            and "loss" in data
            and is_default(data["loss"], of_family)
        ):
            data = {name: value for name, value in data.items() if name != "loss"}
        own_kinds, owners = cls._own_kinds(), dict[str, list[str]]()
        left_out = {"loss"} if data.get("loss") == cls.variant and "loss" not in cls.model_fields else set()
        for name in data:
            others = {kind: one.model_fields[name] for kind, one in own_kinds.items() if name in one.model_fields}
            if name in left_out or name in cls.model_fields or not others:
                continue
            # A stored table of the former form, or a form in which a kind was changed, has the keys of all kinds.
            if name in cls.never_counted(data) or any(is_default(data[name], field) for field in others.values()):
                left_out.add(name)
            else:
                owners[name] = list(others)
        if owners:
            named = ", ".join(f"{name} (of {', '.join(kinds)})" for name, kinds in owners.items())
            raise ValueError(f'kind = "{cls.variant}" has no use for {named}; leave out what it does not know')
        return {name: value for name, value in data.items() if name not in left_out}

    @classmethod
    def never_counted(cls, data: Mapping[str, Any]) -> tuple[str, ...]:
        """Keys of other kinds that a table of the former form may have, although they change nothing."""
        return ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With the keys of the former form, where this is the class that they were of: an orchestrator holds stored
        parameters against the schema before anybody reads them."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        if cls.variant != cls.family:
            return schema
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for kind, other in cls._own_kinds().items():
            for name, field in other.model_fields.items():
                if name not in cls.model_fields and name != "kind":
                    kept: Any = field.annotation
                    inner = handler(TypeAdapter(kept).core_schema)
                    described = {"deprecated": True, "description": f'Of `kind = "{kind}"`.', "title": name}
                    properties[name] = {**_optional(inner, field), **described}
            for choices in _choices(properties.get("loss", {})):
                choices["enum"] = list(dict.fromkeys([*choices.pop("enum", [choices.pop("const", kind)]), kind]))
        return schema


def _optional(schema: JsonSchemaValue, field: FieldInfo) -> JsonSchemaValue:
    """Of a key that the other kind may require."""
    if field.is_required():
        return {"anyOf": [schema, {"type": "null"}], "default": None}
    return {**schema, "default": field.default}


def _choices(schema: JsonSchemaValue) -> list[JsonSchemaValue]:
    """The parts of a key's schema that are names to choose from."""
    return [part for part in (schema, *schema.get("anyOf", ())) if "enum" in part or "const" in part]


def is_default(value: Any, field: FieldInfo) -> bool:
    """Whether a key is given what it is without being given; in the former form a required one of another kind was
    then null."""
    return value is None if field.is_required() else bool(value == field.get_default(call_default_factory=True))


def variant_of(data: Mapping[str, Any], kinds: Mapping[str, type[Variant]]) -> str:
    """The kind that a table is of: as ``kind`` says, or in the former form ``loss``."""
    family = next(iter(kinds))
    kind, loss = data.get("kind", family), data.get("loss")
    return loss if kind == family and isinstance(loss, str) and loss in kinds else kind


def reading(*classes: type[Variant]) -> Callable[[Any, Callable[[Any], Any], ValidationInfo], Any]:
    """What reads a table as the one of ``classes`` that it is of; for `pydantic.WrapValidator`."""
    kinds = {one.variant: one for one in classes}

    def read(data: Any, handler: Callable[[Any], Any], info: ValidationInfo) -> Any:
        if not isinstance(data, Mapping):
            return handler(data)
        kind = variant_of(data, kinds)
        if not isinstance(kind, str) or kind not in kinds:
            expected = " or ".join(f"'{one}'" for one in kinds)
            raise ValidationError.from_exception_data(
                "kind", [{"type": "literal_error", "loc": ("kind",), "input": kind, "ctx": {"expected": expected}}]
            )
        return kinds[kind].model_validate(data, context=info.context)

    return read

"""The OpenAPI description of the server, from its table of operations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from rollout_core.store.http import wire
from rollout_core.store.http.errors import ErrorBody
from rollout_core.store.http.operations import Operation

_ERRORS = {
    "400": "A value makes no sense, or the body is not JSON",
    "401": "No API key, or a wrong one",
    "404": "Something named does not exist",
    "408": "The body did not arrive in time",
    "409": "The thing changed under the caller",
    "410": "What was asked for is gone",
    "413": "The body is too large",
    "415": "The body is packed in an unknown way",
    "422": "The body is JSON, but not of this form",
    "503": "Passing trouble of the storage; the same request can be sent again",
}


def describe(title: str, operations: Sequence[Operation]) -> dict[str, Any]:
    """The whole description, as JSON."""
    wanted = [(operation, mode, adapter) for operation in operations for mode, adapter in _adapters(operation)]
    error = TypeAdapter(ErrorBody)
    schemas, definitions = TypeAdapter.json_schemas(
        [*wanted, ("error", "serialization", error)], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe_one(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }


def _adapters(operation: Operation) -> list[tuple[Any, TypeAdapter[Any]]]:
    found: list[tuple[Any, TypeAdapter[Any]]] = []
    if operation.takes is not None:
        found.append(("validation", TypeAdapter(operation.takes)))
    if operation.gives is not None:
        found.append(("serialization", TypeAdapter(operation.gives)))
    return found


def _describe_one(operation: Operation, schemas: Any) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": (operation.handler.__doc__ or "").strip(),
        "responses": {
            str(operation.status): _content("Done", schemas.get((operation, "serialization"), {})),
            **{status: _content(text, schemas["error", "serialization"]) for status, text in _ERRORS.items()},
        },
    }
    if operation.method == "GET" and operation.takes is not None:
        fields = TypeAdapter(operation.takes).json_schema()
        parameters += [
            {"name": name, "in": "query", "required": name in fields.get("required", ()), "schema": schema}
            for name, schema in fields["properties"].items()
        ]
    elif operation.takes is not None:
        described["requestBody"] = {
            "required": not operation.may_be_empty,
            "content": {wire.JSON: {"schema": schemas[operation, "validation"]}},
        }
    if parameters:
        described["parameters"] = parameters
    return described


def _content(text: str, schema: Any) -> dict[str, Any]:
    return {"description": text, "content": {wire.JSON: {"schema": schema}}}

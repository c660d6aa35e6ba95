"""`rollout schema`: what configurations may hold."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flows.cli.common import one_line_errors
from rollout_core.base.errors import ConfigError
from rollout_core.config import json_schema


def schema(
    kind: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only this kind's, such as infer-batch; default: all, by name.")
    ] = None,
) -> None:
    """Print the JSON Schema of run configurations: every key with its meaning, default and bounds."""
    with one_line_errors(debug=False):
        schemas = json_schema()
        if kind is not None and kind not in schemas:
            raise ConfigError(f"no kind of configuration is named {kind!r}; expected one of {', '.join(schemas)}")
        typer.echo(json.dumps(schemas if kind is None else schemas[kind], indent=2))

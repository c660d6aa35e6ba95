"""`rollout schema`: what configurations may hold."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flows.cli.common import one_line_errors
from rollout_core.config import json_schema
from rollout_core.config.kinds import schema_of


def schema(
    kind: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only this kind's, such as infer-batch; default: all, by name.")
    ] = None,
) -> None:
    """Print the JSON Schema of run configurations: every key with its meaning, default and bounds."""
    with one_line_errors(debug=False):
        typer.echo(json.dumps(json_schema() if kind is None else schema_of(kind), indent=2))

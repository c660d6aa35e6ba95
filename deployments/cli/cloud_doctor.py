"""`rollout cloud doctor`: whether the cloud gives what runs need."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from deployments.cloud_doctor import examined, text
from flows.cli.common import EXIT_FAILED, Debug, one_line_errors


def cloud_doctor(
    provider: Annotated[Literal["local", "aws", "gcp"], typer.Option("--provider", help="Where objects are kept.")],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="TOML file with a [cloud] table. Default: the settings of the environment."),
    ] = None,
    form: Annotated[Literal["human", "json"], typer.Option("--format", help="json: for programs.")] = "human",
    debug: Debug = False,
) -> None:
    """Try storage, credentials, queue, secrets and machine for real, and say what to do. Leaves nothing behind.

    Exit code 0: all checks passed; 1: one did not; 2: they could not be made, such as for another provider's settings.
    """
    with one_line_errors(debug):
        report = examined(provider, config)
        typer.echo(report.as_json() if form == "json" else text(report, coloured=sys.stdout.isatty()))
        if not report.is_healthy:
            raise typer.Exit(EXIT_FAILED)

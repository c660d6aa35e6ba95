"""`rollout ops deploy`: what prefect.yaml lists, on a work pool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import Debug, one_line_errors
from tasks.runtime.prefect_server import PREFECT_HOME, prefect_server


def deploy(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Default: all.")] = None,
    pool: Annotated[str, typer.Option(help="Work pool that takes their runs.")] = "cpu",
    project: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Working folder of runs on the workers' machines. Default: where prefect.yaml is."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file of the nightly run and the canary. Default: what prefect.yaml names."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Bring the deployments of this folder's prefect.yaml to the server, on a work pool.

    Missing pools and block types are created. Deployments that exist move to the pool.
    """
    with one_line_errors(debug):
        with prefect_server(PREFECT_HOME):
            # Not before: Prefect takes the server's address when it is imported.
            from deployments import pools

            if pools.deploy(Path.cwd(), pool, names or (), project=project, config=config):
                typer.echo(f"no worker of pool {pool} is online; start one: rollout ops worker --pool {pool}")

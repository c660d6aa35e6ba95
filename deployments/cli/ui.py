"""`rollout ui`: runs, samples and models in the browser."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from deployments.ui.site import serve_ui
from flows.cli.common import Debug, one_line_errors
from rollout_core.base.errors import ConfigError
from tasks.runtime.prefect_server import storage_and_database


def ui(
    host: Annotated[str, typer.Option("--host", help="Address to listen on; beyond loopback only with a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 4300,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable that holds the key that pages ask for.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Show runs, comparisons, samples, rollouts and models in the browser, until SIGTERM or Ctrl-C.

    The pages read the storage and the database of the settings, and change nothing. Logs come from the Prefect server
    of PREFECT_API_URL, or the one that runs in this folder.
    """
    with one_line_errors(debug):
        api_key = None if api_key_env is None else os.environ.get(api_key_env)
        if api_key_env is not None and not api_key:
            raise ConfigError(f"--api-key-env {api_key_env}: expected an environment variable that holds the key")

        with storage_and_database() as known:
            objects = known.try_objects()
            try:
                known.try_database()
                database = known.database_url()
            except ConfigError as error:
                typer.echo(f"without the pages of the database: {error}", err=True)
                database = None
            serve_ui(objects, database, host=host, port=port, api_key=api_key, announce=typer.echo)

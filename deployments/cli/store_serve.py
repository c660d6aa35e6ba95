"""`rollout store serve`: the store over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from deployments.ui.mounted import PAGES
from flows.cli.common import Debug, one_line_errors
from flows.cli.storage import DatabaseURL
from rollout_core.store.http.program import ServeSettings, serve


def store_serve(
    database: DatabaseURL,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; beyond loopback only with a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 4747,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Server processes.")] = 1,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable that holds the API key.")
    ] = None,
    cors_allow_origin: Annotated[
        list[str] | None, typer.Option("--cors-allow-origin", help="Origin of web pages to let in; *: all. Repeatable.")
    ] = None,
    pages: Annotated[bool, typer.Option("--ui/--no-ui", help="Whether there are pages below /ui.")] = True,
    tls: Annotated[
        bool,
        typer.Option(
            "--tls",
            help="Over HTTPS, and only for clients with a certificate of the authority ROLLOUT_TLS_CA; the server's is "
            "ROLLOUT_TLS_CERTIFICATE with ROLLOUT_TLS_KEY.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Serve a store over HTTP, and below /ui the pages of `rollout ui`, until SIGTERM or Ctrl-C."""
    with one_line_errors(debug):
        origins = tuple(cors_allow_origin or ())
        settings = ServeSettings(database, host, port, workers, api_key_env, origins, PAGES if pages else None, tls)
        serve(settings, typer.echo)

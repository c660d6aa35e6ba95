"""`rollout store`: the server of rollouts, attempts and spans, and its schema."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.common import Debug, one_line_errors

app = typer.Typer(no_args_is_help=True, help="Run the store of rollouts, attempts and spans.")

DatabaseURL = Annotated[
    str, typer.Option("--database", help="sqlite:///path/to/file.db, or postgresql://user@host/name.")
]


@app.command("serve")
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
    debug: Debug = False,
) -> None:
    """Serve a store over HTTP until SIGTERM or Ctrl-C."""
    with one_line_errors(debug):
        from rollout_core.store.http.serve import ServeSettings, serve

        settings = ServeSettings(database, host, port, workers, api_key_env, tuple(cors_allow_origin or ()))
        serve(settings, typer.echo)


@app.command("migrate")
def store_migrate(database: DatabaseURL, debug: Debug = False) -> None:
    """Bring a store's database to the schema of this version."""
    with one_line_errors(debug):
        from rollout_core.store.sql.by_url import migrate

        typer.echo(migrate(database))

"""`rollout ops metrics`: figures for Prometheus."""

from __future__ import annotations

from contextlib import suppress
from threading import Event
from typing import Annotated

import typer

from deployments import probes
from flows.cli.common import Debug, one_line_errors
from rollout_core.base.errors import ConfigError
from tasks.runtime.prefect_server import PREFECT_HOME


def metrics(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 9464,
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between checks of server, storage, database.")] = 15.0,
    debug: Debug = False,
) -> None:
    """Serve figures to Prometheus until Ctrl-C: pipeline and store, and learners and engines from ROLLOUT_EVENTS.

    deployments/grafana.json is a dashboard of them. Starts and changes nothing.
    """
    with one_line_errors(debug):
        server = probes.find_server(debug=debug)
        if server.address is None:
            raise ConfigError(server.trouble or "no Prefect server")
        from deployments.exporter import events_file, serve  # with Prefect, which takes its settings now

        file = events_file()
        found = serve(host, port, PREFECT_HOME, every, file)
        followed = f"events of {file}" if file is not None else "no events: ROLLOUT_EVENTS names no file"
        typer.echo(f"metrics at http://{host}:{found}/metrics; {followed}")
        with suppress(KeyboardInterrupt):
            Event().wait()

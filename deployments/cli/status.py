"""`rollout ops status`: how scheduled runs fare."""

from __future__ import annotations

import typer

from deployments import probes
from flows.cli.common import EXIT_FAILED, AsJson, Debug, one_line_errors
from tasks.runtime.prefect_server import PREFECT_HOME


def status(as_json: AsJson = False, debug: Debug = False) -> None:
    """Report on the server, pools, workers, scheduled runs, storage and database. Starts nothing.

    Exit code 0: all is well; 1: something needs attention, in lines that begin with "!".
    """
    with one_line_errors(debug):
        server = probes.find_server(PREFECT_HOME, debug=debug)
        from deployments.status import look, text  # with Prefect, which takes its settings now

        found = look(server, debug=debug)
        typer.echo(found.model_dump_json(indent=2) if as_json else text(found))
        if found.problems:
            raise typer.Exit(EXIT_FAILED)

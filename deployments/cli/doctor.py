"""`rollout ops doctor`: what is not as it should be, and what to do."""

from __future__ import annotations

import typer

from deployments import probes
from flows.cli.common import EXIT_FAILED, AsJson, Debug, one_line_errors
from tasks.runtime.prefect_server import PREFECT_HOME


def doctor(as_json: AsJson = False, debug: Debug = False) -> None:
    """Check versions, schedules, clock, disks, automations and access, and say what to do. Starts and changes nothing.

    Exit code 0: no check failed, though some may warn; 1: one did.
    """
    with one_line_errors(debug):
        server = probes.find_server(PREFECT_HOME, debug=debug)
        from deployments.doctor import Level, examine, text  # with Prefect, which takes its settings now

        found = examine(server, debug=debug)
        typer.echo(found.model_dump_json(indent=2) if as_json else text(found))
        if any(check.level is Level.FAIL for check in found.checks):
            raise typer.Exit(EXIT_FAILED)

"""`rollout ops worker`: runs of a pool, taken until the machine goes away."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Annotated, cast

import typer

from deployments import supervision
from flows.cli.common import Debug, one_line_errors
from rollout_core.base.errors import ConfigError
from rollout_core.base.spot import Kind

EXIT_DRAINED = 75
"""After a spot notice: a supervisor need not start the worker again on a machine that goes away."""
SPOT = ("aws", "gce", "azure", "auto", "none")


def worker(
    pool: Annotated[str, typer.Option(help="Work pool of type process whose runs this machine takes.")] = "cpu",
    name: Annotated[str | None, typer.Option(help="Name of the worker. Default: machine, user and pool.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Runs at the same time. Default: any number.")] = None,
    spot: Annotated[
        str,
        typer.Option(
            metavar="aws|gce|azure|auto|none", help="Drain when the cloud announces that it takes the machine back."
        ),
    ] = "none",
    drain_seconds: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Seconds from SIGTERM to the end, at most. Default: 120 on aws, 30 on gce and azure, else the seconds "
            "that a run may take to stop (ROLLOUT_STOP_SECONDS) plus 15.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Take runs of a pool until SIGTERM, Ctrl-C or a spot notice, and then drain.

    A draining worker takes no new run; runs under way keep what they have stored and go back to the server. The worker
    is started again when it dies, and after an outage of the server. Exit code 0; 75 after a spot notice.
    """
    with one_line_errors(debug):
        server = os.environ.get("PREFECT_API_URL")
        if not server:
            raise ConfigError(
                "PREFECT_API_URL is not set: give the address of the Prefect server's API, or use make serve"
            )
        if spot not in SPOT:
            raise ConfigError(f"--spot {spot}: expected one of {', '.join(SPOT)}")
        from deployments.pools import require_process_pool  # with Prefect, which takes its server's address now

        require_process_pool(pool)
        with suppress(KeyboardInterrupt):
            supervision.work(
                pool,
                name or supervision.worker_name(pool),
                os.environ,
                keep_server=supervision.Outages(server).is_over,
                say=lambda line: typer.echo(f"worker: {line}", err=True),
                spot=cast(Kind, spot),
                drain_seconds=drain_seconds,
                limit=limit,
            )
            raise typer.Exit(EXIT_DRAINED)

"""The whole `rollout` command: that of `flows.cli`; `rollout ops`, which looks after deployments; and `rollout ui`."""

from __future__ import annotations

import typer

from flows.cli import app, main as run_app, store_app
from flows.cli.lazy import add_commands

ops_app = typer.Typer(no_args_is_help=True, help="Health, automations and alerts of scheduled runs.")
add_commands(
    ops_app,
    {
        "install": (
            "deployments.cli.install:install",
            "Install the automations that restart crashed runs and send alerts of failed and late ones.",
        ),
        "deploy": (
            "deployments.cli.deploy:deploy",
            "Bring the deployments of this folder's prefect.yaml to the server, on a work pool.",
        ),
        "worker": (
            "deployments.cli.worker:worker",
            "Take runs of a pool until SIGTERM, Ctrl-C or a spot notice, and then drain.",
        ),
        "status": (
            "deployments.cli.status:status",
            "Report on the server, pools, workers, scheduled runs, storage and database.",
        ),
        "doctor": (
            "deployments.cli.doctor:doctor",
            "Check versions, schedules, clock, disks, automations and access, and say what to do.",
        ),
        "metrics": (
            "deployments.cli.metrics:metrics",
            "Serve figures to Prometheus until Ctrl-C: pipeline and store, and learners and engines from "
            "ROLLOUT_EVENTS.",
        ),
    },
)
app.add_typer(ops_app, name="ops")

cloud_app = typer.Typer(no_args_is_help=True, help="Check the cloud or the machine that runs depend on.")
add_commands(
    cloud_app,
    {
        "doctor": (
            "deployments.cli.cloud_doctor:cloud_doctor",
            "Try storage, credentials, queue, secrets and machine for real, and say what to do.",
        ),
    },
)
app.add_typer(cloud_app, name="cloud")

add_commands(
    app,
    {
        "ui": (
            "deployments.cli.ui:ui",
            "Show runs, comparisons, samples, rollouts and models in the browser, until SIGTERM or Ctrl-C.",
        ),
    },
)
add_commands(
    store_app,
    {
        "serve": (
            "deployments.cli.store_serve:store_serve",
            "Serve a store over HTTP, and below /ui the pages of `rollout ui`, until SIGTERM or Ctrl-C.",
        ),
    },
)


def main() -> None:
    """Entry point of the `rollout` command."""
    run_app()

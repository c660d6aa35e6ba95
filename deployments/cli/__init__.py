"""The whole `rollout` command: `flows.cli`, and what is about deployments: `rollout doctor`, `ops` and `ui`."""

from __future__ import annotations

import typer

from flows.cli import app, main as run_app, store_app
from flows.cli.lazy import add_commands

ops_app = typer.Typer(no_args_is_help=True, help="Deployments, workers, automations and figures of scheduled runs.")
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
        "certificates": (
            "deployments.cli.certificates:certificates",
            "Issue certificates for machines, by an authority of one's own.",
        ),
        "metrics": (
            "deployments.cli.metrics:metrics",
            "Serve figures to Prometheus until Ctrl-C: pipeline and store, and learners and engines from "
            "ROLLOUT_EVENTS.",
        ),
    },
)
app.add_typer(ops_app, name="ops")

# Earlier names of `rollout doctor` and its words, for one release.
add_commands(
    ops_app,
    {
        "status": ("deployments.cli.doctor:ops_status", "The earlier name of `rollout doctor status`."),
        "doctor": (
            "deployments.cli.doctor:ops_doctor",
            "The earlier name of `rollout doctor`, without checks of pools and runs.",
        ),
    },
    hidden=True,
)
cloud_app = typer.Typer(no_args_is_help=True, help="Earlier names of commands.")
add_commands(
    cloud_app,
    {"doctor": ("deployments.cli.doctor:cloud_doctor", "The earlier name of `rollout doctor cloud`.")},
    hidden=True,
)
app.add_typer(cloud_app, name="cloud", hidden=True)

add_commands(
    app,
    {
        "doctor": (
            "deployments.cli.doctor:doctor",
            "Check machine, server, workers, schedule, storage, store and cloud, and say what to do.",
        ),
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

"""`rollout ops install`: automations that heal, and notifications."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from flows.cli.common import Debug, one_line_errors
from rollout_core.base.errors import ConfigError
from tasks.runtime.prefect_server import PREFECT_HOME, prefect_server

WEBHOOK_VARIABLE = "ROLLOUT_WEBHOOK_URL"


def install(
    webhook: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            # Not as its `envvar`: typer would count it as given together with one of the other two.
            help=f"Address that gets alerts of failed and late runs, as JSON by POST. Default: {WEBHOOK_VARIABLE}.",
        ),
    ] = None,
    notify: Annotated[
        str | None,
        typer.Option(
            "--notify", metavar="SLUG/NAME", help="Send alerts by this Prefect block, such as slack-webhook/team."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--no-notify", help="Turn notifications off.")] = False,
    silent_after: Annotated[
        float | None,
        typer.Option(
            help="Seconds without a heartbeat after which a run's machine counts as lost; at least three heartbeats "
            "(PREFECT_FLOWS_HEARTBEAT_FREQUENCY of the workers, 180 s by default). Default: 600, at first."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what differs; change nothing.")] = False,
    debug: Debug = False,
) -> None:
    """Install the automations that restart crashed runs and send alerts of failed and late ones.

    Installing twice changes nothing. Options of the last installation hold until an option changes them.
    """
    with one_line_errors(debug):
        if sum([webhook is not None, notify is not None, quiet]) > 1:
            raise ConfigError("give one of --webhook, --notify and --no-notify")
        if webhook is None and notify is None and not quiet:
            webhook = os.environ.get(WEBHOOK_VARIABLE) or None
        if webhook is not None and not webhook.startswith(("http://", "https://")):
            raise ConfigError("--webhook: expected an address that begins with http:// or https://")
        with prefect_server(PREFECT_HOME):
            # Not before: Prefect takes the server's address when it is imported.
            from deployments import automations

            least = automations.MIN_SILENT_SECONDS
            if silent_after is not None and silent_after < least:
                raise ConfigError(f"--silent-after {silent_after:g}: expected at least {least}, three heartbeats")
            if webhook is not None and dry_run:
                typer.echo("(--dry-run does not compare the address of --webhook)")
            for change in automations.bring_about(webhook, notify, quiet, silent_after, dry_run):
                typer.echo(f"{change.action:6}  {change.name}")
                for line in change.diff:
                    typer.echo(f"    {line}")

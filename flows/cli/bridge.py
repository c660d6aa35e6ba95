"""`rollout store bridge`: the store, fed from a queue of a cloud."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import Debug, one_line_errors
from rollout_core.base.errors import ConfigError
from rollout_core.base.queue_settings import queue_settings
from rollout_core.config.base import read_toml
from rollout_core.config.cloud import take_cloud
from rollout_core.store.bridge.bridge_program import bridge_forever

BRIDGE_WAIT_SECONDS = 300.0
"""After a start of a machine others, with queue and store, start as well."""


def store_bridge(
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file with a table [cloud.sqs] or [cloud.pubsub].")
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue",
            help="URL of an SQS queue, or projects/PROJECT/subscriptions/NAME of Pub/Sub; default: ROLLOUT_QUEUE.",
        ),
    ] = None,
    database: Annotated[
        str | None, typer.Option("--database", help="The store's database; default: ROLLOUT_DATABASE.")
    ] = None,
    server: Annotated[
        str | None, typer.Option("--server", help="URL of `rollout store serve` instead of a database.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable that holds the server's key.")
    ] = None,
    wait: Annotated[
        float,
        typer.Option("--wait", min=0.0, help="Seconds to wait at the start for a queue or store that does not answer."),
    ] = BRIDGE_WAIT_SECONDS,
    debug: Debug = False,
) -> None:
    """Make each message of a cloud's queue a rollout of the store, until SIGTERM or Ctrl-C.

    Messages are acknowledged once their rollout is stored. Any number of bridges may run on one queue.
    """
    with one_line_errors(debug):
        if config is not None:
            take_cloud(read_toml(config), str(config))
        if server is not None and database is not None:
            raise ConfigError("--server and --database each say which store is fed; give one of them")
        key = os.environ.get(api_key_env) if api_key_env else None
        if api_key_env and not key:
            raise ConfigError(f"the environment variable {api_key_env} is not set; put the server's key there")
        tally = bridge_forever(queue_settings(queue), server or database, key, typer.echo, wait)
        typer.echo(f"bridge ended: {tally}")

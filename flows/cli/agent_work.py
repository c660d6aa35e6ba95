"""`rollout agent work`: a worker for the tasks of an agent that is trained elsewhere."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import Debug, one_line_errors
from rollout_core.agents import agent_calls as running
from rollout_core.agents.code import AgentCode
from rollout_core.agents.worker import WorkOrder, serve
from rollout_core.base.errors import ConfigError


def work(
    store: Annotated[str, typer.Option("--store", help="Address of the run's store, as its log says.")],
    agent: Annotated[str, typer.Option("--agent", help="path/to/agent.py:name, with the same code as the run's.")],
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Tasks at a time.")] = 8,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable that holds the run's key.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Work on the tasks of an agent that is trained elsewhere, until Ctrl-C or SIGTERM, whenever its run has some."""
    with one_line_errors(debug):
        key = None if api_key_env is None else os.environ.get(api_key_env)
        if api_key_env is not None and not key:
            raise ConfigError(f"the environment variable {api_key_env} is not set; put the run's key there")
        code = AgentCode.read(agent, Path.cwd())
        loaded = code.load(alone=True)
        typer.echo(f"working for {store} as {agent} ({code.id.short})", err=True)
        running.owns_process = True
        # The store is away between two stages of the run, and after its end; who started this ends it.
        order = WorkOrder(store, key, {}, concurrency, secrets.randbelow(2**20), math.inf)
        asyncio.run(serve(loaded, code.id, order))

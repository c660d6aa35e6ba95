"""`rollout agent trace`: what an agent did in a rollout."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from flows.cli.common import Debug, one_line_errors
from rollout_core.agents.adapters.drawing import trace_lines
from rollout_core.agents.adapters.ended import made_of
from rollout_core.agents.emitters import find_final_reward
from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.store import SqlLightningStore
from rollout_core.store.reachable import Connections, plain_connections
from tasks.runtime.prefect_server import connections


def trace(
    rollout_id: Annotated[str, typer.Argument(help="Id of a rollout, or its first characters.")],
    attempt: Annotated[str, typer.Option("--attempt", help="Id of one of its attempts.")] = "latest",
    debug: Debug = False,
) -> None:
    """Print what an agent did and said in a rollout, as a tree, and the checkpoints that were made of it."""
    with one_line_errors(debug):
        known = connections() or plain_connections()
        for line in asyncio.run(_trace_lines(known, rollout_id, attempt)):
            typer.echo(line)


async def _trace_lines(known: Connections, rollout_id: str, attempt: str) -> list[str]:
    known.try_database()
    async with SqlLightningStore.from_url(known.database_url()) as store:
        rollout = await store.get_rollout_by_id(rollout_id)
        if rollout is None and rollout_id:
            found = await store.query_rollouts(rollout_id_contains=rollout_id)
            beginning = [item for item in found if item.rollout_id.startswith(rollout_id)]
            if len(beginning) > 1:
                raise ConfigError(
                    f"{len(beginning)} rollouts have ids that begin with {rollout_id!r}, {beginning[0].rollout_id} and "
                    f"{beginning[1].rollout_id} among them; give more of it"
                )
            rollout = beginning[0] if beginning else None
        if rollout is None:
            raise NotFound(f"no rollout in the database has an id that begins with {rollout_id!r}")
        rollout_id = rollout.rollout_id
        attempts = await store.query_attempts(rollout_id)
        spans = await store.query_spans(rollout_id, attempt)
    lines = [f"rollout {rollout_id}: {rollout.status}, reward {find_final_reward(spans)}"]
    lines += [f"attempt {item.attempt_id}: {item.status}" for item in attempts]
    lines += trace_lines(spans)
    made = [item for item in made_of(known.open_objects(), rollout_id) if item.stage.endswith("_update")]
    lines += [f"learnt from it: model {item.outputs[0]} ({item.stage})" for item in made]
    return lines

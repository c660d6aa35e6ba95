"""`rollout agent`: train an agent, and work on the tasks of one that is trained elsewhere."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.common import (
    ConfigPath,
    Debug,
    DryRun,
    Overrides,
    load_run,
    look_ahead,
    one_line_errors,
    parse_overrides,
    print_plan,
    run_flow,
)

if TYPE_CHECKING:
    from rollout_core.store.connections import Connections

agent_app = typer.Typer(no_args_is_help=True, help="Train agents.")


@agent_app.command("train")
def train(config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, debug: Debug = False) -> None:
    """Train the model behind an agent by GRPO or PPO on what the agent does."""
    with one_line_errors(debug):
        if dry_run:
            look_ahead()
        from rollout_core.config import TrainAgentConfig
        from rollout_core.plans.agent_plan import plan_agent
        from tasks.runtime.prefect_server import connections

        parsed = load_run(config, TrainAgentConfig, parse_overrides(set_))
        facts = plan_agent(parsed, Path.cwd(), connections())
        if dry_run:
            print_plan({"algorithm": parsed.algorithm.kind, **facts})
            return

        def start() -> Any:
            from flows.agent import train_agent

            return train_agent(parsed)

        _print_trained(run_flow(start, debug, "flows.agent"))


def _print_trained(result: Mapping[str, Any]) -> None:
    typer.echo("reward: " + " ".join(f"{reward:.3f}" for reward in result["rewards"]))
    for moment, value in result["held_out"].items():
        typer.echo(f"held-out reward {moment}: {value:.3f}")
    typer.echo(f"model: {result['model']}{' (promoted)' if result['promoted'] else ''}")
    typer.echo(f"train state: {result['train_state']} (step {result['step']})")
    typer.echo(f"report: {Path(result['report']) / 'index.html'}")


@agent_app.command("tune")
def tune(config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, debug: Debug = False) -> None:
    """Search for a prompt template with which an agent earns more."""
    with one_line_errors(debug):
        if dry_run:
            look_ahead()
        from rollout_core.config import TunePromptConfig
        from rollout_core.plans.agent_plan import plan_prompt
        from tasks.runtime.prefect_server import connections

        parsed = load_run(config, TunePromptConfig, parse_overrides(set_))
        facts = plan_prompt(parsed, Path.cwd(), connections())
        if dry_run:
            print_plan(facts)
            return

        def start() -> Any:
            from flows.prompts import tune_prompt

            return tune_prompt(parsed)

        _print_tuned(run_flow(start, debug, "flows.prompts"))


def _print_tuned(result: Mapping[str, Any]) -> None:
    typer.echo("reward: " + " ".join(f"{score:.3f}" for score in result["scores"]))
    for moment, value in result["held_out"].items():
        typer.echo(f"held-out reward {moment}: {value:.3f}")
    typer.echo(f"template: {result['template']}{' (promoted)' if result['promoted'] else ''}")
    typer.echo(f"report: {Path(result['report']) / 'index.html'}")


@agent_app.command("online")
def online(config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, debug: Debug = False) -> None:
    """Serve a policy to live agents and train it on what they do, until Ctrl-C, SIGTERM or the run's own end."""
    with one_line_errors(debug):
        if dry_run:
            look_ahead()
        from rollout_core.config import LearnOnlineConfig
        from rollout_core.plans.agent_plan import plan_online
        from tasks.runtime.prefect_server import connections

        parsed = load_run(config, LearnOnlineConfig, parse_overrides(set_))
        facts = plan_online(parsed, Path.cwd(), connections())
        if dry_run:
            print_plan({"algorithm": parsed.algorithm.kind, **facts})
            return

        def start() -> Any:
            from flows.online import learn_online

            return learn_online(parsed)

        _print_learnt(run_flow(start, debug, "flows.online"))


def _print_learnt(result: Mapping[str, Any]) -> None:
    typer.echo("reward: " + " ".join(f"{reward:.3f}" for reward in result["rewards"]))
    typer.echo(f"updates: {result['updates']}, refused {result['refused']}; batches skipped: {result['skipped']}")
    typer.echo(f"model: {result['model']}")
    typer.echo(f"report: {Path(result['report']) / 'index.html'}")


@agent_app.command("work")
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
        from rollout_core.agents import running
        from rollout_core.agents.code import AgentCode
        from rollout_core.agents.worker import WorkOrder, serve
        from rollout_core.base.errors import ConfigError

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


@agent_app.command("trace")
def trace(
    rollout_id: Annotated[str, typer.Argument(help="Id of a rollout, or its first characters.")],
    attempt: Annotated[str, typer.Option("--attempt", help="Id of one of its attempts.")] = "latest",
    debug: Debug = False,
) -> None:
    """Print what an agent did and said in a rollout, as a tree, and the checkpoints that were made of it."""
    with one_line_errors(debug):
        from rollout_core.store.connections import plain_connections
        from tasks.runtime.prefect_server import connections

        known = connections() or plain_connections()
        for line in asyncio.run(_trace_lines(known, rollout_id, attempt)):
            typer.echo(line)


async def _trace_lines(known: Connections, rollout_id: str, attempt: str) -> list[str]:
    from rollout_core.agents.adapters.drawing import trace_lines
    from rollout_core.agents.adapters.ended import made_of
    from rollout_core.agents.emitters import find_final_reward
    from rollout_core.base.errors import ConfigError, NotFound
    from rollout_core.store import SqlLightningStore

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

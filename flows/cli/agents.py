"""`rollout agent train`, `tune` and `online`: the flows that train an agent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from flows.cli.common import (
    ConfigPath,
    Debug,
    DryRun,
    Locked,
    Overrides,
    held_to,
    one_line_errors,
    parse_overrides,
    print_plan,
)
from flows.cli.starting import load_run, look_ahead, run_flow
from rollout_core.config import CONFIG_KINDS
from tasks.runtime.prefect_server import connections

_FLOWS = {
    "train-agent": "flows.agent:train_agent",
    "tune-prompt": "flows.prompts:tune_prompt",
    "learn-online": "flows.online:learn_online",
}


def train(
    config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, locked: Locked = None, debug: Debug = False
) -> None:
    """Train the model behind an agent by GRPO or PPO on what the agent does."""
    with one_line_errors(debug):
        result = _run("train-agent", config, dry_run, set_, locked, debug)
        if result is not None:
            _print_trained(result)


def _print_trained(result: Mapping[str, Any]) -> None:
    typer.echo("reward: " + " ".join(f"{reward:.3f}" for reward in result["rewards"]))
    for moment, value in result["held_out"].items():
        typer.echo(f"held-out reward {moment}: {value:.3f}")
    typer.echo(f"model: {result['model']}{' (promoted)' if result['promoted'] else ''}")
    typer.echo(f"train state: {result['train_state']} (step {result['step']})")
    typer.echo(f"report: {Path(result['report']) / 'index.html'}")


def tune(
    config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, locked: Locked = None, debug: Debug = False
) -> None:
    """Search for a prompt template with which an agent earns more."""
    with one_line_errors(debug):
        result = _run("tune-prompt", config, dry_run, set_, locked, debug)
        if result is not None:
            _print_tuned(result)


def _print_tuned(result: Mapping[str, Any]) -> None:
    typer.echo("reward: " + " ".join(f"{score:.3f}" for score in result["scores"]))
    for moment, value in result["held_out"].items():
        typer.echo(f"held-out reward {moment}: {value:.3f}")
    typer.echo(f"template: {result['template']}{' (promoted)' if result['promoted'] else ''}")
    typer.echo(f"report: {Path(result['report']) / 'index.html'}")


def online(
    config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, locked: Locked = None, debug: Debug = False
) -> None:
    """Serve a policy to live agents and train it on what they do, until Ctrl-C, SIGTERM or the run's own end."""
    with one_line_errors(debug):
        result = _run("learn-online", config, dry_run, set_, locked, debug)
        if result is not None:
            _print_learnt(result)


def _print_learnt(result: Mapping[str, Any]) -> None:
    typer.echo("reward: " + " ".join(f"{reward:.3f}" for reward in result["rewards"]))
    typer.echo(f"updates: {result['updates']}, refused {result['refused']}; batches skipped: {result['skipped']}")
    typer.echo(f"model: {result['model']}")
    typer.echo(f"report: {Path(result['report']) / 'index.html'}")


def _run(
    kind: str, config: Path, dry_run: bool, set_: Overrides, locked: Path | None, debug: bool
) -> Mapping[str, Any] | None:
    """What the flow of this kind returned; None where it was a dry run, which is printed."""
    if dry_run:
        look_ahead()
    parsed: Any = load_run(config, CONFIG_KINDS[kind], parse_overrides(set_) | held_to(locked, dry_run=dry_run))
    from rollout_core.plans import agent_plan  # while another process imports torch for a dry run

    plan = {
        "train-agent": agent_plan.plan_agent,
        "tune-prompt": agent_plan.plan_prompt,
        "learn-online": agent_plan.plan_online,
    }[kind]
    facts = plan(parsed, Path.cwd(), connections())
    if not dry_run:
        return run_flow(_FLOWS[kind], debug, parsed)
    print_plan(facts if kind == "tune-prompt" else {"algorithm": parsed.algorithm.kind, **facts})
    return None

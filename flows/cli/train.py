"""`rollout train`: one command an algorithm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.common import (
    ConfigPath,
    Debug,
    DryRun,
    Overrides,
    Processes,
    load_run,
    one_line_errors,
    parse_overrides,
    print_plan,
    run_flow,
)

ALGORITHMS = {
    "sft": "Supervised fine-tuning.",
    "ppo": "PPO on the model's own completions.",
    "grpo": "GRPO on groups of the model's own completions.",
    "rm": "A reward model from preference pairs.",
    "dpo": "Direct preference optimization on pairs.",
    "ipo": "Identity preference optimization on pairs.",
    "kto": "Kahneman-Tversky optimization on single labelled answers.",
}

Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", help="Start from a snapshot: latest (of this run's name), its id or the first digits of it."
    ),
]

app = typer.Typer(no_args_is_help=True, help="Train a model.")


def _command(kind: str) -> Callable[..., None]:
    def command(
        config: ConfigPath,
        resume: Resume = None,
        nproc: Processes = None,
        dry_run: DryRun = False,
        set_: Overrides = None,
        debug: Debug = False,
    ) -> None:
        with one_line_errors(debug):
            overrides = parse_overrides(set_) | ({} if resume is None else {"run.resume": resume})
            overrides |= {} if nproc is None else {"algorithm.parallel.nproc": nproc}
            options = ({} if resume is None else {"run.resume": "--resume"}) | (
                {} if nproc is None else {"algorithm.parallel.nproc": "--nproc"}
            )
            _train(kind, config, dry_run, overrides, options, debug)

    return command


for _kind, _help in ALGORITHMS.items():
    app.command(_kind, help=_help)(_command(_kind))


def _train(
    kind: str, config: Path, dry_run: bool, overrides: dict[str, Any], options: dict[str, str], debug: bool
) -> None:
    from flows.connections import connections
    from rollout_core.config import CONFIG_KINDS

    parsed: Any = load_run(config, CONFIG_KINDS[f"train-{kind}"], overrides, options)
    facts = _planner(kind)(parsed, Path.cwd(), connections(), keep=not dry_run)
    if dry_run:
        settings = parsed.algorithm
        data = settings.prompts if kind in ("ppo", "grpo") else settings.dataset
        print_plan({"algorithm": kind, **facts, "minibatch": settings.minibatch_size, "dataset": data.path})
        return
    result = run_flow(lambda: _flow(kind)(parsed), debug)
    if "rewards" in result:
        typer.echo("reward: " + " ".join(f"{reward:.3f}" for reward in result["rewards"]))
    typer.echo(f"model: {result['model']}")
    typer.echo(f"train state: {result['train_state']} (step {result['step']})")


def _planner(kind: str) -> Callable[..., dict[str, Any]]:
    from rollout_core.plans import learner_plan

    on_policy = {"ppo": learner_plan.plan_on_policy, "grpo": learner_plan.plan_on_policy}
    plans = {"sft": learner_plan.plan_sft, "kto": learner_plan.plan_kto, **on_policy}
    return plans.get(kind, learner_plan.plan_pairs)


def _flow(kind: str) -> Callable[..., dict[str, Any]]:
    from flows import preference, train

    return getattr(train if kind in ("sft", "ppo", "grpo") else preference, f"train_{kind}")

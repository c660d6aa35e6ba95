"""`rollout train`: each algorithm by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.common import (
    DataPath,
    Debug,
    DryRun,
    HotReload,
    Locked,
    ModelAddress,
    Overrides,
    PluginPaths,
    Processes,
    RewardCallable,
    held_to,
    one_line_errors,
    parse_overrides,
    plugins_at,
    print_plan,
)
from flows.cli.starting import load_run, load_tables, look_ahead, run_flow
from rollout_core.config import CONFIG_KINDS
from tasks.runtime.prefect_server import connections

ON_POLICY = ("ppo", "grpo")

Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", help="Start from a snapshot: latest (of this run's name), its id or the first digits of it."
    ),
]
OptionalConfigPath = Annotated[
    Path | None, typer.Option("--config", help="TOML file of the run; without one give --model and --data.")
]


def _command(kind: str, meaning: str) -> Callable[..., None]:
    def command(
        config: OptionalConfigPath = None,
        model: ModelAddress = None,
        data: DataPath = None,
        resume: Resume = None,
        nproc: Processes = None,
        dry_run: DryRun = False,
        set_: Overrides = None,
        plugin: PluginPaths = None,
        locked: Locked = None,
        debug: Debug = False,
    ) -> None:
        with one_line_errors(debug), plugins_at(plugin):
            overrides = parse_overrides(set_) | held_to(locked, dry_run=dry_run)
            _train(kind, config, Given(model, data, None, resume, nproc), overrides, dry_run, debug)

    command.__doc__ = meaning
    return command


def _command_with_reward(kind: str, meaning: str) -> Callable[..., None]:
    def command(
        config: OptionalConfigPath = None,
        model: ModelAddress = None,
        data: DataPath = None,
        reward: RewardCallable = None,
        resume: Resume = None,
        nproc: Processes = None,
        dry_run: DryRun = False,
        set_: Overrides = None,
        plugin: PluginPaths = None,
        locked: Locked = None,
        hot_reload: HotReload = False,
        debug: Debug = False,
    ) -> None:
        with one_line_errors(debug), plugins_at(plugin, hot_reload=hot_reload):
            overrides = parse_overrides(set_) | held_to(locked, dry_run=dry_run)
            _train(kind, config, Given(model, data, reward, resume, nproc), overrides, dry_run, debug)

    command.__doc__ = meaning
    return command


sft = _command("sft", "Supervised fine-tuning.")
ppo = _command_with_reward("ppo", "PPO on the model's own completions.")
grpo = _command_with_reward("grpo", "GRPO on groups of the model's own completions.")
rm = _command("rm", "A reward model from preference pairs.")
dpo = _command("dpo", "Direct preference optimization on pairs.")
ipo = _command("ipo", "Identity preference optimization on pairs.")
kto = _command("kto", "Kahneman-Tversky optimization on single labelled answers.")


@dataclass(frozen=True)
class Given:
    """Options that stand for keys of the configuration."""

    model: str | None
    data: str | None
    reward: str | None
    resume: str | None
    nproc: int | None

    def changes(self, kind: str, has_file: bool) -> dict[str, tuple[str, Any]]:
        """By dotted key, the option's name and the value; where there is no file some of them are in its place."""
        changes: dict[str, tuple[str, Any]] = {}
        if has_file:
            changes |= _overrides_of(kind, self.model, self.data, self.reward)
        if self.resume is not None:
            changes["run.resume"] = ("--resume", self.resume)
        if self.nproc is not None:
            changes["algorithm.parallel.nproc"] = ("--nproc", self.nproc)
        return changes


def _train(kind: str, config: Path | None, given: Given, overrides: dict[str, Any], dry_run: bool, debug: bool) -> None:
    if dry_run:
        look_ahead()
    changes = given.changes(kind, has_file=config is not None)
    overrides |= {key: value for key, (_, value) in changes.items()}
    options, run = {key: option for key, (option, _) in changes.items()}, CONFIG_KINDS[f"train-{kind}"]
    if config is None:
        from flows.cli.init import tables_without_file

        tables = tables_without_file(kind, given.model, given.data, given.reward)
        parsed: Any = load_tables(tables, f"rollout train {kind}", run, overrides, options)
    else:
        parsed = load_run(config, run, overrides, options)
    from rollout_core.plans.learner_plan import plan_training  # while another process imports torch for a dry run

    facts = plan_training(parsed, Path.cwd(), connections(), keep=not dry_run)
    if dry_run:
        settings = parsed.algorithm
        data = settings.prompts if kind in ON_POLICY else settings.dataset
        print_plan({"algorithm": kind, **facts, "minibatch": settings.minibatch_size, "dataset": data.path})
        return
    result = run_flow(f"flows.train:train_{kind}", debug, parsed)
    if "rewards" in result:
        typer.echo("reward: " + " ".join(f"{reward:.3f}" for reward in result["rewards"]))
    typer.echo(f"model: {result['model']}")
    typer.echo(f"train state: {result['train_state']} (step {result['step']})")


def _overrides_of(kind: str, model: str | None, data: str | None, reward: str | None) -> dict[str, tuple[str, Any]]:
    """What the options change of a configuration file: by dotted key, the option's name and the value."""
    rows = "algorithm.prompts" if kind in ON_POLICY else "algorithm.dataset"
    table = None if data is None else {"kind": "files", "path": data}
    changes = {
        "algorithm.base_model.uri": ("--model", model),
        rows: ("--data", table),
        "algorithm.reward": ("--reward", None if reward is None else {"kind": "function", "callable": reward}),
    }
    return {key: (option, value) for key, (option, value) in changes.items() if value is not None}

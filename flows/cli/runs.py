"""`rollout train`, `rollout infer batch` and `rollout nightly`: the commands that run flows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    load_tables,
    look_ahead,
    one_line_errors,
    parse_overrides,
    print_plan,
    run_flow,
)
from flows.cli.init import DataPath, ModelAddress, RewardCallable, overrides_of, tables_without_file

ALGORITHMS = {
    "sft": "Supervised fine-tuning.",
    "ppo": "PPO on the model's own completions.",
    "grpo": "GRPO on groups of the model's own completions.",
    "rm": "A reward model from preference pairs.",
    "dpo": "Direct preference optimization on pairs.",
    "ipo": "Identity preference optimization on pairs.",
    "kto": "Kahneman-Tversky optimization on single labelled answers.",
}

ON_POLICY = ("ppo", "grpo")

Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", help="Start from a snapshot: latest (of this run's name), its id or the first digits of it."
    ),
]

train_app = typer.Typer(no_args_is_help=True, help="Train a model.")
infer_app = typer.Typer(no_args_is_help=True, help="Generate completions.")


OptionalConfigPath = Annotated[
    Path | None, typer.Option("--config", help="TOML file of the run; without one give --model and --data.")
]


def _command(kind: str) -> Callable[..., None]:
    def command(
        config: OptionalConfigPath = None,
        model: ModelAddress = None,
        data: DataPath = None,
        resume: Resume = None,
        nproc: Processes = None,
        dry_run: DryRun = False,
        set_: Overrides = None,
        debug: Debug = False,
    ) -> None:
        with one_line_errors(debug):
            _train(kind, config, Given(model, data, None, resume, nproc), parse_overrides(set_), dry_run, debug)

    return command


def _command_with_reward(kind: str) -> Callable[..., None]:
    def command(
        config: OptionalConfigPath = None,
        model: ModelAddress = None,
        data: DataPath = None,
        reward: RewardCallable = None,
        resume: Resume = None,
        nproc: Processes = None,
        dry_run: DryRun = False,
        set_: Overrides = None,
        debug: Debug = False,
    ) -> None:
        with one_line_errors(debug):
            _train(kind, config, Given(model, data, reward, resume, nproc), parse_overrides(set_), dry_run, debug)

    return command


for _kind, _help in ALGORITHMS.items():
    train_app.command(_kind, help=_help)((_command_with_reward if _kind in ON_POLICY else _command)(_kind))


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
            changes |= overrides_of(kind, self.model, self.data, self.reward)
        if self.resume is not None:
            changes["run.resume"] = ("--resume", self.resume)
        if self.nproc is not None:
            changes["algorithm.parallel.nproc"] = ("--nproc", self.nproc)
        return changes


def _train(kind: str, config: Path | None, given: Given, overrides: dict[str, Any], dry_run: bool, debug: bool) -> None:
    if dry_run:
        look_ahead()
    from rollout_core.config import CONFIG_KINDS
    from rollout_core.plans.learner_plan import plan_training
    from tasks.runtime.prefect_server import connections

    changes = given.changes(kind, has_file=config is not None)
    overrides |= {key: value for key, (_, value) in changes.items()}
    options, run = {key: option for key, (option, _) in changes.items()}, CONFIG_KINDS[f"train-{kind}"]
    if config is None:
        tables = tables_without_file(kind, given.model, given.data, given.reward)
        parsed: Any = load_tables(tables, f"rollout train {kind}", run, overrides, options)
    else:
        parsed = load_run(config, run, overrides, options)
    facts = plan_training(parsed, Path.cwd(), connections(), keep=not dry_run)
    if dry_run:
        settings = parsed.algorithm
        data = settings.prompts if kind in ON_POLICY else settings.dataset
        print_plan({"algorithm": kind, **facts, "minibatch": settings.minibatch_size, "dataset": data.path})
        return
    result = run_flow(lambda: _flow(kind)(parsed), debug, "flows.train")
    if "rewards" in result:
        typer.echo("reward: " + " ".join(f"{reward:.3f}" for reward in result["rewards"]))
    typer.echo(f"model: {result['model']}")
    typer.echo(f"train state: {result['train_state']} (step {result['step']})")


def _flow(kind: str) -> Callable[..., dict[str, Any]]:
    from flows import train

    return getattr(train, f"train_{kind}")


@infer_app.command("batch")
def infer_batch(
    config: ConfigPath,
    resume: Annotated[str | None, typer.Option("--resume", help="Id of the run to resume.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Instead of [workers].count.")] = None,
    events: Annotated[
        bool, typer.Option("--events", help="A line of JSON on stderr for each finished sample.")
    ] = False,
    dry_run: DryRun = False,
    set_: Overrides = None,
    debug: Debug = False,
) -> None:
    """Complete every prompt of the input, exactly once."""
    with one_line_errors(debug):
        if dry_run:
            look_ahead()
        from rollout_core.config import InferBatchConfig
        from rollout_core.plans.batch_plan import plan_batch
        from tasks.runtime.prefect_server import connections

        overrides = parse_overrides(set_) | ({} if workers is None else {"workers.count": workers})
        overrides |= {"output.events": True} if events else {}
        options = {} if workers is None else {"workers.count": "--workers"}
        parsed = load_run(config, InferBatchConfig, overrides, options)
        facts = plan_batch(parsed, Path.cwd(), connections(), run_id=resume, thorough=dry_run)
        if dry_run:
            print_plan(facts)
            return

        def start() -> Any:
            from flows.batch import batch_inference as flow

            return flow(parsed, run_id=resume)

        _print_batch(run_flow(start, debug, "flows.batch"))


def _print_batch(written: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in written["figures"].items():
        table.add_row(name, f"{value:,}" if isinstance(value, int | float) else str(value))
    Console().print(table)
    typer.echo(f"run {written['run_id']}: {written['num_rows']} completions in {written['path']}")


def nightly(
    config: ConfigPath,
    nproc: Processes = None,
    dry_run: DryRun = False,
    set_: Overrides = None,
    debug: Debug = False,
) -> None:
    """Fine-tune, PPO, evaluate, promote, report."""
    with one_line_errors(debug):
        if dry_run:
            look_ahead()
        from rollout_core.config import NightlyConfig, apply_overrides, as_given, parse_config
        from rollout_core.plans.learner_plan import plan_nightly
        from tasks.runtime.prefect_server import connections

        parsed = load_run(config, NightlyConfig, parse_overrides(set_))
        if nproc is not None:
            learners = [name for name in ("sft", "rm", "dpo", "ppo", "grpo") if getattr(parsed, name) is not None]
            several = {f"{name}.parallel.nproc": nproc for name in learners}
            # The file is read once: it may have been edited since.
            changed = apply_overrides(as_given(parsed), several)
            parsed = parse_config(changed, NightlyConfig, name="--nproc")
        facts = plan_nightly(parsed, Path.cwd(), connections(), keep=not dry_run)
        if dry_run:
            print_plan(facts)
            return

        def start() -> Any:
            from flows.nightly import nightly as flow

            return flow(parsed)

        _print_nightly(run_flow(start, debug, "flows.nightly"))


def _print_nightly(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Stages", box=None, pad_edge=False)
    for column in ("stage", "label", "state", "seconds", "in", "out"):
        table.add_column(column, justify="right" if column == "seconds" else "left", no_wrap=column != "label")
    for row in result["stages"]:
        cells = (row["stage"], row["label"], row["state"], f"{row['seconds']:.2f}", _ids(row["in"]), _ids(row["out"]))
        table.add_row(*cells, style=None if row["state"] == "completed" else "dim")
    console = Console(width=max(Console().width, 110))
    console.print(table)
    counts = Counter(row["state"] for row in result["stages"])
    console.print(f"stages: {', '.join(f'{count} {state}' for state, count in counts.most_common())}")
    for moment, value in result["held_out"].items():
        console.print(f"held-out reward {moment}: {value:.3f}")
    console.print(f"model {result['model']}: {'promoted' if result['promoted'] else 'not promoted'}")
    console.print(f"report: {Path(result['report']) / 'index.html'}", soft_wrap=True)


def _ids(text: str) -> str:
    """Content ids short enough for a line: eight digits each, three at most."""
    ids = text.split()
    return " ".join(content_id[:8] for content_id in ids[:3]) + (f" +{len(ids) - 3}" if len(ids) > 3 else "")

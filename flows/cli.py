"""The `rollout` command. Exit codes: 0 done, 1 a check or a run failed, 2 bad configuration or input.

Heavy imports happen inside the commands that need them, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LLM post-training that cannot lose work.",
)
train_app = typer.Typer(no_args_is_help=True, help="Train a model.")
infer_app = typer.Typer(no_args_is_help=True, help="Generate completions.")
snapshot_app = typer.Typer(no_args_is_help=True, help="Look at train-state snapshots.")
store_app = typer.Typer(no_args_is_help=True, help="Run the store of rollouts, attempts and spans.")
app.add_typer(train_app, name="train")
app.add_typer(infer_app, name="infer")
app.add_typer(snapshot_app, name="snapshot")
app.add_typer(store_app, name="store")

ConfigPath = Annotated[Path, typer.Option("--config", help="TOML file of the run.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything reachable; build and run nothing.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Change one value, such as --set ppo.iterations=3. Repeatable.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]


@contextmanager
def _one_line_errors(debug: bool) -> Iterator[None]:
    """Turns our errors into an exit code and lines on stderr, one for each thing that is wrong."""
    from rollout_core.errors import ConfigError, NotFound, RolloutError

    try:
        yield
    except RolloutError as error:
        if debug:
            traceback.print_exc()
        sys.stderr.writelines(f"rollout: {line}\n" for line in str(error).splitlines())
        bad_input = isinstance(error, ConfigError | NotFound)
        raise typer.Exit(EXIT_BAD_INPUT if bad_input else EXIT_FAILED) from None


def _parse_overrides(settings: list[str] | None) -> dict[str, Any]:
    from rollout_core.errors import ConfigError

    overrides = {}
    for setting in settings or ():
        key, separator, text = setting.partition("=")
        if not separator or not all(key.split(".")):
            raise ConfigError(f"--set {setting!r}: expected KEY=VALUE, such as ppo.iterations=3")
        try:
            overrides[key] = json.loads(text)
        except ValueError:
            overrides[key] = text
    return overrides


def _print_plan(facts: Mapping[str, Any]) -> None:
    # What was not checked needs room: it comes last.
    pairs = dict(sorted(facts.items(), key=lambda fact: fact[0] == "not checked"))
    typer.echo("dry-run OK: " + " ".join(f"{name.replace(' ', '_')}={value}" for name, value in pairs.items()))


def _run_flow(start: Callable[[], Any]) -> Any:
    """Run a flow against the configured Prefect API, or a server of this command's own."""
    from flows.connections import PREFECT_HOME
    from flows.local_server import prefect_server

    with prefect_server(PREFECT_HOME):
        try:
            return start()
        finally:
            from prefect.logging.handlers import APILogHandler

            # The last lines are sent in the background; a server of our own is gone a moment later.
            APILogHandler().flush()


@train_app.command("sft")
def train_sft(config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, debug: Debug = False) -> None:
    """Supervised fine-tuning."""
    with _one_line_errors(debug):
        from flows.connections import connections
        from rollout_core.config import TrainSFTConfig, load_config
        from rollout_core.plan import plan_sft

        parsed = load_config(config, TrainSFTConfig, _parse_overrides(set_))
        facts = plan_sft(parsed, Path.cwd(), connections())
        if dry_run:
            settings = parsed.algorithm
            _print_plan(
                {"algorithm": "sft", **facts, "minibatch": settings.minibatch_size, "dataset": settings.dataset.path}
            )
            return

        def start() -> Any:
            from flows.train import train_sft as flow

            return flow(parsed)

        _print_checkpoint(_run_flow(start))


@train_app.command("ppo")
def train_ppo(config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, debug: Debug = False) -> None:
    """PPO on the model's own completions."""
    with _one_line_errors(debug):
        from rollout_core.config import TrainPPOConfig

        _train_on_policy("ppo", config, TrainPPOConfig, dry_run, set_)


@train_app.command("grpo")
def train_grpo(config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, debug: Debug = False) -> None:
    """GRPO on groups of the model's own completions."""
    with _one_line_errors(debug):
        from rollout_core.config import TrainGRPOConfig

        _train_on_policy("grpo", config, TrainGRPOConfig, dry_run, set_)


def _train_on_policy(kind: str, config: Path, model: Any, dry_run: bool, set_: list[str] | None) -> None:
    from flows.connections import connections
    from rollout_core.config import load_config
    from rollout_core.plan import plan_on_policy

    parsed = load_config(config, model, _parse_overrides(set_))
    facts = plan_on_policy(parsed, Path.cwd(), connections())
    if dry_run:
        settings = parsed.algorithm
        _print_plan(
            {"algorithm": kind, **facts, "minibatch": settings.minibatch_size, "dataset": settings.prompts.path}
        )
        return

    def start() -> Any:
        from flows import train

        return {"ppo": train.train_ppo, "grpo": train.train_grpo}[kind](parsed)

    result = _run_flow(start)
    typer.echo("reward: " + " ".join(f"{reward:.3f}" for reward in result["rewards"]))
    _print_checkpoint(result)


@train_app.command("rm")
def train_rm(config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, debug: Debug = False) -> None:
    """A reward model from preference pairs."""
    _train_on_preferences("rm", config, dry_run, set_, debug)


@train_app.command("dpo")
def train_dpo(config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, debug: Debug = False) -> None:
    """Direct preference optimization on pairs."""
    _train_on_preferences("dpo", config, dry_run, set_, debug)


@train_app.command("ipo")
def train_ipo(config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, debug: Debug = False) -> None:
    """Identity preference optimization on pairs."""
    _train_on_preferences("ipo", config, dry_run, set_, debug)


@train_app.command("kto")
def train_kto(config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, debug: Debug = False) -> None:
    """Kahneman-Tversky optimization on single judged answers."""
    _train_on_preferences("kto", config, dry_run, set_, debug)


def _train_on_preferences(kind: str, config: Path, dry_run: bool, set_: list[str] | None, debug: bool) -> None:
    with _one_line_errors(debug):
        from flows.connections import connections
        from rollout_core.config import CONFIG_KINDS, load_config
        from rollout_core.preference_plan import plan_kto, plan_pairs

        parsed: Any = load_config(config, CONFIG_KINDS[f"train-{kind}"], _parse_overrides(set_))
        facts = (plan_kto if kind == "kto" else plan_pairs)(parsed, Path.cwd(), connections())
        if dry_run:
            settings = parsed.algorithm
            _print_plan(
                {"algorithm": kind, **facts, "minibatch": settings.minibatch_size, "dataset": settings.dataset.path}
            )
            return

        def start() -> Any:
            from flows import preference

            return getattr(preference, f"train_{kind}")(parsed)

        _print_checkpoint(_run_flow(start))


def _print_checkpoint(result: Mapping[str, Any]) -> None:
    typer.echo(f"model: {result['model']}")
    typer.echo(f"train state: {result['train_state']} (step {result['step']})")


@infer_app.command("batch")
def infer_batch(
    config: ConfigPath,
    resume: Annotated[str | None, typer.Option("--resume", help="Run id to go on with.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Instead of [workers].count.")] = None,
    dry_run: DryRun = False,
    set_: Overrides = None,
    debug: Debug = False,
) -> None:
    """Complete every prompt of the input, exactly once."""
    with _one_line_errors(debug):
        from flows.connections import connections
        from rollout_core.config import InferBatchConfig, load_config
        from rollout_core.plan import plan_batch

        overrides = _parse_overrides(set_) | ({} if workers is None else {"workers.count": workers})
        parsed = load_config(config, InferBatchConfig, overrides)
        facts = plan_batch(parsed, Path.cwd(), resume, connections())
        if dry_run:
            _print_plan(facts)
            return

        def start() -> Any:
            from flows.batch import batch_inference as flow

            return flow(parsed, run_id=resume)

        written = _run_flow(start)
        typer.echo(f"run {written['run_id']}: {written['num_rows']} completions in {written['path']}")


@app.command("nightly")
def nightly(config: ConfigPath, dry_run: DryRun = False, set_: Overrides = None, debug: Debug = False) -> None:
    """Fine-tune, PPO, evaluate, promote, report."""
    with _one_line_errors(debug):
        from flows.connections import connections
        from rollout_core.config import NightlyConfig, load_config
        from rollout_core.plan import plan_nightly

        parsed = load_config(config, NightlyConfig, _parse_overrides(set_))
        facts = plan_nightly(parsed, Path.cwd(), connections())
        if dry_run:
            _print_plan(facts)
            return

        def start() -> Any:
            from flows.nightly import nightly as flow

            return flow(parsed)

        _print_nightly(_run_flow(start))


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


StoragePath = Annotated[
    str | None,
    typer.Option("--storage", help="URL or block:SLUG/NAME of the object store; default: ROLLOUT_STORAGE."),
]
ShortId = Annotated[str, typer.Argument(help="Content id, or its first digits, at least 8.")]


@snapshot_app.command("list")
def snapshot_list(
    storage: StoragePath = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="Only this run's.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Only this kind.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many, newest first.")] = None,
    debug: Debug = False,
) -> None:
    """Print snapshots, newest first, as JSON."""
    with _one_line_errors(debug):
        from flows.connections import object_store
        from rollout_core.snapshots import SnapshotStore

        with object_store(storage) as objects:
            found = SnapshotStore(objects).list(run_id=run_id, kind=kind, limit=limit)  # pyright: ignore[reportArgumentType]
        typer.echo(json.dumps([item.model_dump(mode="json") for item in found], indent=2))


@snapshot_app.command("show")
def snapshot_show(snapshot_id: ShortId, storage: StoragePath = None, debug: Debug = False) -> None:
    """Print one snapshot as JSON."""
    with _one_line_errors(debug):
        from flows.connections import object_store
        from rollout_core.short_ids import complete_snapshot_id
        from rollout_core.snapshots import SnapshotStore

        with object_store(storage) as objects:
            found = SnapshotStore(objects).get(complete_snapshot_id(objects, snapshot_id))
        typer.echo(found.model_dump_json(indent=2))


@app.command("lineage")
def lineage(content_id: ShortId, storage: StoragePath = None, debug: Debug = False) -> None:
    """Print what made a checkpoint or any other result, back to the first inputs, as JSON."""
    with _one_line_errors(debug):
        from flows.connections import object_store
        from rollout_core.errors import NotFound
        from rollout_core.lineage import trace_lineage
        from rollout_core.short_ids import complete_lineage_id

        with object_store(storage) as objects:
            found = trace_lineage(objects, complete_lineage_id(objects, content_id))
        if not found:
            raise NotFound(f"no stage recorded that it made {content_id}")
        typer.echo(json.dumps([item.model_dump(mode="json") for item in found], indent=2))


DatabaseURL = Annotated[
    str, typer.Option("--database", help="sqlite:///path/to/file.db, or postgresql://user@host/name.")
]


@store_app.command("serve")
def store_serve(
    database: DatabaseURL,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; beyond loopback only with a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 4747,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Server processes.")] = 1,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable that holds the API key.")
    ] = None,
    cors_allow_origin: Annotated[
        list[str] | None, typer.Option("--cors-allow-origin", help="Origin of web pages to let in; *: all. Repeatable.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve a store over HTTP until SIGTERM or Ctrl-C."""
    with _one_line_errors(debug):
        from rollout_core.store.http.serve import ServeSettings, serve

        settings = ServeSettings(database, host, port, workers, api_key_env, tuple(cors_allow_origin or ()))
        serve(settings, lambda address: typer.echo(f"serving at {address}"))


@store_app.command("migrate")
def store_migrate(database: DatabaseURL, debug: Debug = False) -> None:
    """Bring a store's database to the schema of this version."""
    with _one_line_errors(debug):
        from rollout_core.store.migrate import migrate

        typer.echo(migrate(database))


@app.command("schema")
def schema() -> None:
    """Print the JSON Schema of every run configuration."""
    from rollout_core.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def main() -> None:
    """Entry point of the `rollout` command."""
    app()

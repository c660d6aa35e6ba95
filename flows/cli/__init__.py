"""The `rollout` command. Exit codes: 0 done, 1 a check or a run failed, 2 bad configuration or input.

Heavy imports happen inside the commands that need them, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json

import typer

from flows.cli import records, run, storage, store, train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LLM post-training that cannot lose work.",
)
app.add_typer(train.app, name="train")
app.add_typer(run.infer_app, name="infer")
app.add_typer(records.snapshot_app, name="snapshot")
app.add_typer(storage.app, name="storage")
app.add_typer(store.app, name="store")
app.command("nightly")(run.nightly)
app.command("lineage")(records.lineage)


@app.command("schema")
def schema() -> None:
    """Print the JSON Schema of every run configuration."""
    from rollout_core.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def main() -> None:
    """Entry point of the `rollout` command."""
    app()

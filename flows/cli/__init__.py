"""The `rollout` command. Exit codes: 0 done, 1 a check or a run failed, 2 bad configuration or input.

Heavy imports happen inside the commands that need them, so that ``--help`` answers at once.
"""

from __future__ import annotations

import io
import json
import sys
from typing import Annotated

import typer

from flows.cli import agents, completion, imports, init, lineage, plan, promotion, results, runs, snapshots, storage
from flows.cli.common import one_line_errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # else "[workers].count" in a help text is taken for a colour and left out
    help="LLM post-training that cannot lose work.",
)
app.add_typer(runs.train_app, name="train")
app.add_typer(runs.infer_app, name="infer")
app.add_typer(agents.agent_app, name="agent")
app.add_typer(snapshots.snapshot_app, name="snapshot")
app.add_typer(storage.storage_app, name="storage")
app.add_typer(storage.store_app, name="store")
app.command("init")(init.init)
app.command("plan")(plan.plan)
app.command("import")(imports.import_model)
app.command("nightly")(runs.nightly)
app.command("runs")(results.runs)
app.command("show")(results.show)
app.command("compare")(results.compare)
app.command("samples")(results.samples)
app.command("tail")(results.tail)
app.command("lineage")(lineage.lineage)
app.command("export")(lineage.export)
app.command("reproduce")(lineage.reproduce)
app.command("promotions")(promotion.promotions)
app.command("promote")(promotion.promote)
app.command("rollback")(promotion.rollback)
app.command("completion")(completion.completion)


def _print_version(wanted: bool) -> None:
    if wanted:
        from rollout_core import __version__

        typer.echo(f"rollout {__version__}")
        raise typer.Exit


@app.callback()
def rollout(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """LLM post-training that cannot lose work."""


@app.command("schema")
def schema(
    kind: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only this kind's, such as infer-batch; default: all, by name.")
    ] = None,
) -> None:
    """Print the JSON Schema of run configurations: every key with its meaning, default and bounds."""
    with one_line_errors(debug=False):
        from rollout_core.base.errors import ConfigError
        from rollout_core.config import CONFIG_KINDS, json_schema

        schemas = json_schema()
        if kind is not None and kind not in schemas:
            raise ConfigError(f"no kind of run is named {kind!r}; expected one of {', '.join(CONFIG_KINDS)}")
        typer.echo(json.dumps(schemas if kind is None else schemas[kind], indent=2))


def main() -> None:
    """Entry point of the `rollout` command."""
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal cannot show is no reason for a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    completion.answer_shells()
    app()

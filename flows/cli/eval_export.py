"""`rollout eval export`: the figures of evaluations for other programs and for model cards."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from flows.cli.common import Debug, one_line_errors
from flows.cli.evaluate import model_document
from flows.cli.promotion import ServedResource, served_id
from flows.cli.results import as_json_text
from flows.cli.storage import StoragePath
from rollout_core.base.errors import ConfigError
from rollout_core.exports.evaluations import as_card, as_csv, figure_rows
from rollout_core.runs.evaluations import evaluated_models, find_evaluated
from rollout_core.runs.run_records import RunRecords
from tasks.runtime.prefect_server import object_store


def eval_export(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="As of eval compare. Default: all that there are.")
    ] = None,
    output: Annotated[
        Literal["csv", "json", "card"],
        typer.Option("--format", help="Table; whole reports; or a section of a model card with model-index."),
    ] = "csv",
    name: Annotated[str | None, typer.Option("--name", help="Of the model in its card; default: its address.")] = None,
    storage: StoragePath = None,
    resource: ServedResource = "policy",
    debug: Debug = False,
) -> None:
    """Print the figures of evaluated models for others: as CSV, as JSON, or for a model card."""
    with one_line_errors(debug):
        names = [served_id(resource) if each == "latest" else each for each in models or ()]
        with object_store(storage) as objects:
            known = evaluated_models(RunRecords(objects))
        chosen = [find_evaluated(known, each) for each in names] if names else known
        if output == "json":
            typer.echo(as_json_text([model_document(model) for model in chosen]))
        elif output == "csv":
            rows = [row for each in chosen for row in figure_rows(each.model, each.address, each.reports.values())]
            typer.echo(as_csv(rows), nl=False)
        elif len(chosen) != 1:
            raise ConfigError(f"--format card: got {len(chosen)} models, expected one; name it")
        else:
            [model] = chosen
            typer.echo(as_card(name or model.address or model.model, list(model.reports.values())), nl=False)

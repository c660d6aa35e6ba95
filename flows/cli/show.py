"""`rollout show`: one run."""

from __future__ import annotations

from datetime import UTC

import typer
from rich.table import Table

from flows.cli.common import AsJson, Debug, one_line_errors
from flows.cli.results import RunName, add_row, as_json_text, duration, print_curves, print_table, visible
from flows.cli.storage import StoragePath
from rollout_core.runs.figures import curves_of
from rollout_core.runs.run_records import (
    RunDetail,
    RunHead,
    RunRecords,
    next_step,
    runs_under_way,
    shown_seconds,
    shown_state,
    state_in_words,
    work_in_words,
)
from tasks.runtime.prefect_server import object_store


def show(run: RunName = "latest", storage: StoragePath = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Print one run: what came of it, its curves, its stages."""
    with one_line_errors(debug):
        with object_store(storage) as objects:
            records = RunRecords(objects)
            head, detail = records.detail(records.find(run))
            state = shown_state(head, runs_under_way(objects))
            curves = curves_of(objects, head, detail)
        if as_json:
            shown = {name: {"x": curve.x, "y": curve.y} for name, curve in curves.items()}
            document = {
                **head.model_dump(mode="json"),
                "state": state,
                **detail.model_dump(mode="json"),
                "curves": shown,
            }
            typer.echo(as_json_text(document))
            return
        for name, value in _facts(head, detail, state).items():
            typer.echo(f"{name + ':':22} {visible(value)}")
        print_curves({curve.name: [curve.y] for curve in curves.values()})
        print_table(_stages(detail))


def _facts(head: RunHead, detail: RunDetail, state: str) -> dict[str, str]:
    cost = f"{head.computed_seconds:.1f} s computed" + (f", {head.price:.4f} {head.currency}" if head.currency else "")
    return {
        "run": f"{head.name} ({head.id})",
        "flow": f"{head.flow}, called {head.flow_run_name}" + (f", try {head.tries}" if head.tries > 1 else ""),
        "state": state_in_words(head, state) + (f": {head.error}" if head.error else ""),
        **({"next": todo} if (todo := next_step(head, state)) else {}),
        **({"at work": work} if (work := work_in_words(head, state)) else {}),
        "began": f"{head.began.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, took {duration(shown_seconds(head, state))}",
        **{name: value for name in ("model", "algorithm", "data") if (value := getattr(head, name))},
        **{f"held out {moment.name}": f"{moment.reward:.4f}" for moment in head.held_out},
        **({} if head.promoted is None else {"promoted": f"{'yes' if head.promoted else 'no'}: {head.reason}"}),
        **detail.facts,
        "stages": ", ".join(f"{count} {kind}" for kind, count in head.counts.items()) or "none yet",
        "cost": cost,
    }


def _stages(detail: RunDetail) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "label", "state", "seconds"):
        table.add_column(column, justify="right" if column == "seconds" else "left", no_wrap=column != "label")
    for call in detail.calls:
        style = {"Completed": None, "Cached": "dim", "Checked": "dim"}.get(call.state, "red")
        add_row(table, (call.stage, call.label, call.state.lower(), f"{call.seconds:.2f}"), style)
    return table

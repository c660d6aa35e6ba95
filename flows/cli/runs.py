"""`rollout runs`: which runs there were."""

from __future__ import annotations

import json
from datetime import UTC
from typing import Annotated

import typer
from rich.table import Table

from flows.cli.common import AsJson, Debug, one_line_errors
from flows.cli.results import add_row, duration, print_table
from flows.cli.storage import StoragePath
from rollout_core.base.errors import ConfigError
from rollout_core.runs.run_records import (
    SHOWN_STATES,
    RunHead,
    RunRecords,
    runs_under_way,
    shown_seconds,
    shown_state,
    state_in_words,
    work_in_words,
)
from tasks.runtime.prefect_server import object_store


def runs(
    flow: Annotated[
        str | None, typer.Option("--flow", help="Only of this flow, such as nightly or train-grpo.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only those whose name contains this.")] = None,
    state: Annotated[
        str | None, typer.Option("--state", help="Only running, completed, failed, stopped or lost ones.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many, the newest first.")] = 20,
    storage: StoragePath = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print runs, the newest first: state, held-out reward, promotion, time and cost."""
    with one_line_errors(debug):
        if state is not None and state not in SHOWN_STATES:
            raise ConfigError(f"--state {state}: expected one of {', '.join(SHOWN_STATES)}")
        with object_store(storage) as objects:
            alive = runs_under_way(objects)

            def wanted(head: RunHead) -> bool:
                return (
                    (flow is None or head.flow == flow)
                    and (name is None or name in head.name)
                    and (state is None or shown_state(head, alive) == state)
                )

            records = RunRecords(objects)
            found = records.heads(wanted, limit=limit)
        if as_json:
            rows = [{**head.model_dump(mode="json"), "state": shown_state(head, alive)} for head in found]
            typer.echo(json.dumps(rows, indent=2))
            return
        if not found:
            typer.echo("no run is recorded here yet" if flow is name is state is None else "no run is like that")
            return
        table = Table(box=None, pad_edge=False)
        rows = [_cells(records.short(head.id), head, shown_state(head, alive)) for head in found]
        names = (
            "run",
            "began (UTC)",
            "name",
            "flow",
            "state",
            "at work",
            "held-out reward",
            "promoted",
            "time",
            "cost",
        )
        # What no run has needs no room; of the rest only names may be cut.
        shown = [place for place, name in enumerate(names) if any(row[place] for row in rows)]
        for place in shown:
            width = None if names[place] in ("name", "flow") else max(len(row[place]) for row in rows)
            justify = "right" if names[place] in ("time", "cost") else "left"
            table.add_column(names[place], justify=justify, no_wrap=True, min_width=width)
        for row in rows:
            add_row(table, [row[place] for place in shown])
        print_table(table)


def _cells(short: str, head: RunHead, state: str) -> tuple[str, ...]:
    promoted = "" if head.promoted is None else "yes" if head.promoted else "no"
    cost = f"{head.price:.2f} {head.currency}" if head.currency else ""
    return (
        short,
        f"{head.began.astimezone(UTC):%m-%d %H:%M}",
        head.name,
        head.flow,
        state_in_words(head, state),
        work_in_words(head, state),
        _rewards(head),
        promoted,
        duration(shown_seconds(head, state)),
        cost,
    )


def _rewards(head: RunHead) -> str:
    rewards, gain = [moment.reward for moment in head.held_out], head.gain
    if gain is None:
        return "".join(f"{reward:.3f}" for reward in rewards)
    return f"{rewards[0]:.3f} to {rewards[-1]:.3f} ({gain:+.3f})"

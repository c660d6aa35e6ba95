"""`rollout tail`: a run while it is under way."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime

import typer

from flows.cli.common import EXIT_FAILED, Debug, one_line_errors
from flows.cli.results import RunName, visible
from flows.cli.storage import StoragePath
from rollout_core.objects import ObjectStore
from rollout_core.runs.run_records import RunHead, RunRecords, runs_under_way, shown_state
from tasks.runtime.prefect_server import object_store

POLL_SECONDS = 2.0


def tail(run: RunName = "latest", storage: StoragePath = None, debug: Debug = False) -> None:
    """Follow a run: a line for each stage that ends and for the step under way, until the run has ended.

    Ends with 1 where the run failed, was stopped, or its process is gone.
    """
    with one_line_errors(debug):
        with object_store(storage) as objects:
            records = RunRecords(objects)
            state = _follow(objects, records, records.find(run))
        if state != "completed":
            raise typer.Exit(EXIT_FAILED)


def _follow(objects: ObjectStore, records: RunRecords, head: RunHead) -> str:
    printed_until, step = 0.0, ""
    while True:
        head, detail = records.detail(head)
        for call in (call for call in detail.calls if call.ended > printed_until):
            at = datetime.fromtimestamp(call.ended, UTC)
            printed_until = call.ended
            done = f"{call.stage} {call.label}: {call.state.lower()}, {call.seconds:.2f} s"
            typer.echo(f"{at:%H:%M:%S}  {visible(done)}")
        if detail.live is not None and detail.live.rows:
            row = detail.live.rows[-1]
            figures = ", ".join(f"{name} {value:.4g}" for name, value in list(row.items())[:4] if value is not None)
            line = f"{visible(detail.live.title)} of {detail.live.num_steps}: {figures}"
            if line != step:
                typer.echo(f"          {line}")
            step = line
        state = shown_state(head, runs_under_way(objects))
        if state != "running":
            typer.echo(
                f"{head.name} ({records.short(head.id)}) {state}" + (f": {visible(head.error)}" if head.error else "")
            )
            return state
        sys.stdout.flush()
        time.sleep(POLL_SECONDS)
        head = records.find(head.id)

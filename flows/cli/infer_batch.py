"""`rollout infer batch`: completions of every prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flows.cli.common import (
    ConfigPath,
    Debug,
    DryRun,
    Locked,
    Overrides,
    held_to,
    one_line_errors,
    parse_overrides,
    print_plan,
)
from flows.cli.starting import load_run, look_ahead, run_flow
from rollout_core.config import InferBatchConfig
from tasks.runtime.prefect_server import connections


def infer_batch(
    config: ConfigPath,
    resume: Annotated[str | None, typer.Option("--resume", help="Id of the run to resume.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Instead of [workers].count.")] = None,
    events: Annotated[
        bool, typer.Option("--events", help="A line of JSON on stderr for each finished sample.")
    ] = False,
    dry_run: DryRun = False,
    set_: Overrides = None,
    locked: Locked = None,
    debug: Debug = False,
) -> None:
    """Complete every prompt of the input, exactly once."""
    with one_line_errors(debug):
        if dry_run:
            look_ahead()
        overrides = parse_overrides(set_) | ({} if workers is None else {"workers.count": workers})
        overrides |= ({"output.events": True} if events else {}) | held_to(locked, dry_run=dry_run)
        options = {} if workers is None else {"workers.count": "--workers"}
        parsed = load_run(config, InferBatchConfig, overrides, options)
        from rollout_core.plans.batch_plan import plan_batch  # while another process imports torch for a dry run

        facts = plan_batch(parsed, Path.cwd(), connections(), run_id=resume, thorough=dry_run)
        if dry_run:
            print_plan(facts)
            return
        _print_batch(run_flow("flows.batch:batch_inference", debug, parsed, run_id=resume))


def _print_batch(written: Mapping[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in written["figures"].items():
        table.add_row(name, f"{value:,}" if isinstance(value, int | float) else str(value))
    Console().print(table)
    typer.echo(
        f"run {written['run_id']}: {written['num_rows']} {written.get('what', 'completions')} in {written['path']}"
    )

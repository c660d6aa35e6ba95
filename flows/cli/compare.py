"""`rollout compare`: how two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from flows.cli.common import AsJson, Debug, one_line_errors
from flows.cli.results import RunName, add_row, as_json_text, print_curves, print_table, shortened
from flows.cli.storage import StoragePath
from rollout_core.base.errors import NotFound
from rollout_core.runs.figures import curves_of
from rollout_core.runs.run_records import RunRecords, differences
from rollout_core.runs.run_samples import HeldOut, compare_held_out
from tasks.runtime.prefect_server import object_store


def compare(
    first: RunName,
    second: RunName,
    storage: StoragePath = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Samples that changed most to print.")] = 5,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print how two runs differ: configuration, figures, held-out samples that changed."""
    with one_line_errors(debug):
        with object_store(storage) as objects:
            records = RunRecords(objects)
            both = [records.detail(records.find(run)) for run in (first, second)]
            keys = differences([detail.config for _, detail in both])
            curves = [curves_of(objects, head, detail) for head, detail in both]
            held_out, gone = None, ""
            try:
                held_out = compare_held_out(objects, both)
            except NotFound as error:  # their record stays for longer
                gone = str(error)
        names = [name for name in curves[0] if name in curves[1]]
        figures = {name: (curves[0][name].last, curves[1][name].last) for name in names}
        if as_json:
            document = {
                "runs": [head.id for head, _ in both],
                "configuration": {row.key: row.values for row in keys},
                "figures": figures,
                "held_out": None if held_out is None else _held_out_json(held_out, limit),
            }
            typer.echo(as_json_text(document))
            return
        typer.echo("runs: " + " and ".join(f"{head.name} ({records.short(head.id)})" for head, _ in both))
        print_table(_side_by_side("configuration", [(row.key, *map(str, row.values)) for row in keys]))
        last = [(name, f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}") for name, (a, b) in figures.items()]
        print_table(_side_by_side("last value of", last, "difference"))
        both_y = {name: [list(of[name].y) for of in curves] for name in names}
        changed = [name for name, (a, b) in both_y.items() if a != b and len({*a, *b}) > 1]
        if changed:
            typer.echo("curves that differ, the first run's above the second's:")
            print_curves({name: both_y[name] for name in changed})
        if held_out is not None:
            _print_held_out(held_out, limit)
        elif gone:
            typer.echo(gone)


def _side_by_side(title: str, rows: Sequence[tuple[str, ...]], *more: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in (title, "first", "second", *more):
        table.add_column(column)
    for row in rows or [("(nothing differs)" if title == "configuration" else "(no figure that both have)", "", "")]:
        add_row(table, row)
    return table


def _held_out_json(held_out: HeldOut, limit: int) -> dict[str, Any]:
    document = asdict(held_out)
    return {**document, "pairs": document["pairs"][:limit]}


def _print_held_out(held_out: HeldOut, limit: int) -> None:
    labels = " and ".join(f"{label!r} {mean:.4f}" for label, mean in zip(held_out.labels, held_out.means, strict=True))
    typer.echo(f"held-out reward: {labels}")
    gain = held_out.gain
    if gain is not None:
        typer.echo(
            f"gain: {gain.gain:+.4f}, 95 % interval {gain.lower:+.4f} to {gain.upper:+.4f} "
            f"(paired bootstrap over {gain.num_prompts} prompts)"
        )
    elif held_out.labels[0] != held_out.labels[1]:
        typer.echo("no gain is given: the two are evaluations of different moments")
    elif not held_out.pairs:
        typer.echo("the two were evaluated on different prompts")
    worse = [pair for pair in held_out.pairs if pair.change < 0][:limit]
    better = [pair for pair in reversed(held_out.pairs) if pair.change > 0][:limit]
    for title, pairs in (("worse", worse), ("better", better)):
        for pair in pairs:
            typer.echo(f"{title} {pair.rewards[0]:.3g} to {pair.rewards[1]:.3g}: {shortened(pair.prompt)}")
            for completion in pair.completions:
                typer.echo(f"    {shortened(completion)}")

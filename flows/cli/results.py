"""What the commands share that show runs: how one is named, and curves, tables and text for a terminal."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_core.base.errors import RolloutError
from rollout_core.base.settings import locations
from rollout_core.objects import ObjectStore
from rollout_core.runs.run_records import RunRecords

if TYPE_CHECKING:
    from rich.table import Table

_MOST_RUNS = 50


def _recorded_runs(incomplete: str) -> list[tuple[str, str]]:
    """Ids and names of runs, with what they are, where they can be had at once: from a folder."""
    url = locations().storage
    if not url.startswith("file://"):
        return []
    try:
        records = RunRecords(ObjectStore.from_url(url))
        heads = records.heads(limit=_MOST_RUNS)
    except (RolloutError, OSError):  # a shell has no use for an error
        return []
    found = [("latest", "the last run")]
    found += [(records.short(head.id), f"{head.name}, {head.flow}, {head.began:%m-%d %H:%M}") for head in heads]
    found += [(name, "the last run of this name") for name in dict.fromkeys(head.name for head in heads)]
    return [(word, meaning) for word, meaning in found if word.startswith(incomplete)]


RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="First digits of its id, at least 4; its name, for the last such; or latest.",
        autocompletion=_recorded_runs,
    ),
]
_BLOCKS = " ▁▂▃▄▅▆▇█"
_WIDTH = 40
_LONGEST_NAME = 48
_FIGURES_WIDTH = 28


def duration(seconds: float) -> str:
    """Of a run, for a table."""
    return str(timedelta(seconds=round(seconds)))


def print_curves(curves: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """A line for each curve: name, course, first and last value. Several of a name have a common scale."""
    names = {name: visible(name) for name in curves}
    column = min(max(map(len, names.values()), default=0), _LONGEST_NAME)
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    width = max(_WIDTH, room - column - _FIGURES_WIDTH)
    for name, series in curves.items():
        lines = sparklines(series, width)
        for place, (line, values) in enumerate(zip(lines, series, strict=True)):
            shown = names[name][:column] if place == 0 else ""
            typer.echo(
                f"{shown:{column}} {line:{min(width, max(map(len, lines)))}} {values[0]:.4g} to {values[-1]:.4g}"
            )


def sparklines(series: Sequence[Sequence[float]], width: int = _WIDTH) -> list[str]:
    """Curves in one line of text each, on a common scale: means of as many equal parts as there is room for."""
    means = [_means([value for value in values if math.isfinite(value)], width) for values in series]
    every = [value for values in means for value in values]
    low, high = min(every, default=0.0), max(every, default=0.0)
    if math.isclose(low, high, rel_tol=1e-9):  # means of equal values differ in last bits
        return [_BLOCKS[4] * len(values) for values in means]
    # Halves, whose difference no two floats can overflow.
    scale = high / 2 - low / 2
    return ["".join(_BLOCKS[1 + round((value / 2 - low / 2) / scale * 7)] for value in values) for values in means]


def _means(values: Sequence[float], width: int) -> list[float]:
    parts = min(width, len(values))
    ends = [round(place * len(values) / parts) for place in range(parts + 1)] if parts else []
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]


def visible(text: str) -> str:
    """In one line, and without characters that would command the terminal."""
    return "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))


def shortened(text: str, width: int = 200) -> str:
    shown = visible(text)
    return shown if len(shown) <= width else shown[: width - 3] + "..."


def as_json_text(document: Any) -> str:
    """What is no number in JSON is null."""

    def finite(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, dict):
            return {name: finite(item) for name, item in value.items()}
        return [finite(item) for item in value] if isinstance(value, list | tuple) else value

    return json.dumps(finite(document), indent=2)


def add_row(table: Table, cells: Sequence[str], style: str | None = None) -> None:
    from rich.text import Text

    # Not as markup: "[INST]" would be taken for a style.
    table.add_row(*(Text(visible(cell)) for cell in cells), style=style)


def print_table(table: Table) -> None:
    from rich.console import Console

    # Piped, a line stays one: other programs read it.
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(table)

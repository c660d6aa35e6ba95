"""What the benchmarks share: a place of their own, and one table.

Timings of a busy machine wander, so every comparison alternates its sides in one process and reports medians over
rounds; the ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

PROJECT = Path(__file__).resolve().parent.parent
# `examples` is no installed package; the benchmarks make their models with its functions.
sys.path.insert(0, str(PROJECT))


def quick_asked(description: str | None) -> bool:
    """Whether the command line asks for the small form."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small form, to see that it runs")
    return parser.parse_args().quick


@contextmanager
def own_place() -> Iterator[Path]:
    """A temporary working folder with its own storage, database and cache; gone at the end.

    Enter it before prefect or torch is imported: both read the environment when they are.
    """
    start = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as name:
        folder = Path(name)
        for setting in ("PREFECT_API_URL", "ROLLOUT_LIMITS"):
            os.environ.pop(setting, None)
        os.environ |= {
            "ROLLOUT_STORAGE": f"file://{folder / 'objects'}",
            "ROLLOUT_DATABASE": f"sqlite:///{folder / 'rollout.db'}",
            "ROLLOUT_CACHE": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "TQDM_DISABLE": "1",
            # Runs send their log lines to the server as always; only the terminal is spared.
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
        }
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(start)


@contextmanager
def own_server(folder: Path) -> Iterator[str]:
    """A Prefect server with its home in ``folder``, for the length of the block."""
    from tasks.runtime.prefect_server import prefect_server

    with prefect_server(folder / "prefect") as address:
        try:
            yield address
        finally:
            from prefect.logging.handlers import APILogHandler

            # The last lines are sent in the background, to a server that is gone a moment later.
            APILogHandler().flush()


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage is collected before the block instead of at some moment within it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def median_ratio(ours: Sequence[float], baseline: Sequence[float]) -> float:
    """Median over rounds of ours / baseline, round by round."""
    return statistics.median(mine / other for mine, other in zip(ours, baseline, strict=True))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


_COLUMNS = ("what", "ours", "baseline", "ratio", "rounds")


class Figures:
    """Rows of the one table a benchmark prints."""

    def __init__(self, title: str) -> None:
        self._table = Table(title=title, title_justify="left", box=None, pad_edge=False, caption_justify="left")
        self._title = title
        self.rows: list[tuple[str, ...]] = []
        for column in _COLUMNS:
            self._table.add_column(column, justify="left" if column == "what" else "right", no_wrap=True)

    def add(self, what: str, ours: str, baseline: str = "", ratio: float | None = None, rounds: int = 1) -> None:
        """One row; figures come with their units. A line says so at once: a table that takes minutes may be cut off."""
        shown = "" if ratio is None else f"{ratio:.3f}"
        self.rows.append((what, ours, baseline, shown, str(rounds)))
        self._table.add_row(*self.rows[-1])
        print(f"{what}: {ours} {baseline} {shown}".rstrip(), file=sys.stderr, flush=True)

    def compare(self, what: str, ours: Sequence[float], baseline: Sequence[float], *, form: str = "{:,.0f}") -> None:
        """A row of two sides measured in alternation: their medians and the median ratio."""
        medians = (form.format(statistics.median(side)) for side in (ours, baseline))
        self.add(what, *medians, ratio=median_ratio(ours, baseline), rounds=len(ours))

    def markdown(self) -> str:
        """The table as the documents have it."""
        aligned = ("---", *("---:" for _ in _COLUMNS[1:]))
        lines = (f"| {' | '.join(row)} |" for row in (_COLUMNS, aligned, *self.rows))
        return "\n".join([self._title, "", *lines])

    def show(self, caption: str = "") -> None:
        """Print the table."""
        self._table.caption = caption or None
        console = Console()
        with contextlib.suppress(BrokenPipeError):
            Console(width=max(console.width, 110)).print(self._table)

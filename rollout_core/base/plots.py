"""Figures as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


def draw_curve(
    target: Path | IO[bytes],
    series: Mapping[str, Sequence[float]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    first_x: int = 1,
    marks: Mapping[str, float] | None = None,
) -> None:
    """Write a PNG with one line per named series over ``first_x``, ``first_x + 1``, ...; ``marks`` are level lines."""
    # The object interface needs no display and leaves no global state behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, values in series.items():
        steps = range(first_x, first_x + len(values))
        axes.plot(steps, values, label=name, linewidth=1.8, marker="o" if len(values) <= 60 else None, markersize=3)
    for name, level in (marks or {}).items():
        axes.axhline(level, linestyle="--", linewidth=1.0, color="grey")
        axes.annotate(name, (1.0, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    if len(series) > 1:
        axes.legend(frameon=False)
    figure.savefig(target, format="png")


def draw_histogram(
    target: Path | IO[bytes], counts: Sequence[int], *, width: int, title: str, x_label: str, y_label: str
) -> None:
    """Write a PNG of ``counts``, of which bucket i holds values from ``i * width + 1`` to ``(i + 1) * width``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.bar([bucket * width + 0.5 for bucket in range(len(counts))], counts, width=0.95 * width, align="edge")
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25, axis="y")
    figure.savefig(target, format="png")

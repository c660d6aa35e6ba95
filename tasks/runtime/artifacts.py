"""What a person looks at: pictures of figures; and in the Prefect UI tables, curves, links and progress of stages.

An artifact never decides about a stage: it is sent in the background (`tasks.runtime.artifact_sender`), and when the
server refuses it, that is logged.
"""

from __future__ import annotations

import base64
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from prefect.artifacts import Artifact, ImageArtifact, MarkdownArtifact, ProgressArtifact, TableArtifact
from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn
from rich.table import Column

from rollout_core.base.ids import ContentId
from rollout_core.base.processes import size_text
from rollout_core.base.watching import watched
from tasks.runtime.artifact_sender import SENDER, Outgoing
from tasks.runtime.journal import INTERVAL_SECONDS, Pace, stage_logger
from tasks.runtime.prefect_logs import through_stderr


def draw_curve(
    target: Path | IO[bytes],
    series: Mapping[str, Sequence[float]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    marks: Mapping[str, float] | None = None,
    bounds: Sequence[tuple[float, float]] = (),
    places: Sequence[str] = (),
) -> None:
    """Write a PNG with one line per named series over 1, 2, ..., or over ``places``. ``marks`` are level lines,
    ``bounds`` the ends of an interval around each value."""
    with _axes(target, title, x_label, y_label) as axes:
        for name, values in series.items():
            marker = "o" if len(values) <= 60 else None
            axes.plot(range(1, len(values) + 1), values, label=name, linewidth=1.8, marker=marker, markersize=3)
        if bounds:
            lower, upper = zip(*bounds, strict=True)
            axes.fill_between(range(1, len(bounds) + 1), lower, upper, alpha=0.18, linewidth=0)
        for name, level in (marks or {}).items():
            axes.axhline(level, linestyle="--", linewidth=1.0, color="grey")
            place = {"xycoords": ("axes fraction", "data"), "xytext": (-3, 2), "textcoords": "offset points"}
            axes.annotate(name, (1.0, level), **place, ha="right", va="bottom", fontsize=8)
        if places:
            axes.set_xticks(range(1, len(places) + 1), places, rotation=20, ha="right", fontsize=8)
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)  # steps, of which there is no half
        axes.grid(alpha=0.25)
        if len(series) > 1:
            axes.legend(frameon=False)


def draw_histogram(
    target: Path | IO[bytes], counts: Sequence[int], *, width: int, title: str, x_label: str, y_label: str
) -> None:
    """Write a PNG of ``counts``, of which bucket i holds values from ``i * width + 1`` to ``(i + 1) * width``."""
    with _axes(target, title, x_label, y_label) as axes:
        axes.bar([bucket * width + 0.5 for bucket in range(len(counts))], counts, width=0.95 * width, align="edge")
        axes.grid(alpha=0.25, axis="y")


@contextmanager
def _axes(target: Path | IO[bytes], title: str, x_label: str, y_label: str) -> Iterator[Any]:
    """What to draw on; the picture is written at the end of the block."""
    # The object interface needs no display and leaves no global state behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    yield axes
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    figure.savefig(target, format="png")


PROGRESS_INTERVAL_SECONDS = 2.0


def table(key: str, rows: Sequence[Mapping[str, Any]], description: str) -> None:
    """A table of figures. ``key`` is lower-case letters, digits and dashes."""
    _send(TableArtifact, key=key, table=[dict(row) for row in rows], description=description)


def figures(key: str, values: Mapping[str, Any], description: str) -> None:
    """A table of two columns: what each value is, and the value."""
    table(key, [{"figure": name, "value": value} for name, value in values.items()], description.strip())


def curve(key: str, values: Sequence[float], *, title: str, x_label: str, y_label: str) -> None:
    """A PNG curve of ``values`` over 1, 2, 3, ..."""
    if len(values) < 2:
        return
    drawn = io.BytesIO()
    draw_curve(drawn, {y_label: values}, title=title, x_label=x_label, y_label=y_label)
    image(key, drawn.getvalue(), title)


def image(key: str, png: bytes, description: str) -> None:
    """A picture."""
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    _send(ImageArtifact, key=key, image_url=url, description=description)


def origin(key: str, title: str, outputs: Mapping[str, ContentId], made_from: Mapping[str, ContentId | None]) -> None:
    """A page that leads from what a stage made to what it was made from."""
    lines = [f"### {title}", "", "| what | content id |", "|---|---|"]
    lines += [f"| {name} | `{content_id}` |" for name, content_id in outputs.items()]
    lines += ["", "Made from:", "", "| what | content id |", "|---|---|"]
    lines += [f"| {name} | `{content_id}` |" for name, content_id in made_from.items() if content_id]
    lines += ["", f"Whole history: `rollout lineage {next(iter(outputs.values()))}`"]
    _send(MarkdownArtifact, key=key, markdown="\n".join(lines), description=title)


class Page:
    """A page of Markdown, the only one of its key in a flow run; what it shows is replaced while the run continues."""

    def __init__(self, key: str, markdown: str, description: str) -> None:
        artifact = MarkdownArtifact(key=key, markdown=markdown, description=description)
        self._shown = Outgoing(artifact, only=True)
        SENDER.send(self._shown)

    def show(self, markdown: str) -> None:
        """Show this from now on."""
        self._shown.data = markdown
        SENDER.send(self._shown)


class ProgressBar:
    """Progress of long work until the block ends: in the UI, and as a bar in a terminal or else a line of the log every
    half minute. It is refreshed at most every two seconds; work that ends sooner shows nothing.

    ``is_logged``: somebody else writes the lines. ``draws_bar``: whether a terminal gets the bar.
    """

    def __init__(
        self, key: str, description: str, *, is_logged: bool = False, in_bytes: bool = False, draws_bar: bool = True
    ) -> None:
        self._key = key
        self._description = description
        self._draws_bar = draws_bar and sys.stderr.isatty()
        self._shown: Outgoing | None = None
        self._bar: Bar | None = None
        self._opened = ExitStack()
        self._next = time.monotonic() + PROGRESS_INTERVAL_SECONDS
        self._text: Callable[[int], str] = size_text if in_bytes else str
        self._figures = ""
        self._pace = Pace()
        self._next_line = math.inf if is_logged else time.monotonic() + INTERVAL_SECONDS

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()

    def show(self, done: int, total: int, figures: str = "") -> None:
        """Show ``done`` of ``total``, and the latest ``figures``, if it is time."""
        self._figures = figures
        self._pace.note(done)
        if time.monotonic() >= self._next and total:
            self._next = time.monotonic() + PROGRESS_INTERVAL_SECONDS
            self._show(done, total)

    def end(self, done: int, total: int) -> None:
        """Show where the work ended, if it was shown at all."""
        if self._shown is not None and total:
            self._show(done, total)

    def _show(self, done: int, total: int) -> None:
        if self._draws_bar:
            self._show_bar(done, total)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + INTERVAL_SECONDS
            more = "".join(f", {text}" for text in (self._figures, self._pace.left(total)) if text)
            stage_logger().info("%s: %s of %s%s", self._description, self._text(done), self._text(total), more)
        percent = 100.0 * done / total
        if self._shown is None:
            self._shown = Outgoing(ProgressArtifact(key=self._key, progress=percent, description=self._description))
        self._shown.data = percent
        SENDER.send(self._shown)

    def _show_bar(self, done: int, total: int) -> None:
        if self._bar is None:
            # Where a terminal is narrow, the figures give way.
            longest = len(self._amount(total, total))
            whole, cut = Column(no_wrap=True, min_width=longest, justify="right"), Column(no_wrap=True, ratio=4)
            columns = (
                TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=len(self._description))),
                BarColumn(bar_width=None, table_column=Column(min_width=8, max_width=20, ratio=1)),
                TextColumn("{task.fields[amount]}", table_column=whole),
                TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True, min_width=len("0:00:00 left"))),
                TextColumn("{task.fields[figures]}", table_column=cut),
            )
            bar = Bar(*columns, console=Console(stderr=True), transient=True, expand=True)
            bar.add_task(self._description, total=total, figures="", left="", amount="")
            self._bar = self._opened.enter_context(bar)
            self._opened.enter_context(through_stderr())
        shown: dict[str, Any] = {
            "figures": self._figures,
            "left": self._pace.left(total),
            "amount": self._amount(done, total),
        }
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, figures=self._figures, **shown)

    def _amount(self, done: int, total: int) -> str:
        return f"{self._text(done)}/{self._text(total)}"


@contextmanager
def import_progress(title: str) -> Iterator[None]:
    """Inside the block a `ProgressBar` shows how many bytes of inputs were read."""
    with ProgressBar("import-progress", title, in_bytes=True) as bar, watched(bar.show):
        yield


def _send(kind: type[Artifact], **fields: Any) -> None:
    try:
        SENDER.send(Outgoing(kind(**fields)))
    except (ValueError, TypeError) as error:  # a key or a value that Prefect's models do not take
        stage_logger().warning("the artifact %s could not be made: %s", fields["key"], error)

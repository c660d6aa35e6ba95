"""What reports and summaries of runs say of the suites by which their models were evaluated."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from rollout_core.evaluation.moments import LATEST, change_of, in_order
from rollout_core.evaluation.reports import Metric, SuiteReport
from rollout_core.objects import ObjectStore
from tasks.runtime.report import Curve
from tasks.runtime.stage import retry

Reports = Mapping[str, Mapping[str, SuiteReport]]
"""Of suites by name and moment, in order."""


def suite_curves(reports: Reports) -> list[Curve]:
    """The figure that stands for each suite, by moment of the run, with its interval."""
    return [
        _curve(name, {moment: report.headline for moment, report in by_moment.items() if moment != LATEST})
        for name, by_moment in reports.items()
    ]


def _curve(suite: str, figures: Mapping[str, Metric]) -> Curve:
    values = list(figures.values())
    return Curve(
        f"suite {suite}, {values[0].name}",
        [figure.value for figure in values],
        "moment",
        bounds=[_bounds(figure) for figure in values],
        places=list(figures),
    )


def _bounds(figure: Metric) -> tuple[float, float]:
    return (
        figure.value if figure.lower is None else figure.lower,
        figure.value if figure.upper is None else figure.upper,
    )


def suite_facts(reports: Reports) -> dict[str, str]:
    """The figure that stands for each suite, by moment, for a run's summary."""
    return {f"suite {name}": _by_moment(by_moment) for name, by_moment in reports.items() if by_moment}


def _by_moment(reports: Mapping[str, SuiteReport]) -> str:
    figures = {moment: report.headline for moment, report in reports.items()}
    values = (f"{figure.value:.4f}{_interval(figure)} {moment}" for moment, figure in figures.items())
    return f"{next(iter(figures.values())).name} {', '.join(values)}"


def in_words(metric: Metric) -> str:
    """A figure with its interval."""
    return f"{metric.name} {metric.value:.4f}{_interval(metric)}"


def _interval(metric: Metric) -> str:
    return "" if metric.lower is None else f" ({metric.lower:.4f} to {metric.upper:.4f})"


def worse(objects: ObjectStore, reports: Reports, before: str, after: str) -> list[str]:
    """For people: the suites whose figure is worse at the moment ``after`` than at the one ``before``."""
    pairs = [(by_moment[before], by_moment[after]) for by_moment in reports.values()]
    found = [retry(lambda pair=pair: change_of(objects, *pair)) for pair in pairs]
    return [change.line(before) for change in found if change is not None and change.fall > 0]


def suites_section(reports: Reports, fell: Sequence[str], decided: Mapping[str, str]) -> str:
    """All figures of all suites by moment, what fell, and what they decided about training, as HTML."""
    if not reports:
        return ""
    moments = in_order(reports.values())
    head = "".join(f"<th>{html.escape(moment)}</th>" for moment in moments)
    rows = ""
    for name, by_moment in reports.items():
        known = {moment: {metric.name: metric for metric in report.metrics} for moment, report in by_moment.items()}
        for metric in dict.fromkeys(metric for figures in known.values() for metric in figures):
            cells = "".join(f"<td>{_cell(known.get(moment, {}).get(metric))}</td>" for moment in moments)
            rows += f"<tr><td>{html.escape(name)}</td><td>{html.escape(metric)}</td>{cells}</tr>\n"
    lines = "".join(f'<li class="wrong">{html.escape(line)}</li>' for line in fell)
    said = f"<p>What fell:</p><ul>{lines}</ul>" if lines else "<p>No suite fell.</p>"
    said += "".join(f"<p>Training {html.escape(name)} {html.escape(text)}.</p>" for name, text in decided.items())
    return f"""<h2>Suites</h2>
{said}
<table><tr><th>suite</th><th>metric</th>{head}</tr>
{rows}</table>"""


def _cell(metric: Metric | None) -> str:
    return "" if metric is None else f"{metric.value:.4f}{_interval(metric)}"

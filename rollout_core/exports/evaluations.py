"""Reports of suites as others read them: rows of a table, and a section of a model card with Hugging Face's
``model-index``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from rollout_core.evaluation.metrics import Metric
from rollout_core.evaluation.reports import SuiteReport

COLUMNS = (
    *("model", "address", "suite", "suite_id", "metric", "value", "lower", "upper", "questions", "answers"),
    *("truncated", "without_score", "failed"),
)


def figure_rows(model: str, address: str | None, reports: Iterable[SuiteReport]) -> list[dict[str, Any]]:
    """A row of each metric, with the keys of `COLUMNS`."""
    return [
        {
            "model": model,
            "address": address,
            "suite": report.suite,
            "suite_id": report.suite_id,
            "metric": metric.name,
            "value": metric.value,
            "lower": metric.lower,
            "upper": metric.upper,
            "questions": metric.num_questions,
            "answers": report.num_samples,
            "truncated": report.num_truncated,
            "without_score": report.num_abstained + report.num_score_failed,
            "failed": report.num_failed,
        }
        for report in reports
        for metric in report.metrics
    ]


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """With a line of names; what is not known is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_card(name: str, reports: Sequence[SuiteReport]) -> str:
    """The front matter of a model card for a model of this name, and a section with the figures and their intervals."""
    figures = [(report, metric) for report in reports for metric in report.metrics]
    front = ModelCardData(model_name=name, eval_results=[_result(*each) for each in figures]).to_yaml().strip()
    lines = ["## Evaluation", "", "| suite | metric | value | 95 % interval | questions |", "|---|---|---:|---:|---:|"]
    for report, metric in figures:
        row = (report.suite, metric.name, f"{metric.value:.4f}", _interval(metric), f"{metric.num_questions:,}")
        lines.append(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in row)} |")
    lines += ["", "Evaluated by `rollout eval`; the suites by their content:", ""]
    lines += [f"- {report.suite}: `{report.suite_id}`" for report in reports]
    return f"---\n{front}\n---\n\n" + "\n".join(lines) + "\n"


def _result(report: SuiteReport, metric: Metric) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=report.suite,
        dataset_name=report.suite,
        metric_type=metric.name,
        metric_value=metric.value,
        metric_args={"lower": metric.lower, "upper": metric.upper, "num_questions": metric.num_questions},
    )


def _interval(metric: Metric) -> str:
    return "-" if metric.lower is None else f"{metric.lower:.4f} to {metric.upper:.4f}"

"""The stages of suites: prompts are rendered from rows, and what the answers come to is filed."""

from __future__ import annotations

from rollout_core.base.ids import ContentId
from rollout_core.config import Suite, SuitePrompt
from rollout_core.data.datasets import TaskRow, parse_rows, to_jsonl
from rollout_core.evaluation import reports
from rollout_core.evaluation.prompts import render_prompts
from rollout_core.evaluation.reports import SuiteReport, suite_id_of
from rollout_core.objects.records import Completions, Dataset, Scores
from tasks.runtime import artifacts
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, stage


@stage(version=1)
def render_suite(rows: ContentId, examples: ContentId | None, prompt: SuitePrompt, *, label: str = "") -> Dataset:
    """Make a prompt of each row of a suite, with answered ``examples`` before it where it asks for them."""
    objects = current_stage().objects
    read = [
        [] if blob is None else parse_rows(objects.get_bytes(blob), f"{what} {blob.short}", TaskRow)
        for what, blob in (("rows", rows), ("examples", examples))
    ]
    rendered = render_prompts(prompt, *read)
    return Dataset(data=objects.put_bytes(to_jsonl(rendered)), num_rows=len(rendered))


@stage(version=1, time="scoring", place="scoring")
def report_suite(
    suite: Suite,
    prompts: ContentId,
    reward_source: ContentId,
    completions: Completions,
    scores: Scores,
    *,
    label: str = "",
) -> SuiteReport:
    """File the metrics of a model's scored answers to a suite, whose reward models have names by content."""
    suite_id = suite_id_of(suite, prompts, reward_source)
    report = reports.report_suite(
        current_stage().objects, suite, suite_id, completions, scores, lambda line: stage_logger().warning("%s", line)
    )
    rows = [metric.model_dump() for metric in report.metrics]
    for row in rows:
        stage_logger().info("%s of model %s: %s %.4f", suite.name, report.model.short, row["name"], row["value"])
    artifacts.table("suite", rows, f"Suite {label}".strip())
    return report

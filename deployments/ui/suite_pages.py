"""Pages of suites: models by the suites that evaluated them, and two models question by question."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deployments.ui.pages import Pages, link_of, number_of
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.evaluation.lm_eval_tasks import lower_is_better
from rollout_core.evaluation.reports import Flip, SuiteComparison, SuiteReport, compare_reports
from rollout_core.runs.evaluations import EvaluatedModel, Evaluation, evaluated_models, find_evaluated, read_evaluations
from rollout_core.runs.run_records import RunHead, RunRecords
from rollout_core.runs.run_samples import shown_prompt

PAGE = 50
"""Models on a page."""
QUESTIONS = 20
"""Questions on a page of comparison."""
NAMED = 5
"""Questions without a score, of a model."""
RECORDS_KEPT = 2_000
"""Of runs, whose evaluations are kept in memory, some KiB each."""
QUESTIONS_KEPT = 40_000
"""Of comparisons, which are kept with prompts and answers for the next of their pages, some KiB each."""


_Compared = tuple[SuiteComparison, frozenset[str]]
"""Two models, and the metrics of which less is better."""


def routes(pages: Pages) -> list[Route]:
    """Of these pages."""
    own = SuitePages(pages)
    return [Route("/suites", own.table), Route("/suites/compare", own.compare)]


class SuitePages:
    """What answers. Methods run in a thread of their own."""

    def __init__(self, pages: Pages) -> None:
        self._pages, self._sources = pages, pages.sources
        self._known: dict[ContentId, Sequence[Evaluation]] = {}
        """By the details of runs' records."""
        self._compared: dict[tuple[SuiteReport, SuiteReport], _Compared] = {}
        """The last ones, oldest first."""

    def table(self, request: Request) -> Response:
        """Models by suites, the one that was evaluated last first."""
        query = request.query_params
        text, offset = query.get("q", "").strip().lower(), number_of(query.get("offset"), 0)
        models = [model for model in self._models() if not text or text in f"{model.model} {model.address}".lower()]
        shown = models[offset : offset + PAGE]
        return self._pages.show(
            "suites.html",
            request,
            models=shown,
            suites=sorted({name for model in shown for name in model.evaluations}),
            total=len(models),
            offset=offset,
            page=PAGE,
            link=link_of(query),
        )

    def compare(self, request: Request) -> Response:
        """Two models on one suite, question by question: what the second has right or wrong otherwise than the
        first."""
        query = request.query_params
        named = query.getlist("model")
        if len(named) != 2:
            raise ConfigError(f"got {len(named)} models to compare; choose 2 in the table of suites")
        known = self._models()
        models = [find_evaluated(known, name) for name in named]
        common = [name for name in models[0].evaluations if name in models[1].evaluations]
        suite = query.get("suite") or (common[0] if common else "")
        if suite not in common:
            what = f"suite {suite!r:.40}" if suite else "no suite"
            raise ConfigError(f"{what} evaluated both {models[0].model[:12]} and {models[1].model[:12]}: choose others")
        sides = [model.evaluations[suite] for model in models]
        compared, falling = self._compare(sides[0][1].report, sides[1][1].report)
        which, offset = query.get("show", "flipped"), number_of(query.get("offset"), 0)
        chosen = _chosen(compared, which)
        return self._pages.show(
            "suite_compare.html",
            request,
            models=models,
            common=common,
            suite=suite,
            sides=sides,
            compared=compared,
            falling=falling,
            lacking=_lacking([each.report for _, each in sides]),
            unpaired=_unpaired(compared, *(each.report for _, each in sides)),
            questions=[(flip, shown_prompt(flip.prompt)) for flip in chosen[offset : offset + QUESTIONS]],
            total=len(chosen),
            which=which,
            offset=offset,
            page=QUESTIONS,
            link=link_of(query, model=[model.model for model in models]),
        )

    def _compare(self, before: SuiteReport, after: SuiteReport) -> _Compared:
        """Which takes seconds for ten thousand questions."""
        found = self._compared.pop((before, after), None)
        if found is None:
            compared = compare_reports(self._sources.objects, before, after, every=True)
            found = compared, lower_is_better(self._sources.objects, after)
        kept = [*self._compared.items(), ((before, after), found)]
        while len(kept) > 1 and sum(len(each.questions) for _, (each, _) in kept) > QUESTIONS_KEPT:
            kept.pop(0)
        self._compared = dict(kept)  # not changed in place: threads answer side by side
        return found

    def _models(self) -> list[EvaluatedModel]:
        return evaluated_models(self._sources.records, self._read)

    def _read(self, records: RunRecords, head: RunHead) -> Sequence[Evaluation]:
        found = self._known.get(head.detail)
        if found is None:
            if len(self._known) >= RECORDS_KEPT:
                self._known.clear()
            found = self._known[head.detail] = read_evaluations(records, head)
        return found


def _lacking(reports: Sequence[SuiteReport]) -> Sequence[tuple[str, Sequence[int], Sequence[Sequence[str]]]]:
    """Answers without a score and those that could not be had, of each report, with the first of their questions."""
    found = [
        (
            "Without a score",
            [report.num_abstained + report.num_score_failed for report in reports],
            [report.unscored[:NAMED] for report in reports],
        ),
        ("Failed", [report.num_failed for report in reports], [report.failed[:NAMED] for report in reports]),
    ]
    return [row for row in found if any(row[1])]


def _unpaired(
    compared: SuiteComparison, before: SuiteReport, after: SuiteReport
) -> list[tuple[str, float | None, float]]:
    """Metrics that cannot be compared question by question, with both figures."""
    known = {metric.name: metric.value for metric in before.metrics}
    return [(each.name, known.get(each.name), each.value) for each in after.metrics if each.name not in compared.gains]


def _chosen(compared: SuiteComparison, which: str) -> list[Flip]:
    """Of the questions those that flipped, either way or one of them, or all."""
    if which in ("lost", "gained"):
        return list(compared.lost if which == "lost" else compared.gained)
    return [flip for flip in compared.questions if which == "all" or flip.right[0] != flip.right[1]]

"""Pages of runs: the table of them, one run, several side by side."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from threading import Lock
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deployments.ui.pages import Pages, link_of, number_of
from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.evaluation.moments import LABEL as SUITE, in_order
from rollout_core.runs.browsing import sample_lists
from rollout_core.runs.evaluations import Evaluation, evaluations_of
from rollout_core.runs.figures import REWARD, Curve, curves_of
from rollout_core.runs.run_records import (
    SHOWN_STATES,
    RunDetail,
    RunHead,
    StageCall,
    differences,
    runs_under_way,
    shown_seconds,
    shown_state,
)
from rollout_core.runs.run_samples import Pair, SampleRow, SampleSet, compare_held_out, read_set

PAGE = 50
"""Runs on a page."""
PAIRS = 20
"""Held-out prompts on a page of comparison."""
MOST_COMPARED = 5
OFFERED = 50
"""Runs of the same flow that a run's curves may be laid over, the newest."""
SETS_KEPT = 4
"""Sets of samples that are kept in memory."""
SORTS: dict[str, Callable[[RunHead], Any]] = {
    "began": lambda head: head.began,
    "name": lambda head: head.name,
    "time": lambda head: head.seconds,
    "cost": lambda head: head.price,
    "gain": lambda head: float("-inf") if head.gain is None else head.gain,
}
_FIRST_CURVES = (
    REWARD,
    "loss",
    "eval_loss",
    "objective/kl",
    "kl",
    "entropy",
    "completions/mean_length",
    "tokens/s",
    "seconds",
    "value_loss",
    "rewards/accuracies",
    "rewards/margins",
    "learning_rate",
    "grad_norm",
)


def routes(pages: Pages) -> list[Route]:
    """Of these pages."""
    own = RunPages(pages)
    return [
        Route("/", own.table),
        Route("/runs/{run}", own.run),
        Route("/runs/{run}/curves.json", own.curves),
        Route("/runs/{run}/curves.csv", own.curves_csv),
        Route("/compare", own.compare),
    ]


@dataclass(frozen=True)
class Bar:
    """A call in the drawing of a run's stages, in thousandths of its width and rows of its height."""

    call: StageCall
    x: float
    width: float
    row: int


class RunPages:
    """What answers. Methods that are not coroutines run in a thread of their own."""

    def __init__(self, pages: Pages) -> None:
        self._pages, self._sources = pages, pages.sources
        self._reading = Lock()
        self._known_rows = lru_cache(maxsize=SETS_KEPT)(lambda of: read_set(pages.sources.objects, of))

    def _rows(self, of: SampleSet) -> list[SampleRow]:
        """Of a set; one is read at a time, since each may fill much memory while it is."""
        with self._reading:
            return self._known_rows(of)

    def table(self, request: Request) -> Response:
        """All runs that fit the filters."""
        query = request.query_params
        text, flow, state = query.get("q", "").strip(), query.get("flow", ""), query.get("state", "")
        sort = query.get("sort", "began") if query.get("sort", "began") in SORTS else "began"
        offset = number_of(query.get("offset"), 0)
        alive = runs_under_way(self._sources.objects)
        heads = self._sources.records.heads()
        found = [
            head
            for head in heads
            if (not flow or head.flow == flow)
            and (not state or shown_state(head, alive) == state)
            and (not text or text.lower() in _searched(head))
        ]
        found.sort(key=SORTS[sort], reverse=sort != "name")
        states = ((head, shown_state(head, alive)) for head in found[offset : offset + PAGE])
        rows = [(head, state, shown_seconds(head, state)) for head, state in states]
        return self._pages.show(
            "runs.html",
            request,
            rows=rows,
            total=len(found),
            all_runs=len(heads),
            flows=sorted({head.flow for head in heads}),
            states=SHOWN_STATES,
            sort=sort,
            offset=offset,
            page=PAGE,
            live=any(state == "running" for _, state, _ in rows),
            link=link_of(query),
            compared=MOST_COMPARED,
        )

    def run(self, request: Request) -> Response:
        """One run."""
        head, detail = self._read(request.path_params["run"])
        state = shown_state(head, runs_under_way(self._sources.objects))
        records, given = self._sources.records, request.query_params.getlist("with")
        others = [records.find(name) for name in list(dict.fromkeys(filter(None, given)))[: MOST_COMPARED - 1]]
        laid_over = [other.id for other in others if other.id != head.id]
        recent = records.heads(lambda other: other.flow == head.flow, limit=OFFERED)
        suites = _by_suite(detail)
        in_table = {each.label for by_moment in suites.values() for each in by_moment.values()}
        return self._pages.show(
            "run.html",
            request,
            head=head,
            others=[other for other in others if other.id in laid_over],
            offered=[other for other in recent if other.id not in (head.id, *laid_over)],
            most_others=MOST_COMPARED - 1,
            detail=detail,
            state=state,
            seconds=shown_seconds(head, state),
            live=state == "running",
            bars=_bars(detail.calls),
            num_rows=len({call.stage for call in detail.calls}),
            stages=list(dict.fromkeys(call.stage for call in detail.calls)),
            config=json.dumps(detail.config, indent=2, ensure_ascii=False),
            lists=[each for each in sample_lists(self._sources.objects, detail) if each.label not in in_table],
            suites=suites,
            moments=in_order(suites.values()),
        )

    def curves(self, request: Request) -> Response:
        """Its curves, those people look at first in front."""
        head, detail = self._read(request.path_params["run"])
        curves = curves_of(self._sources.objects, head, detail)
        named = sorted(curves.values(), key=_place)
        document = [
            {
                "name": curve.name,
                "x": curve.x,
                "y": [_finite(value) for value in curve.y],
                **({"lower": curve.lower, "upper": curve.upper, "labels": curve.labels} if curve.labels else {}),
            }
            for curve in named
        ]
        return JSONResponse({"run": f"{head.name} {self._sources.records.short(head.id)}", "curves": document})

    def curves_csv(self, request: Request) -> Response:
        """Its curves as rows of curve, step, value."""
        head, detail = self._read(request.path_params["run"])
        written = io.StringIO()
        rows = csv.writer(written)
        rows.writerow(["curve", "step", "value"])
        for curve in curves_of(self._sources.objects, head, detail).values():
            rows.writerows([curve.name, *point] for point in zip(curve.x, curve.y, strict=True))
        # A header holds few characters, and a name any.
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{head.name}-{self._sources.records.short(head.id)}.csv")
        disposition = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(written.getvalue(), media_type="text/csv", headers=disposition)

    def compare(self, request: Request) -> Response:
        """Runs side by side, the oldest first."""
        query = request.query_params
        named = list(dict.fromkeys(query.getlist("run")))
        if not 2 <= len(named) <= MOST_COMPARED:
            raise ConfigError(f"got {len(named)} runs to compare; choose 2 to {MOST_COMPARED} in the table of runs")
        runs = sorted((self._read(name) for name in named), key=lambda run: run[0].began)
        alive = runs_under_way(self._sources.objects)
        curves = [curves_of(self._sources.objects, *each) for each in runs]
        shared = sorted({name for each in curves for name in each}, key=lambda name: (_rank(name), name))
        held_out, gone = None, ""
        try:
            held_out = compare_held_out(self._sources.objects, runs, self._rows)
        except NotFound as error:  # their record stays for longer
            gone = str(error)
        which, offset = query.get("show", "worse"), number_of(query.get("offset"), 0)
        pairs = [] if held_out is None else _chosen(held_out.pairs, which)
        return self._pages.show(
            "compare.html",
            request,
            heads=[head for head, _ in runs],
            states=[shown_state(head, alive) for head, _ in runs],
            gone=gone,
            differences=differences([detail.config for _, detail in runs]),
            figures=[(name, [each[name].last if name in each else None for each in curves]) for name in shared],
            held_out=held_out,
            pairs=pairs[offset : offset + PAIRS],
            total=len(pairs),
            which=which,
            offset=offset,
            page=PAIRS,
            link=link_of(query, run=named),
        )

    def _read(self, run: str) -> tuple[RunHead, RunDetail]:
        records = self._sources.records
        return records.detail(records.find(run))


def _by_suite(detail: RunDetail) -> dict[str, dict[str, Evaluation]]:
    """What the run evaluated, by suite and moment; an evaluation that was all that it did has none."""
    found: dict[str, dict[str, Evaluation]] = {}
    for each in evaluations_of(detail):
        found.setdefault(each.report.suite, {})[each.moment or ""] = each
    return found


def _searched(head: RunHead) -> str:
    fields = (head.id, head.name, head.flow, head.flow_run_name, head.model, head.algorithm, head.data, *head.tags)
    return " ".join(filter(None, fields)).lower()


def _chosen(pairs: Sequence[Pair], which: str) -> list[Pair]:
    """Those that lost, those that gained, the most changed first; or all."""
    if which == "worse":
        return [pair for pair in pairs if pair.change < 0]
    return [pair for pair in reversed(pairs) if pair.change > 0] if which == "better" else list(pairs)


def _rank(name: str) -> int:
    if name.startswith(SUITE):
        return 0
    figure = name.partition(": ")[2] or name
    return _FIRST_CURVES.index(figure) if figure in _FIRST_CURVES else len(_FIRST_CURVES)


def _place(curve: Curve) -> tuple[int, str]:
    return _rank(curve.name), curve.name


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _bars(calls: Sequence[StageCall]) -> list[Bar]:
    """Each stage has a row, in order of its first end."""
    if not calls:
        return []
    first = min(call.ended - call.seconds for call in calls)
    whole = max(max(call.ended for call in calls) - first, 1e-3)
    rows = {stage: place for place, stage in enumerate(dict.fromkeys(call.stage for call in calls))}
    return [
        Bar(
            call,
            round(1000 * (call.ended - call.seconds - first) / whole, 2),
            max(2.0, round(1000 * call.seconds / whole, 2)),
            rows[call.stage],
        )
        for call in calls
    ]

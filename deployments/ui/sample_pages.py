"""Pages of samples: those of a run, and one by itself, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from statistics import fmean
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deployments.ui.pages import Pages, figure_of, link_of, number_of
from rollout_core.base.errors import NotFound
from rollout_core.runs.browsing import (
    SampleBrowser,
    SampleList,
    SampleView,
    Search,
    find_list,
    sample_lists,
)
from rollout_core.runs.learned import LEVELS, Learned, learned_from
from rollout_core.runs.run_records import RunDetail, RunHead
from rollout_core.runs.tokens import Token, TokenTexts

PAGE = 50
"""Samples on a page."""
SEARCH_SECONDS = 0.08
"""A search shows what it found until then, and continues from there when it is asked to."""
REASONS = ("stop", "length", "error")
NEIGHBOURS = 64
"""Samples before and after one, among which the others of its prompt are looked for."""
MOST_IN_TABLE = 2_000


def routes(pages: Pages, browser: SampleBrowser) -> list[Route]:
    """Of these pages."""
    own = SamplePages(pages, browser)
    return [Route("/runs/{run}/samples", own.table), Route("/runs/{run}/samples/{number}", own.sample)]


@dataclass(frozen=True)
class _Shown:
    """What a page of one sample shows of it."""

    head: RunHead
    chosen: SampleList
    view: SampleView
    parts: Sequence[tuple[str, float, float | None]]
    verdicts: Sequence[tuple[str, float | None, str]]
    """Judge, value and reasoning."""
    tokens: list[Token]
    learned: Learned
    others: list[SampleView]
    """Of the same prompt, itself among them."""


class SamplePages:
    """What answers."""

    def __init__(self, pages: Pages, browser: SampleBrowser) -> None:
        self._pages, self._sources, self._browser = pages, pages.sources, browser
        self._texts = TokenTexts(pages.sources.objects)

    def table(self, request: Request) -> Response:
        """Samples of a run, from one of them on."""
        query = request.query_params
        head, _, lists, chosen = self._chosen(request)
        reason = query.get("end", "")
        search = Search(query.get("q", ""), figure_of(query.get("below")), reason if reason in REASONS else "")
        start = number_of(query.get("from"), 0)
        page = self._browser.page(chosen, search, start=start, limit=PAGE, seconds=SEARCH_SECONDS)
        return self._pages.show(
            "samples.html",
            request,
            head=head,
            lists=lists,
            chosen=chosen,
            rows=[self._texts.readable(chosen.model, row) for row in page.rows],
            start=start,
            next=page.next,
            is_full=len(page.rows) == PAGE,
            search=search,
            page=PAGE,
            reasons=REASONS,
            link=link_of(query),
        )

    async def sample(self, request: Request) -> Response:
        """One sample: its reward and what that is made of, its tokens, its attempts."""
        shown = await run_in_threadpool(self._shown, request)
        store, rollout, attempts = self._sources.store, None, []
        if store is not None:
            rollout = await store.get_rollout_by_id(shown.view.id)
            attempts = [] if rollout is None else (await store.query_attempts(shown.view.id)).items
        rewards = [each.reward for each in shown.others if not isnan(each.reward)]
        return self._pages.show(
            "sample.html",
            request,
            head=shown.head,
            chosen=shown.chosen,
            view=shown.view,
            parts=shown.parts,
            verdicts=shown.verdicts,
            tokens=shown.tokens,
            learned=shown.learned,
            by="advantage" if request.query_params.get("by") == "advantage" else "logprob",
            ranges=_ranges(shown.learned),
            link=link_of(request.query_params),
            in_table=MOST_IN_TABLE,
            others=shown.others,
            mean=fmean(rewards) if rewards else None,
            rollout=rollout,
            attempts=attempts,
            label=request.query_params.get("label", ""),
        )

    def _shown(self, request: Request) -> _Shown:
        head, detail, _, chosen = self._chosen(request)
        number = number_of(request.path_params["number"], -1)
        if number < 0:
            raise NotFound(f"got sample {request.path_params['number']!r:.40}; expected a number")
        view = self._texts.readable(chosen.model, self._browser.sample(chosen, number))
        first = max(0, number - NEIGHBOURS)
        near = self._browser.page(chosen, Search(), start=first, limit=2 * NEIGHBOURS + 1, seconds=SEARCH_SECONDS)
        # A prompt's samples follow each other.
        rows = (self._texts.readable(chosen.model, each) for each in near.rows)
        others = [each for each in rows if each.prompt == view.prompt]
        parts: Any = self._browser.reward_parts(chosen, number)
        learned = learned_from(self._browser, detail, chosen, view)
        verdicts = self._browser.verdicts(chosen, number)
        return _Shown(head, chosen, view, parts, verdicts, self._texts.tokens(chosen.model, view), learned, others)

    def _chosen(self, request: Request) -> tuple[RunHead, RunDetail, list[SampleList], SampleList]:
        records = self._sources.records
        head, detail = records.detail(records.find(request.path_params["run"]))
        lists = sample_lists(self._sources.objects, detail)
        return head, detail, lists, find_list(lists, detail, request.query_params.get("label"))


def _ranges(learned: Learned) -> list[tuple[str, str]]:
    """The classes of tokens by their advantage, each with its range."""
    least, large = (f"{level * learned.scale:.3g}" for level in LEVELS)
    return [
        ("a-2", f"-{large} and below"),
        ("a-1", f"-{large} to -{least}"),
        ("a0", f"-{least} to {least}"),
        ("a1", f"{least} to {large}"),
        ("a2", f"{large} and above"),
    ]

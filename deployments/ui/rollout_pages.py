"""Pages of the store's rollouts: all of them or those of a run, the newest first, and one with its attempts and trace.

Pages go on after a rollout; nothing is counted or skipped, so the millionth page is as quick as the first. What no
index has, a text or a reward, is looked for a part at a time: a page shows what was found in about a tenth of a second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deployments.ui.pages import Pages, figure_of, link_of, number_of
from rollout_core.agents.adapters.drawing import draw_trace
from rollout_core.agents.emitters import find_final_reward
from rollout_core.base.errors import ConfigError, NotFound, RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.runs.browsing import SampleBrowser, SampleFile, sample_lists
from rollout_core.runs.run_records import RunHead
from rollout_core.store import AttemptedRollout, LightningStore, PaginatedResult, Rollout, Span
from rollout_core.store.codec import encode_stored
from rollout_core.store.semconv import AGL_ANNOTATION, AGL_REWARD
from rollout_core.store.types import RolloutStatus

PAGE = 50
"""Rollouts on a page."""
SEARCH_SECONDS = 0.08
"""A search shows what it found until then, and continues from there when it is asked to."""
REWARDS_AT_ONCE = 500
LOOKED_AT = 5_000
"""Rollouts that are looked at between two looks at the clock."""
STATUSES: tuple[RolloutStatus, ...] = get_args(RolloutStatus)
MOST_SPANS = 2_000
"""Of a trace that is drawn."""
_REWARDING = (AGL_REWARD, AGL_ANNOTATION)
"""Names of spans that have rewards."""


def routes(pages: Pages, browser: SampleBrowser) -> list[Route]:
    """Of these pages."""
    own = RolloutPages(pages, browser)
    return [Route("/rollouts", own.table), Route("/rollouts/{rollout:path}", own.one)]


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    rollout: Rollout
    reward: float | None


@dataclass(frozen=True)
class _IdFile:
    """A file with ids of rollouts, one a line."""

    blob: ContentId
    key: str
    """Under which the ids stand."""
    scored: SampleFile | None
    """Where their rewards are."""


@dataclass(frozen=True)
class Wanted:
    """What rollouts are to be like."""

    status: RolloutStatus | None
    text: str
    below: float | None

    @property
    def in_json(self) -> str | None:
        """The text as it stands in JSON."""
        return json.dumps(self.text, ensure_ascii=False)[1:-1] if self.text else None

    def fits(self, rollout: Rollout) -> bool:
        """Whether status and text are like that; the text as `LightningStore.browse_rollouts` looks for it."""
        if self.status is not None and rollout.status != self.status:
            return False
        part = self.in_json
        return part is None or part in rollout.rollout_id or part in encode_stored(rollout.input).decode()


class RolloutPages:
    """What answers."""

    def __init__(self, pages: Pages, browser: SampleBrowser) -> None:
        self._pages, self._sources, self._browser = pages, pages.sources, browser

    async def table(self, request: Request) -> Response:
        """Rollouts, the newest first."""
        query, store = request.query_params, self._sources.require_store()
        wanted = Wanted(_status(query.get("status", "")), query.get("q", ""), figure_of(query.get("below")))
        run = query.get("run", "").strip()
        head = await run_in_threadpool(self._sources.records.find, run) if run else None
        before = query.get("before") or None
        if head is None:
            rows, following = await _browsed(store, wanted, before)
        else:
            rows, following = await self._of_run(store, head, wanted, before)
        return self._pages.show(
            "rollouts.html",
            request,
            rows=rows,
            next=following,
            is_full=len(rows) >= PAGE,
            before=before,
            head=head,
            statuses=STATUSES,
            wanted=wanted,
            link=link_of(query),
            short=_short,
        )

    async def _of_run(
        self, store: LightningStore, head: RunHead, wanted: Wanted, before: str | None
    ) -> tuple[list[Row], str | None]:
        """Of the files that a run's record names with ids of rollouts, the last first. ``before`` is a file and how
        many of its rollouts were looked at, such as ``3.200``."""
        files = await run_in_threadpool(self._files_of, head)
        place, _, looked = (before or "0.0").partition(".")
        place, looked = number_of(place, 0), number_of(looked, 0)
        deadline, rows = time.monotonic() + SEARCH_SECONDS, []
        while place < len(files) and len(rows) < PAGE and time.monotonic() < deadline:
            ids, rewards = await run_in_threadpool(self._read, files[place])
            part = ids[looked : looked + PAGE]
            stored = {each.rollout_id: each for each in await store.query_rollouts(rollout_id_in=part)}
            found = [stored[each] for each in part if each in stored and wanted.fits(stored[each])]
            known = await _rewards(store, [each for each in found if each.rollout_id not in rewards])
            new = [Row(each, rewards.get(each.rollout_id, known.get(each.rollout_id))) for each in found]
            rows += [row for row in new if _is_below(row, wanted)]
            looked += len(part)
            if looked >= len(ids):
                place, looked = place + 1, 0
        return rows, f"{place}.{looked}" if place < len(files) else None

    def _files_of(self, head: RunHead) -> list[_IdFile]:
        """Those of the last stage first."""
        _, detail = self._sources.records.detail(head)
        scored = {
            blob: file
            for each in sample_lists(self._sources.objects, detail)
            for file in each.files
            for blob in (file.prompts, file.completions)
            if file.scores is not None
        }
        files: dict[ContentId, _IdFile] = {}
        for call in detail.calls:
            for kind, name, key in _NAMED:
                if call.kind == kind and name in call.result:
                    blob = ContentId(call.result[name])
                    files[blob] = _IdFile(blob, key, scored.get(blob))
        return list(reversed(files.values()))

    def _read(self, file: _IdFile) -> tuple[list[str], dict[str, float]]:
        """Ids, the last first, and rewards of those that were scored; of a file that is gone nothing."""
        try:
            rewards = {} if file.scored is None else self._browser.rewards(file.scored)
            return self._browser.ids(file.blob, file.key, needed_with=file.scored)[::-1], rewards
        except RolloutError:
            return [], {}

    async def one(self, request: Request) -> Response:
        """One rollout: its input, attempts, and the trace of one of them."""
        store, name = self._sources.require_store(), request.path_params["rollout"]
        rollout = await store.get_rollout_by_id(name)
        if rollout is None:
            raise NotFound(f"the store has no rollout {name!r}")
        attempts = (await store.query_attempts(name, sort_by="sequence_id")).items
        wanted = request.query_params.get("attempt") or (attempts[-1].attempt_id if attempts else None)
        found = None if wanted is None else await store.query_spans(name, attempt_id=wanted, limit=MOST_SPANS)
        spans = [] if found is None else found.items
        return self._pages.show(
            "rollout.html",
            request,
            rollout=rollout,
            attempts=attempts,
            wanted=wanted,
            num_spans=len(spans),
            total_spans=0 if found is None else found.total,
            reward=None if found is None else await _final_reward(store, found, name, wanted),
            trace=Markup(draw_trace(spans)),  # it escapes what comes from spans
            input=json.dumps(rollout.input, indent=2, ensure_ascii=False, default=str),
            metadata=json.dumps(rollout.metadata, indent=2, ensure_ascii=False, default=str),
        )


_NAMED = (
    ("PromptSet", "samples", "id"),
    ("Completions", "samples", "id"),
    ("EvalReport", "samples", "id"),
    ("ShardCompletions", "completions", "id"),
    ("AgentTasks", "rollouts", "rollout_id"),
)
"""Results of stages that name rollouts: the record's kind, the field with a blob of lines, and the key of their ids."""


async def _browsed(store: LightningStore, wanted: Wanted, before: str | None) -> tuple[list[Row], str | None]:
    """Of all rollouts of the store, and where to go on."""
    deadline, rows, cursor = time.monotonic() + SEARCH_SECONDS, cast("list[Row]", []), before
    statuses: list[RolloutStatus] | None = None if wanted.status is None else [wanted.status]
    limit = PAGE if wanted.below is None else REWARDS_AT_ONCE
    while True:
        page = await store.browse_rollouts(
            before=cursor, status_in=statuses, text=wanted.in_json, limit=limit, within=LOOKED_AT
        )
        rewards = await _rewards(store, page.items)
        for each in page.items:
            row = Row(each, rewards.get(each.rollout_id))
            if _is_below(row, wanted):
                rows.append(row)
            if len(rows) == PAGE:
                is_last = page.next is None and each is page.items[-1]
                return rows, None if is_last else each.rollout_id
        cursor = page.next
        if cursor is None or time.monotonic() > deadline:
            return rows, cursor


async def _rewards(store: LightningStore, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Final rewards of the latest attempts, by rollout."""
    begun = [each.rollout_id for each in rollouts if isinstance(each, AttemptedRollout)]
    by_rollout: dict[str, list[Any]] = {}
    for name in _REWARDING if begun else ():
        for span in await store.query_many_spans(begun, name=name):
            by_rollout.setdefault(span.rollout_id, []).append(span)
    rewards = {rollout: find_final_reward(sorted(spans, key=_by_time)) for rollout, spans in by_rollout.items()}
    return {rollout: reward for rollout, reward in rewards.items() if reward is not None}


async def _final_reward(
    store: LightningStore, begin: PaginatedResult[Span], rollout: str, attempt: str | None
) -> float | None:
    """Of an attempt whose spans begin with these; the last reward mostly stands at their end."""
    spans = list(begin.items)
    if begin.total > len(spans):
        for name in _REWARDING:
            spans += (await store.query_spans(rollout, attempt_id=attempt, name=name)).items
        spans.sort(key=_by_time)
    return find_final_reward(spans)


def _by_time(span: Span) -> tuple[int, float, float]:
    """The order of `LightningStore.query_spans`, where spans of several queries come together."""
    return span.sequence_id, span.start_time or 0.0, span.end_time or 0.0


def _is_below(row: Row, wanted: Wanted) -> bool:
    return wanted.below is None or (row.reward is not None and row.reward < wanted.below)


def _status(text: str) -> RolloutStatus | None:
    if text and text not in STATUSES:
        raise ConfigError(f"status {text!r}: expected one of {', '.join(STATUSES)}")
    return cast(RolloutStatus, text) if text else None


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _short(value: object) -> str:
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        value = value["prompt"]  # of a sample
    text = _shown(value)
    return text if len(text) <= 160 else text[:157] + "..."

"""Keeps the record of a flow run while it lasts: at its beginning, now and then, and at its end; and records one that
ends before that, as its parameters or its plan are refused."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State

from rollout_core.base.errors import NotFound
from rollout_core.base.settings import without_passwords
from rollout_core.base.stopping import is_stopping
from rollout_core.config import Run
from rollout_core.objects.records import Checkpoint
from rollout_core.runs.run_records import (
    MOST_AT_WORK,
    MOST_CALLS,
    MOST_LIVE_ROWS,
    AtWork,
    Live,
    MetricsOf,
    Moment,
    RunDetail,
    RunHead,
    RunRecords,
    StageCall,
)
from rollout_core.runs.run_samples import own_evaluations
from tasks.runtime.connections import objects
from tasks.runtime.journal import Journal, StageEntry, stage_logger
from tasks.runtime.summary import MOST_OF_AN_ERROR, Costs, RunSummary, about

LEAST_SECONDS, MOST_SECONDS = 5.0, 60.0
"""Between two records of a run under way; a run that takes long writes less often."""
SHARE = 0.01
"""Of the time that a run has taken so far, between two records."""
END_SECONDS = 30.0
"""For the last record."""
STOP_SECONDS = 3.0
"""For the last record of a run that was asked to stop."""
WORKERS_RUN = "PREFECT__FLOW_RUN_ID"
"""Environment variable by which a Prefect worker names the run to the process that it starts."""
_LEARNERS = ("algorithm", "sft", "rm", "ppo", "grpo", "dpo")
_SOURCES = ("prompts", "dataset", "tasks", "input")


_KEPT: set[str] = set()
"""Ids of flow runs whose records recorders of this process keep."""


class Recorder:
    """The record of one flow run. It never fails the run: a record that cannot be written is logged once.

    One thread writes all of it, the last record included, so that none comes after the last.
    """

    def __init__(self, config: Run, flow: str, flow_run: FlowRun, summary: RunSummary) -> None:
        self._config, self._flow, self._flow_run, self._summary = config, flow, flow_run, summary
        self._started, self._began = time.monotonic(), flow_run.start_time or datetime.now(UTC)
        self._before: tuple[RunHead, RunDetail] | None = None
        """The record of the tries before."""
        self._ended = threading.Event()
        self._written: object = None
        self._has_failed = False
        _KEPT.add(str(flow_run.id))
        self._thread = threading.Thread(target=self._keep, name="run-record", daemon=True)

    def start(self) -> None:
        """The run begins; its lease is held."""
        self._thread.start()

    def end(self) -> None:
        """The run has ended as its summary says. A second time does nothing."""
        if not self._thread.ident:
            self._thread.start()
        self._ended.set()
        self._thread.join(timeout=STOP_SECONDS if is_stopping() else END_SECONDS)
        if self._thread.is_alive():
            stage_logger().warning("the last record of this run is not written yet; it may show as lost")

    def _keep(self) -> None:
        records = None
        while True:
            has_ended = self._ended.is_set()
            try:
                if records is None:
                    records = self._opened()
                self._write(records)
            except Exception as error:  # noqa: BLE001 - whatever storage raises, a record is not worth a run
                if not self._has_failed:
                    stage_logger().warning("the record of this run cannot be written, and is tried again: %s", error)
                self._has_failed = True
            if has_ended:
                return
            passed = time.monotonic() - self._started
            self._ended.wait(min(MOST_SECONDS, max(LEAST_SECONDS, SHARE * passed)))

    def _opened(self) -> RunRecords:
        records = RunRecords(objects())
        with suppress(NotFound):
            self._before = records.detail(records.find(str(self._flow_run.id)))
        return records

    def _write(self, records: RunRecords) -> None:
        moment = self._moment()
        if moment == self._written:
            records.renew(str(self._flow_run.id))
            return
        detail = self._detail()
        records.write(self._head(detail), detail)
        self._written = moment

    def _moment(self) -> object:
        """What a record is of: a record of the same needs not be written again."""
        journals = list(self._summary.journals)
        learning = [(j.learning.title, _last_step(j)) for j in journals if j.learning is not None]
        calls = sum(totals.calls.total() for journal in journals for totals in list(journal.totals.values()))
        return self._summary.state, len(journals), calls, learning, self._at_work(), self._summary.outcome

    def _at_work(self) -> tuple[AtWork, ...]:
        """Calls under way; none once the run has ended."""
        if self._summary.state != "running":
            return ()
        calls = (call for journal in list(self._summary.journals) for call in list(journal.at_work.values()))
        found = islice(calls, MOST_AT_WORK)
        return tuple(AtWork(title=title, since=datetime.fromtimestamp(since, UTC)) for title, since in found)

    def _entries(self) -> list[StageEntry]:
        return [entry for journal in list(self._summary.journals) for entry in list(journal.entries)]

    def _head(self, detail: RunDetail) -> RunHead:
        summary, facts = self._summary, about(self._config)
        costs = Costs(summary.journals, self._config, has_ended=summary.state != "running")
        outcome, before = summary.outcome, None if self._before is None else self._before[0]
        held_out = outcome.held_out or {each.label: each.mean for each in own_evaluations(detail)}
        price = costs.price + (before.price if before else 0.0)
        return RunHead(
            id=str(self._flow_run.id),
            name=self._config.run.name,
            flow=self._flow,
            flow_run_name=self._flow_run.name,
            tags=tuple(self._config.run.tags),
            state=summary.state,
            error=summary.error,
            began=before.began if before else self._began,
            written=datetime.now(UTC),
            tries=max(1, self._flow_run.run_count),
            seconds=time.monotonic() - self._started + (before.seconds if before else 0.0),
            computed_seconds=costs.total + (before.computed_seconds if before else 0.0),
            gpu_seconds=costs.num_gpus * costs.total + (before.gpu_seconds if before else 0.0),
            price=price,
            currency=self._config.cost.currency if price else "",
            model=facts.get("model"),
            algorithm=facts.get("algorithm"),
            data=_data_of(self._config),
            held_out=tuple(Moment(name=name, reward=reward) for name, reward in held_out.items()),
            suites=tuple(dict.fromkeys(result["suite"] for _, result in detail.results("SuiteReport"))),
            promoted=outcome.promoted,
            reason=outcome.reason,
            counts=costs.sums,
            at_work=self._at_work(),
            metrics=(*(before.metrics if before else ()), *_metrics(self._entries())),
        )

    def _detail(self) -> RunDetail:
        learning = next((j.learning for j in reversed(self._summary.journals) if j.learning is not None), None)
        calls = [_call(entry) for entry in self._entries()[-MOST_CALLS:]]
        again = {(call.stage, call.label) for call in calls}
        earlier = () if self._before is None else self._before[1].calls
        calls = [*(call for call in earlier if (call.stage, call.label) not in again), *calls]
        return RunDetail(
            config=self._config.model_dump(mode="json", exclude_none=True),
            facts=dict(self._summary.outcome.facts) | self._summary.endpoints,
            calls=tuple(calls[-MOST_CALLS:]),
            live=None
            if learning is None
            else Live(
                title=learning.title,
                num_steps=learning.num_steps,
                rows=tuple(dict(row) for row in list(learning.rows)[-MOST_LIVE_ROWS:]),
            ),
        )


def record_refusal(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of flows for runs that fail: one of a worker that was refused before its record began is recorded.

    A command's run is not: who started it sees it, and a refused command writes nothing.
    """
    if str(flow_run.id) in _KEPT or WORKERS_RUN not in os.environ:
        return
    try:
        record_refused(flow.name, flow_run, state.message or "")
    except Exception as error:  # noqa: BLE001 - whatever storage raises, a record is not worth a run
        stage_logger().warning("the record of this run cannot be written: %s", error)


def record_refused(flow: str, flow_run: FlowRun, message: str) -> None:
    """Record a run of a flow as failed with what its state's ``message`` says, besides what an earlier try recorded."""
    records, now, run = RunRecords(objects()), datetime.now(UTC), str(flow_run.id)
    line = failure_line(message)
    with suppress(NotFound):
        head, detail = records.detail(records.find(run))
        tries = max(head.tries, flow_run.run_count)
        changed = {"state": "failed", "error": line, "written": now, "tries": tries}
        records.write(head.model_copy(update=changed), detail)
        return
    config = flow_run.parameters.get("config")
    config = config if isinstance(config, dict) else {}
    named = config.get("run")
    head = RunHead(
        id=run,
        name=str(named.get("name", flow) if isinstance(named, dict) else flow),
        flow=flow,
        flow_run_name=flow_run.name,
        state="failed",
        error=line,
        began=flow_run.start_time or now,
        written=now,
        tries=max(1, flow_run.run_count),
    )
    others = {name: given for name, given in flow_run.parameters.items() if name != "config" and given}
    facts = {name: json.dumps(given, ensure_ascii=False) for name, given in _without_passwords(others).items()}
    records.write(head, RunDetail(config=_without_passwords(config), facts=facts))


def failure_line(message: str) -> str:
    """What the message of a failed run's state says, on one line, without Prefect's words before it."""
    words = "; ".join(without_passwords(_PREFECTS_WORDS.sub("", message)).split("\n"))
    return words if len(words) <= MOST_OF_AN_ERROR else words[: MOST_OF_AN_ERROR - 3] + "..."


_PREFECTS_WORDS = re.compile("^(Flow run encountered an exception|Validation of flow parameters failed with error): ")


def _without_passwords(value: Any) -> Any:
    """The same, with every address in it as people may see it: what was refused may hold credentials."""
    if isinstance(value, dict):
        return {key: _without_passwords(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_passwords(item) for item in value]
    return without_passwords(value) if isinstance(value, str) else value


def _last_step(journal: Journal) -> float:
    rows = [] if journal.learning is None else list(journal.learning.rows)
    return rows[-1]["step"] if rows else 0.0


def _metrics(entries: list[StageEntry]) -> Iterator[MetricsOf]:
    for entry in entries[-MOST_CALLS:]:
        if isinstance(entry.result, Checkpoint):
            yield MetricsOf(stage=entry.stage, label=entry.label, metrics=entry.result.metrics)


def _call(entry: StageEntry) -> StageCall:
    result = entry.result
    return StageCall(
        stage=entry.stage,
        label=entry.label,
        state=entry.state,
        ended=entry.ended,
        seconds=entry.seconds,
        inputs=entry.inputs,
        outputs=entry.outputs,
        kind=None if result is None else type(result).__name__,
        result={} if result is None else result.model_dump(mode="json", exclude_none=True),
    )


def _data_of(config: Run) -> str | None:
    """Where the rows come from that a run learns from, or works on: each address once."""
    holders: list[Any] = [*(getattr(config, name, None) for name in _LEARNERS), config]
    found = [getattr(getattr(holder, name, None), "address", None) for holder in holders for name in _SOURCES]
    return ", ".join(dict.fromkeys(address for address in found if isinstance(address, str))) or None

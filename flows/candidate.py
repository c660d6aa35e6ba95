"""A person decides whether a model is promoted: the run that made it ends, and one of `promote-candidate` waits."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Literal
from uuid import UUID

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.input import RunInput
from prefect.runtime import deployment
from prefect.states import Completed
from pydantic import Field

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import watching
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import EvalReport
from rollout_core.promotion.candidates import Candidate, forget_candidate, read_candidate
from tasks.approval import PROMOTED, REJECTED, decide
from tasks.promotion import show_evidence
from tasks.runtime import artifacts
from tasks.runtime.connections import objects
from tasks.runtime.flow_run import WORKERS_RUN
from tasks.runtime.nightly_report import compare_samples
from tasks.runtime.suspension import answer_for, is_first_try, schedule_answer, settle, wait_for, withdraw

_KEEP_HOURS = 24 * 7
"""For which a run may be resumed beyond its time, should nothing decide for the person."""


class Decision(RunInput):
    """The form that a person fills in."""

    decision: Literal["approve", "reject"]
    decided_by: str = Field(min_length=1, description="Your name, for the history.")
    reason: str = Field(default="", description="For the history; may be empty.")
    even_if_latest_has_changed: bool = Field(
        default=False,
        description="Promote it though another model has become the latest since they were compared, or somebody went "
        "back from this one.",
    )


@flow(name="promote-candidate", flow_run_name="promote {name}", persist_result=False)
def promote_candidate(
    candidate: str,
    name: str = "",
    hours: float = 72.0,
    undecided: Literal["reject", "promote"] = "reject",
    decides_for: str | None = None,
) -> State[Any]:
    """Show what speaks for a candidate, wait until somebody resumes this run with a decision, and carry it out.

    After ``hours`` without one the candidate is rejected, or what ``undecided`` says. A second run of this deployment,
    with ``decides_for``, is scheduled for that. Runs wait Suspended, without a process.
    """
    if decides_for is not None:
        return _decide_for(UUID(decides_for), hours, undecided)
    if deployment.id is None:
        raise ConfigError("promote-candidate waits as a run of its deployment; without one use `rollout promote ID`")
    kept = ContentId(candidate)
    found = read_candidate(objects(), kept)
    if is_first_try():
        _show(objects(), found)
        settle()
    bounds = {"candidate": candidate, "name": f"{name}: time-out", "hours": hours, "undecided": undecided}
    time_out = schedule_answer(bounds, timedelta(hours=hours))
    lines = "\n".join(f"- {line}" for line in found.evidence.lines)
    form = Decision.with_initial_data(
        description=f"**{found.model}** of {found.run}, to be served as `{found.resource}`.\n\n{lines}\n\n"
        f"The artifacts of this run show more. Undecided after {hours:g} hours: {undecided}."
    )
    answer = wait_for(form, timedelta(hours=hours + _KEEP_HOURS))
    with watching(ends_process=WORKERS_RUN in os.environ):
        anyway = answer.even_if_latest_has_changed
        done = decide(kept, answer.decision, answer.decided_by, answer.reason, even_if_latest_has_changed=anyway)
    withdraw(time_out)
    forget_candidate(objects(), kept)
    return Completed(name=PROMOTED if done.promoted else REJECTED, message=done.reason)


def _decide_for(waiting: UUID, hours: float, undecided: str) -> State[Any]:
    """Resume a run that nobody has resumed."""
    why = f"nobody decided in {hours:g} hours"
    decision = "approve" if undecided == "promote" else "reject"
    not_needed = answer_for(waiting, Decision(decision=decision, decided_by="time-out", reason=why))
    return Completed(message=not_needed or f"{undecided}: {why}")


def _show(store: ObjectStore, found: Candidate) -> None:
    """Tables, curves and samples, in the Prefect UI."""
    show_evidence(found.evidence)
    for number, (title, png) in enumerate(found.pictures.items(), start=1):
        artifacts.image(f"curve-{number}", store.get_bytes(png), title)
    first = found.evidence.comparisons[0]
    pair = [store.get_json(report) for report in (first.report_of_rival, first.report)]
    if not all("completions" in report for report in pair):
        return  # what was evaluated is no model but an agent
    samples = compare_samples(store, *map(EvalReport.model_validate, pair))
    rows = [
        {
            "prompt": sample.prompt,
            "before": sample.completions[0],
            "after": sample.completions[1],
            "reward before": sample.rewards[0],
            "reward after": sample.rewards[1],
        }
        for sample in samples
    ]
    if rows:
        artifacts.table("samples", rows, "Held-out prompts and what both models made of them, changed rewards first")

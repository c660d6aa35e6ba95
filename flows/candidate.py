"""A person decides whether a model is promoted: the run that made it ends, and one of `promote-candidate` waits."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from prefect import flow, get_client, suspend_flow_run
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.input import RunInput
from prefect.runtime import deployment, flow_run
from prefect.states import Completed, Scheduled
from pydantic import Field, ValidationError

from rollout_core.base.errors import ConfigError, RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import watching
from rollout_core.config import PromotionConfig
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import EvalReport
from rollout_core.promotion.candidates import Candidate, forget_candidate, read_candidate
from tasks.approval import PROMOTED, REJECTED, ask_a_person, decide
from tasks.promotion import Promotion, show_evidence
from tasks.runtime import artifacts
from tasks.runtime.artifact_sender import SENDER
from tasks.runtime.connections import objects
from tasks.runtime.flow_run import SEND_SECONDS, WORKERS_RUN
from tasks.runtime.nightly_report import SampleComparison, compare_samples
from tasks.runtime.report import Curve, shown_curve

SETTLE_SECONDS = 5.0
"""Before a run suspends itself. Its first heartbeat has to come to the server before that does: otherwise it is the
last that is heard of the run, which then counts as lost (`deployments.automations`)."""
_KEEP_HOURS = 24 * 7
"""For which a run may be resumed beyond its time, should nothing decide for the person."""
_MOST_PLACES = 10
_APART_SECONDS, _LOOK_SECONDS = 20.0, 2.0
"""Between the suspension of a run and its resumption by another: Prefect's worker loses a run that is resumed while its
first process still ends."""
_GIVEN_UP_SECONDS = 300.0
"""After which a run that crashed or failed is not tried again by itself."""


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


def reason_of(
    promotion: Promotion,
    served: ContentId | None,
    run: str,
    config: PromotionConfig,
    curve: Curve | None = None,
) -> str:
    """Why a model was promoted, or not, for people; where a person is to decide, that person is asked now.

    ``served`` is what was latest when it was compared; ``run`` names the run that made it.
    """
    if not promotion.waits:
        return promotion.reason
    shown = {} if curve is None else shown_curve(objects(), run, curve)
    pictures = {title: objects().put_bytes(png) for title, png in shown.items()}
    asked = ask_a_person(promotion, served, run, config, pictures=pictures)
    return f"{promotion.reason}; {asked.line}"


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
    if flow_run.run_count <= 1:
        _show(objects(), found)
        SENDER.flush(SEND_SECONDS)  # its process ends when it suspends
        time.sleep(SETTLE_SECONDS)
    time_out = _schedule_end(candidate, name, hours, undecided)
    lines = "\n".join(f"- {line}" for line in found.evidence.lines)
    form = Decision.with_initial_data(
        description=f"**{found.model}** of {found.run}, to be served as `{found.resource}`.\n\n{lines}\n\n"
        f"The artifacts of this run show more. Undecided after {hours:g} hours: {undecided}."
    )
    decision = _wait_for(form, timedelta(hours=hours + _KEEP_HOURS))
    with watching(ends_process=WORKERS_RUN in os.environ):
        done = decide(
            kept,
            decision.decision,
            decision.decided_by,
            decision.reason,
            even_if_latest_has_changed=decision.even_if_latest_has_changed,
        )
    _withdraw(time_out)
    forget_candidate(objects(), kept)
    return Completed(name=PROMOTED if done.promoted else REJECTED, message=done.reason)


def _wait_for(form: type[Decision], limit: timedelta) -> Decision:
    """Suspend until somebody fills in the form. A run that was resumed passes by the places at which it waited."""
    for place in range(_MOST_PLACES):
        with suppress(ValidationError):
            return suspend_flow_run(wait_for_input=form, timeout=int(limit.total_seconds()), key=f"decision-{place}")
        # It continues here without an answer, as it was taken for lost and started again: it waits at another place.
    raise RolloutError("this run was started again too often while it waited; `rollout promote ID` needs no run")


def _show(store: ObjectStore, found: Candidate) -> None:
    """Tables, curves and samples, in the Prefect UI."""
    show_evidence(found.evidence)
    for number, (title, png) in enumerate(found.pictures.items(), start=1):
        artifacts.image(f"curve-{number}", store.get_bytes(png), title)
    rows = [_row(sample) for sample in _samples(store, found)]
    if rows:
        artifacts.table("samples", rows, "Held-out prompts and what both models made of them, changed rewards first")


def _samples(store: ObjectStore, found: Candidate) -> Sequence[SampleComparison]:
    """None where what was evaluated is no model but an agent."""
    first = found.evidence.comparisons[0]
    pair = [store.get_json(report) for report in (first.report_of_rival, first.report)]
    if not all("completions" in report for report in pair):
        return []
    return compare_samples(store, *(EvalReport.model_validate(report) for report in pair))


def _row(sample: SampleComparison) -> dict[str, Any]:
    (before, after), (reward_before, reward_after) = sample.completions, sample.rewards
    return {
        "prompt": sample.prompt,
        "before": before,
        "after": after,
        "reward before": reward_before,
        "reward after": reward_after,
    }


def _schedule_end(candidate: str, name: str, hours: float, undecided: str) -> UUID:
    """The run that decides for a person who does not; the same, however often it is asked for."""
    started = flow_run.scheduled_start_time or datetime.now(UTC)
    parameters = {
        "candidate": candidate,
        "name": f"{name}: time-out",
        "hours": hours,
        "undecided": undecided,
        "decides_for": str(flow_run.id),
    }
    with get_client(sync_client=True) as client:
        return client.create_flow_run_from_deployment(
            UUID(str(deployment.id)),
            parameters=parameters,
            state=Scheduled(scheduled_time=started + timedelta(hours=hours)),
            idempotency_key=f"decides for {flow_run.id}",
        ).id


def _decide_for(waiting: UUID, hours: float, undecided: str) -> State[Any]:
    """Resume a run that nobody has resumed."""
    decision = Decision(
        decision="approve" if undecided == "promote" else "reject",
        decided_by="time-out",
        reason=f"nobody decided in {hours:g} hours",
    )
    with get_client(sync_client=True) as client:
        while True:
            try:
                run = client.read_flow_run(waiting)
            except ObjectNotFound:
                return Completed(message="the run that asked was deleted")
            if run.state is None or run.state.is_completed() or run.state.is_cancelled():
                return Completed(message="somebody has decided")
            since = (datetime.now(UTC) - run.state.timestamp).total_seconds()
            if run.state.is_paused() and since > _APART_SECONDS:
                break
            if run.state.is_final() and since > _GIVEN_UP_SECONDS:
                raise RolloutError(
                    f"the run that asked, {run.name} ({run.id}), ended {run.state.name}, and nobody has decided: "
                    f"`prefect flow-run retry {run.id}` asks again, and `rollout promote ID` needs no run"
                )
            time.sleep(_LOOK_SECONDS)  # it is about to suspend, or to end as somebody has decided
        client.resume_flow_run(waiting, run_input=decision.model_dump(mode="json"))
    return Completed(message=f"{undecided}: nobody decided in {hours:g} hours")


def _withdraw(time_out: UUID) -> None:
    with get_client(sync_client=True) as client:
        try:
            state = client.read_flow_run(time_out).state
            if state is not None and state.is_scheduled():
                client.delete_flow_run(time_out)
        except ObjectNotFound:
            return

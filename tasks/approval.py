"""Stages by which a person decides about a promotion: a candidate is filed and asked about, a decision carried out."""

from __future__ import annotations

from typing import Literal

import httpx
from prefect import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.utilities.urls import url_for

from rollout_core.base.errors import NotFound, Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import PromotionConfig
from rollout_core.objects.records import BlobId, Record
from rollout_core.promotion import history
from rollout_core.promotion.candidates import Candidate, file_candidate, read_candidate
from rollout_core.promotion.decision import withdrawal
from rollout_core.runs.decisions import note_decision
from tasks.promotion import Promotion
from tasks.runtime import connections, events
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, stage

DEPLOYMENT = "promote-candidate/promote-candidate"
PROMOTED, REJECTED = "Promoted", "Rejected"
"""States of a run that asked: what was decided."""


class Asked(Record):
    """A candidate, and the run that asks a person about it."""

    candidate: ContentId
    flow_run: str | None
    """None: the server has no deployment that asks."""
    line: str
    """For people: the outcome of the question."""


class Decided(Record):
    """What came of a decision."""

    model: ContentId
    promoted: bool
    reason: str


@stage(version=1, cached=False)
def ask_a_person(
    promotion: Promotion,
    served: ContentId | None,
    run: str,
    config: PromotionConfig,
    *,
    pictures: dict[str, BlobId] | None = None,
) -> Asked:
    """File the candidate that a promotion waits for, and have one run of `promote-candidate` ask about it.

    A model is asked about once as long as the same one is latest, however often a run arrives at it. ``served``: what
    is latest now.
    """
    assert promotion.evidence is not None, "what a person decides about has evidence"
    found = Candidate(
        resource=config.resource,
        model=promotion.model,
        served=served,
        evidence=promotion.evidence,
        reason=promotion.reason,
        run=run,
        pictures=pictures or {},
    )
    candidate = file_candidate(current_stage().objects, found)
    asking = _ask(found, candidate, config)
    if asking is None:
        line = f"no deployment {DEPLOYMENT} asks on this server; `rollout promote {promotion.model.short}` promotes it"
    else:
        line = _standing(asking)
    stage_logger().info("%s", line)
    return Asked(candidate=candidate, flow_run=None if asking is None else str(asking.id), line=line)


def _ask(found: Candidate, candidate: ContentId, config: PromotionConfig) -> FlowRun | None:
    """The run that asks about a candidate. Raises Recoverable where the server cannot be reached."""
    parameters = {
        "candidate": candidate,
        "name": f"{found.model.short} of {found.run}",
        "hours": config.approval_hours,
        "undecided": config.undecided,
    }
    try:
        with get_client(sync_client=True) as client:
            return client.create_flow_run_from_deployment(
                client.read_deployment_by_name(DEPLOYMENT).id,
                parameters=parameters,
                # Where another model is latest by then, it is another question.
                idempotency_key=f"candidate {found.model} for {found.resource} after {found.served}",
            )
    except ObjectNotFound:
        return None
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        raise Recoverable(f"the Prefect server did not take the candidate {found.model}: {error}") from error


def _standing(run: FlowRun) -> str:
    """The outcome of a question that may have been asked before."""
    where = url_for(run) or f"flow run {run.id}"
    name = "" if run.state is None else run.state.name
    if name == REJECTED:
        return f"it was rejected before ({where})"
    if run.state is not None and run.state.is_final():
        return f"it was asked about before, and that run is {name} ({where})"
    return f"it waits for a person: {where}"


@stage(version=1, cached=False)
def decide(
    candidate: ContentId,
    decision: Literal["approve", "reject"],
    by: str,
    reason: str,
    *,
    even_if_latest_has_changed: bool = False,
) -> Decided:
    """Carry out what ``by`` has decided about a candidate; once, however often it is tried.

    A promotion that the evidence does not speak for any more, as another model is latest now or somebody went back from
    this one, is refused, unless ``even_if_latest_has_changed``. Raises NotFound where the weights are gone.
    """
    objects = current_stage().objects
    found = read_candidate(objects, candidate)
    said = f"{by}: {reason}" if reason else by
    if decision == "reject":
        done = Decided(model=found.model, promoted=False, reason=f"rejected by {said}")
    elif not objects.tree_is_present(found.model):
        raise NotFound(
            f"the weights of {found.model} are not in the object store {objects.url} any more; run what made them again"
        )
    else:
        done = run_async(_promote(found, said, even_if_latest_has_changed))
    reason = done.reason if done.promoted else f"{found.reason}; {done.reason}"
    note_decision(objects, found.model, reason, promoted=done.promoted)
    if done.promoted:
        events.emit(events.Promoted(resource=found.resource, model=found.model, reason=done.reason))
    stage_logger().info("%s", done.reason)
    return done


async def _promote(found: Candidate, said: str, whatever_is_latest: bool) -> Decided:
    objects = current_stage().objects
    if not whatever_is_latest and (objections := withdrawal(objects, found.resource, found.model)):
        reason = f"{said} approved it, but {'; '.join(objections)}"
        return Decided(model=found.model, promoted=False, reason=reason)
    reason = f"approved by {said}; {found.reason}"
    by = f"flow run {current_stage().run_id}"
    change = history.Change("promote", found.resource, found.model, by, reason, found.evidence)
    instead_of: history.Served = "whatever" if whatever_is_latest else found.served
    try:
        async with connections.open_store() as store:
            await history.change_latest(store, objects, change, instead_of=instead_of)
    except history.LatestChanged as error:
        reason = (
            f"{said} approved it, but {error}; the next run compares it anew, and `rollout promote "
            f"{found.model.short}` asks for nothing"
        )
        return Decided(model=found.model, promoted=False, reason=reason)
    return Decided(model=found.model, promoted=True, reason=reason)

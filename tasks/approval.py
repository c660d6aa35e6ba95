"""Stages by which a person decides about a promotion: a candidate is filed and asked about, a decision carried out."""

from __future__ import annotations

from typing import Literal

from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import PromotionConfig
from rollout_core.objects.records import BlobId, Record
from rollout_core.promotion.candidates import Candidate, Decided, carry_out, file_candidate, read_candidate
from rollout_core.promotion.evidence import Promotion
from rollout_core.runs.decisions import note_decision
from tasks.promotion import this_run
from tasks.runtime import connections, events
from tasks.runtime.journal import stage_logger
from tasks.runtime.report import Curve, shown_curve
from tasks.runtime.stage import current_stage, stage
from tasks.runtime.suspension import standing, start_once

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
    found = Candidate.of(promotion, config.resource, served, run, pictures or {})
    candidate = file_candidate(current_stage().objects, found)
    name, bounds = f"{found.model.short} of {run}", {"hours": config.approval_hours, "undecided": config.undecided}
    given = {"candidate": candidate, "name": name, **bounds}
    asking = start_once(DEPLOYMENT, given, key=found.question, about=f"the candidate {found.model.short}")
    if asking is None:
        line = f"no deployment {DEPLOYMENT} asks on this server; `rollout promote {found.model.short}` promotes it"
    else:
        line = standing(asking, refused=REJECTED)
    stage_logger().info("%s", line)
    return Asked(candidate=candidate, flow_run=None if asking is None else str(asking.id), line=line)


@stage(version=1, cached=False)
def decide(
    candidate: ContentId,
    decision: Literal["approve", "reject"],
    by: str,
    reason: str,
    *,
    even_if_latest_has_changed: bool = False,
) -> Decided:
    """Carry out what ``by`` has decided about a candidate, as `carry_out`; once, however often it is tried."""
    objects, anyway = current_stage().objects, even_if_latest_has_changed
    found, said = read_candidate(objects, candidate), f"{by}: {reason}" if reason else by
    done = run_async(
        carry_out(
            objects, connections.open_store, found, decision, said, by=this_run(), even_if_latest_has_changed=anyway
        )
    )
    reason = done.reason if done.promoted else f"{found.reason}; {done.reason}"
    note_decision(objects, found.model, reason, promoted=done.promoted)
    if done.promoted:
        events.emit(events.Promoted(resource=found.resource, model=found.model, reason=done.reason))
    stage_logger().info("%s", done.reason)
    return done


def reason_of(
    promotion: Promotion, served: ContentId | None, run: str, config: PromotionConfig, curve: Curve | None = None
) -> str:
    """Why a model was promoted, or not, for people; where a person is to decide, that person is asked now.

    ``served`` is what was latest when it was compared; ``run`` names the run that made it.
    """
    if not promotion.waits:
        return promotion.reason
    objects = connections.objects()
    shown = {} if curve is None else shown_curve(objects, run, curve)
    pictures = {title: objects.put_bytes(png) for title, png in shown.items()}
    return f"{promotion.reason}; {ask_a_person(promotion, served, run, config, pictures=pictures).line}"

"""Models that the evidence accepts and that a person is to decide about.

A candidate is a blob in the object store. A ref below ``candidates/`` keeps it, with all that it names, from being
collected for as long as notes are kept.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout_core.base.errors import NotFound
from rollout_core.base.ids import ContentId
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import BlobId, Record
from rollout_core.objects.retention.garbage import CANDIDATE_REFS
from rollout_core.promotion import history
from rollout_core.promotion.decision import OpenStore, withdrawal
from rollout_core.promotion.evidence import Evidence, Promotion


class Candidate(Record):
    """A model that may become the latest one, and what speaks for it."""

    resource: str
    model: ContentId
    served: ContentId | None
    """What was latest when the evidence was taken."""
    evidence: Evidence
    reason: str
    run: str
    """Name of the run that made it."""
    pictures: dict[str, BlobId] = Field(default_factory=dict)
    """Curves of that run, as PNG, by their titles."""

    @classmethod
    def of(
        cls, promotion: Promotion, resource: str, served: ContentId | None, run: str, pictures: dict[str, BlobId]
    ) -> Candidate:
        """What a promotion waits for a person to decide about."""
        assert promotion.evidence is not None, "what a person decides about has evidence"
        return cls(
            resource=resource,
            model=promotion.model,
            served=served,
            evidence=promotion.evidence,
            reason=promotion.reason,
            run=run,
            pictures=pictures,
        )

    @property
    def question(self) -> str:
        """The same for one model; where another model is latest by then, it is another question."""
        return f"candidate {self.model} for {self.resource} after {self.served}"


class Decided(Record):
    """What came of a decision."""

    model: ContentId
    promoted: bool
    reason: str


def file_candidate(objects: ObjectStore, candidate: Candidate) -> ContentId:
    """Keep a candidate; the same one has the same id."""
    found = objects.put_json(candidate)
    objects.set_ref(f"{CANDIDATE_REFS}{found}", found)
    return found


def read_candidate(objects: ObjectStore, candidate: ContentId) -> Candidate:
    """Raises NotFound where it is not kept any more."""
    if not objects.exists(candidate):
        raise NotFound(
            f"candidate {candidate} is not in the object store {objects.url} any more; `rollout promote` takes the id "
            "of its model"
        )
    return Candidate.model_validate_json(objects.get_bytes(candidate))


def forget_candidate(objects: ObjectStore, candidate: ContentId) -> None:
    """What was decided about needs not be kept."""
    objects.delete_ref(f"{CANDIDATE_REFS}{candidate}")


async def carry_out(
    objects: ObjectStore,
    open_store: OpenStore,
    candidate: Candidate,
    decision: Literal["approve", "reject"],
    said: str,
    *,
    by: str,
    even_if_latest_has_changed: bool = False,
) -> Decided:
    """Do what was decided about a candidate; ``said`` names who decided and why, ``by`` what notes it in the history.

    A promotion that the evidence does not speak for any more, as another model is latest now or somebody went back from
    this one, is refused, unless ``even_if_latest_has_changed``. Raises NotFound where the weights are gone.
    """
    model, resource = candidate.model, candidate.resource
    if decision == "reject":
        return Decided(model=model, promoted=False, reason=f"rejected by {said}")
    if not objects.tree_is_present(model):
        raise NotFound(
            f"the weights of {model} are not in the object store {objects.url} any more; run what made them again"
        )
    if not even_if_latest_has_changed and (objections := withdrawal(objects, resource, model)):
        return Decided(model=model, promoted=False, reason=f"{said} approved it, but {'; '.join(objections)}")
    reason = f"approved by {said}; {candidate.reason}"
    change = history.Change("promote", resource, model, by, reason, candidate.evidence)
    instead_of: history.Served = "whatever" if even_if_latest_has_changed else candidate.served
    try:
        async with open_store() as store:
            await history.change_latest(store, objects, change, instead_of=instead_of)
    except history.LatestChanged as error:
        reason = (
            f"{said} approved it, but {error}; the next run compares it anew, and `rollout promote {model.short}` "
            "asks for nothing"
        )
        return Decided(model=model, promoted=False, reason=reason)
    return Decided(model=model, promoted=True, reason=reason)

"""Models that the evidence accepts and that a person is to decide about.

A candidate is a blob in the object store. A ref below ``candidates/`` keeps it, with all that it names, from being
collected for as long as notes are kept.
"""

from __future__ import annotations

from pydantic import Field

from rollout_core.base.errors import NotFound
from rollout_core.base.ids import ContentId
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import BlobId, Record
from rollout_core.objects.retention.garbage import CANDIDATE_REFS
from rollout_core.promotion.evidence import Evidence


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

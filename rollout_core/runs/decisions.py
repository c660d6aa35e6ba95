"""What a person decided about a model, in the records of the runs that asked."""

from __future__ import annotations

from rollout_core.base.errors import NotFound
from rollout_core.base.ids import ContentId
from rollout_core.objects import ObjectStore
from rollout_core.runs.records import RunRecords

MOST_LOOKED_AT = 200
"""Runs that did not promote, the newest, among which those are looked for that wait for a decision."""


def note_decision(objects: ObjectStore, model: ContentId, reason: str, *, promoted: bool) -> int:
    """Have the runs that wait for a person's decision about a model say what it was; the number of these runs.

    A record that is gone meanwhile is left out.
    """
    records, noted = RunRecords(objects), 0
    waiting = records.heads(lambda head: head.promoted is False and head.state != "running", limit=MOST_LOOKED_AT)
    for head in waiting:
        try:
            head, detail = records.detail(head)
        except NotFound:
            continue
        asked = [result for _, result in detail.results("Promotion") if result.get("waits")]
        if any(result.get("model") == model for result in asked):
            records.write(head.model_copy(update={"promoted": promoted, "reason": reason}), detail)
            noted += 1
    return noted

"""What a person decided about a model, in the records of the runs that asked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress

from rollout_core.base.errors import NotFound, RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.objects import ObjectStore
from rollout_core.runs.run_records import RunDetail, RunHead, RunRecords

log = logging.getLogger(__name__)

MOST_LOOKED_AT = 200
"""Runs that did not promote, the newest, among which those are looked for that wait for a decision."""


def note_decision(objects: ObjectStore, model: ContentId, reason: str, *, promoted: bool) -> int:
    """Have the runs that wait for a person's decision about a model say what it was; the number of these runs.

    A record that is gone meanwhile is left out. The decision is carried out by then, so storage that fails here is
    logged, and nothing is raised.
    """
    records, noted = RunRecords(objects), 0
    try:
        for head, detail in list(_waiting(records, model)):
            records.write(head.model_copy(update={"promoted": promoted, "reason": reason}), detail)
            noted += 1
    except RolloutError as error:
        log.warning("the runs that asked about model %s may still say that they wait: %s", model.short, error)
    return noted


def _waiting(records: RunRecords, model: ContentId) -> Iterator[tuple[RunHead, RunDetail]]:
    newest = records.heads(lambda head: head.promoted is False and head.state != "running", limit=MOST_LOOKED_AT)
    for known in newest:
        with suppress(NotFound):
            head, detail = records.detail(known)
            asked = [result for _, result in detail.results("Promotion") if result.get("waits")]
            if any(result.get("model") == model for result in asked):
                yield head, detail

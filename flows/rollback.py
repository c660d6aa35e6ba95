"""Going back to the model that was latest before."""

from __future__ import annotations

import os
from typing import TypedDict

from prefect import flow

from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import watching
from tasks.promotion import roll_back
from tasks.runtime.flow_run import WORKERS_RUN


class Served(TypedDict):
    """What a rollback returns, as JSON has it."""

    model: ContentId
    """Served from now on."""
    previous: ContentId | None
    """Served until now."""
    reason: str


@flow(name="rollback", flow_run_name="rollback of {resource}", persist_result=False)
def rollback(resource: str = "policy", to: str | None = None) -> Served:
    """Serve again what was latest before under the name ``resource``, or ``to``, a model of its history (its id, or
    the first digits). A retry of the same flow run goes back no further."""
    with watching(ends_process=WORKERS_RUN in os.environ):
        done = roll_back(resource, to)
    assert done.model is not None, "it goes back whatever is served"
    return Served(model=done.model, previous=done.previous, reason=done.reason)

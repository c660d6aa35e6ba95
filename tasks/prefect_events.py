"""Events of runs at the Prefect server, where automations act on them: ``rollout.promoted``, ``rollout.run_done``.

They go out with the artifacts, from a thread of its own (`tasks.artifact_sender`): nothing waits for a server that is
away, and what happened meanwhile is told in its order once it answers again. Each keeps its id, so that the server
files it once. ``ROLLOUT_PREFECT_EVENTS=off`` switches them off.
"""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.context import FlowRunContext
from prefect.events.schemas.events import Event, RelatedResource, Resource

from tasks.artifact_sender import SENDER

FREQUENT = frozenset({"work_start", "work_end", "train_step", "samples_done"})
"""Topics that are left out: a server is no place for thousands of them, and of stages it has its own task runs."""
_ID, _NAME, _ROLE = "prefect.resource.id", "prefect.resource.name", "prefect.resource.role"


class OutgoingEvent:
    """An event on its way."""

    def __init__(self, event: Event) -> None:
        self.key = event.event
        self.data: Any = [event.model_dump(mode="json")]
        self.context = contextvars.copy_context()

    def deliver(self, client: SyncPrefectClient, data: Any) -> None:
        """Give it to the server."""
        client.request("POST", "/events", json=data)  # pyright: ignore[reportArgumentType]


def send(topic: str, at: datetime, fields: Mapping[str, Any]) -> None:
    """Tell the server of what happened in the current flow run; returns at once. Outside of a flow run it does nothing.

    The event is about the model, where ``fields`` has one, else about the flow run, to which it is related then; also
    to the run's deployment and tags, by which automations choose.
    """
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if topic in FREQUENT or run is None:
        return
    of_run = {_ID: f"prefect.flow-run.{run.id}", _NAME: run.name}
    model = fields.get("model")
    about = of_run if model is None else {_ID: f"rollout.model.{model}", _NAME: str(fields.get("resource", model))}
    related = [] if model is None else [{**of_run, _ROLE: "flow-run"}]
    if run.deployment_id is not None:
        related.append({_ID: f"prefect.deployment.{run.deployment_id}", _ROLE: "deployment"})
    related += [{_ID: f"prefect.tag.{tag}", _ROLE: "tag"} for tag in sorted(run.tags)]
    event = Event(
        occurred=at,  # pyright: ignore[reportArgumentType]
        event=f"rollout.{topic}",
        resource=Resource.model_validate(about),
        related=[RelatedResource.model_validate(one) for one in related],
        payload=dict(fields),
    )
    SENDER.send(OutgoingEvent(event))

"""Runs that wait for a person: Suspended, without a process, until somebody fills in a form or a second run does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect import get_client, suspend_flow_run
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.input import RunInput
from prefect.runtime import deployment, flow_run
from prefect.states import Scheduled
from prefect.utilities.urls import url_for
from pydantic import ValidationError

from rollout_core.base.errors import Recoverable, RolloutError
from tasks.runtime.artifact_sender import SENDER
from tasks.runtime.flow_run import SEND_SECONDS

SETTLE_SECONDS = 5.0
"""Before a run suspends itself. Its first heartbeat has to come to the server before that does: otherwise it is the
last that is heard of the run, which then counts as lost (`deployments.automations`)."""
_MOST_PLACES = 10
_APART_SECONDS, _LOOK_SECONDS = 20.0, 2.0
"""Between the suspension of a run and its resumption by another: Prefect's worker loses a run that is resumed while its
first process still ends."""
_GIVEN_UP_SECONDS = 300.0
"""After which a run that crashed or failed is not tried again by itself."""

FormT = TypeVar("FormT", bound=RunInput)


def start_once(name: str, parameters: Mapping[str, Any], *, key: str, about: str) -> FlowRun | None:
    """A run of the deployment ``name``, the same for the same ``key``; None where there is no such deployment.
    ``about``: what it is to ask about, for errors.

    Raises Recoverable where the server cannot be reached.
    """
    try:
        with get_client(sync_client=True) as client:
            asked = client.read_deployment_by_name(name).id
            return client.create_flow_run_from_deployment(asked, parameters=dict(parameters), idempotency_key=key)
    except ObjectNotFound:
        return None
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        raise Recoverable(f"the Prefect server did not start a run of {name} about {about}: {error}") from error


def standing(run: FlowRun, *, refused: str) -> str:
    """For people: where a question stands that may have been asked before; a run in the state ``refused`` says no."""
    where = url_for(run) or f"flow run {run.id}"
    name = "" if run.state is None else run.state.name
    if name == refused:
        return f"it was {refused.lower()} before ({where})"
    if run.state is not None and run.state.is_final():
        return f"it was asked about before, and that run is {name} ({where})"
    return f"it waits for a person: {where}"


def is_first_try() -> bool:
    """Whether this run begins, and does not continue after it was resumed or lost."""
    return flow_run.run_count <= 1


def settle() -> None:
    """Before the first suspension: have what is shown arrive, and the run be heard of."""
    SENDER.flush(SEND_SECONDS)  # its process ends when it suspends
    time.sleep(SETTLE_SECONDS)


def wait_for(form: type[FormT], limit: timedelta) -> FormT:
    """Suspend until somebody fills in the form. A run that was resumed passes by the places at which it waited."""
    for place in range(_MOST_PLACES):
        with suppress(ValidationError):
            return suspend_flow_run(wait_for_input=form, timeout=int(limit.total_seconds()), key=f"decision-{place}")
        # It continues here without an answer, as it was taken for lost and started again: it waits at another place.
    raise RolloutError("this run was started again too often while it waited; `rollout promote ID` needs no run")


def schedule_answer(parameters: Mapping[str, Any], after: timedelta) -> UUID:
    """A second run of this deployment, with ``decides_for`` this one, ``after`` this one was due; the same however
    often it is asked for."""
    started = flow_run.scheduled_start_time or datetime.now(UTC)
    with get_client(sync_client=True) as client:
        return client.create_flow_run_from_deployment(
            UUID(str(deployment.id)),
            parameters={**parameters, "decides_for": str(flow_run.id)},
            state=Scheduled(scheduled_time=started + after),
            idempotency_key=f"decides for {flow_run.id}",
        ).id


def withdraw(scheduled: UUID) -> None:
    """Delete a run that has not begun."""
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        state = client.read_flow_run(scheduled).state
        if state is not None and state.is_scheduled():
            client.delete_flow_run(scheduled)


def answer_for(waiting: UUID, answer: RunInput) -> str | None:
    """Resume a run with an answer that nobody has given. None, or why none is needed."""
    with get_client(sync_client=True) as client:
        while True:
            try:
                run = client.read_flow_run(waiting)
            except ObjectNotFound:
                return "the run that asked was deleted"
            if run.state is None or run.state.is_completed() or run.state.is_cancelled():
                return "somebody has decided"
            since = (datetime.now(UTC) - run.state.timestamp).total_seconds()
            if run.state.is_paused() and since > _APART_SECONDS:
                break
            if run.state.is_final() and since > _GIVEN_UP_SECONDS:
                raise RolloutError(
                    f"the run that asked, {run.name} ({run.id}), ended {run.state.name}, and nobody has decided: "
                    f"`prefect flow-run retry {run.id}` asks again, and `rollout promote ID` needs no run"
                )
            time.sleep(_LOOK_SECONDS)  # it is about to suspend, or to end as somebody has decided
        client.resume_flow_run(waiting, run_input=answer.model_dump(mode="json"))
    return None

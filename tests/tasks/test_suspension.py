"""Runs that wait for a person, as runs of a deployment on a real Prefect server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from rollout_core.base.errors import Recoverable, RolloutError
from tests.store.ports import own_port

pytestmark = pytest.mark.server


class Asked:
    """A deployment of a flow, whose runs do what they are given."""

    def __init__(self) -> None:
        from prefect import flow, get_client

        @flow(name=f"asks-{uuid4().hex[:8]}")
        def asks(decides_for: str | None = None, about: str = "") -> Any:
            return self.does()

        self.flow, self.does = asks, lambda: None
        self.name = f"{asks.name}/asked"
        with get_client(sync_client=True) as client:
            self.id = client.create_deployment(flow_id=client.create_flow(asks), name="asked")

    def create(self) -> UUID:
        """A run, which has not begun."""
        from prefect import get_client

        with get_client(sync_client=True) as client:
            return client.create_flow_run_from_deployment(self.id).id

    def run(self, run_id: UUID, does: Callable[[], Any]) -> Any:
        """Have the run do that in this process, and what it returns; None where it suspends."""
        from prefect.exceptions import Pause
        from prefect.flow_engine import run_flow

        self.does = does
        with suppress(Pause):
            return run_flow(self.flow, flow_run=read(run_id))
        return None


def read(run_id: UUID) -> Any:
    from prefect import get_client

    with get_client(sync_client=True) as client:
        return client.read_flow_run(run_id)


def set_state(run_id: UUID, state: Any) -> None:
    from prefect import get_client

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, state, force=True)


@pytest.fixture
def asked(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> Asked:
    from tasks.runtime import suspension

    monkeypatch.setattr(suspension, "_APART_SECONDS", 0.0)
    monkeypatch.setattr(suspension, "_LOOK_SECONDS", 0.05)
    return Asked()


@pytest.fixture(scope="module")
def forms() -> Any:
    from prefect.input import RunInput

    class Answer(RunInput):
        word: str

    return Answer


def test_a_question_is_asked_once_for_a_key_and_says_where_it_stands(asked: Asked):
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.states import Cancelled, Completed, Suspended

    from tasks.runtime.suspension import standing, start_once

    first = start_once(asked.name, {"about": "this"}, key="one", about="a model")
    again = start_once(asked.name, {"about": "this"}, key="one", about="a model")
    other = start_once(asked.name, {"about": "that"}, key="two", about="a model")
    assert first is not None and again is not None and other is not None
    assert first.id == again.id != other.id and read(first.id).parameters == {"about": "this"}
    assert start_once("nobody/asks", {}, key="one", about="a model") is None
    with (
        own_port() as port,
        temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}),
        pytest.raises(Recoverable, match=f"did not start a run of {asked.name} about a model"),
    ):
        start_once(asked.name, {}, key="one", about="a model")

    said = []
    for state in (Suspended(), Cancelled(), Completed(name="Rejected")):
        set_state(first.id, state)
        said.append(standing(read(first.id), refused="Rejected"))
    assert said[0].startswith("it waits for a person: ") and str(first.id) in said[0]
    assert said[1].endswith("that run is Cancelled (" + said[0].partition(": ")[2] + ")")
    assert said[2].startswith("it was rejected before (")


def test_a_run_waits_without_a_process_until_it_is_answered(asked: Asked, forms: Any):
    from prefect.states import Scheduled

    from tasks.runtime.suspension import answer_for, is_first_try, wait_for

    tries: list[bool] = []

    def asks() -> str:
        tries.append(is_first_try())
        return wait_for(forms, timedelta(hours=1)).word

    run_id = asked.create()
    assert asked.run(run_id, asks) is None and read(run_id).state.name == "Suspended"
    # Taken for lost and started again without an answer, it waits again.
    set_state(run_id, Scheduled())
    assert asked.run(run_id, asks) is None and read(run_id).state.name == "Suspended"
    assert answer_for(run_id, forms(word="yes")) is None
    assert asked.run(run_id, asks) == "yes" and read(run_id).state.name == "Completed"
    assert tries == [True, False, False]
    assert answer_for(run_id, forms(word="no")) == "somebody has decided"


def test_an_answer_is_for_a_run_that_waits_or_will(asked: Asked, forms: Any, monkeypatch: pytest.MonkeyPatch):
    from prefect.states import Crashed

    from tasks.runtime import suspension

    assert suspension.answer_for(uuid4(), forms(word="no")) == "the run that asked was deleted"
    monkeypatch.setattr(suspension, "_GIVEN_UP_SECONDS", 0.2)
    run_id = asked.create()
    set_state(run_id, Crashed())
    with pytest.raises(
        RolloutError, match=rf"\({run_id}\), ended Crashed, and nobody has decided: `prefect flow-run retry"
    ):
        suspension.answer_for(run_id, forms(word="no"))


def test_a_run_that_is_restarted_too_often_gives_up(asked: Asked, forms: Any, monkeypatch: pytest.MonkeyPatch):
    from prefect.states import Scheduled

    from tasks.runtime import suspension

    monkeypatch.setattr(suspension, "_MOST_PLACES", 1)
    run_id = asked.create()
    asked.run(run_id, lambda: suspension.wait_for(forms, timedelta(hours=1)))
    set_state(run_id, Scheduled())
    with pytest.raises(RolloutError, match="started again too often while it waited; `rollout promote ID`"):
        asked.run(run_id, lambda: suspension.wait_for(forms, timedelta(hours=1)))


def test_the_run_that_decides_in_time_is_scheduled_once_and_withdrawn_unless_it_has_begun(asked: Asked):
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Running

    from tasks.runtime.suspension import schedule_answer, withdraw

    def schedules() -> list[UUID]:
        return [schedule_answer({"about": "this"}, timedelta(hours=1)) for _ in range(2)]

    run_id = asked.create()
    first, again = asked.run(run_id, schedules)
    found, asking = read(first), read(run_id)
    assert first == again and found.parameters == {"about": "this", "decides_for": str(run_id)}
    assert found.state.is_scheduled()
    assert found.expected_start_time - asking.expected_start_time == timedelta(hours=1)
    withdraw(first)
    withdraw(first)  # it is gone
    with pytest.raises(ObjectNotFound):
        read(first)
    begun = asked.create()
    set_state(begun, Running())
    withdraw(begun)
    assert read(begun).state.is_running()

"""The session that stages of agents share: one at a time has it, and a stage fails by what failed first."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rollout_core.agents import session


class Session:
    """Stands for an engine with its runners: notes when it is used, fails or never ends where its name says so."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    async def run(self, *args: Any, **options: Any) -> None:
        self.events.append(f"{self.name} begins")
        await (asyncio.Event().wait() if self.name == "endless" else asyncio.sleep(0.05))
        if "broken" in self.name:
            raise ValueError("the first error")
        self.events.append(f"{self.name} ends")

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.events.append(f"{self.name} closes")
        await asyncio.sleep(0.02)
        if "broken" in self.name:
            raise OSError("the second error")


class Sessions(session.Sessions):
    def __init__(self) -> None:
        super().__init__(lambda: nullcontext(None), Path)  # type: ignore[arg-type]
        self.events: list[str] = []

    def _made(self, setting: Any, store: Any) -> Any:
        return Session(setting, self.events)


async def use(sessions: Sessions, setting: str) -> None:
    await sessions.run(setting, None, None, ["r"])  # type: ignore[arg-type]


@pytest.fixture
def sessions():
    made = Sessions()
    yield made
    made.close()


def test_stages_that_need_other_sessions_wait_for_each_other(sessions):
    async def all_at_once() -> None:
        await asyncio.gather(*(use(sessions, name) for name in ("a", "b", "b")))

    asyncio.run(all_at_once())
    assert sessions.events == ["a begins", "a ends", "a closes", "b begins", "b ends", "b begins", "b ends"]
    sessions.close()
    assert sessions.events[-1] == "b closes"
    asyncio.run(use(sessions, "a"))  # it can be opened again


def test_a_stage_fails_by_the_first_error(sessions, caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="the first error"):
        asyncio.run(use(sessions, "broken"))
    assert "the second error" in caplog.text
    asyncio.run(use(sessions, "whole"))
    assert sessions.events == ["broken begins", "broken closes", "whole begins", "whole ends"]


def test_a_stage_that_is_cancelled_ends_the_session(sessions):
    async def cancelled() -> None:
        task = asyncio.ensure_future(use(sessions, "endless"))
        while not sessions.events:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert sessions.events == ["endless begins", "endless closes"]

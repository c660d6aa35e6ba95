"""What Prefect's own parts leave in the logs of runs and workers when the server is away."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys

import pytest
from prefect._internal.concurrency import logger as services_logger, services
from prefect._internal.observers import FlowRunCancellingObserver, FlowRunSuspendingObserver
from prefect.events import Event, Resource

from tasks.runtime import prefect_logs, scheduled_runs as nights
from tasks.runtime.prefect_logs import OBSERVERS, OneLine


def test_a_traceback_of_an_observer_is_a_line():
    try:
        raise ConnectionRefusedError("nobody\nlistens")
    except ConnectionRefusedError:
        record = logging.LogRecord("x", logging.WARNING, "x", 1, "the %s failed", ("websocket",), sys.exc_info())
    assert OneLine().filter(record)
    assert logging.Formatter().format(record) == "the websocket failed (ConnectionRefusedError: nobody listens)"


@pytest.mark.parametrize("kind", [FlowRunCancellingObserver, FlowRunSuspendingObserver])
def test_an_observer_that_polls_ends_without_a_word(kind, caplog):
    """Prefect asks the task that it has cancelled for its exception, in a callback."""
    assert nights.prefect_logs is prefect_logs  # which every flow imports
    observer = kind(lambda run: None)

    async def end_polling() -> None:
        polling = asyncio.create_task(asyncio.sleep(60))
        polling.add_done_callback(observer._handle_polling_task_done)
        await asyncio.sleep(0)
        polling.cancel()
        await asyncio.wait([polling])
        await asyncio.sleep(0)

    asyncio.run(end_polling())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_other_errors_of_callbacks_are_told(caplog):
    prefect_logs.shorten()

    async def fail() -> None:
        asyncio.get_running_loop().call_soon(int, "no number")
        await asyncio.sleep(0.01)

    asyncio.run(fail())
    assert "no number" in caplog.text


def test_an_event_that_waits_for_the_server_is_a_short_warning():
    """The record as Prefect's service makes it, by the filters of its logger."""
    assert f'"{prefect_logs._UNSENT}"' in inspect.getsource(services)
    prefect_logs.shorten()
    event = Event(event="prefect.task-run.Completed", resource=Resource({"prefect.resource.id": "x" * 3000}))
    record = services_logger.makeRecord(
        services_logger.name, logging.ERROR, "services.py", 1,
        "Service %r failed to process item %r", ("EventsWorker", event), None,
    )  # fmt: skip
    assert services_logger.filter(record)
    assert record.levelno == logging.WARNING and len(record.getMessage()) < 120
    assert "prefect.task-run.Completed" in record.getMessage()


def test_a_process_of_a_flow_has_the_observers_of_both_kinds_say_a_line():
    for name in OBSERVERS:
        assert any(isinstance(kept, OneLine) for kept in logging.getLogger(name).filters), name

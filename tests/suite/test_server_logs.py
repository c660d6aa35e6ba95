"""The check of server logs itself: what it takes for an error, and what it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.server_logs import ServerLogs

SCHEDULER = """\
09:10:11.500 | WARNING | prefect.server - slow
09:10:12.500 | ERROR   | prefect.server.services.scheduler - Unexpected error in: schedule_deployments
Traceback (most recent call last):
  File "deployments.py", line 1009, in schedule_runs
    raise error
sqlalchemy.exc.InvalidRequestError: Can't evaluate bulk DML statement
09:10:13.500 | INFO    | prefect.server - goes on
"""


def problems(tmp_path: Path, text: str, *expected: str) -> list[str]:
    logs = ServerLogs()
    logs.watch(tmp_path / "server.log").write_text(text)
    for pattern in expected:
        logs.expect(pattern, "the test is about it")
    return logs.errors()


def test_the_failing_scheduler_is_found_and_named_with_its_traceback(tmp_path: Path):
    [found] = problems(tmp_path, SCHEDULER)
    assert found.startswith(f"{tmp_path / 'server.log'}:\n09:10:12.500 | ERROR   | prefect.server.services.scheduler")
    assert found.endswith("Can't evaluate bulk DML statement")


@pytest.mark.parametrize(
    "line",
    [
        "09:10:12.500 | CRITICAL | prefect.server - the end",
        "ERROR:    Application startup failed. Exiting.",
        "2026-01-02 03:04:05,678 rollout_core.store.http.app ERROR a request failed",
        "2026-01-02 03:04:05,678 - distributed.worker - ERROR - a task failed",
        "Traceback (most recent call last):\n  File 'a.py', line 1\nValueError: no",
    ],
)
def test_errors_of_every_kind_of_server_are_found(tmp_path: Path, line: str):
    assert len(problems(tmp_path, f"begin\n{line}\nINFO:     on\n")) == 1


def test_a_quiet_log_and_one_that_nobody_wrote_are_fine(tmp_path: Path):
    assert problems(tmp_path, "INFO:     0 errors\n09:10:11.500 | WARNING | no error\n") == []
    logs = ServerLogs()
    logs.watch(tmp_path / "nobody.log")
    logs.check()


def test_an_expected_error_covers_its_own_record_and_no_other(tmp_path: Path):
    assert problems(tmp_path, SCHEDULER, "bulk DML") == []
    assert len(problems(tmp_path, SCHEDULER + SCHEDULER.replace("bulk DML", "another"), "bulk DML")) == 1


def test_the_check_fails_with_the_lines_of_the_log(tmp_path: Path):
    logs = ServerLogs()
    logs.watch(tmp_path / "server.log").write_text(SCHEDULER)
    with pytest.raises(AssertionError, match=r"1 errors in the logs(.|\n)*schedule_deployments"):
        logs.check()

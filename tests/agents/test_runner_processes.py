"""Processes of runners: they say when they are ready, are started again so often, and end with what they have started,
whoever is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rollout_core.agents.runner_processes import Restarts, RunnerProcesses
from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from tests.agents import handed_over
from tests.store.patience import LONG, until, wait_until
from tests.support.alive import lives

ROOT = Path(__file__).parents[2]


def noted(folder: Path) -> list[int]:
    """Runners and their children, as they have noted."""
    files = [file for file in folder.iterdir() if file.read_text()]
    return [int(pid) for file in files for pid in (file.name.partition("-")[2], file.read_text())]


def have_ended(pids: list[int]) -> bool:
    return not any(map(lives, pids))


def test_deaths_in_a_row_are_counted_and_pauses_grow():
    restarts = Restarts(5)
    assert [restarts.pause("it broke") for _ in range(5)] == [0.0, 0.5, 1.5, 3.5, 7.5]
    with pytest.raises(Fatal, match=r"^it broke; it was started again 5 times in a row, the limit \(max_restarts\)$"):
        restarts.pause("it broke")
    restarts = Restarts(1)
    restarts.pause("it broke")
    assert restarts.pause("it broke", lived_seconds=61.0) == 0.0, "it did not die of what it was started with"
    with pytest.raises(Fatal, match=r"^it broke$"):
        Restarts(0).pause("it broke")


def test_a_task_that_has_ended_begins_a_new_row():
    ended = [0]
    restarts = Restarts(2, lambda: ended[0])
    assert [restarts.pause("it broke") for _ in range(2)] == [0.0, 0.5]
    ended[0] = 1
    assert [restarts.pause("it broke", lived_seconds=61.0) for _ in range(2)] == [0.0, 0.5]
    with pytest.raises(Fatal):
        restarts.pause("it broke", lived_seconds=61.0)


async def test_runners_say_when_all_are_ready_write_where_they_are_told_and_end_with_their_children(tmp_path):
    work, logs = tmp_path / "work", tmp_path / "logs"
    for folder in (work, logs):
        folder.mkdir()
    processes = RunnerProcesses(
        handed_over.waits_beside_a_child, [3, 4], max_restarts=0, output=lambda number: str(logs / str(number))
    )
    async with processes.running(str(work), end_seconds=LONG) as running:
        await asyncio.wait_for(processes.all_ready.wait(), LONG)
        assert not running.done()
        assert [(logs / name).read_text() for name in ("3", "4")] == ["runner 3 works\n", "runner 4 works\n"]
        pids = noted(work)
        assert len(pids) == 4 and not have_ended(pids)
    assert running.done() and have_ended(pids)


async def test_a_runner_that_is_killed_is_started_again_and_its_children_have_ended(tmp_path):
    deaths: list[int] = []

    async def note(number: int) -> None:
        deaths.append(number)

    processes = RunnerProcesses(handed_over.waits_beside_a_child, [0], max_restarts=1)
    async with processes.running(str(tmp_path), end_seconds=LONG, on_death=note) as running:
        await until(lambda: len(noted(tmp_path)) == 2)
        first = noted(tmp_path)
        os.kill(first[0], signal.SIGKILL)
        await until(lambda: len(noted(tmp_path)) == 4)
        assert deaths == [0] and have_ended(first)
        for pid in set(noted(tmp_path)) - set(first):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(Fatal, match="runner 0 was killed by SIGKILL; it was started again 1 times in a row"):
            await asyncio.wait_for(running, LONG)
    assert have_ended(noted(tmp_path))


async def test_one_that_returns_unasked_where_that_is_no_end_or_is_never_ready_ends_the_run():
    processes = RunnerProcesses(handed_over.returns_at_once, [0], max_restarts=1, allowed_exit_codes=())
    async with processes.running("", end_seconds=LONG) as running:
        with pytest.raises(Fatal, match="runner 0 ended with exit status 0; it was started again 1 times in a row"):
            await asyncio.wait_for(running, LONG)
    processes = RunnerProcesses(handed_over.never_ready, [0], max_restarts=1, start_seconds=0.1)
    async with processes.running("", end_seconds=LONG) as running:
        with pytest.raises(ConfigError, match=r"not loaded within 0.1 s; what takes so long at its import belongs"):
            await asyncio.wait_for(running, LONG)


async def test_a_runner_that_is_started_again_may_take_longer_to_load(tmp_path):
    processes = RunnerProcesses(handed_over.waits_for_a_word_the_second_time, [0], max_restarts=1, start_seconds=LONG)
    async with processes.running(str(tmp_path), end_seconds=LONG) as running:
        await asyncio.wait_for(processes.all_ready.wait(), LONG)
        processes._start_seconds = 0.0
        os.kill(int((tmp_path / "first").read_text()), signal.SIGKILL)
        await until(lambda: (tmp_path / "second").exists())
        assert not running.done()
        (tmp_path / "word").touch()
        await until(lambda: (tmp_path / "ready").exists())
        assert not running.done()


async def test_a_runner_that_hangs_when_it_is_started_again_is_killed_as_often_as_one_may_die(tmp_path):
    deaths: list[int] = []

    async def note(number: int) -> None:
        deaths.append(number)

    processes = RunnerProcesses(
        handed_over.waits_for_a_word_the_second_time, [0], max_restarts=2, start_seconds=LONG, reload_seconds=0.1
    )
    async with processes.running(str(tmp_path), end_seconds=LONG, on_death=note) as running:
        await asyncio.wait_for(processes.all_ready.wait(), LONG)
        os.kill(int((tmp_path / "first").read_text()), signal.SIGKILL)
        with pytest.raises(Fatal) as caught:
            await asyncio.wait_for(running, LONG)
    assert str(caught.value) == (
        "runner 0 was killed by SIGKILL: the agent was not loaded within 0.1 s; what takes so long at its import "
        "belongs into the function; it was started again 2 times in a row, the limit (max_restarts)"
    )
    assert deaths == [0, 0, 0] and (tmp_path / "second").exists()


async def test_a_run_fails_whose_nursery_is_killed_and_no_runner_is_left(tmp_path):
    processes = RunnerProcesses(handed_over.waits_beside_a_child, [0], max_restarts=1)
    async with processes.running(str(tmp_path), end_seconds=LONG) as running:
        await asyncio.wait_for(processes.all_ready.wait(), LONG)
        runner, child = noted(tmp_path)
        psutil.Process(psutil.Process(runner).ppid()).kill()
        with pytest.raises(Recoverable, match="the process that starts the runners has died"):
            await asyncio.wait_for(running, LONG)
        wait_until(lambda: not lives(runner))
    os.kill(child, signal.SIGKILL)  # nobody is left who knows of it


PROGRAM = """
import asyncio, os, sys, time
from rollout_core.agents.runner_processes import RunnerProcesses
from tests.agents.handed_over import waits_beside_a_child

async def run():
    processes = RunnerProcesses(waits_beside_a_child, [0, 1], max_restarts=0)
    if sys.argv[2] == "forked" and os.fork() == 0:
        os.setsid()  # it holds this program's end of the pipe, and is not killed with it
        os.write(1, f"{os.getpid()}\\n".encode())
        time.sleep(3600)
    async with processes.running(sys.argv[1], end_seconds=0) as running:
        await running

asyncio.run(run())
"""


@pytest.mark.parametrize(
    ("form", "kill"), [("plain", os.kill), ("plain", os.killpg), ("forked", os.kill)], ids=["it", "group", "forked"]
)
def test_when_the_program_is_killed_its_runners_and_their_children_end(
    tmp_path: Path, form: str, kill: Callable[[int, int], None]
):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), form],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        forked = int(program.stdout.readline()) if form == "forked" else None
        wait_until(lambda: len(noted(tmp_path)) == 4)
        pids = noted(tmp_path)
        assert not have_ended(pids)
        kill(program.pid, signal.SIGKILL)
        wait_until(lambda: have_ended(pids))
        if forked is not None:
            os.kill(forked, signal.SIGKILL)
    finally:
        program.kill()
        program.communicate()

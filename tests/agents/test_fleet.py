"""Runners of a run: they get its tasks alone, die and are replaced, and nothing is done twice or waited for in vain."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout_core.agents.code import AgentCode
from rollout_core.agents.run_queue import RolloutQueue
from rollout_core.agents.runner_fleet import Fleet
from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.base.processes import ProcessName
from rollout_core.config import RunnersConfig
from rollout_core.store import (
    LLM,
    EnqueueRolloutRequest,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    RolloutConfig,
    SqlLightningStore,
)
from rollout_core.store.forwarding_store import StoreView
from tests.store.patience import FOREVER, LONG, until

AGENT = """
import json, os, time
from helper import WORD
from rollout_core.agents import rollout


@rollout
def agent(task, llm, rollout):
    with open(os.environ["AGENT_RUNS"], "a") as runs:
        runs.write(json.dumps([rollout.rollout_id, rollout.attempt.attempt_id, os.getpid(), WORD]) + "\\n")
    print("printed by the agent")
    if task.get("exit"):
        os._exit(9)
    if task.get("raise"):
        raise ValueError("the agent's own fault")
    time.sleep(task.get("seconds", 0))
    while "until" in task and not os.path.exists(task["until"]):
        time.sleep(0.02)
    while len({json.loads(line)[2] for line in open(os.environ["AGENT_RUNS"])}) < task.get("processes", 1):
        time.sleep(0.02)
    return float(task["number"])
"""
RETRIED = RolloutConfig(timeout_seconds=600, max_attempts=3, retry_condition=["failed", "timeout", "unresponsive"])


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlLightningStore]:
    async with SqlLightningStore.from_url(f"sqlite:///{tmp_path}/rollout.db") as store:
        yield store


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentCode:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "helper.py").write_text("WORD = 'first'\n")
    monkeypatch.setenv("AGENT_RUNS", str(tmp_path / "runs.jsonl"))
    return AgentCode.read("agent.py:agent", tmp_path)


def runs(tmp_path: Path) -> list[list[Any]]:
    file = tmp_path / "runs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def enqueue(store: LightningStore, tasks: Sequence[dict[str, Any]], **fields: Any) -> list[str]:
    requests = [EnqueueRolloutRequest(input=task, **{"config": RETRIED, **fields}) for task in tasks]
    return [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]


def numbers(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"number": number, **more} for number in range(count)]


RESOURCES: Any = {"llm": LLM(endpoint="http://localhost:1/v1", model="m")}


# The queue


async def test_a_queue_hands_out_its_own_rollouts_alone_and_with_the_runs_resources(store):
    await store.add_resources({"llm": LLM(endpoint="http://localhost:2/v1", model="of others")})
    stray = await enqueue(store, numbers(3))
    own = await enqueue(store, numbers(3))
    queue = RolloutQueue(store)
    queue.set_resources(RESOURCES)
    queue.add(own)
    claimed = await queue.dequeue_many_rollouts(limit=5, worker_id="w")
    assert [rollout.rollout_id for rollout in claimed] == own
    found = await queue.get_resources_by_id(claimed[0].resources_id or "")
    assert found is not None and found.resources == RESOURCES
    assert await queue.dequeue_many_rollouts(limit=5, worker_id="w") == []
    assert {rollout.status for rollout in await store.query_rollouts(rollout_id_in=stray)} == {"queuing"}


async def test_what_is_to_be_tried_again_is_handed_out_again_and_what_has_ended_leaves(store):
    first, second = await enqueue(store, numbers(2))
    queue = RolloutQueue(store)
    queue.add([first, second])
    one, two = await queue.dequeue_many_rollouts(limit=2)
    await queue.update_attempt(one.rollout_id, one.attempt.attempt_id, status="failed")
    await queue.update_attempt(two.rollout_id, two.attempt.attempt_id, status="succeeded")
    assert [rollout.rollout_id for rollout in await queue.look()] == [second]
    [again] = await queue.dequeue_many_rollouts(limit=2)
    assert (again.rollout_id, again.attempt.sequence_id) == (first, 2)
    assert queue.taken == [first]


async def test_a_claim_whose_answer_was_lost_is_answered_again_and_one_given_back_is_handed_out(store):
    ids = await enqueue(store, numbers(2))
    queue = RolloutQueue(store)
    queue.add(ids)
    [claimed] = await queue.claim_rollouts("claim", worker_id="w")
    [repeated] = await queue.claim_rollouts("claim", worker_id="w", repeated=True)
    assert repeated.attempt.attempt_id == claimed.attempt.attempt_id
    await queue.release_rollouts([claimed])
    [taken] = await queue.claim_rollouts("of another", worker_id="v")
    assert await queue.claim_rollouts("claim", worker_id="w", repeated=True) == []
    await queue.release_rollouts([taken])
    [claimed] = await queue.claim_rollouts("claim again", worker_id="w")
    server = LightningStoreServer(queue)
    await server.start()
    async with LightningStoreClient(server.endpoint) as client:
        [other] = await client.dequeue_many_rollouts(limit=2, worker_id="w")
        assert {claimed.rollout_id, other.rollout_id} == set(ids)
        await client.release_rollouts([other])
        [back] = await client.dequeue_many_rollouts(limit=2, worker_id="w")
        assert back.rollout_id == other.rollout_id
    await server.stop()


async def test_looks_during_claims_hand_nothing_out_twice(store):
    ids = await enqueue(store, numbers(60))
    queue = RolloutQueue(store)
    queue.add(ids)
    claimed: list[str] = []

    async def claim() -> None:
        while found := await queue.dequeue_many_rollouts(limit=2):
            claimed.extend(rollout.rollout_id for rollout in found)

    async def look() -> None:
        while True:
            await queue.look()
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await asyncio.gather(*(claim() for _ in range(6)))
    looking.cancel()
    assert sorted(claimed) == sorted(ids)


async def test_who_waits_for_work_is_woken_when_there_is_some(store):
    queue = RolloutQueue(store)
    assert await queue.dequeue_rollout("w") is None
    waiting = asyncio.create_task(queue.wait_for_work(FOREVER))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    [rollout_id] = await enqueue(store, numbers(1))
    assert not waiting.done(), "others' work"
    queue.add([rollout_id])
    assert await asyncio.wait_for(waiting, LONG)
    claimed = await queue.dequeue_rollout("w")
    assert claimed is not None and claimed.rollout_id == rollout_id


async def test_a_rollout_that_somebody_else_works_on_is_not_taken_from_them(store):
    [rollout_id] = await enqueue(store, numbers(1))
    theirs = await store.start_attempt(rollout_id, "somebody")
    queue = RolloutQueue(store)
    queue.add([rollout_id])
    assert await queue.dequeue_many_rollouts(limit=1) == []
    latest = await store.get_latest_attempt(rollout_id)
    assert latest is not None and latest.attempt_id == theirs.attempt.attempt_id
    await store.update_attempt(rollout_id, theirs.attempt.attempt_id, status="succeeded")
    assert [rollout.status for rollout in await queue.look()] == ["succeeded"]


async def test_interrupted_attempts_are_no_failures_of_the_agent(store):
    config = RolloutConfig(max_attempts=30, retry_condition=["failed", "unresponsive"])
    [rollout] = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={}, config=config)])
    queue = RolloutQueue(store, max_failures=2)
    queue.add([rollout.rollout_id])
    for status in ("unresponsive", "failed", "unresponsive", "failed"):
        assert await queue.look() == []
        [claimed] = await queue.dequeue_many_rollouts(limit=1)
        await queue.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status=status)
    assert [found.status for found in await queue.look()] == ["failed"]
    # Forgiven, it may fail as often again.
    await queue.retry(rollout.rollout_id)
    queue.add([rollout.rollout_id])
    for number, status in enumerate(("failed", "failed")):
        [claimed] = await queue.dequeue_many_rollouts(limit=1)
        await queue.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status=status)
        assert len(await queue.look()) == number


# The fleet


def config(**changes: Any) -> RunnersConfig:
    return RunnersConfig(**{"count": 2, "concurrency": 3, **changes})


@pytest.mark.parametrize("where", ["processes", "threads"])
async def test_all_tasks_are_worked_on_once_and_what_is_done_is_left_alone(store, code, tmp_path, where):
    # Each process is to have some of them, however long the other one takes to begin.
    together = {"processes": 2} if where == "processes" else {}
    ids = await enqueue(store, numbers(12, seconds=0.1, **together))
    done: list[int] = []
    async with Fleet(store, code, config(where=where), log_folder=tmp_path / "logs") as fleet:
        fleet.set_resources(RESOURCES)
        await fleet.run(ids, on_progress=lambda number, total: done.append(number))
        await fleet.run(ids)
        more = await enqueue(store, numbers(4))
        await fleet.run([*ids, *more])
    assert sorted(row[0] for row in runs(tmp_path)) == sorted([*ids, *more])
    assert done[-1] == 12 and done == sorted(done)
    rollouts = await store.query_rollouts(rollout_id_in=[*ids, *more])
    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    if where == "processes":
        assert len({row[2] for row in runs(tmp_path)}) == 2
        logs = "".join(file.read_text() for file in (tmp_path / "logs").iterdir())
        assert "printed by the agent" in logs and os.getpid() not in {row[2] for row in runs(tmp_path)}


async def test_killed_runners_are_replaced_and_their_tasks_tried_again_by_the_code_that_was_read(store, code, tmp_path):
    may_end = tmp_path / "may-end"
    ids = await enqueue(store, numbers(8, until=str(may_end)))
    async with Fleet(store, code, config(worker_timeout_seconds=600), log_folder=tmp_path / "logs") as fleet:
        fleet.set_resources(RESOURCES)
        work = asyncio.create_task(fleet.run(ids))
        await until(lambda: len(runs(tmp_path)) == 6)
        (tmp_path / "helper.py").write_text("WORD = 'second'\n")
        victim = psutil.Process(runs(tmp_path)[0][2])
        victim.kill()
        may_end.touch()
        await asyncio.wait_for(work, LONG)
    attempts = [await store.query_attempts(rollout_id) for rollout_id in ids]
    assert all(found[-1].status == "succeeded" for found in attempts)
    assert any(len(found) > 1 and found[0].status == "unresponsive" for found in attempts)
    assert {row[3] for row in runs(tmp_path)} == {"first"}
    assert not victim.is_running()


async def test_agents_that_fail_are_tried_so_often_and_ones_that_end_their_process_end_the_run(store, code, tmp_path):
    failing = await enqueue(store, numbers(2, **{"raise": True}))
    async with Fleet(store, code, config(count=1), log_folder=tmp_path / "logs") as fleet:
        fleet.set_resources(RESOURCES)
        await fleet.run(failing)
        attempts = [len(await store.query_attempts(rollout_id)) for rollout_id in failing]
        assert attempts == [3, 3]
        assert {item.status for item in await store.query_rollouts(rollout_id_in=failing)} == {"failed"}
    deadly = await enqueue(store, numbers(3, exit=True))
    async with Fleet(
        store, code, config(count=1, max_restarts=1, worker_timeout_seconds=3), log_folder=tmp_path / "logs"
    ) as fleet:
        fleet.set_resources(RESOURCES)
        with pytest.raises(Fatal, match=r"exit status 9; what it wrote is in .*runner-.* 1 times in a row"):
            await asyncio.wait_for(fleet.run(deadly), LONG)


@pytest.mark.parametrize("where", ["processes", "threads"])
async def test_an_agent_that_cannot_be_loaded_is_refused_at_once(store, tmp_path, where):
    (tmp_path / "agent.py").write_text("import no_such_module\n")
    broken = AgentCode.read("agent.py:agent", tmp_path)
    with pytest.raises(ConfigError, match=r"agent file .*agent\.py fails on import: .*no_such_module"):
        async with Fleet(store, broken, config(where=where)):
            pass


async def test_a_fleet_that_is_stopped_leaves_its_work_to_be_done_again_and_retries_failed_ones_when_asked(
    store, code, tmp_path
):
    ids = await enqueue(store, numbers(3, until=str(tmp_path / "never")))
    async with Fleet(store, code, config(count=1), log_folder=tmp_path / "logs") as fleet:
        fleet.set_resources(RESOURCES)
        work = asyncio.create_task(fleet.run(ids))
        await until(lambda: len(runs(tmp_path)) == 3)
        work.cancel()
        await asyncio.wait([work])
    attempts = [attempt for rollout_id in ids for attempt in await store.query_attempts(rollout_id)]
    assert {attempt.status for attempt in attempts} == {"unresponsive"}
    assert {rollout.status for rollout in await store.query_rollouts(rollout_id_in=ids)} == {"requeuing"}
    failed = await enqueue(store, numbers(1, **{"raise": True}))
    async with Fleet(store, code, config(count=1, concurrency=1), max_failures=1) as fleet:
        fleet.set_resources(RESOURCES)
        for number, again in enumerate((False, False, True), start=1):
            await fleet.run(failed, retry_failed=again)
            assert len(await store.query_attempts(failed[0])) == (2 if number == 3 else 1)


async def test_a_run_ends_when_its_fleet_is_closed(store, code, tmp_path):
    may_end = tmp_path / "may-end"
    ids = await enqueue(store, numbers(2, until=str(may_end)))
    try:
        async with Fleet(store, code, config(where="threads")) as fleet:
            fleet.set_resources(RESOURCES)
            work = asyncio.create_task(fleet.run(ids))
            await until(lambda: len(runs(tmp_path)) == 2)
        with pytest.raises(Recoverable):
            await asyncio.wait_for(work, LONG)
    finally:
        may_end.touch()  # for the agents' threads, which nobody can end


async def test_work_that_is_taken_on_keeps_its_own_resources(store, code):
    own = await store.add_resources({"llm": LLM(endpoint="http://localhost:3/v1", model="own")})
    [named] = await enqueue(store, numbers(1), resources_id=own.resources_id)
    await store.add_resources({"llm": LLM(endpoint="http://localhost:2/v1", model="latest")})
    [unnamed] = await enqueue(store, numbers(1))
    [tasks] = await enqueue(store, numbers(1))
    queue = RolloutQueue(store)
    queue.set_resources(RESOURCES)
    queue.add([tasks])
    queue.add([named, unnamed], as_stored=True)
    claims = [await queue.claim_task(f"claim-{number}") for number in range(3)]
    models = {task.rollout.rollout_id: task.resources.resources["llm"].model for task in claims if task}
    assert models == {tasks: "m", named: "own", unnamed: "latest"}


async def test_work_that_is_taken_on_is_tried_as_often_as_its_own_config_says(store):
    often = RolloutConfig(max_attempts=4, retry_condition=["failed"])
    [live] = await enqueue(store, numbers(1), config=often)
    queue = RolloutQueue(store, max_failures=2)
    for number in range(1, 5):
        queue.add([live], as_stored=True)
        task = await queue.claim_task(f"claim-{number}")
        assert task is not None and task.rollout.attempt.sequence_id == number
        await queue.update_attempt(live, task.rollout.attempt.attempt_id, status="failed")
        await queue.look()
    found = await store.get_rollout_by_id(live)
    assert found is not None and found.status == "failed"
    assert await queue.claim_task("claim-5") is None


async def test_the_end_of_a_runs_own_tasks_leaves_what_it_has_taken_on(store):
    class SlowToStart(StoreView):
        async def start_many_attempts(self, *arguments, **options):
            await may_start.wait()
            return await self.store.start_many_attempts(*arguments, **options)

    may_start = asyncio.Event()
    [live, running] = await enqueue(store, numbers(2))
    [task] = await enqueue(store, numbers(1))
    queue = RolloutQueue(SlowToStart(store))
    queue.add([live, running], as_stored=True)
    starting = asyncio.create_task(queue.claim_rollouts("claim-1", limit=2, worker_id="w1"))
    await asyncio.sleep(0)
    queue.add([task])
    queue.withdraw([task])
    queue.add([live], as_stored=True)  # the store still has it as queued
    may_start.set()
    assert [rollout.rollout_id for rollout in await starting] == [live, running]
    assert await queue.claim_rollouts("claim-2", limit=3, worker_id="w2") == []
    assert sorted(queue.taken) == sorted([live, running]), "a killed runner's work is tried again at once"
    assert len(await store.query_attempts(live)) == 1


async def test_work_that_nobody_takes_ends_the_run_with_what_to_do(store, code):
    ids = await enqueue(store, numbers(1))
    async with Fleet(store, code, config(where="elsewhere", wait_seconds=1, api_key="K")) as fleet:
        with pytest.raises(Fatal, match="1 tasks wait, and nobody has taken one for 1 s; start runners: rollout agent"):
            await asyncio.wait_for(fleet.run(ids), LONG)


async def test_an_attempt_of_a_run_that_was_killed_is_tried_again_at_once(store, code, tmp_path):
    [rollout_id] = await enqueue(store, numbers(1))
    dead = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass")
    name = ProcessName.of_this_process()
    await dead.wait()
    await store.start_attempt(rollout_id, f"agent-0:{name.machine}:{dead.pid}:{name.start_ticks}")
    async with Fleet(store, code, config(count=1)) as fleet:
        fleet.set_resources(RESOURCES)
        await asyncio.wait_for(fleet.run([rollout_id]), LONG)
    assert [item.status for item in await store.query_attempts(rollout_id)] == ["unresponsive", "succeeded"]


async def test_runners_elsewhere_join_with_the_same_code_and_the_key(store, code, tmp_path, monkeypatch):
    monkeypatch.setenv("WORK_KEY", "a key for the runners")
    ids = await enqueue(store, numbers(4), metadata={"agent_id": code.id})
    command = "from flows.cli import main; main()"
    lines: list[str] = []
    started: list[asyncio.subprocess.Process] = []

    async def join(folder: Path, *more: str) -> asyncio.subprocess.Process:
        options = ["agent", "work", "--store", fleet.endpoint, "--agent", "agent.py:agent", *more]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", command, *options, cwd=folder, stderr=asyncio.subprocess.PIPE
        )
        started.append(process)
        return process

    @asynccontextmanager
    async def all_ended() -> AsyncIterator[None]:
        try:
            yield
        finally:
            for process in started:
                if process.returncode is None:
                    process.kill()
                await process.wait()

    async with (
        all_ended(),
        Fleet(
            store, code, config(where="elsewhere", api_key="K"), api_key="a key for the runners", say=lines.append
        ) as fleet,
    ):
        fleet.set_resources(RESOURCES)
        assert f"rollout agent work --store {fleet.endpoint} --agent agent.py:agent" in lines[0]
        other = tmp_path / "other"
        other.mkdir()
        (other / "agent.py").write_text(AGENT.replace("printed", "printed otherwise"))
        (other / "helper.py").write_text("WORD = 'first'\n")
        work = asyncio.create_task(fleet.run(ids))
        stranger = await join(other, "--api-key-env", "WORK_KEY")
        _, said = await asyncio.wait_for(stranger.communicate(), LONG)
        assert stranger.returncode == 2 and b"the code differs" in said and not runs(tmp_path)
        joined = await join(tmp_path, "--api-key-env", "WORK_KEY", "--concurrency", "2")
        await asyncio.wait_for(work, LONG)
        joined.terminate()
        _, said = await asyncio.wait_for(joined.communicate(), LONG)
        assert joined.returncode == 0, said
    assert sorted(row[0] for row in runs(tmp_path)) == sorted(ids)

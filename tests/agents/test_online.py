"""A policy that learns from live traffic: with a real engine, proxy, learner and a stream of requests."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rollout_core.agents.adapters.span_samples import adapt_rollouts
from rollout_core.agents.emitters import emit_reward
from rollout_core.agents.execution import SharedMemoryExecutionStrategy
from rollout_core.agents.lit_agent import rollout as rollout_agent
from rollout_core.agents.live import LiveRollouts, OnlineState, select, summarize
from rollout_core.agents.online_learning import OnlineLearning
from rollout_core.agents.otel import OtelTracer
from rollout_core.agents.runner import LitAgentRunner
from rollout_core.agents.trainer import Trainer
from rollout_core.base.errors import ConfigError, Conflict, Fatal, Recoverable
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config import LiveTraffic, TransformersBackend
from rollout_core.inference.training_samples import Adapted, TokenSample
from rollout_core.objects import Experience, ObjectStore
from rollout_core.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreThreaded,
    Span,
    SqlLightningStore,
)
from rollout_core.store.semconv import AGL_ANNOTATION, AGL_REWARD, LlmCallAttributes
from tests.agents.training_script import TASKS, ask
from tests.store.patience import LONG

SCRIPT = ("-m", "tests.agents.online_script")
OLD, MIDDLE, NEW = (hash_bytes(name) for name in (b"old", b"middle", b"new"))


def reward(text: str) -> float:
    """Unequal for unequal texts: from equal rewards nothing is learnt, and the weights stay as they are."""
    return zlib.crc32(text.encode()) / 2**32


@rollout_agent
def works(task, llm):
    return reward(ask(task, llm))


def learner(model, folder, **changes) -> OnlineLearning:
    settings = {
        "min_rollouts": 8,
        "max_updates": 2,
        "poll_seconds": 0.1,
        "lr": 1e-3,
        "max_tokens": 6,
        "backend": TransformersBackend(),
        "storage": folder / "objects",
        "cache": folder / "cache",
        "num_threads": 1,
    }
    return OnlineLearning(model, **{**settings, **changes})


def serve(algorithm, store, *, val=None, agent=works) -> None:
    Trainer(
        algorithm=algorithm,
        store=store,
        strategy=SharedMemoryExecutionStrategy(2, managed_store=False),
        runner={"type": LitAgentRunner, "poll_interval": 0.02, "heartbeat_interval": 0},
        tracer=OtelTracer(instrument=[]),
    ).fit(agent, val_dataset=val)


@contextmanager
def traffic(store: LightningStore) -> Iterator[None]:
    """Requests from when the policy is served, a few under way at a time."""
    ended = threading.Event()
    before = asyncio.run(store.get_latest_resources())

    async def ask_on() -> None:
        number = 0
        while not ended.is_set():
            waiting = await store.query_rollouts(status_in=["queuing"], limit=0)
            if await store.get_latest_resources() != before and waiting.total < 3:
                await store.enqueue_rollout(TASKS[number % len(TASKS)])
                number += 1
            await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(ask_on()))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_it_learns_from_each_rollout_once_also_over_restarts_and_no_request_fails(tiny_model, tmp_path):
    store = LightningStoreThreaded(InMemoryLightningStore())
    updates: list[float] = []
    first = learner(tiny_model, tmp_path, gate=lambda new, present: not updates.append(time.time()))
    second = learner(tiny_model, tmp_path, max_updates=3)
    with traffic(store):
        serve(first, store)
    with traffic(store):
        serve(second, store)
    reports = [*first.history, *second.history]
    assert [report.number for report in reports] == [0, 1, 2] and all(report.is_promoted for report in reports)
    learnt = [name for report in reports for name in report.rollouts]
    assert len(learnt) >= 24 and len(learnt) == len(set(learnt))
    rollouts = {item.rollout_id: item for item in asyncio.run(store.query_rollouts())}
    assert Counter(item.status for item in rollouts.values())["succeeded"] >= 24
    between = [
        item.status
        for item in rollouts.values()
        if item.start_time > updates[0] and item.end_time is not None and item.end_time < updates[1]
    ]
    assert between and set(between) == {"succeeded"}, "the weights were swapped meanwhile"
    models = [report.checkpoint.model for report in reports]
    assert len(set(models)) == 3
    answered_by = {
        value
        for name in learnt
        for span in asyncio.run(store.query_spans(name))
        for value in span.attributes.values()
        if value in models
    }
    assert models[0] in answered_by, "new weights are in use"


def test_weights_that_are_no_better_are_refused_and_the_old_ones_answer_again(tiny_model, tmp_path):
    asked = []

    def gate(new, present):
        asked.append((new.content_id, present.content_id))
        return len(asked) > 1

    store = LightningStoreThreaded(InMemoryLightningStore())
    online = learner(tiny_model, tmp_path, gate=gate, lr=1e-2)
    with traffic(store):
        serve(online, store)
    assert [report.is_promoted for report in online.history] == [False, True]
    assert online.checkpoint is not None
    assert asked[0][1] == asked[1][1] != online.checkpoint.model == asked[1][0]


@pytest.mark.parametrize(("worse", "tries"), [("lower", 3), ("fails", 1 + 2 * 3), ("fails after a reward", 3 * 3)])
def test_held_out_tasks_decide(tiny_model, tmp_path, worse, tries):
    asked = Counter()

    @rollout_agent
    def judged(task, llm, rollout):
        text = ask(task, llm)
        if rollout.mode != "val":
            return reward(text)
        asked["val"] += 1
        if asked["val"] <= len(TASKS):
            return 1.0
        if worse == "lower":
            return 0.0
        if worse == "fails" and asked["val"] == len(TASKS) + 1:
            return 1.0  # only this one's
        if worse == "fails after a reward":
            emit_reward(1.0)
        raise ValueError("the new weights' answer leads nowhere")

    store = LightningStoreThreaded(InMemoryLightningStore())
    online = learner(tiny_model, tmp_path, max_updates=1)
    with traffic(store):
        serve(online, store, val=TASKS, agent=judged)
    [report] = online.history
    assert not report.is_promoted and online.checkpoint is None
    assert asked["val"] == len(TASKS) + tries


def test_an_update_that_teaches_nothing_is_not_promoted_nor_tried_on_held_out_tasks(tiny_model, tmp_path):
    modes = Counter()

    @rollout_agent
    def indifferent(task, llm, rollout):
        ask(task, llm)
        modes[rollout.mode] += 1
        return 0.0

    store = LightningStoreThreaded(InMemoryLightningStore())
    online = learner(tiny_model, tmp_path, max_updates=1, gate=lambda new, present: pytest.fail("nothing is new"))
    with traffic(store):
        serve(online, store, val=TASKS, agent=indifferent)
    [report] = online.history
    assert not report.is_promoted and online.checkpoint is None
    assert set(modes) == {None}


def test_it_runs_until_it_is_stopped(tiny_model, tmp_path):
    online = learner(tiny_model, tmp_path, max_updates=None)
    store = LightningStoreThreaded(InMemoryLightningStore())
    threading.Timer(1.0, online.stop).start()
    serve(online, store)  # has an end
    assert online.history == []


def sample(name: str, *models: ContentId | None, task="t") -> TokenSample:
    return TokenSample(name, [1], [2], [-0.5], "stop", 1.0, task, model_ids=list(models), part_rewards=[None])


@pytest.mark.campaign
def test_killed_in_an_update_it_learns_from_the_same_rollouts_to_the_same_weights(start_process, tiny_model, tmp_path):
    def start(storage: str, max_updates: int):
        return start_process(*SCRIPT, str(tmp_path), str(tmp_path / storage), str(tiny_model), str(max_updates))

    def state() -> OnlineState[Experience]:
        objects = ObjectStore.from_url(str(tmp_path / "a" / "objects"))
        found = objects.get_ref("agent-online/online")
        return OnlineState[Experience].model_validate(objects.get_json(found)) if found else OnlineState(versions=[])

    def outcome(storage: str, max_updates: int) -> list[list[str]]:
        output, _ = (process := start(storage, max_updates)).communicate(timeout=LONG)
        assert process.returncode == 0, output[-4000:]
        return [line.split()[1:] for line in output.splitlines() if line.startswith("learnt ")]

    store = SqlLightningStore.from_url(f"sqlite:///{tmp_path / 'rollouts.db'}")
    process = start("a", 4)
    deadline = time.monotonic() + LONG
    with traffic(store):
        while not ((noted := state()).num_updates == 1 and noted.batch is not None):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0][-4000:]
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert state() == noted, "killed in the update"
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with traffic(store):
        resumed, later = outcome("a", 3)
    assert resumed[0] == "1" and resumed[2:] == noted.rollouts
    assert later[0] == "2" and not {*later[2:]} & {*noted.rollouts, *noted.done}
    assert outcome("b", 2) == [resumed], "the same weights, bit for bit"
    asyncio.run(store.close())


def test_what_is_stale_late_or_alone_is_left_out_in_time():
    adapted = Adapted(
        [
            sample("a", NEW),
            sample("b", MIDDLE, NEW),
            sample("c", OLD, NEW),
            sample("d", hash_bytes(b"never in use")),
            sample("e", None),
        ],
        {"no tokens": ["f"], "no finite reward": ["g", "h"]},
    )
    times = {"a": 100.0, "b": 90.0, "c": 90.0, "d": 90.0, "e": 90.0, "f": 90.0, "g": 95.0, "h": 10.0}
    chosen = {"versions": [OLD, MIDDLE, NEW], "max_staleness": 1, "group_size": 1, "patience": 50.0, "now": 100.0}
    rollouts = summarize(adapted, times, by_task=False)
    found = select(rollouts, **chosen, most=8)
    assert found.chosen == ["b", "a"]
    assert found.settled == {
        "no tokens": ["f"],
        "no finite reward": ["h"],
        "stale": ["c"],
        "other weights": ["d", "e"],
    }


def test_groups_are_of_equal_tasks_and_wait_to_be_whole():
    names = "abcde"
    adapted = Adapted([sample(name, NEW, task="x" if name in "acd" else "y") for name in names])
    times = {"a": 1.0, "b": 80.0, "c": 90.0, "d": 95.0, "e": 100.0}
    chosen = {"versions": [NEW], "max_staleness": 0, "group_size": 2, "now": 100.0}
    rollouts = summarize(adapted, times, by_task=True)
    found = select(rollouts, **chosen, patience=50.0, most=4)
    assert found.chosen == ["a", "b", "c", "e"] and found.settled == {}
    assert select(rollouts, **chosen, patience=1.0, most=4).settled == {"incomplete group": ["d"]}
    found = select(rollouts, **chosen, patience=50.0, most=1)
    assert found.chosen == ["b", "e"] and found.settled == {"surplus": ["a", "c"]}, "the latest group stays whole"


class Traffic:
    """Live rollouts that end by hand, and what is read of them."""

    def __init__(self, *, after: Traffic | None = None, **live) -> None:
        """``after``: by the next process of a run."""
        self.store = InMemoryLightningStore() if after is None else after.store
        self.read: list[str] = []
        self.is_away = False
        self.state = OnlineState[Experience](versions=[NEW], since=time.time() - 1)
        if after is not None:
            self.state = OnlineState[Experience].model_validate(after.state.model_dump(mode="json"))
        settings = LiveTraffic(**{"min_rollouts": 3, "reward_patience_seconds": 60.0, **live})
        self.live = LiveRollouts(
            self.store, self.state, settings, group_size=1, adapt=self._adapt, flush=lambda: asyncio.sleep(0)
        )

    async def _adapt(self, names) -> Adapted:
        if self.is_away:
            self.is_away = False
            raise Recoverable("the database is away")
        self.read += names
        return await adapt_rollouts(self.store, ObjectStore.from_url("memory://online"), names)

    async def end(self, *, reward: float | None = 1.0, **fields) -> str:
        """A rollout that one call of the policy was made in."""
        rollout = await self.store.start_rollout("task", **fields)
        ids: dict[str, Any] = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        call = {"prompt_token_ids": [1], "response_token_ids": [2], "logprobs.content": "[-0.5]"}
        call |= {LlmCallAttributes.MODEL_ID.value: str(NEW)}
        await self.store.add_span(Span.from_attributes(**ids, sequence_id=1, name="call", attributes=call))
        if reward is not None:
            await self.reward(rollout, reward)
        await self.store.update_attempt(**ids, status="succeeded")
        return rollout.rollout_id

    async def reward(self, rollout, value: float) -> None:
        ids: dict[str, Any] = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        attributes = {f"{AGL_REWARD}.0.value": value}
        await self.store.add_span(
            Span.from_attributes(**ids, sequence_id=2, name=AGL_ANNOTATION, attributes=attributes)
        )


async def test_a_live_rollout_is_read_once_and_those_of_others_never():
    traffic = Traffic()
    live = [await traffic.end(), await traffic.end(mode="train")]
    await traffic.end(mode="val")
    await traffic.end(metadata={"kind": "agent"})
    await traffic.end(metadata={"kind": "sample"})
    traffic.is_away = True  # for a moment: it is asked again
    for _ in range(3):
        assert await traffic.live.next_batch() == []
    assert Counter(traffic.read) == dict.fromkeys(live, 1)
    live.append(await traffic.end())
    assert await traffic.live.next_batch() == live
    traffic.live.take(live)
    assert await traffic.live.next_batch() == [] and len(traffic.read) == 3
    assert set(traffic.state.done) == set(live) == set(traffic.state.rollouts)


async def test_a_rollout_without_a_reward_is_looked_at_ever_more_seldom_until_it_is_given_up(monkeypatch):
    traffic = Traffic(min_rollouts=1, reward_patience_seconds=1000.0)
    late, never = await traffic.end(reward=None), await traffic.end(reward=None)
    began, now = time.time(), [0.0]
    monkeypatch.setattr("rollout_core.agents.live.time.time", lambda: began + now[0])
    for now[0] in range(1, 900, 5):
        assert await traffic.live.next_batch() == []
    assert 10 < len(traffic.read) < 80, "of 360 looks"
    await traffic.reward(await traffic.store.get_rollout_by_id(late), 2.0)
    now[0] = 1001.0
    assert await traffic.live.next_batch() == [late], "looked at once more when the patience has ended"
    assert traffic.state.left_out == {"no finite reward": 1} and set(traffic.state.done) == {never}


def test_two_processes_of_one_name_do_not_overwrite_each_other():
    objects = ObjectStore.from_url("memory://online-twice")

    def begin() -> OnlineState[Experience]:
        return OnlineState[Experience].begin(objects, "learn-online/x", "x", OLD)

    first, second = begin(), begin()
    first.conclude("refused", "worse")
    first.save(objects, "learn-online/x")
    first.save(objects, "learn-online/x")
    second.conclude("refused", "worse", mean_reward=0.5)
    with pytest.raises(Conflict, match="another process runs under this name"):
        second.save(objects, "learn-online/x")
    assert begin().history == first.history
    with pytest.raises(ConfigError, match=r"began with model .* give it another name"):
        OnlineState[Experience].begin(objects, "learn-online/x", "x", NEW)


def test_a_run_that_learns_nothing_batch_after_batch_fails():
    state = OnlineState[Experience](versions=[OLD])
    for outcome in ("skipped", "skipped", "refused", "skipped", "skipped"):
        state.conclude(outcome, "all samples are too long")
        state.check_learnable()
    state.conclude("skipped", "all samples are too long")
    with pytest.raises(Fatal, match="nothing could be learnt from 3 batches in a row; the last: all samples are too"):
        state.check_learnable()
    assert (state.num_updates, state.num_skipped, len(state.history)) == (1, 5, 6)


@pytest.mark.parametrize(("last", "given_back"), [("skipped", True), ("refused", False)])
async def test_batches_that_are_skipped_in_a_row_are_given_back_to_be_learnt_from_under_other_settings(
    last, given_back
):
    traffic = Traffic(min_rollouts=2, reward_patience_seconds=0.0)
    all_ended: list[str] = []
    for outcome in ("skipped", "skipped", last):
        ended = [await traffic.end() for _ in range(2)]
        all_ended += ended
        chosen = await traffic.live.next_batch()
        assert chosen == ended
        traffic.live.take(chosen)
        traffic.state.conclude(outcome, "the settings are wrong")
    later = Traffic(after=traffic, min_rollouts=2)
    assert await later.live.next_batch() == (all_ended if given_back else [])


def test_what_cannot_be_meant_is_refused(tiny_model, tmp_path):
    for arguments in ({}, {"model": tiny_model, "min_rollouts": 0}, {"model": tiny_model, "max_staleness": -1}):
        with pytest.raises(ConfigError):
            OnlineLearning(**arguments)
    with pytest.raises(ConfigError, match="leave out the train_dataset"):
        asyncio.run(learner(tiny_model, tmp_path).run(TASKS))

"""The flow that learns from live traffic: a stream of requests, kills, refused updates, batches that teach nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.config import LearnOnlineConfig, load_config, parse_config
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import all_lineage
from rollout_core.objects.snapshots import PROGRESS_REFS
from rollout_core.promotion.history import history_of
from rollout_core.store import ProxyLLM, Span, SqlLightningStore
from rollout_core.store.semconv import AGL_ANNOTATION, AGL_REWARD
from tests.flows.conftest import objects, wait_for, write_toml
from tests.flows.kills import free_port
from tests.flows.test_stop_signals import ROLLOUT, SLACK_SECONDS, STOP_SECONDS
from tests.flows.test_train_agent import TEMPLATE

pytestmark = pytest.mark.server

AGENT = """
import os
import openai
from rollout_core.agents import rollout


@rollout
def agent(task, llm, rollout):
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    messages = [{"role": "user", "content": task["question"]}]
    answer = client.chat.completions.create(model=llm.model, messages=messages).choices[0].message.content or ""
    with open(os.environ["AGENT_RUNS"], "a") as runs:
        runs.write(f"{rollout.mode}\\n")
    if rollout.mode == "val":
        return float(len(open(os.environ["AGENT_RUNS"]).readlines()) == 1)  # falls after the first
    return len(set(answer)) / 10
"""


@pytest.fixture
def work(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model that has a chat template, an agent, and a held-out task."""
    shutil.copytree(tiny_model, tmp_path / "model")
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "held-out.jsonl").write_text('{"question": "sort 9 8 ="}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_RUNS", str(tmp_path / "runs.txt"))
    return tmp_path


def document(**changes: Any) -> dict[str, Any]:
    return {
        "num_threads": 1,
        "run": {"name": "online-test"},
        "algorithm": {
            "kind": "ppo",
            "base_model": {"uri": "model"},
            "minibatch_size": 4,
            "gradient_accumulation": 1,
            "sampling": {"max_tokens": 6},
            "optimizer": {"lr": 1e-3},
        },
        "live": {"min_rollouts": 6, "max_rollouts": 8, "poll_seconds": 0.1},
        "backend": {"kind": "transformers"},
        "runners": {"model_port": free_port(), "where": "threads", "concurrency": 2},
        "max_updates": 2,
        "report_dir": "report",
        **changes,
    }


def reward_of(text: str) -> float:
    """Unequal for unequal texts: from equal rewards nothing is learnt."""
    return zlib.crc32(text.encode()) / 2**32


class Service:
    """A live service, which works on requests by itself: each is a rollout of the database, from its start to its end,
    and all but the evaluation's and other flows' are to be learnt from."""

    def __init__(self, work: Path, reward: Callable[[str], float] = reward_of) -> None:
        self.done: list[str] = []
        self.others: list[str] = []
        self.failures: list[Exception] = []
        self.answers = 0
        self._url, self._reward, self._ended = f"sqlite:///{work / 'rollout.db'}", reward, threading.Event()

    @contextmanager
    def streaming(self) -> Iterator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self._stream()))
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    async def _stream(self) -> None:
        async with SqlLightningStore.from_url(self._url) as store:
            number = 0
            while not self._ended.is_set():
                latest = await store.get_latest_resources()
                llm = latest.resources.get("llm") if latest else None
                if isinstance(llm, ProxyLLM):
                    number += 1
                    try:
                        await self._request(store, llm, number)
                    except (openai.APIConnectionError, openai.InternalServerError) as error:
                        self.failures.append(error)
                await asyncio.sleep(0.02)

    async def _request(self, store: SqlLightningStore, llm: ProxyLLM, number: int) -> None:
        other: dict[str, Any] = {7: {"mode": "val"}, 11: {"metadata": {"kind": "agent"}}}.get(number, {})
        rollout = await store.start_rollout({"question": f"sort {number % 10} 1 ="}, **other)
        ids: dict[str, Any] = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        client = openai.AsyncOpenAI(base_url=llm.get_base_url(*ids.values()), api_key=llm.api_key, max_retries=0)
        async with client:
            messages: Any = [{"role": "user", "content": rollout.input["question"]}]
            answer = await client.chat.completions.create(model=llm.model, messages=messages)
        attributes = {f"{AGL_REWARD}.0.value": self._reward(answer.choices[0].message.content or "")}
        place = await store.get_next_span_sequence_id(**ids)
        await store.add_span(Span.from_attributes(**ids, sequence_id=place, name=AGL_ANNOTATION, attributes=attributes))
        await store.update_attempt(**ids, status="succeeded")
        (self.others if other else self.done).append(rollout.rollout_id)


def learnt(storage: ObjectStore) -> list[list[str]]:
    """The rollouts of each batch that samples were made of."""
    blobs = {item.inputs["rollouts"]["rollouts"] for item in all_lineage(storage) if item.stage == "collect_samples"}
    return [
        [orjson.loads(line)["rollout_id"] for line in storage.get_bytes(ContentId(blob)).splitlines()] for blob in blobs
    ]


def state(name: str = "online-test") -> dict[str, Any] | None:
    found = objects().get_ref(f"learn-online/{name}")
    return None if found is None else objects().get_json(found)


def test_it_learns_from_live_rollouts_once_each_also_when_it_is_run_again(prefect_server: str, work: Path):
    from flows.cli.agent_trace import _trace_lines
    from flows.online import learn_online
    from rollout_core.store.reachable import plain_connections

    service = Service(work)
    first_config = document()
    with service.streaming():
        first = learn_online(parse_config(first_config, LearnOnlineConfig))
    assert (first["updates"], first["refused"], first["skipped"]) == (2, 0, 0) and len(first["rewards"]) == 2
    page = (Path(first["report"]) / "index.html").read_text()
    assert page.count(">promoted<") == 2 and (Path(first["report"]) / "mean-reward.png").exists()
    assert learn_online(parse_config(first_config, LearnOnlineConfig)) == first, "it has ended, and serves nothing"

    again = Service(work)
    with again.streaming():
        second = learn_online(parse_config({**first_config, "max_updates": 3}, LearnOnlineConfig))
    assert second["updates"] == 3 and second["rewards"][:2] == first["rewards"]
    promotions = history_of(objects(), "policy")
    assert [entry.reason for entry in promotions] == ["nothing is held out"] * 3
    assert [entry.previous for entry in promotions] == [None, *(entry.model for entry in promotions[:-1])]
    assert promotions[1].model == first["model"] and promotions[2].model == second["model"]
    batches = learnt(objects())
    names = [name for batch in batches for name in batch]
    assert len(batches) == 3 and all(6 <= len(batch) <= 8 for batch in batches)
    assert len(names) == len(set(names)) and set(names) <= {*service.done, *again.done}
    assert service.others, "of the evaluation, and of another flow"
    lines = asyncio.run(_trace_lines(plain_connections(), names[0], "latest"))
    assert any(line.startswith("learnt from it: model ") and "ppo_update" in line for line in lines)


RUN = """
from rollout_core.config import LearnOnlineConfig, load_config
from flows.online import learn_online
print(learn_online(load_config("run.toml", LearnOnlineConfig))["model"])
"""


def run_again(monkeypatch: pytest.MonkeyPatch, storage: Path, database: Path) -> str:
    from flows.online import learn_online

    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{storage}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{database}")
    return learn_online(load_config("run.toml", LearnOnlineConfig))["model"]


def test_killed_in_an_update_and_run_again_it_learns_the_same_and_nothing_twice(
    prefect_server: str, work: Path, start_process: Any, monkeypatch: pytest.MonkeyPatch
):
    storage = Path(os.environ["ROLLOUT_STORAGE"].removeprefix("file://"))
    changes = document(max_updates=1)
    changes["algorithm"] |= {"epochs": 40, "snapshots": {"every_steps": 1}}
    write_toml(work / "run.toml", changes)
    service = Service(work)
    log = work / "run.log"
    process = start_process("-c", RUN, cwd=work, stdout=log.open("w"))

    def is_under_way() -> bool:
        assert process.poll() is None, log.read_text()
        return any(True for _ in objects().list_refs(PROGRESS_REFS))

    with service.streaming():
        wait_for(is_under_way, "a snapshot of the update", seconds=200)
        process.kill()
        process.wait()
    noted = state()
    assert noted is not None and noted["batch"] is not None and noted["num_updates"] == 0
    # A copy that has no snapshot of the update computes all of it afresh.
    shutil.copytree(storage, work / "afresh")
    shutil.copy(work / "rollout.db", work / "afresh.db")
    for end in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            shutil.copy(work / f"rollout.db{end}", work / f"afresh.db{end}")
    afresh = ObjectStore.from_url(f"file://{work / 'afresh'}")
    for ref in afresh.ref_names(PROGRESS_REFS):
        afresh.delete_ref(ref)
    resumed = run_again(monkeypatch, storage, work / "rollout.db")
    assert learnt(objects()) == [noted["rollouts"]]
    after = state()
    assert after is not None and (after["num_updates"], after["batch"]) == (1, None)
    assert resumed != after["versions"][0] and resumed == after["versions"][-1]
    assert run_again(monkeypatch, work / "afresh", work / "afresh.db") == resumed


FOUND_NOBODY = {"ConnectError", "ReadError", "WriteError", "RemoteProtocolError"}
"""Errors of the client's HTTP library, whichever that is."""


def test_a_stop_signal_ends_it_in_time_when_calls_under_way_have_ended(
    prefect_server: str, work: Path, start_process: Any
):
    changes = document()
    del changes["max_updates"]
    config, log = write_toml(work / "run.toml", changes), work / "run.log"
    service = Service(work)
    command = (*ROLLOUT, "agent", "online", "--config", str(config))
    process = start_process(*command, cwd=work, stdout=log.open("w"), env={"PREFECT_API_URL": prefect_server})
    with service.streaming():
        wait_for(lambda: (state() or {}).get("num_updates"), "an update", process=process, seconds=240)
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_SECONDS + SLACK_SECONDS) != 0, log.read_text()
        assert time.monotonic() - asked < STOP_SECONDS + SLACK_SECONDS
        wait_for(lambda: service.failures, "a call that nobody answers")
    for error in service.failures:  # none was cut, or refused as if it were wrong
        cause = error.__cause__
        # Of connections that nobody accepts any more some are reset, and idle ones are closed as the next call begins.
        found_nobody = type(cause).__name__ in FOUND_NOBODY and "complete message" not in str(cause)
        assert found_nobody or getattr(error, "status_code", 0) == 503, (error, cause)
    after = state()
    assert after is not None and len(after["history"]) == after["num_updates"] > 0
    assert "Traceback" not in log.read_text()


def test_weights_that_do_worse_on_held_out_tasks_are_refused(prefect_server: str, work: Path):
    from flows.online import learn_online

    agent = {"function": "agent.py:agent", "timeout_seconds": 60}
    changes = document(agent=agent, evaluation={"tasks": {"path": "held-out.jsonl"}}, max_updates=1)
    service = Service(work)
    with service.streaming():
        result = learn_online(parse_config(changes, LearnOnlineConfig))
    after = state()
    assert (result["updates"], result["refused"]) == (1, 1) and after is not None
    assert result["model"] == after["versions"][0] == after["versions"][-1]
    assert (work / "runs.txt").read_text() == "val\nval\n"
    [past] = after["history"]
    assert past["outcome"] == "refused" and "it fell: held-out reward 1.0000 -> 0.0000" in past["reason"]
    assert past["reason"] in (Path(result["report"]) / "index.html").read_text().replace("&gt;", ">")


def test_a_batch_that_teaches_nothing_is_done_with_and_runners_of_its_own_take_live_rollouts(
    prefect_server: str, work: Path
):
    from flows.online import learn_online

    agent = {"function": "agent.py:agent", "timeout_seconds": 60}
    changes = document(agent=agent, work_live=True, max_updates=1)
    (work / "agent.py").write_text(
        AGENT.replace("return len(set(answer)) / 10", "return 1e300 if task['odd'] else len(set(answer)) / 10")
    )

    names: list[str] = []

    async def enqueue(odd: bool) -> None:
        async with SqlLightningStore.from_url(f"sqlite:///{work / 'rollout.db'}") as store:
            for number in range(6):
                task = {"question": f"sort {number} 1 =", "odd": odd}
                names.append((await store.enqueue_rollout(task, mode="train")).rollout_id)

    def ask_again() -> None:
        wait_for(lambda: (state() or {}).get("num_skipped"), "a batch that teaches nothing")
        asyncio.run(enqueue(odd=False))

    asyncio.run(enqueue(odd=True))
    asking = threading.Thread(target=ask_again)
    asking.start()
    result = learn_online(parse_config(changes, LearnOnlineConfig))
    asking.join()
    assert (result["updates"], result["skipped"]) == (1, 1)
    after = state()
    assert after is not None and [past["outcome"] for past in after["history"]] == ["skipped", "promoted"]
    assert sorted(map(sorted, learnt(objects()))) == sorted([sorted(names[:6]), sorted(names[6:])])
    assert (work / "runs.txt").read_text().split() == ["train"] * 12


def test_what_is_wrong_is_said_before_anything_is_served(prefect_server: str, work: Path):
    from flows.online import learn_online

    changes = document()
    changes["algorithm"]["base_model"]["uri"] = "missing"
    with pytest.raises(ConfigError, match=r"algorithm\.base_model"):
        learn_online(parse_config(changes, LearnOnlineConfig))
    assert state() is None

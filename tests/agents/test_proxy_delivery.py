"""The way of recorded calls to the store: numbered, complete, and there when an attempt has ended."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import urllib.request

import aiohttp
import openai
import pytest
from aiohttp import web
from openai import AsyncOpenAI
from proxied import LONG, asked, attempt, calls, client, close_clients, proxy_of, until
from scripted_upstream import ScriptedUpstream, held

from rollout_core.agents.emitters import emit_reward
from rollout_core.agents.lit_agent import llm_rollout
from rollout_core.agents.otel import OtelTracer
from rollout_core.agents.proxy import call_delivery as delivery
from rollout_core.agents.proxy.proxy_server import LLMProxy
from rollout_core.agents.proxy.upstreams import Upstream
from rollout_core.agents.runner import LitAgentRunner
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.store import (
    CollectionBasedLightningStore,
    InMemoryLightningStore,
    LightningStoreServer,
    ProxyLLM,
    RolloutConfig,
)
from rollout_core.store.forwarding_store import ForwardingLightningStore
from rollout_core.store.semconv import LLM_CALL
from tests.store.ports import own_port


class Wayward(ForwardingLightningStore):
    """A store over another, which is away for spans while told to be."""

    def __init__(self, store) -> None:
        self._store = store
        self.is_away = False
        self.delay = 0.0
        self.may_store = threading.Event()
        """Until then spans wait on their way."""
        self.may_store.set()
        self.batches: list[int] = []

    capabilities = InMemoryLightningStore.capabilities

    def backend(self):
        return self._store

    async def forward(self, name, /, *args, **kwargs):
        if name in ("add_many_spans", "get_many_span_sequence_ids"):
            if self.is_away:
                raise Recoverable("away, by script")
            await asyncio.sleep(self.delay)
            if name == "add_many_spans":
                await asyncio.to_thread(self.may_store.wait, LONG)
                self.batches.append(len(args[0]))
        return await super().forward(name, *args, **kwargs)


def settings(upstream: ScriptedUpstream) -> Upstream:
    return Upstream(url=upstream.url, timeout=LONG)


def runner(**options) -> LitAgentRunner:
    return LitAgentRunner(OtelTracer(instrument=[]), poll_interval=0.01, heartbeat_interval=0, **options)


async def test_when_an_attempt_has_ended_its_calls_are_in_the_store_in_order(store, upstream):
    """Whoever sees the status sees the spans."""

    @llm_rollout
    async def agent(task, llm):
        for turn in range(2):
            agent_client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0)
            made.append(agent_client)
            await agent_client.chat.completions.create(model=llm.model, messages=asked(f"{task}-{turn}"))
        stream = await agent_client.chat.completions.create(model=llm.model, messages=asked("abcdef"), stream=True)
        async for _ in stream:
            break  # it has seen enough
        # Their numbers are asked for beside the answers, and may come after them.
        await until(lambda: not proxy._delivery._new)
        emit_reward(0.5)
        return 1.0

    made: list[AsyncOpenAI] = []
    async with proxy_of(store, settings(upstream)) as proxy:
        await store.add_resources({"llm": proxy.as_resource()})
        queued = [await store.enqueue_rollout(number) for number in range(4)]

        async def look() -> None:
            for rollout in queued:
                while (found := await store.get_rollout_by_id(rollout.rollout_id)).status != "succeeded":
                    assert found.status != "failed"
                    await asyncio.sleep(0.002)
                spans = list(await store.query_spans(rollout.rollout_id))
                # A tracer of an earlier test may have instrumented the client, which lasts.
                names = [span.name for span in spans if span.name != "openai.chat"]
                assert names.count(LLM_CALL) == 3
                assert names[:2] == [LLM_CALL] * 2, "the reward came later"
                assert [span.sequence_id for span in spans] == sorted({span.sequence_id for span in spans})

        looking = asyncio.create_task(look())
        async with runner(max_rollouts=4).run_context(agent=agent, store=store) as worker:
            await asyncio.wait_for(worker.iter(), LONG)
        await looking
        for agent_client in made:
            await agent_client.close()


async def test_an_attempt_whose_calls_cannot_be_stored_is_no_success(memory, upstream, monkeypatch):
    @llm_rollout
    async def agent(task, llm):
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as agent_client:
            await agent_client.chat.completions.create(model=llm.model, messages=asked("ab"))
        return 1.0

    monkeypatch.setattr("rollout_core.agents.proxy.proxy_app.FLUSH_SECONDS", 0.2)
    wayward = Wayward(memory)
    async with proxy_of(wayward, settings(upstream)) as proxy:
        wayward.is_away = True
        await memory.add_resources({"llm": proxy.as_resource()})
        queued = await memory.enqueue_rollout(1)
        async with runner(max_rollouts=1).run_context(agent=agent, store=memory) as worker:
            await asyncio.wait_for(worker.iter(), LONG)
        wayward.is_away = False
    assert (await memory.get_rollout_by_id(queued.rollout_id)).status == "failed"


async def test_an_attempt_whose_calls_the_store_refuses_is_no_success(memory, upstream):
    class Refuses(Wayward):
        refuses = True

        async def forward(self, name, /, *args, **kwargs):
            if name == "add_many_spans" and self.refuses:
                raise ConfigError("refused, by script")
            return await super().forward(name, *args, **kwargs)

    @llm_rollout
    async def agent(task, llm):
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as agent_client:
            await agent_client.chat.completions.create(model=llm.model, messages=asked("ab"))
        return 1.0

    refusing = Refuses(memory)
    async with proxy_of(refusing, settings(upstream)) as proxy:
        await memory.add_resources({"llm": proxy.as_resource()})
        queued = [(await memory.enqueue_rollout(number)).rollout_id for number in range(2)]
        for refuses in (True, False):
            refusing.refuses = refuses
            async with runner(max_rollouts=1).run_context(agent=agent, store=memory) as worker:
                await asyncio.wait_for(worker.iter(), LONG)
    found = [(await memory.get_rollout_by_id(rollout_id)).status for rollout_id in queued]
    assert found == ["failed", "succeeded"]


def answering(body):
    """A mishap: this answer."""

    async def mishap(request):
        return web.json_response(body)

    return mishap


def streaming(event):
    """A mishap: a stream of this event."""

    async def mishap(request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())
        return response

    return mishap


def odd(**message):
    return {"id": "x", "choices": [{"index": 0, "message": {"content": "hi", **message}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("mishap", "is_stream"),
    [
        (answering(odd(tool_calls=["x"])), False),
        (answering(odd(tool_calls={"a": 1})), False),
        (answering(odd(tool_calls=[{"index": 0}, "x"])), False),
        (streaming({"choices": 5}), True),
        (streaming({"choices": [{"delta": {"tool_calls": "x"}}, {"delta": {"tool_calls": [{"index": 0}]}}]}), True),
    ],
)
async def test_answers_of_any_shape_reach_the_agent_and_end_their_call(memory, upstream, mishap, is_stream):
    ids = await attempt(memory)
    upstream.mishaps += [mishap]
    body = {"model": "m", "messages": asked("ab"), "stream": is_stream}
    async with proxy_of(memory, settings(upstream)) as proxy, aiohttp.ClientSession() as session:
        base = f"{proxy.url}/rollout/{ids[0]}/attempt/{ids[1]}"
        async with session.post(f"{base}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            await answer.read()
        async with session.post(f"{base}/flush") as flushed:
            assert (flushed.status, (await flushed.json())["under_way"]) == (200, 0)
        [call] = await memory.query_spans(ids[0])
        assert call.name == LLM_CALL


async def test_a_fault_of_the_recording_ends_the_call_as_failed(memory, upstream, monkeypatch):
    def fails(*_):
        raise ZeroDivisionError

    ids = await attempt(memory)
    async with proxy_of(memory, settings(upstream)) as proxy:
        monkeypatch.setattr("rollout_core.agents.proxy.recording.Choice.attributes", fails)
        with pytest.raises(openai.InternalServerError, match="a fault of the proxy: ZeroDivisionError"):
            await client(proxy, ids).chat.completions.create(model="m", messages=asked("ab"))
        [call] = await calls(memory, proxy, ids[0])
        assert call.status.status_code == "ERROR" and "ZeroDivisionError" in (call.status.description or "")


async def test_a_call_that_an_agent_leaves_under_way_is_no_failure(memory, upstream, caplog, monkeypatch):
    @llm_rollout
    async def agent(task, llm):
        async def ask():
            async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as agent_client:
                return await agent_client.chat.completions.create(model=llm.model, messages=asked("ab"))

        left.append(asyncio.create_task(ask()))
        await until(lambda: upstream.in_flight)
        return 1.0

    monkeypatch.setattr("rollout_core.agents.proxy.proxy_app.UNDER_WAY_SECONDS", 0.1)
    left, may_end = [], asyncio.Event()
    upstream.mishaps += [held(may_end)]
    async with proxy_of(memory, settings(upstream)) as proxy:
        await memory.add_resources({"llm": proxy.as_resource()})
        queued = await memory.enqueue_rollout(1)
        async with runner(max_rollouts=1).run_context(agent=agent, store=memory) as worker:
            await asyncio.wait_for(worker.iter(), LONG)
        assert (await memory.get_rollout_by_id(queued.rollout_id)).status == "succeeded"
        assert f"Rollout {queued.rollout_id} left calls of its model under way" in caplog.text
        may_end.set()
        assert (await left[0]).choices[0].message.content == "ba"


async def test_a_store_that_is_away_delays_nothing_and_gets_all_when_it_is_back(memory, upstream):
    wayward = Wayward(memory)
    ids = await attempt(memory)
    async with proxy_of(wayward, settings(upstream)) as proxy:
        wayward.is_away = True
        create = client(proxy, ids, timeout=LONG).chat.completions.create
        for turn in range(3):
            await create(model="m", messages=asked(f"turn {turn}"))

        async def flushed() -> int:
            place = f"{proxy.url}/rollout/{ids[0]}/attempt/{ids[1]}/flush"
            async with aiohttp.ClientSession() as session, session.post(place) as answer:
                return answer.status

        flush = asyncio.create_task(flushed())
        await asyncio.sleep(0.3)
        assert not flush.done() and not await memory.query_spans(ids[0])
        wayward.is_away = False
        assert await flush == 200
        spans = await calls(memory, proxy, ids[0])
        assert [span.sequence_id for span in spans] == [1, 2, 3]


async def test_stop_delivers_what_is_recorded_or_says_what_is_missing(memory, upstream):
    wayward = Wayward(memory)
    ids = await attempt(memory)
    models = [{"model_name": "m", "litellm_params": {"model": "m", "api_base": upstream.url}}]
    proxy = LLMProxy(0, models, wayward, patience_seconds=LONG)
    await proxy.start()
    wayward.delay = 0.1
    await client(proxy, ids).chat.completions.create(model="m", messages=asked("one"))
    await proxy.stop()
    assert len(await memory.query_spans(ids[0])) == 1
    await proxy.start()
    proxy._patience_seconds = 0.3
    wayward.is_away = True
    await client(proxy, ids).chat.completions.create(model="m", messages=asked("two"))
    with pytest.raises(Recoverable, match="1 calls are recorded but not stored"):
        await proxy.flush()
    with pytest.raises(Recoverable, match="1 calls are recorded but not stored"):
        await proxy.stop()
    with pytest.raises(Recoverable, match="the proxy does not run"):
        await proxy.flush()
    wayward.is_away = False
    proxy._patience_seconds = LONG
    await proxy.start()
    assert len(await calls(memory, proxy, ids[0])) == 2
    await proxy.stop()
    await close_clients()


async def test_calls_of_unknown_rollouts_are_answered_and_harm_no_others(memory, upstream, caplog):
    ids = await attempt(memory)
    async with proxy_of(memory, settings(upstream)) as proxy:
        create = [client(proxy, pair).chat.completions.create for pair in (("ro-x", "at-x"), ids, (ids[0], "at-x"))]
        answers = await asyncio.gather(*(one(model="m", messages=asked("private")) for one in create * 4))
        assert {answer.choices[0].message.content for answer in answers} == {"etavirp"}
        assert len(await calls(memory, proxy, ids[0])) == 4
        await proxy.flush()
    assert "ro-x" in caplog.text and "at-x" in caplog.text and "private" not in caplog.text


async def test_calls_go_to_the_store_in_batches(memory, upstream):
    wayward = Wayward(memory)
    wayward.may_store.clear()
    attempts = [await attempt(memory) for _ in range(4)]
    async with proxy_of(wayward, settings(upstream)) as proxy:
        agents = [client(proxy, ids) for ids in attempts]
        await asyncio.gather(
            *(agent.chat.completions.create(model="m", messages=asked("ab")) for agent in agents for _ in range(16))
        )
        wayward.may_store.set()
        await proxy.flush()
    assert sum(wayward.batches) == 64 and len(wayward.batches) < 40


async def test_a_backlog_that_grows_too_large_lets_nothing_more_in(memory, upstream, monkeypatch):
    wayward = Wayward(memory)
    ids = await attempt(memory)
    monkeypatch.setattr(delivery, "MAX_BACKLOG_BYTES", 1000)
    async with proxy_of(wayward, settings(upstream)) as proxy:
        wayward.is_away = True
        create = client(proxy, ids).chat.completions.create
        await create(model="m", messages=asked("x" * 1000))
        with pytest.raises(openai.InternalServerError, match="the store is away") as raised:
            await create(model="m", messages=asked("x"))
        assert raised.value.status_code == 503 and len(upstream.seen) == 1
        wayward.is_away = False
        await proxy.flush()
        await create(model="m", messages=asked("x"))


async def test_calls_go_to_the_store_that_was_set_when_they_began(memory, upstream):
    ids = await attempt(memory)
    async with InMemoryLightningStore() as other, proxy_of(memory, settings(upstream)) as proxy:
        other_ids = await attempt(other)
        await client(proxy, ids).chat.completions.create(model="m", messages=asked("one"))
        proxy.set_store(other)
        await client(proxy, other_ids).chat.completions.create(model="m", messages=asked("two"))
        await proxy.flush()
        assert len(await memory.query_spans(ids[0])) == len(await other.query_spans(other_ids[0])) == 1


async def test_a_store_of_one_thread_is_refused():
    class OfOneThread(CollectionBasedLightningStore):
        def __init__(self) -> None:
            pass

    with pytest.raises(ConfigError, match="LightningStoreThreaded"):
        LLMProxy(0, [], OfOneThread())


async def test_a_blocked_algorithm_does_not_stop_the_proxy(memory, upstream):
    async with proxy_of(memory, settings(upstream)) as proxy:
        answered = threading.Event()

        def ask() -> None:
            with urllib.request.urlopen(f"{proxy.url}/health", timeout=LONG) as response:
                assert response.status == 200
            answered.set()

        asking = asyncio.get_running_loop().run_in_executor(None, ask)
        assert answered.wait(LONG)  # this loop does nothing else
        await asking


async def test_flush_waits_for_calls_under_way_of_its_rollout_alone(memory, upstream):
    ids, others = await attempt(memory), await attempt(memory)
    upstream.hold_after = (1, asyncio.Event())
    async with proxy_of(memory, settings(upstream)) as proxy:
        create = client(proxy, ids).chat.completions.create
        stream = await create(model="m", messages=asked("abc"), stream=True)
        await client(proxy, others).chat.completions.create(model="m", messages=asked("ab"))
        await asyncio.wait_for(proxy.flush(), LONG)
        await asyncio.wait_for(proxy.flush(others[0]), LONG)
        flush = asyncio.create_task(proxy.flush(ids[0]))
        await asyncio.sleep(0.1)
        assert not flush.done()
        upstream.hold_after[1].set()
        async for _ in stream:
            pass
        await flush
        await until(lambda: not upstream.in_flight)


PROXY = """
import asyncio, sys
from rollout_core.agents.proxy.proxy_server import LLMProxy
from rollout_core.agents.proxy.upstreams import ModelEntry, Upstream
from rollout_core.store import LightningStoreClient

async def main(port, upstream, store):
    models = [ModelEntry("m", (Upstream(url=upstream),))]
    proxy = LLMProxy(int(port), models, store=LightningStoreClient(store))
    await proxy.start()
    print(proxy.port, flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def port():
    with own_port() as port:
        yield port


async def test_an_attempt_whose_proxy_was_killed_is_tried_again(memory, upstream, port):
    """What it had recorded and not stored is lost, so nothing shows that the attempt's calls are all there."""
    server = LightningStoreServer(memory)
    await server.start()
    running: list[asyncio.subprocess.Process] = []

    async def start() -> None:
        command = [sys.executable, "-c", PROXY, str(port), upstream.url, server.endpoint]
        running.append(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE))
        assert int(await running[-1].stdout.readline()) == port

    @llm_rollout
    async def agent(task, llm):
        for turn in range(2):
            async with AsyncOpenAI(base_url=llm.endpoint, api_key="none", max_retries=0) as agent_client:
                await agent_client.chat.completions.create(model="m", messages=asked(f"{task}-{turn}"))
            if len(running) == 1:
                running[0].kill()
                await running[0].wait()
                await start()
        return 1.0

    try:
        await start()
        await memory.add_resources({"llm": ProxyLLM(endpoint=f"http://127.0.0.1:{port}/v1", model="m")})
        config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
        queued = await memory.enqueue_rollout(1, config=config)
        async with runner(max_rollouts=2).run_context(agent=agent, store=memory) as worker:
            await asyncio.wait_for(worker.iter(), LONG)
    finally:
        for process in running:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await server.close()
    first, second = await memory.query_attempts(queued.rollout_id)
    assert (first.status, second.status) == ("failed", "succeeded")
    spans = await memory.query_spans(queued.rollout_id, attempt_id=second.attempt_id)
    assert [span.name for span in spans].count(LLM_CALL) == 2


async def test_an_attempt_whose_proxy_goes_away_is_no_success(memory, upstream, monkeypatch):
    monkeypatch.setattr(delivery, "ABSENT_SECONDS", 0.5)
    async with proxy_of(memory, settings(upstream)) as proxy:

        @llm_rollout
        async def agent(task, llm):
            await proxy.stop()
            return 1.0

        await memory.add_resources({"llm": proxy.as_resource()})
        queued = await memory.enqueue_rollout(1)
        async with runner(max_rollouts=1).run_context(agent=agent, store=memory) as worker:
            await asyncio.wait_for(worker.iter(), LONG)
    assert (await memory.get_rollout_by_id(queued.rollout_id)).status == "failed"

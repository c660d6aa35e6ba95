"""Which upstream answers: the least busy, within its limits; and swaps of the weights under load."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI
from proxied import LONG, asked, attempt, calls, client, ids_of, proxy_of, until
from scripted_upstream import ScriptedUpstream, held, no_answer, status

from rollout_core.agents.proxy.proxy_server import LLMProxy
from rollout_core.agents.proxy.upstreams import ModelEntry, Upstream
from rollout_core.base.errors import ConfigError, NotFound, Recoverable


@pytest.fixture
async def store(memory):
    return memory


@pytest.fixture
async def old() -> AsyncIterator[ScriptedUpstream]:
    running = ScriptedUpstream("old")
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def new() -> AsyncIterator[ScriptedUpstream]:
    running = ScriptedUpstream("new")
    await running.start()
    yield running
    await running.stop()


def upstream(server: ScriptedUpstream, **settings) -> Upstream:
    return Upstream(url=server.url, model_id=server.name, **{"timeout": LONG, **settings})


class Load:
    """Agents that talk without a pause, half of them streaming."""

    def __init__(self, store, proxy: LLMProxy, num_agents: int) -> None:
        self._store, self._proxy = store, proxy
        self._is_over = False
        self.attempts: list[tuple[str, str]] = []
        self.num_calls = 0
        self._agents = [asyncio.create_task(self._agent(number)) for number in range(num_agents)]

    async def _agent(self, number: int) -> None:
        ids = await attempt(self._store)
        self.attempts.append(ids)
        create = client(self._proxy, ids).chat.completions.create
        while not self._is_over:
            text = f"agent {number}"
            if number % 2:
                stream = await create(model="m", messages=asked(text), stream=True)
                said = [chunk.choices[0].delta.content async for chunk in stream]
                answer = "".join(filter(None, said))
            else:
                answer = (await create(model="m", messages=asked(text))).choices[0].message.content
            assert answer == text[::-1]
            self.num_calls += 1

    async def answered(self, number: int) -> None:
        """Wait for so many further answers."""
        wanted = self.num_calls + number
        await until(lambda: self.num_calls >= wanted or any(agent.done() for agent in self._agents))

    async def end(self) -> list:
        """Stop, and all spans."""
        self._is_over = True
        await asyncio.gather(*self._agents)
        spans = [span for ids in self.attempts for span in await calls(self._store, self._proxy, ids[0])]
        assert len(spans) == self.num_calls and {span.status.status_code for span in spans} == {"OK"}
        for span in spans:  # the weights that a span names are those that wrote the answer
            assert span.attributes["gen_ai.response.id"].startswith(span.attributes["rollout.model_id"])
            assert len(span.attributes["rollout.choices.0.token_ids"]) == len("agent 0")
        return spans


@pytest.mark.parametrize("policy", ["drain", "wait", "mix"])
async def test_weights_are_swapped_under_load_and_no_request_fails(store, old, new, policy):
    old.delay = new.delay = 0.01
    async with proxy_of(store, upstream(old)) as proxy:
        load = Load(store, proxy, 8)
        await load.answered(16)
        await until(lambda: old.in_flight)
        swapped = asyncio.create_task(proxy.swap("m", upstream(new), policy))
        if policy == "wait":
            while not swapped.done():
                assert not (old.in_flight and new.in_flight), "never two versions at a time"
                await asyncio.sleep(0.001)
        await swapped
        if policy != "mix":
            assert old.in_flight == 0, "the old server may be shut down now"
        num_old = len(old.seen)
        await load.answered(16)
        assert policy == "mix" or len(old.seen) == num_old
        spans = await load.end()
    assert {span.attributes["rollout.model_id"] for span in spans} == {"old", "new"}


async def test_a_streamed_answer_ends_where_it_began(store, old, new):
    old.hold_after = (1, asyncio.Event())
    async with proxy_of(store, upstream(old)) as proxy:
        ids = await attempt(store)
        create = client(proxy, ids).chat.completions.create
        stream = await create(model="m", messages=asked("abc"), stream=True)
        await proxy.swap("m", upstream(new), "mix")
        assert (await create(model="m", messages=asked("ab"))).choices[0].message.content == "ba"
        drained = asyncio.create_task(proxy.swap("m", [upstream(new), upstream(new, model="again")], "drain"))
        await drained  # of the new one nothing is under way
        old.hold_after[1].set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "cba"
        found = [span.attributes["rollout.model_id"] for span in await calls(store, proxy, ids[0])]
        assert found == ["old", "new"]


async def test_an_old_server_that_dies_in_a_swap_is_replaced_unseen(store, old, new):
    async with proxy_of(store, upstream(old)) as proxy:
        ids = await attempt(store)
        dying = asyncio.Event()

        async def die(request):
            await dying.wait()
            return await no_answer(request)

        old.mishaps += [die]
        call = asyncio.create_task(client(proxy, ids).chat.completions.create(model="m", messages=asked("ab")))
        await until(lambda: old.in_flight == 1)
        await proxy.swap("m", upstream(new), "mix")
        dying.set()
        assert (await call).choices[0].message.content == "ba"
        [span] = await calls(store, proxy, ids[0])
        assert span.attributes["rollout.model_id"] == "new"


async def test_a_pause_lets_requests_end_and_holds_new_ones(store, old):
    old.hold_after = (1, asyncio.Event())
    async with proxy_of(store, upstream(old)) as proxy:
        ids = await attempt(store)
        create = client(proxy, ids).chat.completions.create
        stream = await create(model="m", messages=asked("abc"), stream=True)
        loaded = asyncio.Event()

        async def load_weights() -> None:
            async with proxy.paused("m", model_id="old-2"):
                assert old.in_flight == 0
                loaded.set()
                await asyncio.sleep(0.2)
                assert old.in_flight == 0

        loading = asyncio.create_task(load_weights())
        await asyncio.sleep(0.1)
        assert not loaded.is_set()
        later = asyncio.create_task(create(model="m", messages=asked("ab")))
        old.hold_after[1].set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "cba"
        await loading
        await later
        found = [span.attributes["rollout.model_id"] for span in await calls(store, proxy, ids[0])]
        assert found == ["old", "old-2"]
        with pytest.raises(RuntimeError, match="did not load"):
            async with proxy.paused("m", model_id="old-3"):
                raise RuntimeError("did not load")
        await create(model="m", messages=asked("ab"))
        assert (await calls(store, proxy, ids[0]))[-1].attributes["rollout.model_id"] == "old-2"


async def test_a_held_request_meets_its_time_limit(store, old):
    async with proxy_of(store, upstream(old, timeout=2)) as proxy:
        async with proxy.paused("m"):
            with pytest.raises(openai.InternalServerError, match="did not answer within"):
                await client(proxy).chat.completions.create(model="m", messages=asked("ab"))
        await client(proxy).chat.completions.create(model="m", messages=asked("ab"))


async def test_a_pause_that_is_given_up_lets_requests_go_on(store, old):
    old.hold_after = (0, asyncio.Event())
    async with proxy_of(store, upstream(old)) as proxy:
        create = client(proxy).chat.completions.create
        slow = asyncio.create_task(create(model="m", messages=asked("abc"), stream=True))
        await until(lambda: old.in_flight == 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), proxy.paused("m"):
                raise AssertionError("something is under way")
        await create(model="m", messages=asked("ab"))
        old.hold_after[1].set()
        await slow


async def test_what_cannot_be_swapped(store, old):
    async with proxy_of(store, upstream(old)) as proxy:
        with pytest.raises(NotFound, match="no model 'n'; found: m"):
            await proxy.swap("n", upstream(old))
        with pytest.raises(ConfigError, match="expected drain, wait or mix"):
            await proxy.swap("m", upstream(old), "at once")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="0 upstreams"):
            await proxy.swap("m", [])


async def test_a_swap_of_a_proxy_that_stops_ends_with_it(store, old, new):
    old.mishaps += [held(asyncio.Event())]
    async with proxy_of(store, upstream(old)) as proxy:
        call = asyncio.create_task(client(proxy).chat.completions.create(model="m", messages=asked("ab")))
        await until(lambda: old.in_flight == 1)
        swap = asyncio.create_task(proxy.swap("m", upstream(new), "drain"))
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(proxy.stop())
        with pytest.raises(openai.InternalServerError, match="being stopped"):
            await call
        try:
            await asyncio.wait_for(swap, LONG)
        except Recoverable as error:
            assert "was stopped" in str(error)
        await stopping


# Which one answers


async def test_the_least_busy_upstream_is_asked(store, old, new):
    may_end = asyncio.Event()
    old.mishaps += [held(may_end)]
    new.mishaps += [held(may_end)]
    async with proxy_of(store, upstream(old), upstream(new)) as proxy:
        agent = client(proxy)

        async def talk() -> None:
            await agent.chat.completions.create(model="m", messages=asked("ab"))

        long = asyncio.create_task(talk())
        await until(lambda: old.in_flight or new.in_flight)
        busy, other = (old, new) if old.in_flight else (new, old)
        other.mishaps.clear()
        for _ in range(19):
            await talk()
        assert (len(busy.seen), len(other.seen)) == (1, 19)
        may_end.set()
        await long


async def test_limits_of_an_upstream_hold(store, old):
    may_end = asyncio.Event()
    old.mishaps += [held(may_end)] * 12
    async with proxy_of(store, upstream(old, max_concurrent=3)) as proxy:
        agent = client(proxy)
        asking = [
            asyncio.create_task(agent.chat.completions.create(model="m", messages=asked("ab"))) for _ in range(12)
        ]
        await until(lambda: old.in_flight >= 3)
        may_end.set()
        await asyncio.gather(*asking)
        assert old.most_in_flight == 3
        await proxy.swap("m", upstream(old, requests_per_second=20))
        started = time.monotonic()
        await asyncio.gather(
            *(agent.chat.completions.create(model="m", messages=asked("ab")) for _ in range(10)),
        )
        assert time.monotonic() - started >= 9 / 20


async def test_requests_that_wait_for_room_go_to_the_new_upstream(store, old, new):
    old.hold_after = (0, asyncio.Event())
    async with proxy_of(store, upstream(old, max_concurrent=1)) as proxy:
        create = client(proxy).chat.completions.create
        first = asyncio.create_task(create(model="m", messages=asked("abc"), stream=True))
        await until(lambda: old.in_flight == 1)
        second = asyncio.create_task(create(model="m", messages=asked("ab")))
        await asyncio.sleep(0.05)
        assert not second.done()
        await proxy.swap("m", upstream(new), "mix")
        assert (await second).id.startswith("new")
        old.hold_after[1].set()
        await first


async def test_another_upstream_is_asked_at_once_when_one_fails(store, old, new):
    old.mishaps += [status(500), status(429, retry_after="600")]  # longer than a call may take
    async with proxy_of(store, upstream(old), upstream(new)) as proxy:
        agent = client(proxy)
        for _ in range(4):
            await agent.chat.completions.create(model="m", messages=asked("ab"))
        assert len(new.seen) == 4


async def test_upstreams_without_token_ids_are_asked_for_none(store, old):
    old.is_vllm = False
    async with proxy_of(store, upstream(old, token_ids=False)) as proxy:
        ids = await attempt(store)
        await client(proxy, ids).chat.completions.create(model="m", messages=asked("ab"))
        assert not {"return_token_ids", "logprobs"} & old.seen[0].body.keys()
        [span] = await calls(store, proxy, ids[0])
        assert json.loads(span.attributes["gen_ai.output.messages"])[0]["content"] == "ba"
        assert not [key for key in span.attributes if "token_ids" in key]


async def test_models_come_and_go_while_it_runs(store, old, new):
    async with proxy_of(store, upstream(old)) as proxy:
        ids = await attempt(store)
        await proxy.update_model_list([ModelEntry("m", [upstream(new)]), ModelEntry("n", [upstream(old)])])
        for name in ("m", "n"):
            async with AsyncOpenAI(base_url=proxy.as_resource(*ids, model=name).endpoint, api_key="k") as agent:
                await agent.chat.completions.create(model=name, messages=asked("ab"))
        spans = await calls(store, proxy, ids[0])
        assert [span.attributes["rollout.model_id"] for span in spans] == ["new", "old"]
        assert spans[0].attributes["rollout.choices.0.token_ids"] == ids_of("ba")

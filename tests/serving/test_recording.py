"""Answers as rollouts in the store, and what people say of them as their rewards."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout_core.agents.adapters.span_samples import adapt_rollouts
from rollout_core.agents.adapters.triplets import LlmProxyTraceToTriplet
from rollout_core.agents.emitters import emit_reward, find_final_reward, find_reward_spans, get_reward_value
from rollout_core.agents.live import is_live
from rollout_core.agents.proxy.upstreams import Upstream
from rollout_core.base.errors import ConfigError
from rollout_core.base.processes import search_path
from rollout_core.objects import ObjectStore
from rollout_core.serving import feedback, recording
from rollout_core.serving.feedback import FeedbackDesk
from rollout_core.serving.recording import Recording, parse_share
from rollout_core.store import LightningStore, Rollout, Span, SqlLightningStore
from rollout_core.store.semconv import LLM_CALL, LlmCallAttributes
from tests.agents.proxied import attempt, calls, client, proxy_of
from tests.serving.fronts import LONG, MODEL, RunningFront, events_of, front_over, until
from tests.support.alive import lives

SERVER = Path(__file__).parent / "recorded_server.py"


def url_in(folder: Path) -> str:
    return f"sqlite:///{folder}/store.db"


class Recorded(RunningFront):
    """A front that records every answer, while ``share`` is 1."""

    store: LightningStore
    desk: FeedbackDesk
    share: float = 1.0

    async def rate(self, answer_id: str, reward: Any, **more: Any) -> tuple[int, dict[str, Any]]:
        async with self.client.post("/v1/feedback", json={"id": answer_id, "reward": reward, **more}) as response:
            return response.status, await response.json()

    async def until_figure(self, name: str, least: float) -> None:
        async with asyncio.timeout(LONG):
            while await self.figure(name) < least:
                await asyncio.sleep(0.01)

    async def rollout(self, answer_id: str) -> Rollout | None:
        await self.desk.recording.until_stored(answer_id)
        return await self.store.get_rollout_by_id(f"served-{answer_id}")

    async def spans(self, answer_id: str) -> Sequence[Span]:
        await self.desk.recording.until_stored(answer_id)
        return list(await self.store.query_spans(f"served-{answer_id}"))

    async def rewards(self, answer_id: str) -> list[float | None]:
        return [get_reward_value(span) for span in find_reward_spans(await self.spans(answer_id))]


@asynccontextmanager
async def recorded_in(folder: Path, **options: Any) -> AsyncIterator[Recorded]:
    async with SqlLightningStore.from_url(url_in(folder), busy_timeout_seconds=0.05) as store:
        desk = FeedbackDesk(Recording(store, 1.0, draw=lambda: 1 - front.share))
        try:
            async with front_over(folder, desk=desk, **options) as running:
                front = Recorded(**vars(running))
                front.store, front.desk = store, desk
                yield front
        finally:
            await desk.stop()


def without_nothing(value: Any) -> Any:
    """JSON without keys that hold null."""
    if isinstance(value, list):
        return [without_nothing(entry) for entry in value]
    if isinstance(value, dict):
        return {key: without_nothing(entry) for key, entry in value.items() if entry is not None and key != "id"}
    return value


def facts(span: Span) -> dict[str, Any]:
    """Of a call, but for what differs from call to call."""
    left_out = (LlmCallAttributes.RESPONSE_ID.value,)
    return {key: value for key, value in span.attributes.items() if key not in left_out}


REQUESTS = {
    "chat": ("/chat/completions", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}),
    "chat with log-probabilities": ("/chat/completions", {"messages": [{"content": "abc"}], "logprobs": True}),
    "completion": ("/completions", {"prompt": "abc"}),
    "stream of a chat": ("/chat/completions", {"messages": [{"content": "say 3"}], "stream": True}),
    "stream with ids": ("/completions", {"prompt": "say 3", "stream": True, "return_token_ids": True, "logprobs": 0}),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_an_answer_is_stored_as_the_llm_proxy_stores_it(tmp_path: Path, name: str):
    path, body = REQUESTS[name]
    is_stream = bool(body.get("stream"))

    async def read(response: aiohttp.ClientResponse) -> list[Any]:
        assert response.status == 200
        return events_of(await response.text()) if is_stream else [await response.json()]

    async with recorded_in(tmp_path) as front:
        async with front.client.post(f"/v1{path}", json={"model": "tiny", **body}) as response:
            shown = await read(response)
        front.share = 0.0
        async with front.client.post(f"/v1{path}", json={"model": "tiny", **body}) as response:
            assert without_nothing(shown) == without_nothing(await read(response))
        async with proxy_of(front.store, Upstream(url=f"{front.url}/v1", model="tiny", model_id=MODEL)) as proxy:
            ids = await attempt(front.store)
            base = client(proxy, ids).base_url
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{str(base).rstrip('/')}{path}", json={"model": "m", **body}) as response,
            ):
                await read(response)
            [wanted] = await calls(front.store, proxy, ids[0])
        answer_id = shown[0]["id"]
        assert (await front.rate(answer_id, 0.5))[0] == 200
        await front.store.add_span(
            Span.from_core_fields(
                emit_reward(0.5, propagate=False), rollout_id=ids[0], attempt_id=ids[1], sequence_id=2
            )
        )
        spans = await front.spans(answer_id)
        assert spans[0].name == LLM_CALL and spans[0].status == wanted.status
        renamed = {"gen_ai.request.model": "tiny", "rollout.served_model": "tiny"}
        assert facts(spans[0]) == {**facts(wanted), **renamed}
        assert spans[0].attributes["rollout.prompt_token_ids"] == [
            ord(letter) for letter in ("abc", "say 3")[is_stream]
        ]
        assert spans[0].attributes["rollout.model_id"] == MODEL
        theirs = await front.store.query_spans(ids[0])
        [ours], [same] = LlmProxyTraceToTriplet().adapt(spans), LlmProxyTraceToTriplet().adapt(list(theirs))
        assert ours.reward == 0.5 and len(ours.response["token_ids"]) == (3 if is_stream else 1)
        assert (ours.prompt["token_ids"], ours.response, ours.reward) == (
            same.prompt["token_ids"],
            same.response,
            same.reward,
        )


async def test_online_learning_takes_what_was_rated(tmp_path: Path):
    async with recorded_in(tmp_path) as front:
        _, rated = await front.ask("good")
        _, unrated = await front.ask("bad")
        await front.rate(rated["id"], 1.0)
        names = [f"served-{answer['id']}" for answer in (rated, unrated)]
        await front.desk.recording.until_stored(unrated["id"])
        adapted = await adapt_rollouts(front.store, ObjectStore.from_url(str(tmp_path / "objects")), names)
        [sample] = adapted.samples
        assert sample.rollout_id == names[0] and sample.reward == 1.0 and sample.model_ids == [MODEL]
        assert sample.task == {"prompt": "good"}
        assert adapted.left_out == {"no finite reward": [names[1]]}
        rollout = await front.rollout(rated["id"])
        assert rollout is not None and is_live(rollout) and rollout.status == "succeeded"
        assert rollout.metadata is not None and rollout.metadata["model"] == MODEL


async def test_a_recorded_stream_is_not_held_up_and_feedback_waits_for_its_end(tmp_path: Path):
    async with recorded_in(tmp_path) as front, front.post("hold", stream=True) as response:
        [first] = events_of((await response.content.readuntil(b"\n\n")).decode())
        rating = asyncio.create_task(front.rate(first["id"], 1.0))
        assert await front.store.get_rollout_by_id(f"served-{first['id']}") is None
        (tmp_path / "go").touch()
        assert (await rating)[0] == 200
        assert await front.rewards(first["id"]) == [1.0]


async def test_the_last_feedback_counts_and_the_same_again_is_the_same(tmp_path: Path):
    async with recorded_in(tmp_path) as front:
        _, answer = await front.ask("hello")
        for reward in (1.0, 1.0, 0.0, 1.0, 1.0):
            status, said = await front.rate(answer["id"], reward, text="so so")
            assert status == 200 and said["stored"] and said["rollout_id"] == f"served-{answer['id']}"
        assert await front.rewards(answer["id"]) == [1.0, 0.0, 1.0]
        both = await asyncio.gather(*(front.rate(answer["id"], 0.25) for _ in range(8)))
        assert {status for status, _ in both} == {200}
        spans = await front.spans(answer["id"])
        assert find_final_reward(spans) == 0.25
        assert [span.attributes.get("rollout.feedback.text") for span in spans[1:]] == ["so so"] * 3 + [None]
        assert await front.figure("rollout_serve_feedback_total") == 4


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"id": "cmpl-nobody", "reward": 1}, 404, "no answer with the id 'cmpl-nobody' is recorded"),
        ({"id": "cmpl-nobody", "rewrd": 1}, 400, "unknown key; did you mean 'reward'"),
        ({"id": "cmpl-nobody", "reward": "good"}, 400, "should be a valid number"),
        ({"id": "cmpl-nobody", "reward": True}, 400, "should be a valid number"),
        ({"id": "a\0b", "reward": 1}, 400, "NUL"),
        ({"reward": 1}, 400, "id: required"),
        (b'{"id": "cmpl-nobody", "reward": NaN}', 400, "not JSON"),
        (b'{"id": "cmpl-nobody", "reward": 1e999}', 400, "infinity"),
        (b"[]", 400, "not a JSON object"),
    ],
)
async def test_feedback_that_cannot_be_kept_is_refused(tmp_path: Path, body: Any, status: int, message: str):
    async with recorded_in(tmp_path, keys=["secret"]) as front:
        given: Any = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with front.client.post("/v1/feedback", **given) as response:
            assert response.status == status
            assert message in (await response.json())["error"]["message"]
        async with aiohttp.ClientSession(front.url) as stranger, stranger.post("/v1/feedback", **given) as response:
            assert response.status == 401


async def test_without_recording_feedback_is_refused(tmp_path: Path):
    async with front_over(tmp_path) as front:
        async with front.client.post("/v1/feedback", json={"id": "cmpl-1", "reward": 1}) as response:
            assert response.status == 400
            assert "start it with --record" in (await response.json())["error"]["message"]
        status, said = await front.ask("hello", metadata={"feedback_for": "cmpl-1", "thumbs": "up"})
        assert status == 400 and "start it with --record" in said["error"]["message"]
        assert (await front.ask("hello", metadata={"user": "me"}))[0] == 200


async def test_thumbs_in_the_metadata_of_a_later_request_are_feedback(tmp_path: Path):
    async with recorded_in(tmp_path) as front:
        _, answer = await front.ask("hello")
        for thumbs in ("up", "down"):
            status, _ = await front.ask("next", metadata={"feedback_for": answer["id"], "thumbs": thumbs})
            assert status == 200
        await front.until_figure("rollout_serve_feedback_total", 2)
        assert sorted(reward or 0.0 for reward in await front.rewards(answer["id"])) == [0.0, 1.0]
        status, said = await front.ask("next", metadata={"feedback_for": answer["id"], "thumbs": "sideways"})
        assert status == 400 and "'sideways'" in said["error"]["message"]
        assert (await front.ask("next", metadata={"feedback_for": "cmpl-nobody", "thumbs": "up"}))[0] == 200
        await front.until_figure("rollout_serve_feedback_lost_total", 1)


async def test_a_store_that_is_away_holds_up_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recording, "MAX_WAITING_BYTES", 1_000)
    monkeypatch.setattr(feedback, "WAIT_SECONDS", 0.5)
    async with recorded_in(tmp_path) as front:
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        answers = [(await front.ask("hello")) for _ in range(20)]
        assert time.monotonic() - began < LONG / 10
        assert {status for status, _ in answers} == {200}
        first, last = answers[0][1]["id"], answers[-1][1]["id"]
        status, said = await front.rate(first, 1.0)
        assert status == 503 and "send it again later" in said["error"]["message"]
        lost = await front.figure("rollout_serve_records_lost_total")
        waiting = await front.figure("rollout_serve_records_waiting")
        assert lost >= 1 and waiting >= 1 and lost + waiting == 20
        other.execute("COMMIT")
        other.close()
        monkeypatch.setattr(feedback, "WAIT_SECONDS", LONG)
        assert (await front.rate(first, 1.0))[0] == 200
        assert await front.rewards(first) == [1.0]
        assert (await front.rate(last, 1.0))[0] == 404
        await front.until_figure("rollout_serve_records_total", waiting)
        assert await front.figure("rollout_serve_records_waiting") == 0


async def test_an_answer_without_an_end_is_a_rollout_that_failed(tmp_path: Path):
    async with recorded_in(tmp_path) as front:
        async with front.post("hold", stream=True) as response:
            [first] = events_of((await response.content.readuntil(b"\n\n")).decode())
        rollout, spans = await front.rollout(first["id"]), await front.spans(first["id"])
        assert rollout is not None and rollout.status == "failed"
        assert spans[0].status.status_code == "ERROR" and "the client left" in str(spans[0].status.description)
        async with front.post("half", stream=True) as response:
            [begun, *_, broken] = events_of(await response.text())
        assert "error" in broken
        rollout = await front.rollout(begun["id"])
        assert rollout is not None and rollout.status == "failed"


async def test_an_id_that_was_used_before_keeps_its_first_answer(tmp_path: Path):
    async with recorded_in(tmp_path) as front:
        _, first = await front.ask("hello", request_id="mine")
        before = await front.spans(first["id"])
        for lost, prompt in enumerate(("another", "hello"), start=1):
            _, second = await front.ask(prompt, request_id="mine")
            assert first["id"] == second["id"] == "cmpl-mine"
            await front.until_figure("rollout_serve_records_lost_total", lost)
        assert await front.spans("cmpl-mine") == before


async def test_a_share_of_the_requests_is_recorded_and_of_some_none(tmp_path: Path):
    async with SqlLightningStore.from_url(url_in(tmp_path)) as store:
        draws = iter([0.05, 0.1, 0.5, 0.09])
        taken = Recording(store, parse_share("10%"), draw=lambda: next(draws))
        begun = [taken.begin("/v1/completions", b"{}", {}) for _ in range(4)]
        assert [one is not None for one in begun] == [True, False, False, True]
        everything = Recording(store, 1.0)
        assert everything.begin("/v1/completions", b"{}", {}) is not None
        for path, body in [("/v1/responses", {}), ("/v1/messages", {}), ("/v1/completions", {"echo": True})]:
            assert everything.begin(path, b"{}", body) is None
        assert Recording(store, 0.0).begin("/v1/completions", b"{}", {}) is None
        for one in (taken, everything):
            await one.stop()


def test_a_share_is_a_number_or_a_percentage():
    assert [parse_share(text) for text in ("1", "0.25", "10%", "100 %", "0")] == [1.0, 0.25, 0.1, 1.0, 0.0]
    for text in ("2", "-1", "101%", "nan", "all", ""):
        with pytest.raises(ConfigError, match="expected a share"):
            parse_share(text)


async def test_feedback_that_was_acknowledged_outlives_a_kill(tmp_path: Path):
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-P", str(SERVER), str(tmp_path), url_in(tmp_path)],
            env=os.environ | {"PYTHONPATH": search_path()},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        assert "serves at" in line, (tmp_path / "stderr").read_text()
        async with aiohttp.ClientSession(line.split()[-1]) as session:
            async with session.post("/v1/completions", json={"model": "tiny", "prompt": "hello"}) as response:
                answer_id = (await response.json())["id"]
            async with session.post("/v1/feedback", json={"id": answer_id, "reward": 0.75}) as response:
                process.kill()
                assert response.status == 200
        process.wait(LONG)
    await until(lambda: not any(lives(int(pid)) for pid in (tmp_path / "pids").read_text().split()))
    async with SqlLightningStore.from_url(url_in(tmp_path)) as store:
        rollout = await store.get_rollout_by_id(f"served-{answer_id}")
        assert rollout is not None and rollout.status == "succeeded"
        assert find_final_reward(await store.query_spans(rollout.rollout_id)) == 0.75

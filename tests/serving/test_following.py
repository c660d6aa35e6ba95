"""Weights change under a server: no request fails, no answer is made of two models, and what is wrong never answers."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import Fatal, NotFound, Recoverable
from rollout_core.base.ids import ContentId
from tests.serving.fronts import MODEL, OTHER, RunningFront, events_of, front_over, put_weights, until


async def who(front: RunningFront, **body: Any) -> str:
    """The weights that answer, which the header names as well."""
    async with front.post("who 3", **body) as response:
        assert response.status == 200, await response.text()
        named = response.headers["x-rollout-model"]
        if body.get("stream"):
            made = {event["choices"][0]["text"] for event in events_of(await response.text())[:-1]}
        else:
            made = {(await response.json())["choices"][0]["text"]}
    assert made == {named}
    return named


async def test_while_weights_change_without_pause_no_request_fails_or_is_answered_by_two(tmp_path: Path):
    models = [MODEL, *(ContentId(f"{number:x}" * 64) for number in range(1, 5))]
    drawn = random.Random(5)
    async with front_over(tmp_path) as front:
        for model in models:
            put_weights(tmp_path, model)
        seen: set[str] = set()
        is_over = False

        async def client(number: int) -> None:
            while not is_over:
                seen.add(await who(front, stream=number % 2 == 0))

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        for _ in range(30):
            await front.replica.change(drawn.choice([model for model in models if model != front.replica.model_id]))
            assert await who(front) == front.replica.model_id
        is_over = True
        await asyncio.gather(*clients)
        assert seen == set(models)
        assert front.replica.num_starts == 1 and await front.figure("rollout_serve_weight_changes ") == 30


async def test_requests_under_way_finish_on_the_old_weights_and_new_ones_wait(tmp_path: Path):
    async with front_over(tmp_path) as front:
        put_weights(tmp_path, OTHER)
        async with front.post("hold", stream=True) as response:
            first = await response.content.readany()
            change = asyncio.create_task(front.replica.change(OTHER))
            await until(lambda: front.replica.holds_requests)
            asked = [asyncio.create_task(who(front)) for _ in range(3)]
            await until(lambda: front.front.num_requests == 4)
            await asyncio.wait([change, *asked], timeout=0.2)
            assert not change.done() and front.notes("asked who 3") == 0
            (tmp_path / "go").touch()
            assert events_of((first + await response.content.read()).decode())[-1] == "data: [DONE]"
            assert response.headers["x-rollout-model"] == MODEL
        await change
        assert await asyncio.gather(*asked) == [OTHER] * 3
        assert front.replica.held_seconds > 0.2


async def test_a_client_that_reads_slowly_does_not_hold_up_a_change(tmp_path: Path):
    async with front_over(tmp_path) as front:
        put_weights(tmp_path, OTHER)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]), limit=1 << 12)
        body = b'{"model": "tiny", "prompt": "pour 200", "stream": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n")
        writer.write(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        assert MODEL.encode() in head
        await front.replica.change(OTHER)  # before the client has read more
        assert front.notes("poured") == 1 and await who(front) == OTHER
        rest = await reader.read(-1)
        assert rest.count(b'"text"') == 200 and rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()


async def test_a_client_that_leaves_does_not_hold_up_a_change(tmp_path: Path):
    async with front_over(tmp_path) as front:
        put_weights(tmp_path, OTHER)
        (tmp_path / "held").write_text("3")  # its place in the cache is given back some steps later
        async with front.post("hold", stream=True) as response:
            await response.content.readany()
            change = asyncio.create_task(front.replica.change(OTHER))
            await until(lambda: front.replica.holds_requests)
            await asyncio.wait([change], timeout=0.1)
            assert not change.done()
            response.close()
        await change
        assert front.notes("forgets") == 4 and await who(front) == OTHER


@asynccontextmanager
async def refused(front: RunningFront, kind: type[Exception], reason: str):
    with pytest.raises(kind, match=reason):
        await front.replica.change(OTHER)
    yield
    assert await who(front) == MODEL == front.replica.model_id
    put_weights(front.folder, OTHER)  # as they should be
    (front.folder / "models" / OTHER / "odd").unlink(missing_ok=True)
    await front.replica.change(OTHER)
    assert await who(front) == OTHER


async def test_weights_that_the_engine_runs_otherwise_than_the_trainer_never_answer(tmp_path: Path):
    async with front_over(tmp_path) as front:
        put_weights(tmp_path, OTHER, logprob=-1.6)
        async with refused(front, Fatal, "disagree by 1.00e-01 nats"):
            assert front.notes(f"loads {MODEL}") == 1 and front.replica.num_starts == 1


async def test_weights_that_are_no_numbers_never_answer(tmp_path: Path):
    async with front_over(tmp_path) as front:
        put_weights(tmp_path, OTHER, logprob=float("nan"))
        async with refused(front, Fatal, "what is not JSON"):
            pass


async def test_weights_that_the_engine_refuses_leave_the_old_ones(tmp_path: Path):
    async with front_over(tmp_path) as front:
        put_weights(tmp_path, OTHER, does="refuse")
        async with refused(front, Fatal, "no such layer"):
            pass


async def test_an_engine_that_dies_of_weights_comes_back_with_the_old_ones(tmp_path: Path):
    async with front_over(tmp_path) as front:
        put_weights(tmp_path, OTHER, does="die")
        async with refused(front, Recoverable, "died"):
            assert (await who(front), front.replica.num_starts) == (MODEL, 2)


async def test_old_weights_that_are_gone_from_the_cache_hold_up_no_change(tmp_path: Path):
    async with front_over(tmp_path) as front:
        put_weights(tmp_path, OTHER)
        shutil.rmtree(tmp_path / "models" / MODEL)
        await front.replica.change(OTHER)
        assert (await who(front), front.replica.num_starts) == (OTHER, 2)


async def test_weights_that_are_not_there_are_noticed_before_requests_wait(tmp_path: Path):
    async with front_over(tmp_path) as front, refused(front, NotFound, "no model"):
        assert front.replica.held_seconds == 0


async def test_a_model_that_differs_in_more_than_its_weights_has_the_engine_started_anew(tmp_path: Path):
    async with front_over(tmp_path) as front:
        put_weights(tmp_path, OTHER)
        (tmp_path / "models" / OTHER / "odd").touch()
        change = asyncio.create_task(front.replica.change(OTHER))
        await until(lambda: front.replica.running is None)
        assert await who(front) == OTHER  # it waits meanwhile
        await change
        assert front.replica.num_starts == 2 and front.notes(f"loads {OTHER}") == 0


async def test_a_model_that_does_not_start_leaves_the_old_one(tmp_path: Path):
    async with front_over(tmp_path) as front:
        put_weights(tmp_path, OTHER, does="refuse")
        (tmp_path / "models" / OTHER / "odd").touch()
        async with refused(front, Fatal, "ended with exit status 3 before it served"):
            assert (await who(front), front.replica.num_starts) == (MODEL, 3)


async def test_an_engine_that_is_killed_after_a_change_comes_back_with_the_new_weights(tmp_path: Path):
    async with front_over(tmp_path) as front:
        put_weights(tmp_path, OTHER)
        await front.replica.change(OTHER)
        os.kill(int((tmp_path / "pids").read_text().split()[-1]), signal.SIGKILL)
        assert (await who(front), front.replica.num_starts) == (OTHER, 2)


async def test_an_engine_that_starts_with_other_bits_than_the_trainers_never_answers(tmp_path: Path):
    put_weights(tmp_path, MODEL, logprob=-9.0)
    with pytest.raises(Fatal, match="disagree"):
        async with front_over(tmp_path):
            pass


async def test_clients_may_ask_for_the_weights_that_answer_and_for_no_others(tmp_path: Path):
    async with front_over(tmp_path) as front:
        put_weights(tmp_path, OTHER)
        assert await who(front, model=MODEL) == MODEL
        await front.replica.change(OTHER)
        assert await who(front, model=OTHER) == OTHER
        status, answered = await front.ask("who 3", model=MODEL)
        assert status == 404 and OTHER in answered["error"]["message"]


class Promoted:
    """What is the latest, or why that is not known."""

    def __init__(self) -> None:
        self.now: ContentId | Exception | None = MODEL
        self.num_looks = 0

    async def __call__(self) -> ContentId | None:
        self.num_looks += 1
        if isinstance(self.now, Exception):
            raise self.now
        return self.now

    async def has_been_seen(self) -> None:
        looked = self.num_looks
        await until(lambda: self.num_looks > looked + 1)


async def readiness(front: RunningFront) -> tuple[int, dict[str, Any]]:
    async with front.client.get("/ready") as response:
        return response.status, await response.json()


async def test_what_is_promoted_answers_and_what_is_gone_back_to_as_well(tmp_path: Path):
    latest = Promoted()
    async with front_over(tmp_path, latest=latest) as front:
        put_weights(tmp_path, OTHER)
        for model in (OTHER, MODEL, OTHER):
            latest.now = model
            await until(lambda model=model: front.replica.model_id == model)
            assert await who(front) == model
        await latest.has_been_seen()
        status, said = await readiness(front)
        assert (status, said["model"], said["latest"], said["follows"]) == (200, OTHER, OTHER, "policy")
        assert "problem" not in said and await front.figure("rollout_serve_behind") == 0


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (OTHER, f"model {OTHER} is the latest 'policy', and cannot be served: NotFound: no model"),
        (None, "'policy' names no model that can be served; the one before answers"),
        (ConnectionError("gone"), "what is the latest 'policy' cannot be read: ConnectionError: gone"),
    ],
    ids=["not there", "nothing of ours", "database away"],
)
async def test_where_the_latest_cannot_be_served_the_one_before_answers_and_the_server_says_so(
    tmp_path: Path, now: Any, reason: str
):
    latest = Promoted()
    async with front_over(tmp_path, latest=latest) as front:
        latest.now = now
        await latest.has_been_seen()
        status, said = await readiness(front)
        assert status == 200 and said["problem"].startswith(reason)
        assert await front.figure("rollout_serve_behind") == 1 and await who(front) == MODEL
        latest.now = MODEL
        await latest.has_been_seen()
        assert "problem" not in (await readiness(front))[1]


async def test_weights_that_were_refused_are_not_tried_again_at_once(tmp_path: Path):
    latest = Promoted()
    async with front_over(tmp_path, latest=latest) as front:
        put_weights(tmp_path, OTHER, logprob=-9.0)
        latest.now = OTHER
        await latest.has_been_seen()
        await until(lambda: front.notes(f"loads {OTHER}") == 1)
        await latest.has_been_seen()
        assert front.notes(f"loads {OTHER}") == 1
        latest.now = MODEL
        await latest.has_been_seen()
        put_weights(tmp_path, OTHER)
        latest.now = OTHER  # promoted anew
        await until(lambda: front.replica.model_id == OTHER)

"""The server in front of an engine: who is let in, what is refused, and what happens when engine or client go away."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.serving.program import ServingSettings
from rollout_core.serving.requests import ANSWERED, IGNORED, KEPT_AT_A_VENDOR, read_request
from tests.conftest import PROJECT
from tests.serving.fronts import LONG, MODEL, events_of, front_over, replica_in, until
from tests.support.alive import lives


async def test_an_answer_names_the_weights_that_made_it(tmp_path: Path):
    async with front_over(tmp_path) as front, front.post("hello") as response:
        assert (await response.json())["choices"][0]["text"] == "hello"
        assert response.headers["x-rollout-model"] == MODEL


async def test_tokens_of_a_stream_come_one_by_one(tmp_path: Path):
    async with front_over(tmp_path) as front, front.post("hold", stream=True) as response:
        first = await response.content.readuntil(b"\n\n")  # while the engine has not made the rest
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"] == "0"
        assert response.headers["x-rollout-model"] == MODEL
        assert "text/event-stream" in response.headers["content-type"]
        (tmp_path / "go").touch()
        assert await response.text() == "data: [DONE]\n\n"


@pytest.mark.parametrize("header", [{"authorization": "Bearer second"}, {"x-api-key": "second"}])
async def test_each_of_several_keys_opens(tmp_path: Path, header: dict[str, str]):
    async with front_over(tmp_path, keys=["first", "second"]) as front:
        for given, status in [({}, 401), ({"authorization": "Bearer wrong"}, 401), (header, 200)]:
            async with aiohttp.ClientSession(front.url, headers=given) as client:
                body = {"model": "tiny", "prompt": "hello"}
                async with client.post("/v1/completions", json=body) as response:
                    assert response.status == status
                    said = await response.json()
                async with client.get("/metrics") as response:
                    assert response.status == status
                async with client.get("/ready") as response:
                    assert response.status == 200
            if status == 401:
                assert said["error"]["type"] == "authentication_error"
        assert front.notes("asked hello") == 1


async def test_without_a_key_pages_of_other_sites_are_refused(tmp_path: Path):
    async with front_over(tmp_path) as front:
        async with front.client.get("/v1/models", headers={"origin": "http://elsewhere.example"}) as response:
            assert response.status == 403


def test_beyond_loopback_a_key_is_needed(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="there is no API key"):
        ServingSettings("0.0.0.0", 0).keys()
    with pytest.raises(ConfigError, match="SERVE_KEY, which is not set"):
        ServingSettings("0.0.0.0", 0, ("SERVE_KEY",)).keys()
    monkeypatch.setenv("SERVE_KEY", "secret")
    assert ServingSettings("0.0.0.0", 0, ("SERVE_KEY",)).keys() == ["secret"]


@pytest.mark.parametrize(
    ("path", "field", "reason"),
    [
        ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ("/v1/responses", {"conversation": "conv_1"}, "conversation is not supported"),
        ("/v1/responses", {"background": True}, "background is not supported"),
        ("/v1/responses", {"store": True}, "store is not supported"),
        ("/v1/chat/completions", {"store": True}, "store is not supported"),
        ("/v1/completions", {"temprature": 1.0}, "temprature is not supported"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(tmp_path: Path, path: str, field: dict, reason: str):
    async with front_over(tmp_path) as front:
        status, said = await front.ask("hello", path=path, **field)
        assert status == 400 and reason in said["error"]["message"]
        assert front.notes("asked hello") == 0
        # What says that nothing is to be kept, or says nothing, is taken.
        status, _ = await front.ask("hello", path=path, **{"store": False, "metadata": {"a": "b"}, "user": "me"})
        assert status == 200


async def test_bodies_that_are_no_requests_are_refused(tmp_path: Path):
    async with front_over(tmp_path, max_body_bytes=1000) as front:
        for data, status in [(b"{", 400), (b"[]", 400), (b'{"prompt": "' + b"x" * 1000 + b'"}', 413)]:
            async with front.client.post("/v1/completions", data=data) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (status, status)
        async with front.client.post("/v1/messages", data=b"{") as response:  # in the form of Anthropic's API
            said = await response.json()
            assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")


async def test_paths_of_the_engine_that_are_not_for_clients_are_not_there(tmp_path: Path):
    async with front_over(tmp_path) as front:
        for path in ("/openapi.json", "/v1/../openapi.json", "/tokenize"):
            async with front.client.get(f"{front.url}{path}") as response:
                assert response.status == 404


async def test_models_are_listed_without_places_of_this_machine(tmp_path: Path):
    async with front_over(tmp_path) as front:
        async with front.client.get("/v1/models") as response:
            [listed] = (await response.json())["data"]
        assert (listed["id"], listed["root"], listed["max_model_len"]) == ("tiny", MODEL, 64)
        for name, status in [("tiny", 200), (MODEL, 200), ("other", 404)]:
            async with front.client.get(f"/v1/models/{name}") as response:
                assert response.status == status


async def test_more_requests_than_the_queue_holds_get_429(tmp_path: Path):
    async with front_over(tmp_path, max_requests=2) as front:
        held = [asyncio.create_task(front.ask("hold")) for _ in range(2)]
        await until(lambda: front.notes("asked hold") == 2)
        async with front.post("hello") as response:
            assert response.status == 429
            assert int(response.headers["retry-after"]) >= 1
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        (tmp_path / "go").touch()
        assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]
        assert (await front.ask("hello"))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_work_at_the_engine(tmp_path: Path, stream: bool):
    async with front_over(tmp_path) as front:
        async with aiohttp.ClientSession(front.url) as client:
            body = {"model": "tiny", "prompt": "hold", "stream": stream}
            asked = asyncio.create_task(client.post("/v1/completions", json=body).__aenter__())
            await until(lambda: front.notes("asked hold") == 1)
            asked.cancel()
        await until(lambda: front.notes("left") == 1)
        assert (await front.ask("hello"))[0] == 200
        assert await front.figure("rollout_serve_clients_left_total") == 1
        assert await front.figure("rollout_serve_requests_under_way") == 0


async def test_a_slow_client_holds_up_nobody_and_fills_no_memory(tmp_path: Path):
    async with front_over(tmp_path) as front:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", int(front.url.rpartition(":")[2])))
        body = json.dumps({"model": "tiny", "prompt": "flood", "stream": True}).encode()
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        before = -1
        async with asyncio.timeout(LONG):  # until the engine cannot write on
            while before != front.notes("flooded") or before < 1:
                before = front.notes("flooded")
                assert (await front.ask("hello"))[0] == 200
                assert slow.recv(1)
                await asyncio.sleep(0.2)
        assert before < 400  # 25 MB, of which the kernel's buffers have most
        slow.close()
        await until(lambda: front.notes("left") == 1)


async def test_a_request_that_has_not_begun_is_asked_again_when_the_engine_dies(tmp_path: Path):
    (tmp_path / "deaths").write_text("1")
    async with front_over(tmp_path) as front:
        status, said = await front.ask("die")
        assert (status, said["choices"][0]["text"]) == (200, "die")
        assert front.notes("asked die") == 2
        assert await front.figure("rollout_serve_retries_total") == 1
        assert await front.figure("rollout_serve_engine_starts") == 2


async def test_a_request_that_engines_die_of_is_not_asked_for_ever(tmp_path: Path):
    (tmp_path / "deaths").write_text("100")
    async with front_over(tmp_path) as front:
        status, said = await front.ask("die", stream=True)
        assert status == 503 and "the engine died 3 times with this request" in said["error"]["message"]
        assert front.notes("asked die") == 3
        assert (await front.ask("hello"))[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_stream_that_breaks_ends_with_one_clean_event(tmp_path: Path, path: str):
    async with front_over(tmp_path) as front, front.post("half", path=path, stream=True) as response:
        if path == "/v1/messages":  # the small engine reads prompts alone
            assert response.status == 200
        events = events_of(await response.text())
        *before, last = events
        assert [one["choices"][0]["text"] for one in before] == ["0", "1"]
        message = last["message"] if path == "/v1/responses" else last["error"]["message"]
        assert "the engine died before the end of the answer" in message
        assert front.notes("asked half") == 1  # an answer that has begun is not made twice
        assert await front.figure("rollout_serve_broken_streams_total") == 1


async def test_the_server_says_that_its_engine_is_away(tmp_path: Path):
    async with front_over(tmp_path) as front:
        running = front.replica.running
        assert running is not None
        running.process.send_signal(signal.SIGKILL)
        await until(lambda: front.replica.running is None)
        async with front.client.get("/ready") as response:
            assert response.status == 503 and "died" in (await response.json())["why"]
        async with front.client.get("/health") as response:
            assert response.status == 200
        await until(lambda: front.replica.running is not None)
        async with front.client.get("/ready") as response:
            assert response.status == 200


async def test_a_server_that_stops_lets_requests_finish(tmp_path: Path):
    async with front_over(tmp_path) as front:
        async with front.post("hold", stream=True) as response:
            await response.content.readuntil(b"\n\n")
            front.server.should_exit = True
            await until(lambda: front.front.is_draining)
            (tmp_path / "go").touch()
            assert await response.text() == "data: [DONE]\n\n"
        await front.task


async def test_what_is_not_finished_in_time_ends_with_an_error(tmp_path: Path):
    async with front_over(tmp_path, drain_seconds=0.5) as front:
        waiting = asyncio.create_task(front.ask("hold"))
        async with front.post("hold", stream=True) as response:
            await response.content.readuntil(b"\n\n")
            await until(lambda: front.notes("asked hold") == 2)
            front.server.should_exit = True
            [last] = events_of(await response.text())
            assert "the server stopped" in last["error"]["message"]
        status, said = await waiting
        assert status == 503 and "the server stops" in said["error"]["message"]
        await front.task


async def test_the_figures_are_the_engines_and_its_own(tmp_path: Path):
    async with front_over(tmp_path) as front:
        await front.ask("hello")
        assert await front.figure("engine_figure") == 1
        assert await front.figure('rollout_serve_requests_total{path="/v1/completions",status="200"}') == 1
        assert await front.figure(f'rollout_serve_model_info{{model_id="{MODEL}"') == 1


async def test_the_socket_is_for_this_user_alone_and_gone_in_the_end(tmp_path: Path):
    async with front_over(tmp_path) as front:
        running = front.replica.running
        assert running is not None
        place = Path(running.session.connector.path)  # pyright: ignore[reportOptionalMemberAccess,reportAttributeAccessIssue]
        assert place.is_socket() and place.parent.stat().st_mode & 0o777 == 0o700
    assert not place.parent.exists() and not lives(running.process.pid)


def words_of(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        return process.cmdline()
    return []


async def test_an_engine_that_never_starts_is_an_error(tmp_path: Path):
    replica = replica_in(tmp_path, program=lambda socket, model: ["false"])
    with pytest.raises(Fatal, match="ended with exit status 1 before it served"):
        await replica.started
    await replica.stop()
    replica = replica_in(tmp_path, program=lambda socket, model: ["sleep", "1000"], start_seconds=0.2)
    with pytest.raises(Fatal, match="did not start within"):
        await replica.started
    await replica.stop()
    assert not [child for child in psutil.Process().children() if "1000" in words_of(child)]


async def test_an_engine_that_dies_soon_again_is_started_later_each_time(tmp_path: Path):
    async with front_over(tmp_path) as front:
        waits: list[float] = []
        for _ in range(2):
            running = await front.replica.wait(LONG)
            starts = front.replica.num_starts
            running.process.kill()
            await until(lambda: front.replica.running is None)
            began = time.monotonic()
            await until(lambda starts=starts: front.replica.num_starts > starts)
            waits.append(time.monotonic() - began)
        assert waits[0] >= 0.9 and waits[1] >= 1.9


def rows_of_the_table() -> list[tuple[list[str], str, str]]:
    """Fields, place and fate of each row of the page's table of fields."""
    page = (PROJECT / "docs" / "serving.md").read_text()
    table = page.partition("| field | where | what happens |\n")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    return [(re.findall(r"`(\w+)`", fields), where.strip("`"), fate) for fields, where, fate in cells]


def test_the_page_says_of_each_field_what_happens_to_it():
    rows = rows_of_the_table()
    refused = {field for fields, _, fate in rows if fate.startswith("refused") for field in fields}
    taken = {field for fields, _, fate in rows if fate.startswith("taken") for field in fields}
    assert refused == {*KEPT_AT_A_VENDOR, "background", "store"}
    assert taken == IGNORED - {"store"}
    for fields, where, fate in rows:
        for field in fields:
            paths = ANSWERED if where == "everywhere" else (where,)
            for path in paths:
                data = json.dumps({field: True}).encode()
                if fate.startswith("honoured"):
                    assert read_request(path, data, {field}) == {field: True}
                elif fate.startswith("taken"):
                    assert read_request(path, data, ()) == {field: True}
                else:
                    with pytest.raises(ConfigError, match=f"{field} is not supported"):
                        read_request(path, data, {field})

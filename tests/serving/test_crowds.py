"""Clients by the hundred that vanish in the middle of their requests."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import psutil

from tests.serving.fronts import RunningFront, front_over, until

VANISHING = 300


def stream_of(front: RunningFront, prompt: str) -> socket.socket:
    """A client that has asked for a stream, and reads nothing of its own accord."""
    body = json.dumps({"model": "tiny", "prompt": prompt, "stream": True}).encode()
    client = socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])))
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    return client


async def test_nothing_is_left_of_clients_that_vanish(tmp_path: Path):
    async with front_over(tmp_path) as front:
        assert (await front.ask("hello"))[0] == 200
        own = psutil.Process()
        files, tasks = own.num_fds(), len(asyncio.all_tasks())
        for _ in range(2):  # what the first leave idle is used by the second
            asked = front.notes("asked hold")
            clients = [stream_of(front, "hold") for _ in range(VANISHING // 2)]
            for client in clients[::2]:  # at once, maybe before the request is read
                client.close()
            await until(lambda asked=asked: front.notes("asked hold") >= asked + VANISHING // 4)
            for client in clients[1::2]:
                client.close()
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        await until(lambda: own.num_fds() <= files)
        assert await front.figure("rollout_serve_requests_under_way") == 0
        assert (await front.ask("hello"))[0] == 200

"""Spans on their way to a store over HTTP whose server is killed and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout_core.agents.emitters import emit_annotation, find_final_reward
from rollout_core.agents.lit_agent import llm_rollout
from rollout_core.agents.otel import OtelTracer
from rollout_core.agents.runner import LitAgentRunner
from rollout_core.store import LLM, LightningStoreClient
from tests.conftest import PROJECT
from tests.store.patience import LONG, until
from tests.store.ports import own_port

NUM_SPANS = 80
AWAY_SECONDS = 4.0
Serve = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def port() -> Iterator[int]:
    with own_port() as port:
        yield port


@pytest.fixture
def serve(port: int, tmp_path: Path, server_logs) -> Iterator[Serve]:
    """Starts a server of one SQLite file at one port, and returns when it listens."""
    started: list[subprocess.Popen[str]] = []
    log_file = server_logs.watch(tmp_path / "servers.log")

    def start() -> subprocess.Popen[str]:
        command = ["store", "serve", "--database", f"sqlite:///{tmp_path}/rollout.db", "--port", str(port)]
        with log_file.open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", "from deployments.cli import main; main()", *command],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": str(PROJECT)},
            )
        started.append(process)
        assert process.stdout is not None
        assert any(line.startswith("serving at http://") for line in process.stdout), log_file.read_text()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("moment", [NUM_SPANS // 8, NUM_SPANS - 1], ids=["in the middle", "at the end"])
async def test_spans_wait_for_a_store_that_is_away(serve, port, moment):
    """And come in order, none missing and none twice, while the agent notices nothing."""
    reached, is_away = threading.Event(), threading.Event()
    longest_seconds, made_while_away, latest_seconds = 0.0, 0, 0.0

    @llm_rollout
    def agent(task, llm):
        nonlocal longest_seconds, made_while_away, latest_seconds
        for number in range(NUM_SPANS):
            started = time.monotonic()
            emit_annotation({"number": number})
            longest_seconds = max(longest_seconds, time.monotonic() - started)
            made_while_away += is_away.is_set()
            if number == moment:
                reached.set()
                is_away.wait(LONG)
            started = time.monotonic()
            time.sleep(0.05)
            latest_seconds = max(latest_seconds, time.monotonic() - started - 0.05)
        return 0.5

    server = await asyncio.to_thread(serve)
    async with LightningStoreClient(f"http://127.0.0.1:{port}") as client:
        await client.add_resources({"main": LLM(endpoint="http://localhost:9/v1", model="m")})
        queued = await client.enqueue_rollout(1)
        runner = LitAgentRunner(OtelTracer(instrument=[]), max_rollouts=1, poll_interval=0.05, heartbeat_interval=0.5)
        async with runner.run_context(agent=agent, store=client) as worker:
            work = asyncio.ensure_future(worker.iter())
            assert await asyncio.to_thread(reached.wait, LONG)
            server.send_signal(signal.SIGKILL)
            await asyncio.to_thread(server.wait)
            is_away.set()
            await asyncio.sleep(AWAY_SECONDS)
            if moment < NUM_SPANS - 1:
                await until(lambda: made_while_away > 10)
            assert not work.done(), "an attempt ends when its spans are stored"
            await asyncio.to_thread(serve)
            is_away.clear()
            await asyncio.wait_for(work, LONG)

        [attempt] = await client.query_attempts(queued.rollout_id)
        assert attempt.status == "succeeded"
        spans = list(await client.query_spans(queued.rollout_id, attempt.attempt_id))
    numbers = [span.sequence_id for span in spans]
    assert numbers == sorted(set(numbers))
    assert [span.attributes["number"] for span in spans[:-1]] == list(range(NUM_SPANS))
    assert find_final_reward(spans) == 0.5
    assert longest_seconds < 1.0 + latest_seconds, "it waits for no more than a machine that is busy with others"

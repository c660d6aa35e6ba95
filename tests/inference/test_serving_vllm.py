"""The engine's server over a real vLLM engine: its tokens, its swaps, and its death."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import psutil
import pytest
from batches import make_batch

from rollout_core.base.errors import Recoverable
from rollout_core.config import SamplingParams, VLLMBackend
from rollout_core.data.samples import Completion
from rollout_core.inference.backend import ModelRef, Request
from rollout_core.inference.engines import close_engine, engine
from rollout_core.inference.serving import EngineServer
from rollout_core.models.pretrained import load_tokenizer
from tests.store.patience import LONG, until

pytestmark = pytest.mark.engine

BACKEND = VLLMBackend(max_model_len=96, max_num_seqs=16, hang_timeout_seconds=20)


def engine_processes() -> list[psutil.Process]:
    """Those of vLLM engines of this process."""
    return [child for child in psutil.Process().children(recursive=True) if child.name().startswith("VLLM")]


@pytest.fixture(autouse=True, scope="module")
def others():
    """Processes of engines that other tests use; those of this file end with it."""
    close_engine()
    with tempfile.TemporaryDirectory(prefix="v") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)  # of the engines alone: a killed one's rendezvous file stays there
        yield engine_processes()
        close_engine()


@asynccontextmanager
async def started(model: ModelRef) -> AsyncIterator[EngineServer]:
    server = EngineServer(BACKEND)
    await server.start(model)
    try:
        yield server
    finally:
        await server.stop()


async def test_tokens_swaps_and_64_requests(small, other_small):
    prompts = [load_tokenizer(small.folder)(f"sort {number} =")["input_ids"] for number in range(64)]
    params = SamplingParams(max_tokens=12, logprobs=1)

    def direct(model: ModelRef) -> list[Completion]:
        with engine(BACKEND, model) as running:
            return running.generate(
                [Request(str(number), prompt, params, number) for number, prompt in enumerate(prompts)]
            )

    async with (
        started(small) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="EMPTY", max_retries=0) as client,
    ):

        async def ask(number: int):
            extra = {"return_token_ids": True}
            fields = {"prompt": prompts[number], "seed": number, "max_tokens": 12, "logprobs": 1}
            return (await client.completions.create(model="policy", extra_body=extra, **fields)).choices[0]

        for model in (small, other_small):
            if model is other_small:
                await server.load(model)
            answers = await asyncio.gather(*map(ask, range(64)))

            async with server.lent():
                wanted = await asyncio.to_thread(direct, model)
            for answer, completion in zip(answers, wanted, strict=True):
                assert answer.token_ids == completion.token_ids and answer.text == completion.text
                assert answer.logprobs.token_logprobs == completion.logprobs
                assert answer.finish_reason == completion.finish_reason


@pytest.mark.parametrize(
    ("end", "told"),
    [
        pytest.param(psutil.Process.kill, "engine process died", id="killed"),
        pytest.param(psutil.Process.suspend, "gave no token for 20 s", id="hung", marks=pytest.mark.campaign),
    ],
)
async def test_a_dead_or_hung_engine_is_a_passing_fault_of_which_nothing_is_left_and_is_started_again(
    small, caplog, others, end, told
):
    async with (
        started(small) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="EMPTY", max_retries=0) as client,
    ):
        fields = {"model": "policy", "prompt": "sort 1 =", "max_tokens": 80, "extra_body": {"ignore_eos": True}}
        before = [process for process in engine_processes() if process not in others]
        [core] = [process for process in before if process.name().startswith("VLLM::EngineC")]
        assert len(before) == 2, "the engine and its worker"
        asking = [asyncio.create_task(client.completions.create(**fields)) for _ in range(200)]
        await until(lambda: server.num_running > 64)
        end(core)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, Exception)]
        assert failed and all(isinstance(error, openai.InternalServerError) for error in failed)
        assert {error.status_code for error in failed} == {503}
        assert (await client.completions.create(**fields)).usage.completion_tokens == 80
        assert told in caplog.text
        _, alive = psutil.wait_procs(before, timeout=LONG)
        assert not alive, "processes of the first engine"


@pytest.mark.campaign
async def test_samples_that_a_hung_engine_has_not_finished_are_taken_again_from_another(small, tmp_path, others):
    prompts = [f"sort {number} 3 1 =" for number in range(60)]
    whole, cut = (make_batch(tmp_path / name, small, prompts) for name in ("whole", "cut"))
    with engine(BACKEND, small) as running:
        expected = await whole.complete(running, commit_size=8)
        first = [process for process in engine_processes() if process not in others]
        with pytest.raises(Recoverable, match="gave no token for 20 s"):
            under_way = asyncio.create_task(cut.complete(running, commit_size=8))
            while not cut.progress or cut.progress[-1].done < 8:
                await asyncio.sleep(0)
            # Where the model computes; the engine itself answers that it lives.
            [worker] = [process for process in first if not process.name().startswith("VLLM::EngineC")]
            worker.suspend()
            await under_way
    close_engine()  # as the stage that fails does
    kept = (await cut.statuses())["succeeded"]
    assert 8 <= kept < 60
    with engine(BACKEND, small) as running:
        assert await cut.complete(running, commit_size=8) == expected
    assert set((await cut.successes()).values()) == {1}, "none is taken twice"
    assert psutil.wait_procs(first, timeout=LONG)[1] == []

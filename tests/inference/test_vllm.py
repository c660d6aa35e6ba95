"""The vLLM backend on a real engine: right, repeatable bit for bit, guarded after weight updates, gone in the end."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from alike import GREEDY, PROMPTS, TOLERANCE, assert_alike, requests
from batches import make_batch, ref

from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.config import SamplingParams, TransformersBackend, VLLMBackend
from rollout_core.data.samples import Completion, decode_completions_blob, encode_completion
from rollout_core.inference.backend import ModelRef, Request
from rollout_core.inference.engine_process import EngineProcess
from rollout_core.inference.hf import TransformersEngine, _distribution
from rollout_core.models.pretrained import load_causal_lm
from tests.support.padding import pad_vocabulary

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def small_in_engine(vllm_engine, small):
    vllm_engine.update_weights(small)


@pytest.fixture(scope="module")
def hf(small):
    return TransformersEngine(TransformersBackend(), small)


def test_a_plan_knows_the_head_sizes_that_vllm_takes_on_a_cpu():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from rollout_core.plans.plan import CPU_HEAD_SIZES

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_SIZES


def test_its_process_is_the_one_started_ahead_and_its_worker_a_fork_of_that(vllm_engine):
    """Where another release of vLLM starts them in another way, nothing but the time would show it."""
    [process] = vllm_engine._llm.llm_engine.engine_core.resources.engine_manager.processes
    assert isinstance(process, EngineProcess)
    [worker] = [child for child in psutil.Process(process.pid).children() if child.name().startswith("VLLM")]
    # A program that is started anew is mapped to other addresses.
    first, second = (Path(f"/proc/{pid}/maps").read_text().split()[0] for pid in (process.pid, worker.pid))
    assert first == second


def trainer_logprobs(
    model: ModelRef, request: Request, completion: Completion, known_ids: int | None = None
) -> torch.Tensor:
    """Log-probability of each token under the request's own distribution, by the trainer's model."""
    ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]])
    with torch.no_grad():
        logits_TV = load_causal_lm(model.folder)(ids).logits[0, len(request.prompt_token_ids) - 1 : -1, :known_ids]
    return torch.stack(
        [
            _distribution(logits_V, request.params)[token]
            for logits_V, token in zip(logits_TV, completion.token_ids, strict=True)
        ]
    )


# What it generates


def test_greedy_equals_transformers(vllm_engine, hf, tokenizer):
    asked = requests(tokenizer, GREEDY)
    assert_alike(vllm_engine.generate(asked), hf.generate(asked))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, max_tokens=24),
        SamplingParams(temperature=1.0, max_tokens=24),
        SamplingParams(temperature=0.7, top_k=5, max_tokens=24),
        SamplingParams(temperature=1.3, top_p=0.6, max_tokens=24),
        SamplingParams(temperature=0.0, top_k=1, max_tokens=24),
    ],
    ids=["T=0.7", "T=1", "top-k", "top-p", "greedy and top-k"],
)
def test_logprobs_are_the_trainers_under_the_distribution_drawn_from(vllm_engine, small, tokenizer, params):
    asked = requests(tokenizer, params)
    for request, completion in zip(asked, vllm_engine.generate(asked), strict=True):
        assert len(completion.logprobs) == len(completion.token_ids)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), trainer_logprobs(small, request, completion), atol=TOLERANCE, rtol=0
        )


def test_ids_beyond_the_tokenizer_are_never_drawn(padded, tokenizer, tmp_path):
    """Also after its weights were replaced, for which trainer and engine compare log-probabilities."""
    from rollout_core.inference.vllm_backend import VLLMEngine

    pad_vocabulary(padded.folder, tmp_path / "again", seed=2)
    known, hf = len(tokenizer), TransformersEngine(TransformersBackend(), padded)
    engine = VLLMEngine(VLLMBackend(max_model_len=96, max_num_seqs=16), padded)
    try:
        for model in (padded, ref(tmp_path / "again")):
            engine.update_weights(model)
            hf.update_weights(model)
            asked = requests(tokenizer, GREEDY)
            assert_alike(engine.generate(asked), hf.generate(asked))
            for params in (SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, top_k=5, logprobs=3)):
                asked = requests(tokenizer, params)
                for request, completion in zip(asked, engine.generate(asked), strict=True):
                    assert max(completion.token_ids) < known
                    expected = trainer_logprobs(model, request, completion, known)
                    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=TOLERANCE, rtol=0)
    finally:
        engine.close()


def test_tokens_and_logprobs_are_bitwise_equal_in_any_batch(vllm_engine, tokenizer):
    """More requests than the engine runs together, alone, in the other order, and again."""
    assert vllm_engine.batch_invariant
    asked = requests(tokenizer, SamplingParams(temperature=0.9, max_tokens=32), prompts=PROMPTS * 8)
    together = [encode_completion(completion) for completion in vllm_engine.generate(asked)]
    assert len(set(together)) == 40
    assert [encode_completion(completion) for completion in vllm_engine.generate(asked)] == together
    assert [encode_completion(completion) for completion in vllm_engine.generate(asked[::-1])][::-1] == together
    assert [encode_completion(vllm_engine.generate([request])[0]) for request in asked[:12]] == together[:12]


def test_a_completion_ends_at_its_end_token_or_at_its_length(vllm_engine, tokenizer):
    ends = {"stop": 0, "length": 0}
    params = SamplingParams(temperature=2.0, max_tokens=60)
    for completion in vllm_engine.generate(requests(tokenizer, params, prompts=PROMPTS * 8)):
        ends[completion.finish_reason] += 1
        if completion.finish_reason == "stop":
            assert completion.token_ids.index(tokenizer.eos_token_id) == len(completion.token_ids) - 1
        else:
            assert len(completion.token_ids) == 60
        assert "<|endoftext|>" not in completion.text
    assert min(ends.values()) >= 2, ends


def test_stop_strings_do_what_they_do_in_transformers(vllm_engine, hf, tokenizer):
    plain = hf.generate(requests(tokenizer, GREEDY))
    for prompt, completion in zip(PROMPTS, plain, strict=True):
        params = GREEDY.model_copy(update={"stop": (completion.text[5:8], "never")})
        [stopped] = asked = requests(tokenizer, params, prompts=[prompt])
        assert_alike(vllm_engine.generate(asked), hf.generate(asked))
        assert hf.generate([stopped])[0].finish_reason == "stop"


def test_text_is_the_same_with_stop_strings_that_never_come(vllm_engine, tokenizer):
    asked = requests(tokenizer, GREEDY)
    never = requests(tokenizer, GREEDY.model_copy(update={"stop": ("never to be seen",)}))
    assert [one.text for one in vllm_engine.generate(asked)] == [one.text for one in vllm_engine.generate(never)]


# Requests


def test_requests_are_drawn_as_there_is_room_and_all_come_back(vllm_engine, tokenizer):
    drawn = 0

    def source():
        nonlocal drawn
        for request in requests(tokenizer, SamplingParams(max_tokens=4), prompts=PROMPTS * 20):
            drawn += 1
            yield request

    stream = vllm_engine.stream(source())
    first = next(stream)
    assert drawn <= 2 * 16 + 16, "twice the batch, and what has finished"
    keys = [first.key, *(completion.key for completion in stream)]
    assert sorted(keys) == sorted(f"r{number}" for number in range(100))


def test_an_abandoned_stream_leaves_the_engine_idle_and_usable(vllm_engine, tokenizer):
    asked = requests(tokenizer, SamplingParams(max_tokens=40), prompts=PROMPTS * 8)
    expected = vllm_engine.generate(asked)
    for taken in (1, 7):
        stream = vllm_engine.stream(iter(asked))
        list(itertools.islice(stream, taken))
        stream.close()
        assert not vllm_engine._llm.llm_engine.has_unfinished_requests()
        assert vllm_engine.generate(asked) == expected


def test_requests_that_fail_leave_the_engine_idle_and_usable(vllm_engine, tokenizer):
    asked = requests(tokenizer, GREEDY)

    def source():
        yield asked[0]
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(vllm_engine.stream(source()))
    too_long = Request("long", [5] * 200, GREEDY, 0)
    too_hot = Request("hot", [5], SamplingParams(temperature=2.1), 0)
    for refused, reason in (
        (too_long, "request long failed: vLLM refuses it: .* 96 tokens"),
        (too_hot, r"request hot failed: vLLM refuses it: .*temperature .*\[0, 2\]"),
    ):
        with pytest.raises(Fatal, match=reason):
            vllm_engine.generate([asked[0], refused])
    assert len(vllm_engine.generate(asked)) == len(asked)


async def test_a_batch_cut_short_goes_on_and_ends_byte_equal(vllm_engine, small, tmp_path):
    prompts = [f"sort {number} 3 1 =" for number in range(60)]
    whole, cut = (make_batch(tmp_path / name, small, prompts) for name in ("whole", "cut"))
    expected = await whole.complete(vllm_engine, commit_size=8)
    running = asyncio.create_task(cut.complete(vllm_engine, commit_size=8))
    while not cut.progress or cut.progress[-1].done < 8:
        await asyncio.sleep(0)  # a longer one may last until all are done
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    cut.progress.clear()
    assert await cut.complete(vllm_engine, commit_size=16) == expected
    assert cut.progress[0].done >= 8
    rows = decode_completions_blob(cut.objects.get_bytes(expected.completions))
    assert len({tuple(row.token_ids) for row in rows}) == 60


# Weights


def test_new_weights_are_used_at_once_and_the_old_ones_again(vllm_engine, small, other_small, tokenizer):
    asked = requests(tokenizer, GREEDY)
    before = vllm_engine.generate(asked)
    vllm_engine.update_weights(other_small)
    assert vllm_engine.model_id == other_small.content_id
    after = vllm_engine.generate(asked)
    assert_alike(after, TransformersEngine(TransformersBackend(), other_small).generate(asked))
    assert [one.token_ids for one in after] != [one.token_ids for one in before]
    vllm_engine.update_weights(small)
    assert vllm_engine.generate(asked) == before


def test_weights_stored_in_another_dtype_are_brought_to_the_engines(
    vllm_engine, small, other_small, tokenizer, tmp_path
):
    """So a base model in bfloat16 and its checkpoints in float32 share an engine."""
    from rollout_core.models.pretrained import copy_tokenizer

    load_causal_lm(other_small.folder, "bfloat16").save_pretrained(tmp_path / "base")
    copy_tokenizer(other_small.folder, tmp_path / "base")
    base, asked = ref(tmp_path / "base"), requests(tokenizer, GREEDY)
    before = vllm_engine.generate(asked)
    vllm_engine.update_weights(base)
    assert_alike(vllm_engine.generate(asked), TransformersEngine(TransformersBackend(), base).generate(asked))
    vllm_engine.update_weights(small)
    assert vllm_engine.generate(asked) == before


@pytest.mark.parametrize("fault", ["nothing is loaded", "another model is loaded", "one tensor is a little off"])
def test_the_canary_catches_an_engine_with_other_weights(
    vllm_engine, small, other_small, tokenizer, monkeypatch, tmp_path, fault
):
    asked = requests(tokenizer, GREEDY)
    expected = TransformersEngine(TransformersBackend(), other_small).generate(asked)
    call = vllm_engine._llm.collective_rpc

    def faulty(method, args):
        if fault == "another model is loaded":
            call(method, args=(str(small.folder),))
        elif fault == "one tensor is a little off":
            policy = load_causal_lm(other_small.folder)
            with torch.no_grad():
                policy.model.norm.weight.mul_(1.02)
            policy.save_pretrained(tmp_path / "off")
            call(method, args=(str(tmp_path / "off"),))

    monkeypatch.setattr(vllm_engine._llm, "collective_rpc", faulty)
    with pytest.raises(
        Fatal, match=f"after the weight update to model {other_small.content_id.short} engine and trainer"
    ):
        vllm_engine.update_weights(other_small)
    with pytest.raises(Fatal):
        vllm_engine.update_weights(other_small)
    monkeypatch.undo()
    vllm_engine.update_weights(other_small)
    assert_alike(vllm_engine.generate(asked), expected)


def test_on_a_gpu_vllm_itself_reloads_weights(vllm_engine, small, other_small, monkeypatch):
    """Its workers have no extension of ours. No GPU is needed to see which method they are asked for."""
    asked = []
    monkeypatch.setattr(vllm_engine, "_device", "cuda")
    monkeypatch.setattr(vllm_engine._llm, "collective_rpc", lambda method, **more: asked.append((method, more)))
    monkeypatch.setattr(vllm_engine, "_check_parity", lambda: None)
    vllm_engine.update_weights(other_small)
    assert asked == [("reload_weights", {"kwargs": {"weights_path": str(other_small.folder)}})]
    monkeypatch.undo()
    vllm_engine._suspect = True
    vllm_engine.update_weights(small)


def test_weights_that_cannot_be_loaded_leave_the_engine_in_doubt_until_others_are(
    vllm_engine, small, other_small, tokenizer, tmp_path
):
    shutil.copytree(other_small.folder, tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    before = vllm_engine.generate(requests(tokenizer, GREEDY))
    with pytest.raises(Exception, match=r"(?i)safetensor|header|incomplete|weights"):
        vllm_engine.update_weights(ref(tmp_path / "broken"))
    vllm_engine.update_weights(small)
    assert vllm_engine.generate(requests(tokenizer, GREEDY)) == before


# Start and end


def test_the_context_is_the_configured_one(vllm_engine):
    assert vllm_engine.max_model_len == 96


def test_a_model_vllm_does_not_know_is_a_config_error(small, tmp_path):
    from rollout_core.inference.vllm_backend import VLLMEngine

    shutil.copytree(small.folder, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architectures": ["Nonsense"], "model_type": "nonsense"}))
    with pytest.raises(ConfigError, match="vLLM could not start with model"):
        VLLMEngine(VLLMBackend(), ref(tmp_path / "model"))


def test_a_context_longer_than_the_model_is_a_config_error(small):
    from rollout_core.inference.vllm_backend import VLLMEngine

    with pytest.raises(ConfigError, match="257"):
        VLLMEngine(VLLMBackend(max_model_len=257), small)


def test_a_model_that_ends_the_engine_at_its_first_token_is_a_config_error(vllm_engine, monkeypatch):
    """Heads of 16, for one: vLLM loads such a model, and has no CPU kernel to run it with."""

    def die(requests):
        raise Recoverable("vLLM's engine process died")

    closed = []
    for of_other_tests in vllm_engine._folder.glob("*-failure-*"):
        of_other_tests.unlink()
    monkeypatch.setattr(vllm_engine, "generate", die)
    monkeypatch.setattr(vllm_engine, "close", lambda: closed.append(True))
    with pytest.raises(Recoverable):  # nothing says why, so it was killed
        vllm_engine._try_out()
    reason = vllm_engine._folder / "worker-failure-1"
    reason.write_text("ValueError: no kernel for heads of 16")
    with pytest.raises(
        ConfigError, match=r"vLLM loads the model .* but cannot run it: ValueError: no kernel for heads"
    ):
        vllm_engine._try_out()
    reason.unlink()
    assert closed == [True, True]


def test_an_engine_that_slept_reads_its_weights_again_and_answers_as_before(vllm_engine, other_small, small, tokenizer):
    """On a CPU vLLM takes the calls and keeps its memory; the order of calls and the weights are the same."""
    asked = requests(tokenizer, GREEDY)
    before = vllm_engine.generate(asked)
    vllm_engine.sleep()
    assert not vllm_engine._is_asleep, "it was not asked for"
    vllm_engine._config = vllm_engine._config.model_copy(update={"sleep": True})
    try:
        for model in (small, other_small, small):
            vllm_engine.sleep()
            vllm_engine.sleep()
            assert vllm_engine._is_asleep
            vllm_engine.update_weights(model)
            assert not vllm_engine._is_asleep
        assert vllm_engine.generate(asked) == before
    finally:
        vllm_engine._config = vllm_engine._config.model_copy(update={"sleep": False})


def test_a_token_that_ends_a_turn_ends_a_completion_as_with_transformers(vllm_engine, hf, tokenizer):
    asked = requests(tokenizer, GREEDY)
    whole = hf.generate(asked)
    ended = [
        replace(request, ends=[completion.token_ids[len(completion.token_ids) // 2]])
        for request, completion in zip(asked, whole, strict=True)
    ]
    expected = hf.generate(ended)
    assert {completion.finish_reason for completion in expected} == {"stop"}
    assert_alike(vllm_engine.generate(ended), expected)

"""The prefix cache of vLLM on a CPU: hit where it changes no bit, and only there by default."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alike import requests

from rollout_core.base.determinism import NUMERICS
from rollout_core.config import SamplingParams, VLLMBackend, identity
from rollout_core.config.inference import CPU_BLOCK_SIZE
from rollout_core.data.samples import encode_completion
from rollout_core.inference.backend import ModelRef

BEGINNING = "sort 3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3 2 3 8 4 6 2 6 4 3 3 8 3 2 7 9 "
"""More than a block's tokens."""


def prompts(lengths: range, samples: int) -> list[str]:
    """Groups of equal prompts, all with the same beginning."""
    whole = BEGINNING * 20
    return [f"{whole[:length]}{number} =" for number, length in enumerate(lengths) for _ in range(samples)]


def cached_tokens(engine: Any, tokenizer: Any, texts: list[str]) -> list[int]:
    """Of each prompt, those that the engine did not compute."""
    import vllm

    asked = [vllm.TokensPrompt(prompt_token_ids=tokenizer(text)["input_ids"]) for text in texts]
    answers = engine._llm.generate(asked, vllm.SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    return [answer.num_cached_tokens for answer in answers]


def encoded(engine: Any, asked: list[Any]) -> list[bytes]:
    return [encode_completion(completion) for completion in engine.generate(asked)]


THREADS_BY_DEFAULT = [
    (1, {}, True),
    (2, {}, True),
    (3, {}, False),
    (2, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, False),
    (2, {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}, False),
    (1, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "4"}, False),
    (4, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}, True),
]


@pytest.mark.engine
def test_by_default_prompts_share_beginnings_in_a_short_context_and_no_bit_differs(
    vllm_engine, small, other_small, tokenizer
):
    from rollout_core.inference.vllm_backend import VLLMEngine

    vllm_engine.update_weights(small)
    texts = prompts(range(34, 70, 3), samples=8)
    assert all(len(tokenizer(text)["input_ids"]) < 80 for text in texts)
    asked = requests(tokenizer, SamplingParams(temperature=1.0, max_tokens=14), prompts=texts)
    backend = VLLMBackend(max_model_len=96, max_num_seqs=16, num_threads=1, enable_prefix_caching=False)
    plain = VLLMEngine(backend, small)
    try:
        assert not any(cached_tokens(plain, tokenizer, texts))
        expected = encoded(plain, asked)
        assert encoded(vllm_engine, asked) == expected
        found = cached_tokens(vllm_engine, tokenizer, texts)
        assert min(found) >= CPU_BLOCK_SIZE and {count % CPU_BLOCK_SIZE for count in found} == {0}
        assert encoded(vllm_engine, asked[::-1])[::-1] == expected, "now all begin with a hit"
        assert encoded(vllm_engine, asked[5:6]) == expected[5:6]
        # What was kept belongs to the weights that computed it.
        for model in (other_small, small):
            for engine in (vllm_engine, plain):
                engine.update_weights(model)
            assert encoded(vllm_engine, asked[:32]) == encoded(plain, asked[:32])
    finally:
        plain.close()
        vllm_engine.update_weights(small)


@pytest.mark.campaign
@pytest.mark.engine
@pytest.mark.parametrize("numerics", ["native", "portable"])
def test_no_bit_differs_up_to_the_longest_context_whose_keys_are_one_tile(numerics: str, tmp_path: Path):
    """In a process of its own, for portable numerics are chosen before torch is imported."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("prefix_child.py")), str(tmp_path)],
        env={**os.environ, **({NUMERICS: numerics} if numerics == "portable" else {})},
        cwd=Path(__file__).resolve().parent.parent.parent,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["differing"] == 0 and found["hits"] > 0.9 * found["requests"], found


@pytest.fixture
def changed(small: ModelRef, tmp_path: Path):
    """Copies of the small model with other keys in its configuration."""

    def change(**keys: Any) -> Path:
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(small.folder, folder)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
        return folder

    return change


def test_hits_are_known_to_change_no_bit_in_one_tile_alone(small, changed, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("vllm")
    import torch

    from rollout_core.inference import vllm_attention
    from rollout_core.inference.vllm_attention import hits_change_no_bit, one_tile

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"l2_cache_size": 256 * 1024})
    limit = one_tile(32, 256 * 1024)
    assert 128 < limit < 256 and limit % 32 == 0
    assert hits_change_no_bit(small.folder, limit)
    assert not hits_change_no_bit(small.folder, limit + 1)
    assert not hits_change_no_bit(small.folder, None), "256 tokens by its own configuration"
    assert not hits_change_no_bit(changed(model_type="gemma3_text"), limit)
    sliding = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0, "layer_types": None}
    assert not hits_change_no_bit(changed(**sliding), limit)
    monkeypatch.setattr(vllm_attention, "is_portable_here", lambda: True)
    assert hits_change_no_bit(small.folder, None), "in pieces"


def test_one_tile_is_what_the_kernel_leaves_room_for():
    pytest.importorskip("vllm")
    from rollout_core.inference.vllm_attention import longest_context, one_tile

    found = {head: one_tile(head, 2**20) for head in (32, 64, 80, 128)}
    assert found == {32: 960, 64: 480, 80: 384, 128: 256}
    assert one_tile(64, 0) == 0
    assert all(one_tile(head, 256 * 1024) < longest_context(head) for head in found)


def test_what_a_default_decides_is_no_part_of_what_counts_as_done():
    plain = identity(VLLMBackend())
    assert plain["enable_prefix_caching"] is False and "block_size" not in plain
    assert identity(VLLMBackend(enable_prefix_caching=False)) == plain
    wanted = identity(VLLMBackend(enable_prefix_caching=True))
    assert wanted == {**plain, "enable_prefix_caching": True, "block_size": CPU_BLOCK_SIZE}
    assert VLLMBackend(num_threads=1).batch_invariant
    assert not VLLMBackend(num_threads=1, enable_prefix_caching=True).batch_invariant


@pytest.mark.parametrize(("cores", "environment", "alone"), THREADS_BY_DEFAULT)
def test_an_engine_of_several_threads_is_not_batch_invariant(cores, environment, alone, monkeypatch):
    """vLLM divides rows and keys of a step among its threads by the whole batch, and leaves one core free by itself."""
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert VLLMBackend().batch_invariant is VLLMBackend().is_single_threaded is alone
    assert VLLMBackend(num_threads=1).batch_invariant and not VLLMBackend(num_threads=2).batch_invariant
    # What counts as done does not depend on the machine's cores, but on a number that is set.
    assert {"num_threads", "max_num_seqs"}.isdisjoint(identity(VLLMBackend()))
    assert identity(VLLMBackend(num_threads=1)) == identity(VLLMBackend(num_threads=1, max_num_seqs=8))
    assert identity(VLLMBackend(num_threads=2)) != identity(VLLMBackend(num_threads=2, max_num_seqs=8))

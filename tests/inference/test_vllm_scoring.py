"""Log-probabilities of continuations by vLLM: those of a plain forward pass, in any batch, also of cached prompts."""

from __future__ import annotations

from typing import Any

import pytest
from alike import GREEDY, requests
from test_scoring import PAIRS, harness, requests_of

from rollout_core.inference.backend import ModelRef

pytestmark = pytest.mark.engine


def test_the_engine_gives_the_harness_log_likelihoods_beside_requests_that_generate(
    vllm_engine: Any, small: ModelRef, tokenizer: Any
):
    vllm_engine.update_weights(small)
    drawn = requests(tokenizer, GREEDY)
    before = vllm_engine.generate(drawn)
    asked = requests_of(small)
    together = vllm_engine.generate([each for pair in zip(asked, drawn, strict=True) for each in pair])
    assert together[1::2] == before
    for (prompt, continuation), one in zip(PAIRS, together[::2], strict=True):
        _, after, total, is_greedy = harness(small.folder, prompt, continuation)
        assert (one.token_ids, one.text, one.greedy) == (after, continuation, is_greedy)
        assert sum(one.logprobs) == pytest.approx(total, abs=1e-4)
    # The prompt's keys and values are cached by now; a cached prefix would have no log-probabilities.
    assert vllm_engine.generate(asked) == together[::2]


def test_what_the_engine_writes_greedily_is_greedy(vllm_engine: Any, small: ModelRef, tokenizer: Any):
    vllm_engine.update_weights(small)
    [drawn] = vllm_engine.generate(requests(tokenizer, GREEDY, ["sort 3 1 2 ="]))
    [scored] = vllm_engine.generate(requests_of(small, [("sort 3 1 2 =", drawn.text)]))
    if scored.token_ids == drawn.token_ids[: len(scored.token_ids)]:  # random weights may write what reads otherwise
        assert scored.greedy
        assert scored.logprobs == pytest.approx(drawn.logprobs[: len(scored.logprobs)], abs=1e-4)

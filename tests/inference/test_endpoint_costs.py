"""What an endpoint that generates took: tokens by its count, money by the configuration's prices."""

from __future__ import annotations

import json
from typing import Any

import pytest
from endpoint_server import config_of, outcomes, requests

from rollout_core.config import InferBatchConfig, parse_config
from rollout_core.data.samples import Completion, decode_completions_blob, encode_completion


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 70, "completion_tokens": 50}, (70, 50)),
        ({"prompt_tokens": 70}, (70, None)),
        ({"prompt_tokens": -1, "completion_tokens": 10**12}, (None, None)),
        ("much", (None, None)),
        (None, (None, None)),
    ],
)
def test_tokens_are_those_that_the_endpoint_counts_and_ours_where_it_counts_none(
    server, engine_of, tokenizer, usage: Any, counted: tuple[int | None, int | None]
):
    server.change = lambda answer: answer | {"usage": usage}
    [request] = requests(tokenizer)[:1]
    completion = outcomes(engine_of(), [request])["r0"]
    assert isinstance(completion, Completion)
    own = len(request.prompt_token_ids), len(completion.token_ids)
    expected = [mine if count is None else count for count, mine in zip(counted, own, strict=True)]
    assert completion.usage is not None and list(completion.usage) == expected
    completion.key = "0" * 64
    assert decode_completions_blob(encode_completion(completion))[0].usage == expected


@pytest.mark.server
def test_the_record_of_a_run_says_what_the_endpoint_took_also_of_answers_that_were_kept_before(
    server, tiny_model, tmp_path, monkeypatch, prefect_server
):
    from flows.batch import batch_inference
    from rollout_core.runs.run_records import RunRecords
    from tasks.runtime.connections import objects

    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"sort {n} ="}) + "\n" for n in range(20)))
    document = {
        "run": {"name": "paid"},
        "model": {"uri": str(tiny_model)},
        "sampling": {"max_tokens": 16},
        "input": {"glob": "prompts.jsonl"},
        "output": {"dir": "out"},
        "backend": config_of(server, served_model="served", max_concurrency=1, max_retries=0).model_dump(),
    }
    prices = {"prompt_price": 2.0, "answer_price": 10.0}

    def run(**backend: Any) -> dict[str, str]:
        config = {**document, "backend": {**document["backend"], **backend}}
        try:
            batch_inference(parse_config(config, InferBatchConfig))
        finally:
            records = RunRecords(objects())
            facts = records.detail(records.heads()[0])[1].facts
        return {name: told for name, told in facts.items() if name.startswith("endpoint")}

    def answer(completion: dict[str, Any]) -> dict[str, Any]:
        if len(server.asked) == 10:
            server.key = "unknown to us"
        return completion | {"usage": {"prompt_tokens": 70, "completion_tokens": 5}}

    server.change, server.slow_seconds = answer, 0.2  # answers are committed every second
    with pytest.raises(Exception, match="refuses access"):
        run(**prices)
    server.key, server.slow_seconds = None, 0.0
    name = f"endpoint served at {server.url}"
    told = "20 answers, 1,400 tokens of prompts and 100 of answers, 0.0038 of money"
    assert run(**prices) == {name: told}
    assert len(server.asked) < 11 + 20, "some were kept"
    assert run(**prices) == {}, "what is cached costs nothing"

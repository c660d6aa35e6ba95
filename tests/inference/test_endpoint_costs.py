"""What an endpoint that generates took, tokens by its count, money by the configuration's prices, and its budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from batches import PARAMS
from endpoint_server import config_of, outcomes, requests, reset, status
from pydantic import ValidationError

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.config import EndpointModel, EvalConfig, InferBatchConfig, OpenAIBackend, identity, parse_config
from rollout_core.config.inference import TokenBudget
from rollout_core.data.samples import Completion, decode_completions_blob, encode_completion
from rollout_core.inference.backend import ModelRef, Request
from rollout_core.inference.endpoint_model import EndpointEngine, endpoint_id
from rollout_core.inference.spending import Account, BudgetSpent


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


COUNTED = {"prompt_tokens": 5, "completion_tokens": 5}


def most_of(backend: OpenAIBackend, request: Request) -> int:
    """Tokens that are reserved for a request of token ids."""
    return Account(backend).most({"prompt": list(request.prompt_token_ids)}, request.params.max_tokens).tokens


async def test_a_budget_stops_before_the_request_that_could_exceed_it_and_the_next_run_counts_what_is_kept(
    server, batch, engine_of
):
    server.change = lambda answer: answer | {"usage": COUNTED}
    engine = engine_of(max_concurrency=3)
    most = max(most_of(engine._config, Request("", each.prompt_token_ids, PARAMS, 0)) for each in batch.samples)
    limit = TokenBudget(tokens=most + 45)
    options = {"deterministic": False, "commit_size": 1}
    first, second, third = (Account(engine._config, budget) for budget in (limit, limit, TokenBudget(tokens=500)))
    with pytest.raises(BudgetSpent, match=rf"50 of {most + 45} tokens of its budget, .* raise budget.tokens and run"):
        await batch.complete(engine, **options, account=first)
    assert len(server.asked) == 5 and first.spending.tokens == 50
    with pytest.raises(BudgetSpent, match="50 of"):
        await batch.complete(engine, **options, account=second)
    assert len(server.asked) == 5, "those that are kept count for a run that is started again"
    await batch.complete(engine, **options, account=third)
    assert len(server.asked) == 10 and third.spending.tokens == 100
    assert set((await batch.successes()).values()) == {1}, "none was asked twice"


def test_a_budget_of_money_holds_whatever_is_under_way(server, tokenizer, engine_of):
    server.slow_seconds = 0.02
    asked = requests(tokenizer, prompts=[f"sort {n} =" for n in range(40)])
    # Each takes all that it may.
    server.change = lambda answer: answer | {"usage": {"prompt_tokens": 20, "completion_tokens": 64}}
    prices = {"prompt_price": 5.0, "answer_price": 20.0, "budget": {"money": 0.02}}
    engine = engine_of(max_concurrency=16, **prices)
    with pytest.raises(BudgetSpent, match=r"budget.money"):
        outcomes(engine, asked)
    assert 0.015 < engine._account.spending.money <= 0.02
    assert engine._account.spending.money == pytest.approx(len(server.asked) * 0.00138)


@pytest.mark.parametrize(("mishap", "counts"), [(reset, True), (status(500), False), (status(504), True)])
def test_an_answer_that_may_have_been_paid_for_counts_in_full(server, tokenizer, engine_of, mishap, counts: bool):
    server.mishaps.append(mishap)
    server.change = lambda answer: answer | {"usage": COUNTED}
    [request] = requests(tokenizer)[:1]
    engine = engine_of(budget={"tokens": 1_000})
    outcomes(engine, [request])
    assert engine._account.spending.tokens == 10 + (most_of(engine._config, request) if counts else 0)


@pytest.mark.parametrize("budget", [None, {"tokens": 1_000}])
def test_an_endpoint_that_counts_nothing_is_counted_by_what_was_reserved_where_there_is_a_budget(server, budget: Any):
    server.change = lambda answer: {name: value for name, value in answer.items() if name != "usage"}
    named = {"kind": "endpoint", "url": server.url, "model": "served", "api": "completions", "budget": budget}
    config = EndpointModel.model_validate(named)
    engine = EndpointEngine(config, ModelRef(endpoint_id(config), Path()))
    try:
        [completion] = engine.stream([Request("a", (), PARAMS, 0, "say a")])
    finally:
        engine.close()
    assert isinstance(completion, Completion) and completion.usage is not None
    assert (sum(completion.usage) >= PARAMS.max_tokens + len("say a")) == (budget is not None)
    assert sum(completion.usage) == engine._account.spending.tokens


@pytest.mark.parametrize("kind", ["openai", "endpoint"])
def test_prices_and_budgets_change_no_identity(kind: str):
    named = {"url": "http://127.0.0.1:1/v1"} | ({} if kind == "openai" else {"kind": kind, "model": "m"})
    model = OpenAIBackend if kind == "openai" else EndpointModel
    paid = {"prompt_price": 1.0, "answer_price": 2.0, "budget": {"money": 3.0}}
    assert identity(model.model_validate(named | paid)) == identity(model.model_validate(named))
    with pytest.raises(ValidationError, match=r"budget.money needs prompt_price and answer_price of each endpoint"):
        model.model_validate(named | {"prompt_price": 1.0, "budget": {"money": 3.0}})
    with pytest.raises(ValidationError, match="give tokens or money; got neither"):
        model.model_validate(named | {"budget": {}})


def test_a_budget_is_of_one_process_and_of_shards_in_turn():
    backend = {"kind": "openai", "url": "http://127.0.0.1:1/v1", "budget": {"tokens": 5}}
    document = {
        "model": {"uri": "m"},
        "sampling": {},
        "input": {"glob": "*"},
        "output": {"dir": "out"},
        "backend": backend,
    }
    with pytest.raises(ConfigError, match=r"backend.budget has shards come one after another; leave out workers.count"):
        parse_config({**document, "workers": {"count": 2}}, InferBatchConfig)
    dask = {"address": "tcp://scheduler:8786"}
    with pytest.raises(ConfigError, match=r"backend.budget is kept by one process"):
        parse_config({**document, "workers": {"dask": dask}}, InferBatchConfig)
    suites = {"suites": [{"name": "s", "rows": {"path": "rows.jsonl"}, "scorer": {"kind": "exact_match"}}]}
    placed = {"placement": {"dask": dask, "generation": {}}, **suites}
    model = {"kind": "endpoint", "url": "http://127.0.0.1:1/v1", "model": "m", "budget": {"tokens": 5}}
    with pytest.raises(ConfigError, match=r"model.budget is kept by one process"):
        parse_config({"model": model, **placed}, EvalConfig)


@pytest.mark.server
def test_the_budget_of_a_batch_counts_shards_that_are_cached(server, tiny_model, tmp_path, monkeypatch, prefect_server):
    from flows.batch import batch_inference
    from rollout_core.runs.run_records import RunRecords
    from tasks.runtime.connections import objects

    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"sort {n} ="}) + "\n" for n in range(20)))
    server.change = lambda answer: answer | {"usage": COUNTED}
    backend = config_of(server, served_model="served", max_concurrency=2).model_dump()

    def run(tokens: int) -> str:
        document = {
            "run": {"name": "paid"},
            "model": {"uri": str(tiny_model)},
            "sampling": {"max_tokens": 16},
            "input": {"glob": "prompts.jsonl"},
            "output": {"dir": "out"},
            "workers": {"shard_size": 4},
            "backend": {**backend, "budget": {"tokens": tokens}},
        }
        try:
            batch_inference(parse_config(document, InferBatchConfig))
        finally:
            records = RunRecords(objects())
            facts = records.detail(records.heads()[0])[1].facts
        return facts[f"endpoint served at {server.url}"]

    for _ in range(2):
        with pytest.raises(Fatal, match=r"generation has taken (1[0-9]0) of 200 tokens"):
            run(200)
        asked = len(server.asked)
        assert 14 <= asked < 20
    assert run(2_000) == "20 answers, 100 tokens of prompts and 100 of answers"
    assert len(server.asked) == 20, "none was asked twice"

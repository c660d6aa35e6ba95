"""Judges in stages: answers are kept in the run's store, and the budget and the figures are those of the whole run."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import Fatal
from rollout_core.base.ids import hash_bytes
from rollout_core.config.judges import JudgeReward
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Completions, Scores
from rollout_core.rewards.judges.questions import questions_of
from rollout_core.rewards.scores import reward_inputs
from rollout_core.rewards.source_ids import source_id
from tests.rewards.judge_server import TOKENS, JudgeServer, most_taken

pytestmark = pytest.mark.server


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def objects() -> ObjectStore:
    return ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])


def completions(*texts: str) -> Completions:
    ids = [hash_bytes(f"{text} {number}".encode()) for number, text in enumerate(texts)]
    samples = [Sample(key, "write x", [1, 2], 0, f"row-{number}", {}) for number, key in enumerate(ids)]
    made = [Completion(key, [3], [-0.5], text, "stop") for key, text in zip(ids, texts, strict=True)]
    return Completions(
        completions=objects().put_bytes(b"".join(map(encode_completion, made))),
        samples=objects().put_bytes(encode_samples(samples)),
        model=hash_bytes(b"model"),
        num_samples=len(texts),
        num_tokens=len(texts),
        finish_reasons={"stop": len(texts)},
    )


@pytest.fixture
def run(prefect_server: str) -> Iterator[Callable[..., tuple[list[Scores], dict[str, str]]]]:
    """Score several sets of completions in one flow run: the scores, and what is shown of judges afterwards."""
    from prefect import flow

    from rollout_core.rewards.kept import close_rewards
    from tasks.runtime.endpoint_costs import endpoint_facts
    from tasks.runtime.journal import keep_journal
    from tasks.score import score_rewards

    def start(spec: JudgeReward, *given: Completions) -> tuple[list[Scores], dict[str, str]]:
        facts: dict[str, str] = {}

        @flow(name="test-judges", persist_result=False)
        def test_judges() -> list[Scores]:
            with keep_journal() as journal:
                try:
                    return [score_rewards(each, spec, source_id(spec)) for each in given]
                finally:
                    facts.update(endpoint_facts([journal]))

        try:
            return test_judges(), facts
        except Fatal as error:
            error.add_note(json.dumps(facts))
            raise
        finally:
            close_rewards()  # as at a flow's end

    yield start


def test_the_budget_and_the_figures_are_of_the_whole_run_also_of_what_was_cached(run):
    first, second = completions("x", "xx", "xxx"), completions("xxxx", "xxxxx", "xx")
    with JudgeServer() as server:
        endpoint = {"url": server.url, "model": "wise", "prompt_price": 1.0, "answer_price": 2.0, "max_concurrency": 1}

        def spec_of(**settings: Any) -> JudgeReward:
            return JudgeReward.model_validate({"judges": [endpoint], **settings})

        free = spec_of()
        most = most_taken(free.judges[0], questions_of(free, reward_inputs(objects(), second))[0][1])
        small = spec_of(budget={"tokens": most + 3 * sum(TOKENS)})
        with pytest.raises(Fatal, match=r"judging has taken 200 of .*raise budget.tokens and run the same") as stopped:
            run(small, first, second)
        assert len(server.bodies) == 4, "three of the first set, and one of the second"
        # A run anew, of which the first scoring is cached: its answers count, and cost nothing again.
        with pytest.raises(Fatal, match="judging has taken 200 of"):
            run(small, first, second)
        assert len(server.bodies) == 4
        [one, two], facts = run(spec_of(budget={"tokens": 100 * most}), first, second)
        assert len(server.bodies) == 5, "'xx' was judged before"
    values = [json.loads(objects().get_bytes(scores.scores)) for scores in (one, two)]
    assert values == [[0.1, 0.2, 0.3], [0.4, 0.5, 0.2]]
    shown = f"{5 * TOKENS[0]} tokens of prompts and {5 * TOKENS[1]} of answers, {5 * 70 / 1e6:.4f} of money"
    assert facts == {f"judge wise at {server.url}": f"5 answers, {shown}"}
    assert "4 answers" in stopped.value.__notes__[0], "a run that was stopped shows it, too"
    assert one.judged is not None
    [judgement] = objects().get_json(one.judged)
    assert judgement["verdicts"][0][0]["reasoning"] == "it has [1] x"
    assert "judged" not in one.cache_identity()


def test_questions_are_samples_of_the_runs_store(run):
    with JudgeServer() as server:
        spec = JudgeReward.model_validate({"judges": [{"url": server.url, "model": "wise", "revision": "June"}]})
        run(spec, completions("x", "xx"))
    from tasks.runtime import connections

    async def stored() -> list[Any]:
        async with connections.open_store() as store:
            return [each for each in await store.query_rollouts() if each.status == "succeeded"]

    found = asyncio.run(stored())
    assert len(found) == 2 and {each.mode for each in found} == {"test"}
    assert all(each.input["prompt"][0]["role"] == "system" for each in found)

"""Processes that judge and are killed: nothing is asked again whose answer was kept, and the scores are the same."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollout_core.config.judges import JudgeReward
from rollout_core.inference.ledger import SampleLedger
from rollout_core.rewards.judges.judging import GENERATOR, Judges
from rollout_core.rewards.judges.questions import Question, questions_of
from tests.rewards.judge_child import filed_id, inputs_of, ledger_of
from tests.rewards.judge_server import TOKENS, JudgeServer, honest
from tests.store.patience import wait_until

CHILD = Path(__file__).with_name("judge_child.py")
KILLS = 6


def kept(folder: Path, questions: list[Question]) -> set[str]:
    """Messages of the questions whose answers the ledger has."""
    ledger = ledger_of(folder)

    async def look() -> set[str]:
        async with ledger.open_store() as store:
            samples = SampleLedger(
                store, ledger.objects, worker_id="test", stale_after_seconds=1.0, generator=GENERATOR
            )
            standing = await samples.shard_status([question.id for question in questions], exclusive=True)
            return set(standing.done)

    done = asyncio.run(look())
    return {json.dumps([dict(each) for each in question.messages]) for question in questions if question.id in done}


def has_come_to(server: JudgeServer, wanted: int, process: Any) -> bool:
    """Whether so many questions are answered, or nobody asks any more."""
    return server.answered.total() >= wanted or process.poll() is not None


def says_nonsense_at_times(body: dict[str, Any]) -> str:
    """About a third of the questions need a repair."""
    question = body["messages"][1]["content"]
    return "well" if len(body["messages"]) == 2 and len(question) % 3 == 0 else honest(body)


@pytest.mark.parametrize(
    ("mode", "kills"),
    [
        ("score", KILLS),
        ("ranking", KILLS),
        *(pytest.param(mode, 20, marks=pytest.mark.campaign) for mode in ("score", "pairwise", "ranking")),
    ],
)
def test_judges_killed_at_any_moment_ask_nothing_again_that_was_answered_and_kept(
    tmp_path: Path, start_process: Callable[..., Any], mode: str, kills: int
):
    chance = random.Random(7)
    count = {"score": 8, "pairwise": 6, "ranking": 27}[mode] * kills
    completions = ["x" * chance.randrange(10) + "y" * n for n in range(count)]
    with JudgeServer(say=says_nonsense_at_times, slow_seconds=0.02) as server:
        endpoint = {"url": server.url, "model": "wise", "max_concurrency": 3, "backoff_seconds": 0.01}
        spec = JudgeReward.model_validate({"judges": [endpoint], "mode": mode, "reference_key": "answer"})
        undisturbed = Judges(spec, None, print)
        expected = [undisturbed(inputs_of(completions)), filed_id(undisturbed)]
        total = server.answered.total()
        assert set(server.answered.values()) == {1}
        questions, _ = questions_of(spec, inputs_of(completions))
        server.answered.clear()
        arguments = [str(CHILD), str(tmp_path), spec.model_dump_json(), json.dumps(completions)]
        counted: dict[str, int] = {}
        for _ in range(kills):
            wanted = server.answered.total() + chance.randrange(1, max(2, total // kills))
            process = start_process(*arguments)
            wait_until(partial(has_come_to, server, wanted, process))
            process.kill()
            process.communicate()
            done = kept(tmp_path, questions)
            assert all(server.answered[question] == count for question, count in counted.items())
            counted = {question: server.answered[question] for question in done}
        assert counted, "some were kept before the last kill"
        finished = start_process(*arguments)
        out, _ = finished.communicate()
        assert finished.returncode == 0
        *result, tokens = json.loads(out.splitlines()[-1])
        assert result == expected, "the same scores, verdicts and charges"
        assert all(server.answered[question] == count for question, count in counted.items()), "kept, and asked again"
        # What was answered and not kept yet at a kill is asked again: no more than were under way.
        assert server.answered.total() <= total + kills * 5
        assert tokens == undisturbed.spending.tokens == total * sum(TOKENS), "each answer counts once"
        after = server.answered.total()
        again = start_process(*arguments)
        assert json.loads(again.communicate()[0].splitlines()[-1])[:2] == expected
        assert server.answered.total() == after, "nothing is asked where all is kept"

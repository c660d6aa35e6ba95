"""What the child processes of ``test_judges_killed`` do: ``python judge_child.py FOLDER SPEC COMPLETIONS``, JSON each.

Judges the completions with answers kept in the folder, and writes one line of JSON at the end: the scores, the id of
what would be filed of it, and the tokens spent.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from rollout_core.base.ids import content_id
from rollout_core.config.judges import JudgeReward
from rollout_core.objects import ObjectStore
from rollout_core.rewards.judges.judging import Judges
from rollout_core.rewards.judges.kept_answers import AnswerLedger
from rollout_core.rewards.scoring import RewardInput
from rollout_core.store import SqlLightningStore


def ledger_of(folder: Path) -> AnswerLedger:
    """Answers kept in a folder."""

    @asynccontextmanager
    async def opened():
        store = SqlLightningStore.from_url(f"sqlite:///{folder}/store.db")
        try:
            yield store
        finally:
            await store.close()

    return AnswerLedger(ObjectStore.from_url(str(folder / "objects")), opened)


def filed_id(judges: Judges) -> str:
    """Of all that the judges said at the last call, and what each answer took."""
    [judgement] = judges.take_judgements()
    return content_id("test-judgement/1", judgement.document())


def inputs_of(completions: list[str]) -> list[RewardInput]:
    return [RewardInput(f"write {n // 8}", text, {"answer": "xxxx"}) for n, text in enumerate(completions)]


if __name__ == "__main__":
    folder, spec, completions = sys.argv[1:]
    judges = Judges(JudgeReward.model_validate_json(spec), ledger_of(Path(folder)), print)
    scores = judges(inputs_of(json.loads(completions)))
    os.write(1, (json.dumps([scores, filed_id(judges), judges.spending.tokens]) + "\n").encode())

"""What the child processes of ``test_judges_killed`` do: ``python judge_child.py FOLDER SPEC COMPLETIONS``, JSON each.

Judges the completions with answers kept in the folder, and writes the scores as one line of JSON at the end.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

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


def inputs_of(completions: list[str]) -> list[RewardInput]:
    return [RewardInput(prompt=f"write {n // 8}", completion=text) for n, text in enumerate(completions)]


if __name__ == "__main__":
    folder, spec, completions = sys.argv[1:]
    judges = Judges(JudgeReward.model_validate_json(spec), ledger_of(Path(folder)), print)
    scores = judges(inputs_of(json.loads(completions)))
    os.write(1, (json.dumps(["scores", scores, judges.spending.tokens]) + "\n").encode())

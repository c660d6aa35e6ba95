"""A trainer that learns from live traffic in a process of its own, to be killed: ``python -m
tests.agents.online_script FOLDER STORAGE MODEL MAX_UPDATES``. Prints the rollouts and the weights of each update."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from rollout_core.store import SqlLightningStore
from tests.agents.test_online import learner, serve


def main(folder: Path, storage: Path, model: Path, max_updates: int) -> None:
    """Learn, and print what was learnt from."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    online = learner(model, storage, max_updates=max_updates, gate=lambda new, present: True)
    serve(online, SqlLightningStore.from_url(f"sqlite:///{folder / 'rollouts.db'}"))
    for report in online.history:
        sys.stdout.write(f"learnt {report.number} {report.checkpoint.model} {' '.join(report.rollouts)}\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), int(sys.argv[4]))

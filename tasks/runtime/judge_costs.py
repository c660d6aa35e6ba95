"""What the judges of a run took: for the budget that bounds it, and for the summary and record of the run."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from rollout_core.objects import ObjectStore
from rollout_core.rewards.judges.spending import RunSpending, spent_by_judge
from tasks.runtime.connections import objects
from tasks.runtime.journal import Journal

_lock = threading.Lock()


def judged_so_far(journal: Journal, objects: ObjectStore) -> RunSpending:
    """What judges took in a run, by its scorings under way and those that have ended, cached ones among them."""
    with _lock:  # the run's record looks from a thread of its own
        found = journal.judging = journal.judging or RunSpending()
    for judged in list(journal.judged):
        found.note_judged(judged, lambda judged=judged: objects.get_json(judged))
    return found


def judge_facts(journals: Iterable[Journal]) -> dict[str, str]:
    """What each judge took, for people, by what it is called; for journals with judges."""
    spendings = [spending for journal in journals for spending in judged_so_far(journal, objects()).all()]
    return {f"judge {name}": str(spent) for name, spent in spent_by_judge(spendings).items()}

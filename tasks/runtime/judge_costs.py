"""What the judges of a run took: for the budget that bounds it, and for the summary and record of the run."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_core.objects import ObjectStore
from rollout_core.objects.records import EvalReport, Scores
from rollout_core.rewards.judges.spending import RunSpending, spent_by_judge
from tasks.runtime.connections import objects
from tasks.runtime.journal import Journal


def judged_so_far(journal: Journal, objects: ObjectStore) -> RunSpending:
    """What judges took in a run, by its scorings under way and those that have ended, cached ones among them."""
    for entry in list(journal.entries):
        judged = entry.result.judged if isinstance(entry.result, Scores | EvalReport) else None
        if judged is not None:
            journal.judging.note_judged(judged, lambda judged=judged: objects.get_json(judged))
    return journal.judging


def judge_facts(journals: Iterable[Journal]) -> dict[str, str]:
    """What each judge took, for people, by what it is called; none where no judge was asked."""
    spendings = [spending for journal in journals for spending in judged_so_far(journal, objects()).all()]
    return {f"judge {name}": str(spent) for name, spent in spent_by_judge(spendings).items()}

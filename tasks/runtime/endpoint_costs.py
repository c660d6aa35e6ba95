"""What endpoints took of a run, as judges and as models that generate: for budgets of judges, and for the summary and
record of the run."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress

from rollout_core.base.errors import RolloutError
from rollout_core.objects import ObjectStore
from rollout_core.rewards.judges.spending import RunSpending, Spent, spent_by_judge
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


def endpoint_facts(journals: Iterable[Journal]) -> dict[str, str]:
    """What each endpoint took, for people, by what it is called; nothing of judges where that cannot be read now, which
    is worth neither a page nor a record."""
    journals, generated = list(journals), dict[str, Spent]()
    for backend, usage in [asked for journal in journals for asked in list(journal.asked)]:
        money = backend.price_of(usage.prompt_tokens, usage.answer_tokens)
        spent = generated.setdefault(backend.name, Spent())
        spent.add(usage.prompt_tokens, usage.answer_tokens, money, usage.answers)
    judges: dict[str, Spent] = {}
    with suppress(RolloutError, OSError):
        asked = [judged_so_far(journal, objects()) for journal in journals if journal.has_judges]
        judges = spent_by_judge(spending for each in asked for spending in each.all())
    return {f"endpoint {name}": str(spent) for name, spent in generated.items()} | {
        f"judge {name}": str(spent) for name, spent in judges.items()
    }

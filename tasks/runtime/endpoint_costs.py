"""What endpoints took of a run, as judges and as models that generate: for their budgets, and for the summary and
record of the run."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress

from rollout_core.base.errors import RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.config import EndpointModel, OpenAIBackend
from rollout_core.data.samples import decode_completions_blob
from rollout_core.inference.spending import Account, Charge, RunSpending, Spending, spent_by_endpoint
from rollout_core.objects import ObjectStore
from tasks.runtime.connections import objects
from tasks.runtime.journal import Journal

_lock = threading.Lock()


def judged_so_far(journal: Journal, objects: ObjectStore) -> RunSpending:
    """What judges took in a run, by its scorings under way and those that have ended, cached ones among them."""
    with _lock:  # the run's record looks from a thread of its own
        found = journal.judging = journal.judging or RunSpending("judging")

    def charges(filed: ContentId) -> Iterator[tuple[str, str, Charge]]:
        for judgement in objects.get_json(filed):
            for question, charge in judgement["charges"].items():
                yield judgement["reward"], question, Charge(*charge)

    for judged in list(journal.judged):
        found.note_filed(judged, lambda judged=judged: charges(judged))
    return found


def generated_so_far(journal: Journal, backend: OpenAIBackend | EndpointModel, objects: ObjectStore) -> Spending:
    """What the endpoint took in a run. Where it has a budget, the answers of cached stages count, too; without one they
    are not read for it."""
    with _lock:
        found = journal.generating = journal.generating or RunSpending("generation")
    spending = found.of(backend.name)

    def charges(completions: ContentId) -> Iterator[tuple[str, str, Charge]]:
        account = Account(backend, backend.budget, spending)
        for row in decode_completions_blob(objects.get_bytes(completions)):
            if row.usage is not None:
                yield backend.name, str(row.id), account.charge(row.usage[0], row.usage[1])

    for completions in list(journal.completed) if backend.budget is not None else ():
        found.note_filed(completions, lambda completions=completions: charges(completions))
    return spending


def endpoint_facts(journals: Iterable[Journal]) -> dict[str, str]:
    """What each endpoint took, for people, by what it is called; nothing of judges where that cannot be read now, which
    is worth neither a page nor a record."""
    generated: list[Spending] = []
    judged: list[Spending] = []
    for journal in journals:
        generated += () if journal.generating is None else journal.generating.all()
        if journal.has_judges:
            with suppress(RolloutError, OSError):
                judged += judged_so_far(journal, objects()).all()
    spent = {f"endpoint {name}": spent for name, spent in spent_by_endpoint(generated).items()}
    spent |= {f"judge {name}": spent for name, spent in spent_by_endpoint(judged).items()}
    return {name: str(each) for name, each in spent.items()}

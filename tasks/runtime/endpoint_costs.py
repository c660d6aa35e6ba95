"""What endpoints took of a run, as judges and as models that generate: for their budgets, and for the summary and
record of the run."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from rollout_core.base.errors import RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.config import EndpointModel, OpenAIBackend
from rollout_core.data.samples import decode_completions_blob
from rollout_core.inference.endpoint_model import endpoint_id
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

    if backend.budget is None:
        return spending
    account, own = Account(backend, backend.budget, spending), _model_of(backend)

    def charges(usages: Iterable[tuple[str, Sequence[int]]]) -> Iterator[tuple[str, str, Charge]]:
        for sample, usage in usages:
            yield backend.name, sample, account.charge(usage[0], usage[1])

    def completed(blob: ContentId) -> Iterator[tuple[str, Sequence[int]]]:
        for row in decode_completions_blob(objects.get_bytes(blob)):
            if row.usage is not None:
                yield str(row.id), row.usage

    def asked(questions: ContentId) -> Iterable[tuple[str, Sequence[int]]]:
        return objects.get_json(questions).get("usage", {}).get(backend.name, {}).items()

    # A run may ask several endpoints, such as a model and its grader; what one of them took is not the other's.
    for model, blob in list(journal.completed):
        if own in (None, model):
            found.note_filed(f"{backend.name} {blob}", lambda blob=blob: charges(completed(blob)))
    for questions in list(journal.asked):
        found.note_filed(f"{backend.name} {questions}", lambda questions=questions: charges(asked(questions)))
    return spending


def _model_of(backend: OpenAIBackend | EndpointModel) -> ContentId | None:
    """The model of whose completions an endpoint is paid; None of one that has whichever the run's are."""
    return endpoint_id(backend) if isinstance(backend, EndpointModel) else None


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

"""What decides about a promotion: the comparisons of the new model with those before it, what the guards say, and
whether somebody went back from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from rollout_core.agents.adapters.ended import ended_rollouts
from rollout_core.base.errors import ConfigError, CorruptObject, NotFound
from rollout_core.base.ids import ContentId
from rollout_core.config import BackendConfig, PromotionConfig
from rollout_core.inference.engines import computed_dtype
from rollout_core.models.precision import stored_dtype
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import AgentRollouts, Divergence, EvalReport
from rollout_core.promotion import history
from rollout_core.promotion.evidence import Comparison, Evidence, Promotion, compare, rewards_by_prompt
from rollout_core.promotion.guards import (
    GuardFinding,
    GuardReports,
    Measured,
    Moment,
    judge_guards,
)
from rollout_core.store import LightningStore

Evaluated = EvalReport | AgentRollouts
OpenStore = Callable[[], AbstractAsyncContextManager[LightningStore]]
"""The store of the latest resources, opened once something is to be looked up or changed there."""


def weigh(
    objects: ObjectStore,
    rivals: dict[Moment, Evaluated],
    after: Evaluated,
    config: PromotionConfig,
    guarded: Sequence[GuardReports],
    divergences: Sequence[Divergence],
    backend: BackendConfig | None,
) -> Evidence:
    """All that speaks for and against ``after`` in comparison with its rivals, by moment.

    ``guarded``: the evaluations that guards look at as well; ``divergences``: from each rival, where a guard asks for
    it; ``backend``: what drew the completions, for the evidence to say in which precision. Raises ConfigError where a
    guard has nothing to look at.
    """
    return Evidence(
        comparisons=_compare(objects, rivals, after, config),
        guards=_judge(objects, rivals, after, config, guarded, divergences),
        precision=None if backend is None else _precisions(objects, {**rivals, "after": after}, backend),
    )


async def promote_if_accepted(
    objects: ObjectStore,
    open_store: OpenStore,
    model: ContentId,
    evidence: Evidence,
    config: PromotionConfig,
    *,
    by: str,
    instead_of: history.Served = "whatever",
) -> Promotion:
    """Make ``model`` the latest if the evidence for it is what ``config`` asks for, nobody went back from it, and
    ``instead_of`` is still served. Where a person is to decide, it waits for that instead. ``by``: for the history."""

    def refused(reason: str, *, waits: bool = False) -> Promotion:
        return Promotion(model=model, promoted=False, reason=reason, evidence=evidence, waits=waits)

    figures = evidence.comparisons[0].rewards
    if not config.enabled:
        return refused(f"promotion is switched off; {figures}")
    objections = [*evidence.objections(config), *withdrawal(objects, config.resource, model)]
    if objections:
        return refused("; ".join(objections))
    async with open_store() as store:
        if config.approval == "person":
            if await history.served_model(store, objects, config.resource) == model:
                return refused(f"{figures}; it is the latest already")
            return refused(f"{figures}; a person is to decide", waits=True)
        reason = f"{figures}, {evidence.comparisons[0].interval}" if config.confidence else figures
        change = history.Change("promote", config.resource, model, by, reason, evidence)
        try:
            await history.change_latest(store, objects, change, instead_of=instead_of)
        except history.LatestChanged as error:
            return refused(f"{figures}; {error}; the next run compares it with that")
    return Promotion(model=model, promoted=True, reason=reason, evidence=evidence)


def withdrawal(objects: ObjectStore, resource: str, model: ContentId) -> list[str]:
    """That a person, or the canary, went back from a model: a scheduled run that finds the same weights again would
    undo it every night."""
    entry = history.withdrawn(history.history_of(objects, resource, last=history.LOOKED_AT), model)
    if entry is None:
        return []
    return [
        f"{entry.by} rolled back from this model on {entry.at:%Y-%m-%d} ({entry.reason}); `rollout promote "
        f"{model.short}` promotes it all the same"
    ]


def _compare(
    objects: ObjectStore, rivals: dict[Moment, Evaluated], after: Evaluated, config: PromotionConfig
) -> tuple[Comparison, ...]:
    new = objects.put_json(after), _rewards(objects, after)
    return tuple(
        compare(moment, (rival.model, objects.put_json(rival), _rewards(objects, rival)), new, config)
        for moment, rival in rivals.items()
    )


def _rewards(objects: ObjectStore, evaluated: Evaluated) -> dict[str, list[float]]:
    if isinstance(evaluated, EvalReport):
        return rewards_by_prompt(objects, evaluated)
    # Every model works on the same tasks in the same order, each once; a rollout without a reward counts as 0.
    rollouts = ended_rollouts(objects, evaluated)
    return {f"task {number:08d}": [rollout.reward or 0.0] for number, rollout in enumerate(rollouts)}


def _judge(
    objects: ObjectStore,
    rivals: dict[Moment, Evaluated],
    after: Evaluated,
    config: PromotionConfig,
    guarded: Sequence[GuardReports],
    divergences: Sequence[Divergence],
) -> tuple[GuardFinding, ...]:
    """What the guards say; an agent's work has no completions to look at."""
    reports: dict[Moment, EvalReport] = {
        moment: rival for moment, rival in rivals.items() if isinstance(rival, EvalReport)
    }
    evaluated = Measured(objects, reports, after) if isinstance(after, EvalReport) else None
    return tuple(judge_guards(config.guards, evaluated, guarded, divergences))


def _precisions(objects: ObjectStore, evaluated: Mapping[str, Evaluated], backend: BackendConfig) -> str | None:
    found = {moment: precision_of(objects, of.model, backend) for moment, of in evaluated.items()}
    known = [f"{moment} {text}" for moment, text in found.items() if text is not None]
    return f"precision: {'; '.join(known)}" if known else None


def precision_of(objects: ObjectStore, model: ContentId, backend: BackendConfig) -> str | None:
    """In which precision ``backend`` evaluates a stored model, for people; None where nothing is known."""
    try:
        stored = stored_dtype(objects, model)
    except (NotFound, CorruptObject, ConfigError):
        return None
    computed = computed_dtype(backend, stored)
    if computed is None:  # such as of an endpoint, whose weights are its own
        return None
    return f"{stored} weights, computed in {computed}" if stored else f"computed in {computed}"

"""What decides about a promotion: the comparisons of the new model with those before it, what the guards say, and
whether somebody went back from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout_core.agents.adapters.ended import ended_rollouts
from rollout_core.base.errors import ConfigError, CorruptObject, NotFound
from rollout_core.base.ids import ContentId
from rollout_core.config import BackendConfig, KLGuard, PromotionConfig
from rollout_core.inference.engines import computed_dtype
from rollout_core.models.precision import stored_dtype
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import AgentRollouts, EvalReport
from rollout_core.promotion import history
from rollout_core.promotion.evidence import (
    Comparison,
    Divergence,
    Evidence,
    GuardFinding,
    GuardReports,
    Moment,
    compare,
    judge_guard,
    judge_kl,
    rewards_by_prompt,
)

Evaluated = EvalReport | AgentRollouts
OWN_REPORTS = ("reward", "prompts")
"""Kinds of guards that look at evaluations of their own."""


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


def _judge(
    objects: ObjectStore,
    rivals: dict[Moment, Evaluated],
    after: Evaluated,
    config: PromotionConfig,
    guarded: Sequence[GuardReports],
    divergences: Sequence[Divergence],
) -> tuple[GuardFinding, ...]:
    """What the guards say. Raises ConfigError where one has nothing to look at."""
    own = {reports.guard: reports for reports in guarded}
    main: dict[Moment, EvalReport] = {
        moment: rival for moment, rival in rivals.items() if isinstance(rival, EvalReport)
    }
    from_rival = {item.rival: item for item in divergences if item.model == after.model}
    found: list[GuardFinding] = []
    for number, guard in enumerate(config.guards):
        if isinstance(guard, KLGuard) and all(rival.model in from_rival for rival in main.values()):
            found += [judge_kl(guard, moment, from_rival[rival.model]) for moment, rival in main.items()]
        elif isinstance(guard, KLGuard):
            raise ConfigError(f"promotion.guards.{number} (kl) has no KL divergence to look at; measure it first")
        elif guard.kind in OWN_REPORTS and number in own:
            looked_at = own[number]
            latest: dict[Moment, EvalReport] = {} if looked_at.latest is None else {"latest": looked_at.latest}
            found += judge_guard(objects, guard, {"before": looked_at.before, **latest}, looked_at.after)
        elif guard.kind not in OWN_REPORTS and isinstance(after, EvalReport):
            found += judge_guard(objects, guard, main, after)
        else:
            raise ConfigError(
                f"promotion.guards.{number} ({guard.kind}) has no evaluation to look at; evaluate what it names, or "
                "leave it out"
            )
    return tuple(found)

"""Stages that decide about a model: the latest is looked up, a better one promoted, the one before served again."""

from __future__ import annotations

from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import BackendConfig, PromotionConfig
from rollout_core.objects.records import Divergence, Record
from rollout_core.promotion import history
from rollout_core.promotion.decision import Evaluated, promote_if_accepted, weigh
from rollout_core.promotion.evidence import Evidence, Promotion
from rollout_core.promotion.guards import GuardReports, Moment
from rollout_core.promotion.history import Latest
from tasks.runtime import artifacts, connections, events
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, stage


class RolledBack(Record):
    """What is served again, and what was served until now."""

    model: ContentId | None
    previous: ContentId | None
    """None also where nothing was done."""
    reason: str


@stage(version=1, cached=False, in_dry_run=lambda resource: history.latest_by_history(connections.objects(), resource))
def latest_model(resource: str) -> Latest:
    """What the store's latest resources serve under this name, if its weights are still in the object store."""

    async def look() -> Latest:
        async with connections.open_store() as store:
            return await history.find_latest(store, current_stage().objects, resource, warn=stage_logger().warning)

    return run_async(look())


@stage(version=1, cached=False)
def promote(
    before: Evaluated,
    latest: Evaluated | None,
    after: Evaluated,
    config: PromotionConfig,
    *,
    guarded: tuple[GuardReports, ...] = (),
    divergences: tuple[Divergence, ...] = (),
    instead_of: history.Served = "whatever",
    backend: BackendConfig | None = None,
) -> Promotion:
    """Make the new checkpoint the store's latest resources, if the evidence that it is better than ``before`` and
    ``latest`` is what ``config`` asks for, and ``instead_of`` is still served. ``guarded``: the evaluations that guards
    look at besides these; ``divergences``: from each of the two, where a guard asks for it; ``backend``: what drew the
    completions, for the evidence to say in which precision."""
    objects, open_store = current_stage().objects, connections.open_store
    rivals: dict[Moment, Evaluated] = {"before": before} if latest is None else {"before": before, "latest": latest}
    evidence = weigh(objects, rivals, after, config, guarded, divergences, backend)
    done = run_async(
        promote_if_accepted(objects, open_store, after.model, evidence, config, by=this_run(), instead_of=instead_of)
    )
    if done.promoted:
        events.emit(events.Promoted(resource=config.resource, model=done.model, reason=done.reason))
    stage_logger().info("%s: %s", "promoted" if done.promoted else "not promoted", done.reason)
    for line in evidence.lines:
        stage_logger().info("evidence: %s", line)
    verdict = [{"model": done.model.short, "promoted": done.promoted, "reason": done.reason}]
    artifacts.table("promotion", verdict, "Promotion of the new checkpoint")
    show_evidence(evidence)
    return done


@stage(version=1, cached=False)
def roll_back(
    resource: str, to: str | None, *, reason: str = "", instead_of: history.Served = "whatever"
) -> RolledBack:
    """Serve again what was latest before, or the model ``to`` of the history; once in a flow run, however often it is
    tried. Nothing is done where something else than ``instead_of`` is served. ``reason``: for the history."""
    objects, options = current_stage().objects, {"reason": reason, "instead_of": instead_of}

    async def go_back() -> history.Entry:
        async with connections.open_store() as store:
            return await history.roll_back(store, objects, resource, to=to, by=this_run(), once=True, **options)

    try:
        entry = run_async(go_back())
    except history.LatestChanged as error:
        stage_logger().warning("%s; nothing was taken back", error)
        return RolledBack(model=error.now, previous=None, reason=f"{error}; nothing was taken back")
    events.emit(
        events.RolledBack(resource=resource, model=entry.model, instead_of=entry.previous or "", reason=entry.reason)
    )
    stage_logger().info("%r serves %s again: %s", resource, entry.model, entry.reason)
    row = {"resource": resource, "model": entry.model, "instead of": entry.previous or "", "reason": entry.reason}
    artifacts.table("rollback", [row], f"Rollback of {resource}")
    return RolledBack(model=entry.model, previous=entry.previous, reason=entry.reason)


def show_evidence(evidence: Evidence) -> None:
    """What a promotion is decided by, in the Prefect UI."""
    title = "Evidence for the promotion: held-out rewards, paired by prompt"
    artifacts.table("promotion-evidence", evidence.rows, title)
    if evidence.guards:
        guards = [{"guard": item.kind, "passed": item.passed, "found": item.line} for item in evidence.guards]
        artifacts.table("promotion-guards", guards, "Guards of the promotion")


def this_run() -> str:
    """Who changes the latest model, for the history."""
    return f"flow run {current_stage().run_id}"

"""Stages that decide about checkpoints: snapshots are verified and labelled, the better model is promoted."""

from __future__ import annotations

from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.base.locks import scratch_folder
from rollout_core.base.stopping import run_async
from rollout_core.config import PromotionConfig
from rollout_core.objects.records import AgentRollouts, Checkpoint, EvalReport, Record, SnapshotRecord
from rollout_core.objects.snapshots import SnapshotStore
from rollout_core.store import LLM
from tasks import artifacts, connections
from tasks.logs import stage_logger
from tasks.stage import current_stage, stage


class Promotion(Record):
    """Whether a checkpoint became the latest one."""

    model: ContentId
    promoted: bool
    reason: str


class Latest(Record):
    """The model that the store's latest resources serve."""

    model: ContentId | None


@stage(version=1)
def snapshot(checkpoint: Checkpoint, snapshot_label: str, *, label: str = "") -> SnapshotRecord:
    """Restore a checkpoint's train state once, so that it is known to be whole, and label it for people."""
    objects = current_stage().objects
    snapshots = SnapshotStore(objects)
    with scratch_folder("verify") as scratch:
        restored = snapshots.restore(checkpoint.train_state, scratch / "state")
    snapshots.set_label(checkpoint.train_state, snapshot_label)
    stage_logger().info("snapshot %s verified and labelled %r", restored.id.short, snapshot_label)
    return SnapshotRecord(
        snapshot=restored.id,
        model=checkpoint.model,
        label=snapshot_label,
        step=checkpoint.step,
        size_bytes=restored.size_bytes,
    )


@stage(version=1, cached=False)
def latest_model(resource: str) -> Latest:
    """What the store's latest resources serve under this name, if its weights are still in the object store."""
    model = run_async(_get_latest(resource))
    if model is not None and not current_stage().objects.tree_is_present(model):
        stage_logger().warning("the latest %r, %s, is not in the object store any more; not compared", resource, model)
        model = None
    return Latest(model=model)


@stage(version=1, cached=False)
def promote(
    before: EvalReport | AgentRollouts,
    latest: EvalReport | AgentRollouts | None,
    after: EvalReport | AgentRollouts,
    config: PromotionConfig,
) -> Promotion:
    """Make the new checkpoint the store's latest resources, unless ``before`` or ``latest`` has a higher reward."""
    rivals = {"it fell": before} | ({} if latest is None else {"the latest model is better": latest})
    better = [
        f"{why}: held-out reward {rival.mean_reward:.4f} -> {after.mean_reward:.4f}"
        for why, rival in rivals.items()
        if rival.mean_reward - after.mean_reward > config.tolerance
    ]
    figures = f"held-out reward {before.mean_reward:.4f} -> {after.mean_reward:.4f}"
    if not config.enabled:
        promotion = Promotion(model=after.model, promoted=False, reason=f"promotion is switched off; {figures}")
    elif better:
        promotion = Promotion(model=after.model, promoted=False, reason="; ".join(better))
    else:
        run_async(_set_latest(after.model, config.resource))
        promotion = Promotion(model=after.model, promoted=True, reason=figures)
    stage_logger().info("%s: %s", "promoted" if promotion.promoted else "not promoted", promotion.reason)
    artifacts.table(
        "promotion",
        [{"model": after.model.short, "promoted": promotion.promoted, "reason": promotion.reason}],
        "Promotion of the new checkpoint",
    )
    return promotion


async def _get_latest(resource: str) -> ContentId | None:
    async with connections.open_store() as store:
        latest = await store.get_latest_resources()
    named = latest.resources.get(resource) if latest else None
    # Somebody else's resource of that name may serve a model that is no content id.
    return ContentId(named.model) if isinstance(named, LLM) and is_content_id(named.model) else None


async def _set_latest(model: ContentId, resource: str) -> None:
    async with connections.open_store() as store:
        latest = await store.get_latest_resources()
        named = LLM(endpoint="", model=model, sampling_parameters={})
        if latest is None or latest.resources.get(resource) != named:
            await store.add_resources({**(latest.resources if latest else {}), resource: named})

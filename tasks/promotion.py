"""Stages that decide about checkpoints: snapshots are labelled, the trained model gets the precision of its base, the
better model is promoted, and the one before is served again.
"""

from __future__ import annotations

from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import BackendConfig, PromotionConfig
from rollout_core.models.precision import in_precision_of, stored_dtype
from rollout_core.objects.records import Checkpoint, Model, Record, SnapshotRecord
from rollout_core.objects.snapshots import SnapshotStore
from rollout_core.promotion import history
from rollout_core.promotion.decision import Evaluated, weigh, withdrawal
from rollout_core.promotion.evidence import Divergence, Evidence, GuardReports, Moment
from tasks.runtime import artifacts, connections, events
from tasks.runtime.dry_run import is_placeholder
from tasks.runtime.journal import stage_logger
from tasks.runtime.kept_states import current_keeping
from tasks.runtime.stage import current_stage, retry, stage


class Promotion(Record):
    """Whether a checkpoint became the latest one."""

    model: ContentId
    promoted: bool
    reason: str
    evidence: Evidence | None = None
    waits: bool = False
    """The evidence is what was asked for, and a person is to decide."""


class Latest(Record):
    """The model that the store's latest resources serve."""

    model: ContentId | None
    """None also where its weights are gone, so that nothing can be compared with it."""
    served: ContentId | None


class RolledBack(Record):
    """What is served again, and what was served until now."""

    model: ContentId | None
    previous: ContentId | None
    """None also where nothing was done."""
    reason: str


@stage(version=1)
def snapshot(checkpoint: Checkpoint, snapshot_label: str, *, label: str = "") -> SnapshotRecord:
    """Label a checkpoint's training state for people. That it is there is looked at; its files were verified when they
    were written, and are when they are restored, so they are not read."""
    snapshots = SnapshotStore(current_stage().objects)
    found = snapshots.present(checkpoint.train_state)
    snapshots.set_label(checkpoint.train_state, snapshot_label, by_stage=True)
    stage_logger().info("snapshot %s labelled %r", found.id.short, snapshot_label)
    return SnapshotRecord(
        snapshot=found.id,
        model=checkpoint.model,
        label=snapshot_label,
        step=checkpoint.step,
        size_bytes=found.size_bytes,
    )


def file_state(checkpoint: Checkpoint, name: str, *, label: str = "") -> None:
    """Have the states before a checkpoint's go, if that is stored, and label it ``name`` for people."""
    if (kept := current_keeping()) is not None:
        kept.later(checkpoint)
    label_state(checkpoint, name, label=label)


def label_state(checkpoint: Checkpoint, name: str, *, label: str = "") -> None:
    """Label a checkpoint's state for people, unless it is not stored. One that was given up since has its label."""
    snapshots, state = SnapshotStore(connections.objects()), checkpoint.train_state
    is_there = retry(lambda: snapshots.find_pruned(state) is None or snapshots.is_present(state))
    labelled = {"checkpoint": checkpoint, "snapshot_label": name, "label": label}
    if is_there or retry(lambda: snapshot.find(labelled)) is not None:
        snapshot(checkpoint, name, label=label)


@stage(version=2)
def round_weights(model: ContentId, base: ContentId) -> Model:
    """A trained model with its weights in the dtype of ``base``, which its training began with."""
    rounded = in_precision_of(model, base, current_stage().objects, connections.cache_folder())
    stage_logger().info("model %s with the dtype of its base is %s", model.short, rounded.short)
    return Model(model=rounded)


def in_base_precision(model: ContentId, base: ContentId) -> ContentId:
    """The form of ``model`` that leaves the run which trained it, and so is evaluated for promotion: what
    `round_weights` makes of it, unless the dtype of ``base`` is float32, as in training, or unknown."""
    if is_placeholder(base):  # to be downloaded or converted: of most models that dtype is another
        return round_weights(model, base).model
    dtype = retry(lambda: stored_dtype(connections.objects(), base))
    return model if dtype in (None, "float32") else round_weights(model, base).model


def _latest_by_history(resource: str) -> Latest:
    """What `latest_model` gives in a dry run, which opens no database."""
    entries = history.history_of(connections.objects(), resource, last=1)
    served = entries[-1].model if entries else None
    is_there = served is not None and connections.objects().tree_is_present(served)
    return Latest(model=served if is_there else None, served=served)


@stage(version=1, cached=False, in_dry_run=_latest_by_history)
def latest_model(resource: str) -> Latest:
    """What the store's latest resources serve under this name, if its weights are still in the object store."""
    model = served = run_async(_get_latest(resource))
    if model is not None and not current_stage().objects.tree_is_present(model):
        stage_logger().warning("the latest %r, %s, is not in the object store any more; not compared", resource, model)
        model = None
    return Latest(model=model, served=served)


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
    objects = current_stage().objects
    rivals: dict[Moment, Evaluated] = {"before": before}
    if latest is not None:
        rivals["latest"] = latest
    evidence = weigh(objects, rivals, after, config, guarded, divergences, backend)
    figures = evidence.comparisons[0].rewards
    waits = False
    objections = [*evidence.objections(config), *withdrawal(objects, config.resource, after.model)]
    if not config.enabled:
        reason, promoted = f"promotion is switched off; {figures}", False
    elif objections:
        reason, promoted = "; ".join(objections), False
    elif config.approval == "person" and run_async(_get_latest(config.resource)) == after.model:
        reason, promoted = f"{figures}; it is the latest already", False
    elif config.approval == "person":
        reason, promoted, waits = f"{figures}; a person is to decide", False, True
    else:
        sure = f", {evidence.comparisons[0].interval}" if config.confidence else ""
        reason = f"{figures}{sure}"
        change = history.Change("promote", config.resource, after.model, _run(), reason, evidence)
        try:
            run_async(_change_latest(change, instead_of))
            promoted = True
        except history.LatestChanged as error:
            reason, promoted = f"{figures}; {error}; the next run compares it with that", False
    if promoted:
        events.emit(events.Promoted(resource=config.resource, model=after.model, reason=reason))
    stage_logger().info("%s: %s", "promoted" if promoted else "not promoted", reason)
    for line in evidence.lines:
        stage_logger().info("evidence: %s", line)
    verdict = [{"model": after.model.short, "promoted": promoted, "reason": reason}]
    artifacts.table("promotion", verdict, "Promotion of the new checkpoint")
    show_evidence(evidence)
    return Promotion(model=after.model, promoted=promoted, reason=reason, evidence=evidence, waits=waits)


@stage(version=1, cached=False)
def roll_back(
    resource: str, to: str | None, *, reason: str = "", instead_of: history.Served = "whatever"
) -> RolledBack:
    """Serve again what was latest before, or the model ``to`` of the history; once in a flow run, however often it is
    tried. Nothing is done where something else than ``instead_of`` is served. ``reason``: for the history."""
    try:
        entry = run_async(_roll_back(resource, to, reason, instead_of))
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
    rows = [
        {
            "against": f"{item.moment} {item.rival.short}",
            "before": round(item.mean_before, 4),
            "after": round(item.mean_after, 4),
            "gain": round(item.gain, 4),
            "interval": f"{item.lower:.4f} to {item.upper:.4f} ({item.confidence:.4g})",
            "prompts": item.num_prompts,
        }
        for item in evidence.comparisons
    ]
    artifacts.table("promotion-evidence", rows, "Evidence for the promotion: held-out rewards, paired by prompt")
    if evidence.guards:
        guards = [{"guard": item.kind, "passed": item.passed, "found": item.line} for item in evidence.guards]
        artifacts.table("promotion-guards", guards, "Guards of the promotion")


def _run() -> str:
    return f"flow run {current_stage().run_id}"


async def _get_latest(resource: str) -> ContentId | None:
    async with connections.open_store() as store:
        entry = await history.adopt_history(store, current_stage().objects, resource)
        if entry is not None:
            stage_logger().warning(
                "the database knows no %r; by the history in object storage %s became the latest at %s UTC, and is so "
                "here as well",
                resource,
                entry.model.short,
                f"{entry.at:%Y-%m-%d %H:%M}",
            )
        return await history.served_model(store, current_stage().objects, resource)


async def _change_latest(change: history.Change, instead_of: history.Served) -> None:
    async with connections.open_store() as store:
        await history.change_latest(store, current_stage().objects, change, instead_of=instead_of)


async def _roll_back(resource: str, to: str | None, reason: str, instead_of: history.Served) -> history.Entry:
    objects, by = current_stage().objects, _run()
    async with connections.open_store() as store:
        entries = history.history_of(objects, resource)
        done = [entry for entry in entries[-1:] if (entry.action, entry.by) == ("rollback", by)]
        if done and await history.served_model(store, objects, resource) == done[0].model:
            return done[0]
        return await history.roll_back(store, objects, resource, to=to, by=by, reason=reason, instead_of=instead_of)

"""Stages about what stays: inputs filed in the object store, labelled snapshots, promotion of a checkpoint."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from rollout_core.config import HeldOutRows, ModelSource, PromotionConfig, RunInfo
from rollout_core.datasets import parse_prompts, parse_sft, to_jsonl
from rollout_core.errors import ConfigError
from rollout_core.ids import ContentId
from rollout_core.models import import_model as file_model
from rollout_core.objects import ObjectStore
from rollout_core.preferences import parse_judged, parse_pairs
from rollout_core.records import Checkpoint, Dataset, EvalReport, Model, Record, SnapshotRecord
from rollout_core.resume import find_start
from rollout_core.rewards import RewardSpec, with_models
from rollout_core.snapshots import SnapshotStore
from rollout_core.store import LLM
from tasks import artifacts, places
from tasks.stage import current_stage, stage, stage_logger


class Promotion(Record):
    """Whether a checkpoint became the latest one."""

    model: ContentId
    promoted: bool
    reason: str


@stage(version=1, cached=False)
def import_model(source: ModelSource) -> Model:
    """File a model folder or hub model in the object store; unchanged files are only hashed."""
    return Model(model=file_model(source, current_stage().objects, places.working_folder()))


@stage(version=1, cached=False)
def import_prompts(path: str) -> Dataset:
    """File prompt rows in the object store in canonical form."""
    return _import(current_stage().objects, path, parse_prompts)


@stage(version=1, cached=False)
def import_sft(path: str) -> Dataset:
    """File SFT rows in the object store in canonical form."""
    return _import(current_stage().objects, path, parse_sft)


@stage(version=1, cached=False)
def import_pairs(path: str) -> Dataset:
    """File preference pairs in the object store in canonical form."""
    return _import(current_stage().objects, path, parse_pairs)


@stage(version=1, cached=False)
def import_judged(path: str) -> Dataset:
    """File judged answers in the object store in canonical form."""
    return _import(current_stage().objects, path, parse_judged)


def import_held_out(evaluation: HeldOutRows | None, import_rows: Callable[[str], Dataset]) -> ContentId | None:
    """File the rows of an evaluation during training, if there is one, in the form of the training rows."""
    return None if evaluation is None else import_rows(evaluation.dataset.path).data


def start_snapshot(run: RunInfo, algorithm: str, *, steps_per_iteration: int = 1) -> ContentId | None:
    """The snapshot that a run is told to start from, if it is; raises as `find_start` does."""
    if run.resume is None:
        return None
    options = {"algorithm": algorithm, "run_name": run.name, "steps_per_iteration": steps_per_iteration}
    return find_start(places.objects(), run.resume, **options).id


def import_reward(spec: RewardSpec) -> RewardSpec:
    """``spec`` with its reward models filed in the object store and named by content."""
    return with_models(spec, lambda uri: import_model(ModelSource(uri=uri)).model)


def _import(objects: ObjectStore, path: str, parse) -> Dataset:
    file = places.working_folder() / path
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"dataset {path!r} cannot be read: {error.strerror}") from error
    rows = parse(data, name=path)
    if not rows:
        raise ConfigError(f"dataset {path!r} has no rows")
    return Dataset(data=objects.put_bytes(to_jsonl(rows)), num_rows=len(rows))


@stage(version=1)
def snapshot(checkpoint: Checkpoint, snapshot_label: str, *, label: str = "") -> SnapshotRecord:
    """Restore a checkpoint's train state once, so that it is known to be whole, and label it for people."""
    objects = current_stage().objects
    snapshots = SnapshotStore(objects)
    with tempfile.TemporaryDirectory(prefix="rollout-verify-") as scratch:
        restored = snapshots.restore(checkpoint.train_state, Path(scratch) / "state")
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
def promote(before: EvalReport, after: EvalReport, config: PromotionConfig) -> Promotion:
    """Make the new checkpoint the store's latest resources, unless its held-out reward fell."""
    fell_by = before.mean_reward - after.mean_reward
    figures = f"held-out reward {before.mean_reward:.4f} -> {after.mean_reward:.4f}"
    if not config.enabled:
        promotion = Promotion(model=after.model, promoted=False, reason=f"promotion is switched off; {figures}")
    elif fell_by > config.tolerance:
        promotion = Promotion(model=after.model, promoted=False, reason=f"it fell: {figures}")
    else:
        asyncio.run(_set_latest(after.model, config.resource))
        promotion = Promotion(model=after.model, promoted=True, reason=figures)
    stage_logger().info("%s: %s", "promoted" if promotion.promoted else "not promoted", promotion.reason)
    artifacts.table(
        "promotion",
        [{"model": after.model.short, "promoted": promotion.promoted, "reason": promotion.reason}],
        "Promotion of the new checkpoint",
    )
    return promotion


async def _set_latest(model: ContentId, resource: str) -> None:
    async with places.open_store() as store:
        latest = await store.get_latest_resources()
        named = LLM(endpoint="", model=model, sampling_parameters={})
        if latest is None or latest.resources.get(resource) != named:
            await store.add_resources({**(latest.resources if latest else {}), resource: named})

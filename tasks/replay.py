"""The stage between scores and an update that mixes in completions of earlier iterations."""

from __future__ import annotations

import json
import statistics

from prefect.runtime import flow_run

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, canonical_json, content_id
from rollout_core.base.locks import scratch_folder
from rollout_core.config import Replay
from rollout_core.data.replay import Buffer, Drawn, mix
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import BlobId, Record, Scores, SnapshotId
from rollout_core.objects.snapshots import FINISHED, RUN_NAME, SnapshotStore
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, stage


class Replayed(Record):
    """An iteration's completions with those that are replayed."""

    buffer: SnapshotId
    """With the iteration's own groups in it."""
    scores: BlobId
    """As of `Scores`, the fresh ones first."""
    completions: BlobId
    samples: BlobId
    replayed: BlobId
    """`rollout_core.data.replay.Mixed.document`."""
    num_samples: int
    num_replayed: int
    """Groups."""
    mean: float
    std: float
    num_left_out: int = 0
    num_abstained: int = 0
    """Of the fresh ones, as of `Scores`; ``num_reward_failed``, too."""
    num_reward_failed: int = 0

    def as_scores(self) -> Scores:
        """What an update takes."""
        return Scores.model_validate(self.model_dump(include=set(Scores.model_fields)))


@stage(version=2, optional=("buffer",))
def replay_groups(
    scores: Scores,
    samples: ContentId,
    model: ContentId,
    settings: Replay,
    *,
    buffer: ContentId | None,
    number: int,
    group_size: int,
    seed: int,
    algorithm: str,
    label: str = "",
) -> Replayed:
    """Add groups of ``buffer`` to those that ``model`` drew for iteration ``number``, and these to the buffer."""
    objects = current_stage().objects
    snapshots = SnapshotStore(objects)
    fresh = _drawn(objects, scores, samples, model, number)
    with scratch_folder("buffer") as scratch:
        before = Buffer(group_size)
        if buffer is not None:
            snapshots.restore(buffer, scratch / "before")
            before = Buffer.read(scratch / "before")
        if before.group_size != group_size:
            raise ConfigError(
                f"the replay buffer {buffer} holds groups of {before.group_size} completions, and samples_per_prompt "
                f"is {group_size}: set it to {before.group_size}, or go on without replay"
            )
        mixed = mix(before, fresh, settings, content_id("replay/1", [seed, number, buffer]))
        folder = scratch / "after"
        folder.mkdir()
        before.with_iteration(fresh, settings).write(folder)
        saved = snapshots.save(
            folder,
            kind="buffer",
            run_id=current_stage().run_id,
            step=number + 1,
            algorithm=algorithm,
            label=FINISHED,  # or an update of the same run would prune it
            meta={RUN_NAME: flow_run.name or ""},
        )
    ages = [number - group.iteration for group in mixed.groups]
    old = f", {statistics.fmean(ages):.1f} iterations old in the mean" if ages else ""
    stage_logger().info("%s: %d groups are replayed%s", label, len(ages), old)
    known = [value for value in mixed.scores if value is not None]
    return Replayed(
        buffer=saved.id,
        scores=objects.put_bytes(canonical_json(mixed.scores)),
        completions=objects.put_bytes(mixed.completions),
        samples=objects.put_bytes(mixed.samples),
        replayed=objects.put_json(mixed.document),
        num_samples=len(mixed.scores),
        num_replayed=len(ages),
        mean=statistics.fmean(known),
        std=statistics.pstdev(known),
        num_left_out=scores.num_left_out,
        num_abstained=scores.num_abstained,
        num_reward_failed=scores.num_reward_failed,
    )


def _drawn(objects: ObjectStore, scores: Scores, samples: ContentId, model: ContentId, number: int) -> Drawn:
    blobs = (samples, scores.completions)
    lines, completions = (objects.get_bytes(blob).splitlines(keepends=True) for blob in blobs)
    return Drawn(number, model, lines, completions, json.loads(objects.get_bytes(scores.scores)))

"""The outcome of rollouts, frozen: which attempt ended each, and the content of its spans.

A store keeps changing: another attempt may start, a late span may come. What is learnt from, and what a cached stage
returned, must be the same spans, so they are named here with a digest and compared when they are read again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass, field

import orjson

from rollout_core.agents.emitters import find_final_reward
from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId, content_id
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import Lineage, all_lineage, descendants, in_order
from rollout_core.objects.records import AgentRollouts
from rollout_core.store import AttemptedRollout, LightningStore, Rollout, Span

CHUNK = 500
"""Rollouts whose spans are read at once."""


@dataclass(frozen=True)
class EndedRollout:
    """A rollout's last attempt, as it was when it was looked at."""

    rollout_id: str
    status: str
    attempt_id: str | None = None
    reward: float | None = None
    """The final one; None where the rollout did not succeed or has no finite one."""
    span_ids: list[str] = field(default_factory=list)
    """``trace_id span_id`` of each span, in order."""
    digest: ContentId | None = None
    """Content of these spans; None where there are none."""


async def read_rollouts(
    store: LightningStore, rollout_ids: Sequence[str], *, chunk: int = CHUNK
) -> AsyncIterator[tuple[str, Rollout | None, list[Span]]]:
    """Each rollout, None where there is none, with the spans of its latest attempt, in the order asked for."""
    for start in range(0, len(rollout_ids), chunk):
        part = rollout_ids[start : start + chunk]
        rollouts = {rollout.rollout_id: rollout for rollout in await store.query_rollouts(rollout_id_in=part)}
        spans: dict[str, list[Span]] = {}
        for span in await store.query_many_spans(part):
            spans.setdefault(span.rollout_id, []).append(span)
        for rollout_id in part:
            yield rollout_id, rollouts.get(rollout_id), spans.get(rollout_id, [])


def earned_reward(status: str, spans: Sequence[Span]) -> float | None:
    """The final reward of a rollout that succeeded; None without a finite one. What others emitted on their way is no
    outcome."""
    reward = find_final_reward(spans) if status == "succeeded" else None
    return reward if reward is not None and math.isfinite(reward) else None


def freeze(rollout: Rollout, spans: Sequence[Span]) -> EndedRollout:
    """What a rollout and the spans of its latest attempt are now."""
    return EndedRollout(
        rollout.rollout_id,
        rollout.status,
        rollout.attempt.attempt_id if isinstance(rollout, AttemptedRollout) else None,
        earned_reward(rollout.status, spans),
        [_name(span) for span in spans],
        _digest(spans),
    )


def as_they_were(ended: EndedRollout, spans: Iterable[Span]) -> list[Span]:
    """Of the spans that a rollout has now, those that it had then. Raises Fatal where they are not the same."""
    known = {_name(span): span for span in spans if span.attempt_id == ended.attempt_id}
    found = [known[name] for name in ended.span_ids if name in known]
    if len(found) < len(ended.span_ids) or _digest(found) != ended.digest:
        what = "have changed" if len(found) == len(ended.span_ids) else "are not all in the database any more"
        raise Fatal(
            f"the spans of rollout {ended.rollout_id} {what} since the rollout ended (attempt {ended.attempt_id}); "
            "restore the database, or give the run another seed, whose rollouts are others"
        )
    return found


def _name(span: Span) -> str:
    return f"{span.trace_id} {span.span_id}"


def _digest(spans: Sequence[Span]) -> ContentId | None:
    if not spans:
        return None
    return content_id("spans/1", [span.model_dump(mode="json") for span in spans])


async def earned_rewards(store: LightningStore, rollout_ids: Sequence[str]) -> list[float]:
    """Those of the rollouts that earned one, see `earned_reward`. Nothing is filed."""
    return [
        reward
        async for _, rollout, spans in read_rollouts(store, rollout_ids)
        if rollout is not None and (reward := earned_reward(rollout.status, spans)) is not None
    ]


async def look_up(
    store: LightningStore, objects: ObjectStore, rollout_ids: Sequence[str], model: ContentId
) -> AgentRollouts:
    """The outcome of these rollouts, filed. One that the store does not know has the status ``unknown``."""
    ended = [
        EndedRollout(rollout_id, "unknown") if rollout is None else freeze(rollout, spans)
        async for rollout_id, rollout, spans in read_rollouts(store, rollout_ids)
    ]
    rewards = [row.reward for row in ended if row.reward is not None]
    return AgentRollouts(
        rollouts=objects.put_bytes(b"".join(orjson.dumps(asdict(row)) + b"\n" for row in ended)),
        model=model,
        num_rollouts=len(ended),
        num_spans=sum(len(row.span_ids) for row in ended),
        statuses=dict(sorted(Counter(row.status for row in ended).items())),
        num_rewards=len(rewards),
        mean_reward=math.fsum(rewards) / max(1, len(ended)),
    )


def ended_rollouts(objects: ObjectStore, rollouts: AgentRollouts) -> list[EndedRollout]:
    """The rollouts of a record, in order."""
    return [EndedRollout(**orjson.loads(line)) for line in objects.get_bytes(rollouts.rollouts).splitlines()]


def most_changed(
    before: Sequence[EndedRollout], after: Sequence[EndedRollout], *, num_gained: int, num_lost: int
) -> list[tuple[EndedRollout, EndedRollout]]:
    """Of rollouts of the same tasks, in the same order, those whose reward rose most, then those whose reward fell
    most."""
    pairs = sorted(zip(before, after, strict=True), key=lambda pair: (pair[0].reward or 0.0) - (pair[1].reward or 0.0))
    return [*pairs[:num_gained], *pairs[max(num_gained, len(pairs) - num_lost) :]]


def made_of(objects: ObjectStore, rollout_id: str) -> list[Lineage]:
    """What was made of a rollout's spans, directly or not (samples, checkpoints, what was learnt from those on), in
    the order in which it was made."""
    records = all_lineage(objects)
    name = f'"{rollout_id}"'.encode()
    blobs = [
        blob
        for lineage in records
        if (blob := _rollouts_of(lineage)) is not None and objects.exists(blob) and name in objects.get_bytes(blob)
    ]
    return in_order(descendants(records, blobs))


def _rollouts_of(lineage: Lineage) -> ContentId | None:
    """The rollouts that a record's samples were made of, where it is one of `collect_samples` and names them."""
    rollouts = lineage.inputs.get("rollouts") if lineage.stage == "collect_samples" else None
    return ContentId(rollouts["rollouts"]) if isinstance(rollouts, dict) else None

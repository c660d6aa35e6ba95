"""Prioritised replay of completions that earlier weights drew (Schaul and others, arXiv:1511.05952).

A buffer holds groups of completions of one prompt, the newest of them, with the ids of the weights that drew them. As a
folder it is ``buffer.json`` and, for each iteration, the very files of samples, completions and scores that the
iteration filed: a snapshot of it takes no room in addition to these. What is drawn follows from the buffer and a seed.
"""

from __future__ import annotations

import json
import logging
import random
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId, canonical_json, content_id
from rollout_core.base.locks import scratch_folder
from rollout_core.config import Replay
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import lineage_of, maker_for, makers_of
from rollout_core.objects.records import BlobId, Record, Scores, SnapshotId
from rollout_core.objects.snapshots import FINISHED, SnapshotStore

log = logging.getLogger(__name__)

_VERSION = 1
_EPS = 1e-6
"""Priority of a group whose rewards are alike: it teaches nothing, but is drawn where there is nothing else."""


@dataclass(frozen=True)
class Drawn:
    """Scored completions of one iteration; lines as of `rollout_core.data.samples`."""

    number: int
    """Of the iteration, from 0."""
    model: ContentId
    """The weights that drew every token of these completions."""
    samples: Sequence[bytes]
    completions: Sequence[bytes]
    scores: Sequence[float | None]
    """None where a completion has no score."""


@dataclass(frozen=True)
class Group:
    """Completions of one prompt."""

    iteration: int
    place: int
    """Among the groups of its iteration."""
    priority: float


@dataclass(frozen=True)
class Buffer:
    """Groups of completions, the oldest first."""

    group_size: int
    iterations: tuple[Drawn, ...] = ()
    """Of which there are groups."""
    groups: tuple[Group, ...] = ()

    def with_iteration(self, drawn: Drawn, settings: Replay) -> Buffer:
        """With all groups of an iteration, and without the oldest beyond ``settings.capacity`` or ``max_age``."""
        rated = enumerate(priorities(drawn.scores, self.group_size))
        own = [Group(drawn.number, place, priority) for place, priority in rated]
        first = 0 if settings.max_age is None else drawn.number - settings.max_age + 1
        groups = [group for group in (*self.groups, *own) if group.iteration >= first][-settings.capacity :]
        kept = {group.iteration for group in groups}
        iterations = [item for item in (*self.iterations, drawn) if item.number in kept]
        return replace(self, iterations=tuple(iterations), groups=tuple(groups))

    def draw(self, settings: Replay, seed: str) -> tuple[list[Group], list[float]]:
        """``settings.groups`` different groups, or all where there are fewer, and the weight of each.

        A group is drawn with probability P(i) = p_i^priority_exponent / sum_k p_k^priority_exponent among those not
        drawn yet, and weighs w_i = (N P(i))^-weight_exponent, over the largest w that was drawn; N groups, P of the
        whole buffer. Equations 1 and 2 of arXiv:1511.05952, section 3.4; the paper draws with replacement.
        """
        chances = [group.priority**settings.priority_exponent for group in self.groups]
        total, chance, left = sum(chances), random.Random(seed), list(range(len(chances)))
        found: list[int] = []
        while left and len(found) < settings.groups:
            [place] = chance.choices(range(len(left)), weights=[chances[index] for index in left])
            found.append(left.pop(place))
        raw = [(len(chances) * chances[index] / total) ** -settings.weight_exponent for index in found]
        return [self.groups[index] for index in found], [weight / max(raw) for weight in raw]

    def rows(self, group: Group) -> tuple[Drawn, slice]:
        """The iteration of a group, and which of its rows are the group's."""
        [drawn] = [item for item in self.iterations if item.number == group.iteration]
        return drawn, slice(group.place * self.group_size, (group.place + 1) * self.group_size)

    def write(self, folder: Path) -> None:
        """Into an empty folder; equal buffers give equal files."""
        document: dict[str, Any] = {
            "version": _VERSION,
            "group_size": self.group_size,
            "iterations": [{"number": item.number, "model": item.model} for item in self.iterations],
            "groups": [[group.iteration, group.place, group.priority] for group in self.groups],
        }
        (folder / "buffer.json").write_bytes(canonical_json(document))
        for item in self.iterations:
            own = folder / f"iteration-{item.number}"
            own.mkdir()
            (own / "samples.jsonl").write_bytes(b"".join(item.samples))
            (own / "completions.jsonl").write_bytes(b"".join(item.completions))
            (own / "scores.json").write_bytes(canonical_json(list(item.scores)))

    @classmethod
    def read(cls, folder: Path) -> Buffer:
        """Inverse of `write`."""
        document = json.loads((folder / "buffer.json").read_bytes())
        iterations = []
        for item in document["iterations"]:
            own = folder / f"iteration-{item['number']}"
            files = [own / f"{name}.jsonl" for name in ("samples", "completions")]
            samples, completions = (file.read_bytes().splitlines(keepends=True) for file in files)
            scores = json.loads((own / "scores.json").read_bytes())
            iterations.append(Drawn(item["number"], ContentId(item["model"]), samples, completions, scores))
        groups = tuple(Group(*group) for group in document["groups"])
        return cls(document["group_size"], tuple(iterations), groups)


def priorities(scores: Sequence[float | None], group_size: int) -> list[float]:
    """Of each group of an iteration, the mean of |A|: how far rewards are from the mean of the group, or where groups
    have one completion from that of the iteration. Completions without a score do not count."""
    groups = [_known(scores[start : start + group_size]) for start in range(0, len(scores), group_size)]
    overall = _mean(_known(scores))

    def spread(group: Sequence[float]) -> float:
        mean = overall if group_size == 1 else _mean(group)
        return _mean([abs(score - mean) for score in group])

    return [spread(group) + _EPS for group in groups]


def _known(scores: Sequence[float | None]) -> list[float]:
    return [score for score in scores if score is not None]


def _mean(values: Sequence[float]) -> float:
    """Of equal values exactly theirs, which a rounded sum need not give; 0 of none."""
    if not values or min(values) == max(values):
        return values[0] if values else 0.0
    return sum(values) / len(values)


def num_fresh(number: int, wanted: int, settings: Replay | None, *, first: int = 0) -> int:
    """Groups that iteration ``number`` (from 0) draws anew, of ``wanted`` in all: the rest comes from the buffer, as
    far as it has them. It was empty before iteration ``first``."""
    if settings is None:
        return wanted
    fresh = [0] * first
    for each in range(first, number + 1):
        since = 0 if settings.max_age is None else max(0, each - settings.max_age)
        held = min(settings.capacity, sum(fresh[since:each]))
        fresh.append(wanted - min(settings.groups, held))
    return fresh[number]


@dataclass(frozen=True)
class Mixed:
    """An iteration's completions, and after them those that are replayed."""

    samples: bytes
    completions: bytes
    scores: list[float | None]
    document: dict[str, Any]
    """For each completion what it counts, and the weights that drew it: ``weights``, ``drawn_by``; ``num_fresh``."""
    groups: tuple[Group, ...]
    """Those that are replayed."""


def mix(buffer: Buffer, fresh: Drawn, settings: Replay, seed: str) -> Mixed:
    """``fresh`` with what is drawn from ``buffer``."""
    groups, weights = buffer.draw(settings, seed)
    parts = [(fresh, slice(None)), *map(buffer.rows, groups)]
    counted = zip(parts, [1.0, *weights], strict=True)
    each = [(weight, item.model) for (item, rows), weight in counted for _ in item.scores[rows]]
    return Mixed(
        samples=b"".join(line for item, rows in parts for line in item.samples[rows]),
        completions=b"".join(line for item, rows in parts for line in item.completions[rows]),
        scores=[value for item, rows in parts for value in item.scores[rows]],
        document={
            "weights": [weight for weight, _ in each],
            "drawn_by": [model for _, model in each],
            "num_fresh": len(fresh.scores),
        },
        groups=tuple(groups),
    )


# In object storage


class Replayed(Record):
    """An iteration's completions with those that are replayed."""

    buffer: SnapshotId
    """With the iteration's own groups in it."""
    scores: BlobId
    """As of `Scores`, the fresh ones first."""
    completions: BlobId
    samples: BlobId
    replayed: BlobId
    """`Mixed.document`."""
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
        return self.part(Scores)


def replay_groups(
    objects: ObjectStore,
    scores: Scores,
    samples: ContentId,
    model: ContentId,
    settings: Replay,
    *,
    buffer: ContentId | None,
    number: int,
    group_size: int,
    seed: int,
    **about: Any,
) -> tuple[Replayed, list[int]]:
    """File what ``model`` drew for iteration ``number`` with groups of ``buffer``, and the buffer with these groups.
    Also returns how many iterations old each group is that is replayed.

    ``about``: what the buffer's snapshot says of its run, as `SnapshotStore.save` takes it. Raises ConfigError where
    the buffer has groups of another size."""
    rows, completions = (objects.get_bytes(blob).splitlines(keepends=True) for blob in (samples, scores.completions))
    fresh = Drawn(number, model, rows, completions, objects.get_json(scores.scores))
    snapshots, before = SnapshotStore(objects), Buffer(group_size)
    with scratch_folder("buffer") as scratch:
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
        # With this label an update of the same run does not prune it.
        saved = snapshots.save(folder, kind="buffer", step=number + 1, label=FINISHED, **about)
    known = _known(mixed.scores)
    filed = Replayed(
        buffer=saved.id,
        scores=objects.put_bytes(canonical_json(mixed.scores)),
        completions=objects.put_bytes(mixed.completions),
        samples=objects.put_bytes(mixed.samples),
        replayed=objects.put_json(mixed.document),
        num_samples=len(mixed.scores),
        num_replayed=len(mixed.groups),
        mean=statistics.fmean(known),
        std=statistics.pstdev(known),
        num_left_out=scores.num_left_out,
        num_abstained=scores.num_abstained,
        num_reward_failed=scores.num_reward_failed,
    )
    return filed, [number - group.iteration for group in mixed.groups]


def buffer_behind(objects: ObjectStore, train_state: ContentId) -> ContentId | None:
    """The buffer, with its own groups in it, of the iteration that left ``train_state``; None where that replayed
    nothing, or what it was made of is not known any more."""
    update = lineage_of(objects, train_state)
    replayed = None if update is None else update.inputs.get("replayed")
    mixed = None
    if update is not None and replayed is not None:
        mixed = maker_for(update, replayed, makers_of(objects, ContentId(replayed)))
    for output in () if mixed is None else mixed.outputs:
        with suppress(NotFound):
            if SnapshotStore(objects).get(output).kind == "buffer":
                return output
    log.warning(
        "no buffer of the iteration that left training state %s is there; replay begins with an empty one",
        train_state.short,
    )
    return None

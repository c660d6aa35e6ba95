"""Curves of a run from its record and the metrics of its updates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout_core.base.errors import RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.evaluation.moments import LABEL as SUITE, LATEST
from rollout_core.objects import ObjectStore
from rollout_core.runs.evaluations import evaluations_of
from rollout_core.runs.run_records import RunDetail, RunHead, StageCall

MOST_POINTS = 2_000
"""Of one curve; of more steps every n-th, and always the last."""
REWARD = "reward of iterations"
_REWARDS = {"SelectedGroups": "mean_drawn", "Scores": "mean", "Experience": "mean"}
_TIMED = frozenset({"Completions", "ShardCompletions", "AgentRollouts", "Checkpoint"})
"""Results of engines and learners."""
_COUNTERS = frozenset({"step", "epoch"})
_NOT_OF_ITERATIONS = ("guard", SUITE)
"""Begin the labels of what evaluations drew and scored."""


@dataclass(frozen=True)
class Curve:
    """Values of one figure over steps or iterations of a run."""

    name: str
    """Of the stage and the figure, such as ``ppo_update: value_loss``."""
    x: list[int] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    """Of each value's interval, where they have any."""
    upper: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    """What each x stands for, where that is no step."""

    @property
    def last(self) -> float:
        """Its last value."""
        return self.y[-1]


def curves_of(objects: ObjectStore, head: RunHead, detail: RunDetail) -> dict[str, Curve]:
    """All curves of a run by name: the reward of each iteration first, then each figure of each learner over all its
    steps, those of the update under way included, and the time and speed of engines and learners over their calls.
    Updates whose metrics are gone leave a gap."""
    first = {**_rewards(detail), **suite_curves(detail)}
    found = {name: curve for name, curve in first.items() if len(curve.y) > 1}
    offsets: dict[str, int] = {}
    tokens: dict[tuple[str, str], float] = {}
    # A run that recomputed what storage lost names the same figures twice.
    updates = list({of.metrics: of for of in head.metrics}.values())
    read = objects.in_parallel(lambda of: metric_rows(objects, of.metrics), updates)
    for of, rows in zip(updates, read, strict=True):
        _extend(found, of.stage, rows, offsets)
        tokens[of.stage, of.label] = sum(float(row.get("num_tokens") or 0) for row in rows)
    found |= {curve.name: curve for curve in _times(detail, tokens) if len(curve.y) > 1}
    if detail.live is not None:
        # The update under way counts its own steps, of which only the last may be there.
        _extend(found, detail.live.title.partition(" ")[0], detail.live.rows, offsets, counts_on=False)
    return {name: _thinned(curve) for name, curve in found.items()}


def _times(detail: RunDetail, trained: Mapping[tuple[str, str], float]) -> Iterator[Curve]:
    """Seconds and tokens a second of each inference and each update, over the calls of its stage. What was cached
    leaves a gap: it took no time. ``trained`` are the tokens of updates, by stage and label."""
    calls: dict[str, list[StageCall]] = {}
    for call in detail.calls:
        if call.kind in _TIMED and not call.label.startswith(_NOT_OF_ITERATIONS):
            calls.setdefault(call.stage, []).append(call)
    for stage, each in calls.items():
        seconds, speed = Curve(f"{stage}: seconds"), Curve(f"{stage}: tokens/s")
        for place, call in enumerate(each, start=1):
            if call.state != "Completed" or call.seconds <= 0:
                continue
            seconds.x.append(place)
            seconds.y.append(call.seconds)
            tokens = trained.get((stage, call.label)) or call.result.get("num_tokens")
            if tokens:
                speed.x.append(place)
                speed.y.append(float(tokens) / call.seconds)
        yield from (seconds, speed)


def suite_curves(detail: RunDetail) -> dict[str, Curve]:
    """The figures of suites by which the run evaluated its models, each over the moments at which it did."""
    found: dict[str, Curve] = {}
    for each in evaluations_of(detail):
        if each.moment is None or each.moment == LATEST:
            continue
        for metric in each.report.metrics:
            name = f"{SUITE}{each.report.suite}: {metric.name}"
            curve = found.setdefault(name, Curve(name))
            curve.x.append(len(curve.x) + 1)
            curve.y.append(metric.value)
            curve.lower.append(metric.value if metric.lower is None else metric.lower)
            curve.upper.append(metric.value if metric.upper is None else metric.upper)
            curve.labels.append(each.moment)
    return found


def _rewards(detail: RunDetail) -> dict[str, Curve]:
    """Of all that an iteration drew. An iteration has one of these results; where it has several, the first kind."""
    for kind, figure in _REWARDS.items():
        rewards = [
            float(result[figure])
            for call, result in detail.results(kind)
            if isinstance(result.get(figure), int | float) and not call.label.startswith(_NOT_OF_ITERATIONS)
        ]
        if rewards:
            return {REWARD: Curve(REWARD, list(range(1, len(rewards) + 1)), rewards)}
    return {}


def metric_rows(objects: ObjectStore, metrics: ContentId) -> list[dict[str, Any]]:
    """Figures of each step of an update; none where they cannot be read."""
    try:
        return [json.loads(line) for line in objects.get_bytes(metrics).splitlines()]
    except (RolloutError, ValueError):  # gone, or damaged: the others are worth showing
        return []


def _extend(
    found: dict[str, Curve],
    stage: str,
    rows: Iterable[Mapping[str, Any]],
    offsets: dict[str, int],
    *,
    counts_on: bool = True,
) -> None:
    """Add the figures of one update, whose steps follow those of the stage's updates before; where ``counts_on`` they
    may be numbered so already."""
    before, base = offsets.get(stage, 0), None
    for row in rows:
        step = int(row.get("step") or 0)
        base = (0 if counts_on and step > before else before) if base is None else base
        offsets[stage] = base + step
        for figure, value in row.items():
            if figure in _COUNTERS or not isinstance(value, int | float) or isinstance(value, bool):
                continue
            name = f"{stage}: {figure}"
            curve = found.setdefault(name, Curve(name))
            curve.x.append(base + step)
            curve.y.append(float(value))


def _thinned(curve: Curve) -> Curve:
    stride = -(-len(curve.x) // MOST_POINTS)
    if stride <= 1:
        return curve
    places = sorted({*range(0, len(curve.x), stride), len(curve.x) - 1})
    return Curve(curve.name, [curve.x[place] for place in places], [curve.y[place] for place in places])

"""The curves of a report: what of a run's figures a person looks at, over iterations or steps."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Checkpoint

_OF_ITERATIONS = {
    "objective/kl": "KL to the reference, nats a completion",
    "kl": "KL to the reference, nats a token",
    "entropy": "entropy, nats a token",
    "completions/mean_length": "mean completion length, tokens",
    "value_loss": "value loss",
}


@dataclass(frozen=True)
class Curve:
    """Values over 1, 2, 3, ... of ``x_label``."""

    what: str
    """Name and unit, for the y axis."""
    values: Sequence[float]
    x_label: str

    @property
    def file_name(self) -> str:
        """Of the picture."""
        return "-".join(self.what.partition(",")[0].lower().split()) + ".png"


def figure_of_steps(objects: ObjectStore, checkpoint: Checkpoint, name: str) -> list[float]:
    """A figure of each optimizer step of an update; of steps that have none, nothing."""
    rows = map(json.loads, objects.get_bytes(checkpoint.metrics).splitlines())
    return [row[name] for row in rows if name in row]


def curves_of_iterations(objects: ObjectStore, checkpoints: Sequence[Checkpoint], x_label: str) -> list[Curve]:
    """KL, entropy, length and value loss of PPO or GRPO iterations, each the mean over an iteration's steps."""
    curves = []
    for name, what in _OF_ITERATIONS.items():
        steps = [figure_of_steps(objects, checkpoint, name) for checkpoint in checkpoints]
        if all(steps):
            curves.append(Curve(what, [statistics.fmean(values) for values in steps], x_label))
    return curves

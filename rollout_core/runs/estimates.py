"""How long stages took in earlier runs, for an estimate of a run that is planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rollout_core.base.errors import NotFound
from rollout_core.runs.run_records import RunHead, RunRecords, differences

MOST_RUNS = 5
"""Records that are looked into, the newest first."""


@dataclass(frozen=True)
class StageTime:
    """What a call of a stage took."""

    seconds: float
    """Mean of the calls that were computed."""
    num_calls: int
    run: RunHead
    """The newest run in which it was computed."""
    short_id: str
    """As many digits of its id as tell it from all other runs'."""
    differing: tuple[str, ...]
    """Dotted keys in which the configuration of that run differs from the planned one."""


def stage_times(
    records: RunRecords, flow: str, name: str, model: str | None, config: Mapping[str, Any]
) -> dict[str, StageTime]:
    """By stage, from the newest runs of this flow that have this name; where there are none, that have this model.

    Each stage's time is of one run, the newest that computed it: means over runs of different settings say nothing.
    """
    heads = records.heads(lambda head: head.flow == flow and head.name == name, limit=MOST_RUNS)
    if not heads and model is not None:
        heads = records.heads(lambda head: head.flow == flow and head.model == model, limit=MOST_RUNS)
    found: dict[str, StageTime] = {}
    for head in heads:
        try:
            head, detail = records.detail(head)
        except NotFound:
            continue
        seconds: dict[str, list[float]] = defaultdict(list)
        for call in detail.calls:
            if call.state == "Completed":
                seconds[call.stage].append(call.seconds)
        keys = tuple(row.key for row in differences([detail.config, config]))
        for stage, values in seconds.items():
            found.setdefault(stage, StageTime(fmean(values), len(values), head, records.short(head.id), keys))
    return found

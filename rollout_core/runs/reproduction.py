"""Making a result again: which recorded calls it takes, in which order, what they start from, and what stands in the
way."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_core.base.determinism import arithmetic
from rollout_core.base.errors import ConfigError, MissingObject, NotFound
from rollout_core.base.ids import ContentId
from rollout_core.config.rewards import RewardSpec
from rollout_core.objects import ObjectStore, SnapshotStore
from rollout_core.objects.addresses import copy_object
from rollout_core.objects.lineage import Lineage, in_order, makers_of, software_versions, trace_makers
from rollout_core.objects.plugin_files import is_hot_reloaded
from rollout_core.rewards.source_ids import filed_codes, hold_source

REWARD, REWARD_SOURCE = "reward", "reward_source"
NAMED = ("model", "reference", "dataset", "held_out", "prompts", "tasks", "rows", "start_from", "train_state")
"""Inputs that are content ids of what is stored. Ids of what is no blob, such as code, are others."""
ReadCall = Callable[[Lineage], dict[str, Any]]
"""The arguments of a recorded call of a stage. Raises ConfigError where the stage would make another."""


@dataclass(frozen=True)
class Step:
    """A recorded call that is to be made again."""

    lineage: Lineage
    inputs: dict[str, Any]

    @property
    def title(self) -> str:
        """For people."""
        return _title(self.lineage)


@dataclass(frozen=True)
class Plan:
    """What it takes to make something again."""

    steps: Sequence[Step]
    """In order."""
    first_inputs: Sequence[ContentId]
    """What no step makes, to be copied."""
    problems: Sequence[str]
    """Why it cannot be done."""
    notes: Sequence[str]
    """What differs here from where it was made, and may make other ids."""
    base: Path | None = None
    """Where relative files of rewards are; None: the working directory."""

    @property
    def numerics(self) -> str:
        """``portable`` or ``native``, as all of it was made. Raises ConfigError where it was both."""
        found = {str(step.lineage.arithmetic.get("numerics", "native")) for step in self.steps}
        if len(found) > 1:
            raise ConfigError(
                "its stages were computed with native and with portable numerics; make it again in two parts"
            )
        return found.pop() if found else "native"


def plan_reproduction(
    source: ObjectStore, content: ContentId, stages: Mapping[str, ReadCall], base: Path | None = None
) -> Plan:
    """How to make ``content`` again, from the records of ``source``, by ``stages``. Raises NotFound where none made it.

    Where several calls made the same, it is the last one that can be made again.
    """
    plans: list[Plan] = []
    for maker in reversed(makers_of(source, content)):
        recorded = [lineage for lineage in in_order(trace_makers(source, [maker])) if lineage.stage in stages]
        if recorded:
            plans.append(_plan(source, recorded, stages, base))
            if not plans[-1].problems:
                return plans[-1]
    if not plans:
        raise NotFound(f"no stage recorded that it made {content}; only what stages made can be made again")
    return plans[0]


def _plan(source: ObjectStore, recorded: Sequence[Lineage], stages: Mapping[str, ReadCall], base: Path | None) -> Plan:
    # A result may pass on what it was made of, such as an evaluation its model.
    inputs = {lineage.key: set(lineage.inputs_named()) for lineage in recorded}
    made = {output for lineage in recorded for output in lineage.outputs if output not in inputs[lineage.key]}
    steps: list[Step] = []
    problems: list[str] = []
    first: dict[ContentId, None] = {}
    for lineage in recorded:
        first |= {one: None for one in sorted(inputs[lineage.key] - made) if _is_stored(source, one)}
        problems += [
            f"{_title(lineage)}: {name} is not in {source.url} any more" for name in _gone(source, lineage, made)
        ]
        try:
            steps.append(Step(lineage, stages[lineage.stage](lineage)))
        except ConfigError as error:
            problems.append(f"{_title(lineage)}: {error}")
    for step in steps:
        try:
            hold_code(source, step, base)
        except (ConfigError, MissingObject) as error:
            problems.append(f"{step.title}: {error}")
    return Plan(steps, list(first), problems, _differences(recorded), base)


def _title(lineage: Lineage) -> str:
    return f"{lineage.stage} {lineage.inputs.get('label') or ''}".strip()


def _is_stored(source: ObjectStore, content: ContentId) -> bool:
    return source.exists(content) or SnapshotStore(source).is_present(content)


def _gone(source: ObjectStore, lineage: Lineage, made: set[ContentId]) -> list[str]:
    """Inputs by name that no step makes and that are not stored."""
    given = {name: lineage.inputs.get(name) for name in NAMED}
    return [
        f"{name} {ContentId(value).short}"
        for name, value in given.items()
        if isinstance(value, str) and value not in made and not _is_stored(source, ContentId(value))
    ]


def hold_code(source: ObjectStore, step: Step, base: Path | None) -> None:
    """Have the filed code of a step's reward run, whatever its files under ``base`` are by now. Raises ConfigError
    where it is not the code of the step."""
    reward: RewardSpec | None = step.inputs.get(REWARD)
    wanted = step.inputs.get(REWARD_SOURCE)
    if reward is None or wanted is None:
        return
    if is_hot_reloaded(source, wanted):
        raise ConfigError(
            f"reward {ContentId(wanted).short} is of plugins that ran with --hot-reload: which of their files made "
            "which score is not known, and it cannot be made again; run it without --hot-reload"
        )
    if hold_source(reward, filed_codes(source, wanted), base) != wanted:
        raise ConfigError(f"the filed code of its reward is not that of {ContentId(wanted).short}")


def _differences(recorded: Sequence[Lineage]) -> list[str]:
    """What decides over last bits and is not here as it was there."""
    importlib.import_module("torch")  # of a process without it there is no arithmetic to compare
    here = {"software": software_versions(), "arithmetic": arithmetic()}
    found: dict[str, None] = {}
    for lineage in recorded:
        there: dict[str, dict[str, Any]] = {"software": dict(lineage.software), "arithmetic": dict(lineage.arithmetic)}
        for what, values in there.items():
            for name in sorted((values.keys() | here[what].keys()) - {"threads"}):
                if values.get(name) != here[what].get(name):
                    found[f"{name}: {values.get(name)} there, {here[what].get(name)} here"] = None
    return list(found)


def reproduce(
    source: ObjectStore, target: ObjectStore, plan: Plan, call: Callable[[Step], Sequence[ContentId]]
) -> dict[str, Any]:
    """Make it again in ``target`` by ``call``, which makes a step and returns its ids.

    Stops at the first step whose ids differ, as those after it have other inputs. Returns ``same`` (titles of steps),
    and ``difference``, None where there is none: ``stage``, the ids ``there`` and ``here``. Raises ConfigError where
    the plan has problems.
    """
    if plan.problems:
        raise ConfigError("\n".join(plan.problems))
    for content in plan.first_inputs:
        if source.exists(content):
            copy_object(source, target, content)
        else:
            SnapshotStore(source).copy(content, target)
    same: list[str] = []
    for step in plan.steps:
        hold_code(source, step, plan.base)
        there, here = list(step.lineage.outputs), list(call(step))
        if here != there:
            return {"same": same, "difference": {"stage": step.title, "there": there, "here": here}}
        same.append(step.title)
    return {"same": same, "difference": None}

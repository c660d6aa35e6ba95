"""Making a result again: the stages that its lineage records, called with the same inputs in another object store, and
their ids compared one by one."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast, get_args, get_type_hints

from prefect import flow
from pydantic import BaseModel, TypeAdapter, ValidationError

from rollout_core.base.determinism import arithmetic
from rollout_core.base.errors import ConfigError, MissingObject, NotFound
from rollout_core.base.ids import ContentId
from rollout_core.config import Run, RunInfo
from rollout_core.config.rewards import RewardSpec
from rollout_core.inference.engines import close_engine
from rollout_core.objects import ObjectStore, SnapshotStore
from rollout_core.objects.addresses import copy_object
from rollout_core.objects.imports import code_behind
from rollout_core.objects.lineage import Lineage, in_order, makers_of, software_versions, trace_makers
from rollout_core.rewards.kept import close_rewards
from rollout_core.rewards.source_ids import hold_source
from rollout_core.rewards.user_code import UserCode
from tasks.agents import close_agents
from tasks.runtime.connections import objects, storage_at
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal
from tasks.runtime.stage import Stage

MODULES = ("batch", "generate", "score", "learn", "partial_rollouts", "checkpoints", "promotion", "prompts", "agents")
"""Of `tasks`, those whose cached stages make results."""
REWARD, REWARD_SOURCE = "reward", "reward_source"


@dataclass(frozen=True)
class Step:
    """A recorded call that is to be made again."""

    lineage: Lineage
    stage: Stage[..., Any]
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


def plan_reproduction(source: ObjectStore, content: ContentId) -> Plan:
    """How to make ``content`` again, from the records of ``source``. Raises NotFound where there are none.

    Where several calls made the same, it is the last one that can be made again.
    """
    known = _stages()
    plans: list[Plan] = []
    for maker in reversed(makers_of(source, content)):
        found = in_order(trace_makers(source, [maker]))
        if any(lineage.stage in known for lineage in found):
            plans.append(_plan(source, known, found))
            if not plans[-1].problems:
                return plans[-1]
    if not plans:
        raise NotFound(f"no stage recorded that it made {content}; only what stages made can be made again")
    return plans[0]


def _plan(source: ObjectStore, known: Mapping[str, Stage[..., Any]], found: Sequence[Lineage]) -> Plan:
    recorded = [lineage for lineage in found if lineage.stage in known]
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
            steps.append(_step(known[lineage.stage], lineage))
        except ConfigError as error:
            problems.append(f"{_title(lineage)}: {error}")
    problems += [problem for step in steps if (problem := _code_problem(source, step))]
    return Plan(steps, list(first), problems, _differences(recorded))


def _stages() -> dict[str, Stage[..., Any]]:
    modules = [importlib.import_module(f"tasks.{name}") for name in MODULES]
    found = (value for module in modules for value in vars(module).values())
    return {item.name: item for item in found if isinstance(item, Stage) and item.cached}


def _title(lineage: Lineage) -> str:
    return f"{lineage.stage} {lineage.inputs.get('label') or ''}".strip()


def _is_stored(source: ObjectStore, content: ContentId) -> bool:
    return source.exists(content) or SnapshotStore(source).is_present(content)


def _gone(source: ObjectStore, lineage: Lineage, made: set[ContentId]) -> list[str]:
    """Inputs by name that no step makes and that are not stored. Ids of what is no blob, such as code, do not count."""
    names = ("model", "reference", "dataset", "held_out", "prompts", "tasks", "rows", "start_from", "train_state")
    given = {name: lineage.inputs.get(name) for name in names}
    return [
        f"{name} {ContentId(value).short}"
        for name, value in given.items()
        if isinstance(value, str) and value not in made and not _is_stored(source, ContentId(value))
    ]


def _step(stage: Stage[..., Any], lineage: Lineage) -> Step:
    """The call, as it was made. Raises ConfigError where this version would make another."""
    if stage.version != lineage.version:
        raise ConfigError(
            f"it was made by version {lineage.version} of this stage, and here is version {stage.version}"
        )
    given = {**lineage.inputs, **lineage.arguments}
    function = inspect.unwrap(stage)
    hints = get_type_hints(function)
    inputs: dict[str, Any] = {}
    try:
        for name, parameter in inspect.signature(function).parameters.items():
            kind = hints[name]
            if is_dataclass(kind):
                own = get_type_hints(kind)
                inputs[name] = cast(Any, kind)(
                    **{field.name: _read(own[field.name], given[field.name]) for field in fields(kind)}
                )
            elif name in given:
                inputs[name] = _read(kind, given[name])
            elif parameter.default is inspect.Parameter.empty:
                raise ConfigError(f"{name!r} is not recorded")
    except (KeyError, ValidationError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"{error} is not recorded"
        raise ConfigError(f"its settings cannot be read from the record ({what}); earlier versions kept less") from None
    bound = inspect.signature(function).bind(**inputs)
    bound.apply_defaults()
    if stage.key(dict(bound.arguments)) != lineage.key and not lineage.arguments:
        raise ConfigError("what is recorded of its settings gives another key; earlier versions kept less")
    return Step(lineage, stage, dict(bound.arguments))


def _read(kind: Any, value: Any) -> Any:
    """``value`` as the type that a stage asks for, or as one made of it, such as the settings of a run."""
    problem: ValidationError | None = None
    for one in (kind, *_made_of(kind)):
        try:
            return TypeAdapter(one).validate_json(json.dumps(value))
        except ValidationError as error:
            problem = problem or error
    assert problem is not None, "there is at least one type"
    raise problem


def _made_of(kind: Any) -> Iterator[Any]:
    for member in get_args(kind):
        yield from _made_of(member)
    for own in kind.__subclasses__() if inspect.isclass(kind) and issubclass(kind, BaseModel) else ():
        yield own
        yield from _made_of(own)


def _code_problem(source: ObjectStore, step: Step) -> str | None:
    try:
        _hold_code(source, step)
    except (ConfigError, MissingObject) as error:
        return f"{step.title}: {error}"
    return None


def _hold_code(source: ObjectStore, step: Step) -> None:
    """Have the filed code of a step's reward run, whatever its files are by now."""
    reward: RewardSpec | None = step.inputs.get(REWARD)
    wanted = step.inputs.get(REWARD_SOURCE)
    if reward is None or wanted is None:
        return
    filed = {name: UserCode.from_document(source.get_json(blob)) for name, blob in code_behind(source, wanted).items()}
    if hold_source(reward, filed) != wanted:
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


def numerics_of(plan: Plan) -> str:
    """``portable`` or ``native``, as all that is to be made again was made. Raises ConfigError where it was both."""
    found = {str(step.lineage.arithmetic.get("numerics", "native")) for step in plan.steps}
    if len(found) > 1:
        raise ConfigError("its stages were computed with native and with portable numerics; make it again in two parts")
    return found.pop() if found else "native"


@flow(name="reproduce", flow_run_name="reproduce-{content}", persist_result=False)
def reproduce(content: str, source: str, numerics: str = "native") -> dict[str, Any]:
    """Make a result again in the object store of the settings, from the records of ``source``, and compare ids.

    Stops at the first stage whose ids differ, as those after it have other inputs. Returns ``same`` (titles of stages),
    and ``difference``, None where there is none: ``stage``, the ids ``there`` and ``here``.
    """
    run = Run.model_validate({"run": RunInfo(name="reproduce").model_dump(), "numerics": numerics})
    return _reproduce(run, ContentId(content), source)


@pipeline(None, closes=(close_engine, close_rewards, close_agents))
def _reproduce(run: Run, journal: Journal, content: ContentId, source: str) -> dict[str, Any]:
    there = storage_at(source).objects()
    plan = plan_reproduction(there, content)
    if plan.problems:
        raise ConfigError("\n".join(plan.problems))
    for one in plan.first_inputs:
        _copy(there, objects(), one)
    same: list[str] = []
    for step in plan.steps:
        _hold_code(there, step)
        outputs = step.stage(**step.inputs).outputs()
        if outputs != step.lineage.outputs:
            changed = {"there": list(step.lineage.outputs), "here": list(outputs)}
            return {"same": same, "difference": {"stage": step.title, **changed}}
        same.append(step.title)
    return {"same": same, "difference": None}


def _copy(source: ObjectStore, target: ObjectStore, content: ContentId) -> None:
    if source.exists(content):
        copy_object(source, target, content)
    else:
        SnapshotStore(source).copy(content, target)

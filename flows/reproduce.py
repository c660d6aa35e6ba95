"""Making a result again: the stages that its lineage records, called with the same inputs in another object store, and
their ids compared one by one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from prefect import flow

from rollout_core.base.ids import ContentId
from rollout_core.config import Run, RunInfo
from rollout_core.inference.engines import close_engine
from rollout_core.objects import ObjectStore
from rollout_core.rewards.kept import close_rewards
from rollout_core.runs import reproduction
from rollout_core.runs.reproduction import Plan, Step
from tasks.agents import close_agents
from tasks.runtime.connections import objects, storage_at, working_folder
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal
from tasks.runtime.stage import Stage

MODULES = ("batch", "generate", "score", "learn", "checkpoints", "promotion", "prompts", "agents")
"""Of `tasks`, those whose cached stages make results."""


def _stages() -> Mapping[str, Stage[..., Any]]:
    found = (value for name in MODULES for value in vars(import_module(f"tasks.{name}")).values())
    return {item.name: item for item in found if isinstance(item, Stage) and item.cached}


def plan_reproduction(source: ObjectStore, content: ContentId) -> Plan:
    """`rollout_core.runs.reproduction.plan_reproduction` by the stages of this version."""
    known = {name: stage.recorded_call for name, stage in _stages().items()}
    return reproduction.plan_reproduction(source, content, known, working_folder())


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
    there, stages = storage_at(source).objects(), _stages()

    def call(step: Step) -> tuple[ContentId, ...]:
        return stages[step.lineage.stage](**step.inputs).outputs()

    return reproduction.reproduce(there, objects(), plan_reproduction(there, content), call)

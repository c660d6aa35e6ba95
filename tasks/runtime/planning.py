"""What a run would do: its flow runs dry, and the time of what is not stored is estimated from earlier runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from prefect import Flow

from rollout_core.base.determinism import num_gpus
from rollout_core.config import InferBatchConfig, Run, RunCost
from rollout_core.plans.lock import PlanLock
from rollout_core.runs.estimates import StageTime, stage_times
from rollout_core.runs.run_records import RunRecords
from tasks.runtime.connections import result_storage
from tasks.runtime.dry_run import DryRun, DryRunCall
from tasks.runtime.summary import about
from tasks.runtime.walking import walk

FLOWS: Mapping[str, str] = {
    "nightly": "flows.nightly:nightly",
    "train-sft": "flows.train:train_sft",
    "train-ppo": "flows.train:train_ppo",
    "train-grpo": "flows.train:train_grpo",
    "train-rm": "flows.train:train_rm",
    "train-dpo": "flows.train:train_dpo",
    "train-ipo": "flows.train:train_ipo",
    "train-kto": "flows.train:train_kto",
    "infer-batch": "flows.batch:batch_inference",
    "evaluate-suites": "flows.evaluate:evaluate_suites",
    "train-agent": "flows.agent:train_agent",
    "tune-prompt": "flows.prompts:tune_prompt",
    "learn-online": "flows.online:learn_online",
}
"""Module and name of the flow that runs each kind of configuration. To define one takes Prefect a tenth of a second or
two, so that only what is planned is imported."""


def flow_of(kind: str) -> Flow[..., Any]:
    """The flow that runs configurations of this kind."""
    module, _, name = FLOWS[kind].partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class StagePlan:
    """The calls of a stage."""

    stage: str
    counts: Mapping[str, int]
    """By what would become of them, as of `DryRunCall`."""
    time: StageTime | None
    """Of one call, by an earlier run; None where none computed it, or none is to be computed."""

    @property
    def num_to_compute(self) -> int:
        """Calls of which no result is stored."""
        return self.counts.get("computed", 0) + self.counts.get("continued", 0)


@dataclass(frozen=True)
class RunPlan:
    """What a run would do."""

    kind: str
    facts: Mapping[str, Any]
    """What the run's own checks found, resources among it."""
    calls: Sequence[DryRunCall]
    stages: Sequence[StagePlan]
    """In order of their first calls."""
    seconds: float
    """Of the stages that are to be computed and whose time is known."""
    price: float | None
    """Of these seconds; None where the configuration has no prices."""
    currency: str
    remarks: Sequence[str]
    """What is not known before the run."""
    is_open: bool
    """Whether more stages follow than these, nobody knows how many."""

    @property
    def untimed(self) -> list[str]:
        """Stages that are to be computed and were in no earlier run."""
        return [stage.stage for stage in self.stages if stage.num_to_compute and stage.time is None]

    @property
    def totals(self) -> Counter[str]:
        """Calls by what would become of them."""
        return Counter(call.state for call in self.calls)


def plan_run(kind: str, config: Run) -> RunPlan:
    """Rehearse a run of ``kind``. Raises ConfigError naming all that is wrong with it; changes nothing."""
    dry_run = walk(lambda: flow_of(kind).fn(config))
    return _estimated(kind, config, dry_run, RunRecords(result_storage().objects()))


def lock_plan(kind: str, config: Run) -> PlanLock:
    """The plan of a run of ``kind``, for runs to be held to. Raises ConfigError where not all inputs are known before
    the run."""
    return walk(lambda: flow_of(kind).fn(config), is_cold=True).lock()


def _estimated(kind: str, config: Run, dry_run: DryRun, records: RunRecords) -> RunPlan:
    times = stage_times(
        records,
        flow_of(kind).name,
        config.run.name,
        about(config).get("model"),
        config.model_dump(mode="json", exclude_none=True),
    )
    counts: dict[str, Counter[str]] = {}
    for call in dry_run.calls:
        counts.setdefault(call.stage, Counter())[call.state] += 1
    stages = [
        StagePlan(stage, dict(of), times.get(stage) if of["computed"] + of["continued"] else None)
        for stage, of in counts.items()
    ]
    workers = config.workers.count if isinstance(config, InferBatchConfig) else 1
    seconds = sum(stage.num_to_compute * stage.time.seconds for stage in stages if stage.time) / workers
    return RunPlan(
        kind=kind,
        facts=dry_run.facts,
        calls=dry_run.calls,
        stages=stages,
        seconds=seconds,
        price=_price(config.cost, seconds),
        currency=config.cost.currency,
        remarks=tuple(dict.fromkeys(dry_run.remarks)),
        is_open=dry_run.is_open,
    )


def _price(cost: RunCost, seconds: float) -> float | None:
    if not (cost.per_hour or cost.per_gpu_hour):
        return None
    gpus = num_gpus() if cost.per_gpu_hour else 0
    return seconds / 3600 * (cost.per_hour + gpus * cost.per_gpu_hour)

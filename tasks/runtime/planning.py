"""What a run would do: its flow runs dry, and the time of what is not stored is estimated from earlier runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from prefect import Flow

from blocks import ContentAddressedStorage
from rollout_core.base.determinism import num_gpus
from rollout_core.base.errors import MissingObject
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.base.locks import scratch_folder
from rollout_core.config import HuggingFaceDataset, InferBatchConfig, ModelSource, Run, RunCost
from rollout_core.models.locating import locate_model, locate_tokenizer
from rollout_core.objects.overlay import overlaid
from rollout_core.runs.estimates import StageTime, stage_times
from rollout_core.runs.run_records import RunRecords
from tasks.runtime.connections import result_storage, working_folder
from tasks.runtime.dry_run import DryRun, DryRunCall, StagesEnd, running_dry
from tasks.runtime.summary import about

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
    storage = result_storage()
    with scratch_folder("plan") as folder:
        copy = ContentAddressedStorage.over(overlaid(storage.objects(), folder))
        dry_run = DryRun(copy, _out_of_reach)
        with running_dry(dry_run):
            try:
                flow_of(kind).fn(config)
            except StagesEnd:
                pass
            except MissingObject as error:
                if dry_run.is_placeholder(error.content_id):
                    dry_run.remarks.append("what follows depends on results that are not there yet")
                elif copy.objects().exists(ContentId(error.content_id)):  # noted, and not kept
                    dry_run.remarks.append("what follows depends on large files, which a plan does not keep")
                else:
                    raise
    return _estimated(kind, config, dry_run, RunRecords(storage.objects()))


def _out_of_reach(inputs: dict[str, Any]) -> str | None:
    """Why an import would have to download something first."""
    source, base = inputs.get("source"), working_folder()
    if isinstance(source, HuggingFaceDataset) and not (base / source.uri).is_dir():
        return f"{source.uri}: read from the hub when the run starts; what is made of it counts as not cached"
    if not isinstance(source, ModelSource):
        return None
    found = is_content_id(source.uri) or locate_model(source, base, download=False)
    if found and source.tokenizer is not None:
        found = locate_tokenizer(source, base, download=False)
    if found and source.adapter is not None:
        found = is_content_id(source.adapter) or (base / source.adapter).is_dir()
    named = ", ".join(filter(None, (source.uri, source.tokenizer, source.adapter)))
    return None if found else f"{named}: downloaded when the run starts; what is made of it counts as not cached"


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

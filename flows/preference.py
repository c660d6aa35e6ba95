"""Training flows on preference data: `train_rm`, `train_dpo`, `train_ipo` and `train_kto`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect import flow

from flows.flow_run import recompute_missing
from rollout_core.config import DatasetSource, TrainDPOConfig, TrainIPOConfig, TrainKTOConfig, TrainRMConfig
from rollout_core.objects.records import Checkpoint, Dataset
from rollout_core.objects.short_ids import with_whole_ids
from rollout_core.plans.learner_plan import plan_kto, plan_pairs
from tasks.connections import current_connections, objects, working_folder
from tasks.imports import import_held_out, import_model, import_pairs, import_unpaired, start_snapshot
from tasks.journal import Journal
from tasks.learn import dpo_update, kto_update, rm_update
from tasks.promotion import snapshot


@flow(name="train-rm", flow_run_name="{config.run.name}", persist_result=False)
def train_rm(config: TrainRMConfig) -> dict[str, Any]:
    """A reward model from preference pairs; returns the checkpoint record."""
    config = with_whole_ids(config, working_folder(), objects)
    plan_pairs(config, working_folder(), current_connections(), keep=True)

    def body(journal: Journal) -> dict[str, Any]:
        settings = config.algorithm
        model = import_model(settings.base_model).model
        dataset = import_pairs(settings.dataset).data
        held_out = import_held_out(settings.evaluation, import_pairs)
        start_from = start_snapshot(config.run, settings.kind)
        options = {
            "seed": config.seed,
            "num_threads": config.num_threads,
            "held_out": held_out,
            "start_from": start_from,
        }
        checkpoint = rm_update(model, dataset, settings, **options)
        snapshot(checkpoint, f"{config.run.name}/rm")
        return checkpoint.model_dump(mode="json")

    return recompute_missing(body, config)


@flow(name="train-dpo", flow_run_name="{config.run.name}", persist_result=False)
def train_dpo(config: TrainDPOConfig) -> dict[str, Any]:
    """DPO of one model on preference pairs; returns the checkpoint record."""
    return _train_on_pairs(config)


@flow(name="train-ipo", flow_run_name="{config.run.name}", persist_result=False)
def train_ipo(config: TrainIPOConfig) -> dict[str, Any]:
    """IPO of one model on preference pairs; returns the checkpoint record."""
    return _train_on_pairs(config)


@flow(name="train-kto", flow_run_name="{config.run.name}", persist_result=False)
def train_kto(config: TrainKTOConfig) -> dict[str, Any]:
    """KTO of one model on labelled answers; returns the checkpoint record."""
    config = with_whole_ids(config, working_folder(), objects)
    plan_kto(config, working_folder(), current_connections(), keep=True)
    return _train_against_reference(config, import_unpaired, kto_update)


def _train_on_pairs(config: TrainDPOConfig | TrainIPOConfig) -> dict[str, Any]:
    config = with_whole_ids(config, working_folder(), objects)
    plan_pairs(config, working_folder(), current_connections(), keep=True)
    return _train_against_reference(config, import_pairs, dpo_update)


def _train_against_reference(
    config: TrainDPOConfig | TrainIPOConfig | TrainKTOConfig,
    import_rows: Callable[[DatasetSource], Dataset],
    update: Callable[..., Checkpoint],
) -> dict[str, Any]:
    def body(journal: Journal) -> dict[str, Any]:
        settings = config.algorithm
        model = import_model(settings.base_model).model
        reference = import_model(settings.reference or settings.base_model).model
        checkpoint = update(
            model,
            reference,
            import_rows(settings.dataset).data,
            settings,
            seed=config.seed,
            num_threads=config.num_threads,
            held_out=import_held_out(settings.evaluation, import_rows),
            start_from=start_snapshot(config.run, settings.kind),
        )
        snapshot(checkpoint, f"{config.run.name}/{settings.kind}")
        return checkpoint.model_dump(mode="json")

    return recompute_missing(body, config)

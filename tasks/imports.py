"""Stages that bring inputs in: models, rows and reward models are filed in the object store."""

from __future__ import annotations

from rollout_core.base.ids import is_content_id
from rollout_core.config import DatasetSource, DemonstrationSource, EpisodesDataset, ModelSource
from rollout_core.config.rewards import RewardSpec, with_models
from rollout_core.data.dataset_sources import import_dataset, read_dataset, record_origin
from rollout_core.data.datasets import PairRow, PromptRow, Row, SftRow, TaskRow, UnpairedRow
from rollout_core.models.locating import import_model as file_model, is_gguf, known_model, locate_model
from rollout_core.objects.lineage import record_derivation
from rollout_core.objects.records import Dataset, Model
from rollout_core.runs.played_episodes import read_episodes
from tasks.runtime import connections
from tasks.runtime.artifacts import import_progress
from tasks.runtime.dry_run import dry_run_remark
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, stage


def _known_model(source: ModelSource) -> Model | None:
    """What `import_model` gives in a dry run."""
    model, remark = known_model(source, connections.objects(), connections.working_folder())
    if remark is not None:
        dry_run_remark(remark)
    return None if model is None else Model(model=model)


@stage(version=1, cached=False, imports=True, time="importing", in_dry_run=_known_model)
def import_model(source: ModelSource) -> Model:
    """File a model folder or hub model in the object store; unchanged files are only hashed."""
    found = locate_model(source, connections.working_folder(), download=False)
    if found is None and not is_content_id(source.uri):
        stage_logger().info("model %s is downloaded from the hub", source.uri)
    if found is not None and is_gguf(found):
        stage_logger().info("model %s is converted from GGUF, unless that was done before", source.uri)
    with import_progress(f"Model {source.uri}"):
        return Model(model=file_model(source, current_stage().objects, connections.working_folder()))


@stage(version=1, cached=False, imports=True, time="importing")
def import_prompts(source: DatasetSource, *, label: str = "") -> Dataset:
    """File prompt rows in the object store in canonical form."""
    return _import(source, PromptRow)


@stage(version=1, cached=False, imports=True, time="importing")
def import_sft(source: DemonstrationSource) -> Dataset:
    """File SFT rows in the object store in canonical form."""
    return _import_episodes(source) if isinstance(source, EpisodesDataset) else _import(source, SftRow)


@stage(version=1, cached=False, imports=True, time="importing")
def import_pairs(source: DatasetSource) -> Dataset:
    """File preference pairs in the object store in canonical form."""
    return _import(source, PairRow)


@stage(version=1, cached=False, imports=True, time="importing")
def import_unpaired(source: DatasetSource) -> Dataset:
    """File labelled answers in the object store in canonical form."""
    return _import(source, UnpairedRow)


@stage(version=1, cached=False, imports=True, time="importing")
def import_tasks(source: DatasetSource, *, label: str = "") -> Dataset:
    """File an agent's tasks in the object store in canonical form."""
    return _import(source, TaskRow)


def import_reward(spec: RewardSpec) -> RewardSpec:
    """``spec`` with its reward models filed in the object store and named by content."""
    return with_models(spec, lambda uri: import_model(ModelSource(uri=uri)).model)


def _import_episodes(source: EpisodesDataset) -> Dataset:
    objects = current_stage().objects
    episodes = read_episodes(source, objects, connections.database_url())
    stage_logger().info("episodes of run %s: %s", source.run, episodes.remark())
    dataset = import_dataset(objects, map(SftRow.model_validate, episodes.documents))
    record_derivation(objects, "read_episodes", {"rollouts": episodes.rollouts}, (dataset.data,))
    return dataset


def _import(source: DatasetSource, model: type[Row]) -> Dataset:
    objects, base = current_stage().objects, connections.working_folder()
    rows = read_dataset(source, model, base=base, objects=objects)
    with import_progress(f"Rows of {source.address}"):
        dataset = import_dataset(objects, rows)
    for remark in rows.remarks():
        stage_logger().info("rows of %s: %s", source.address, remark)
    record_origin(objects, dataset, source, base, rows)
    return dataset

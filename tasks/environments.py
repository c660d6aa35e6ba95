"""The stages of environments: rows become episodes, which are played, and what came of them is filed."""

from __future__ import annotations

import orjson
from prefect.runtime import flow_run

from rollout_core.agents.adapters.ended import look_up
from rollout_core.agents.task_rollouts import file_rollouts
from rollout_core.base.errors import Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import EngineConfig, EnvironmentRows, InferBatchConfig, SamplingParams, identity
from rollout_core.config.environments import EnvironmentConfig
from rollout_core.data.dataset_sources import import_dataset, record_origin
from rollout_core.data.datasets import TaskRow
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.episodes import Episode, Tally, play_episodes
from rollout_core.environments.hosts import look_at, rows_of
from rollout_core.environments.memory import merge_notes, read_memory
from rollout_core.inference.folders import output_folder
from rollout_core.inference.output import OutputFile
from rollout_core.objects.records import AgentRollouts, AgentTasks, Dataset, EnvironmentSource, EpisodicMemory
from rollout_core.objects.snapshots import RUN_NAME
from rollout_core.runs.played_files import write_episodes as write_played
from rollout_core.store.types import RolloutMode
from tasks.runtime import artifacts, connections
from tasks.runtime.episodes import notes_of
from tasks.runtime.generation import generate_on_demand
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, refresh_name, stage


@stage(version=1, cached=False, imports=True, time="importing")
def import_environment(environment: EnvironmentConfig) -> EnvironmentSource:
    """File the code of an environment, with what of the user's own it imports. What runs from then on is this code."""
    folder = connections.working_folder()
    return EnvironmentCode.of(environment, folder).file(current_stage().objects, environment, folder)


@stage(version=1, cached=False, imports=True, time="importing")
def import_environment_rows(
    rows: EnvironmentRows, source: EnvironmentSource, environment: EnvironmentConfig, *, label: str = ""
) -> Dataset:
    """File the rows that an environment makes itself in the object store in canonical form."""
    objects, folder = current_stage().objects, connections.working_folder()
    made = rows_of(EnvironmentCode.filed(objects, source), environment, rows)
    dataset = import_dataset(objects, [TaskRow(extras=row) for row in made])
    record_origin(objects, dataset, rows, folder, None)
    return dataset


@stage(version=1, optional=("seed", "limit", "memory"))
def enqueue_episodes(
    rows: ContentId,
    model: ContentId,
    source: EnvironmentSource,
    environment: EnvironmentConfig,
    sampling: SamplingParams,
    backend: EngineConfig,
    *,
    first: int = 0,
    count: int | None = None,
    episodes_per_row: int = 1,
    seed: int | None = None,
    draws: int = 0,
    mode: RolloutMode = "train",
    limit: int | None = None,
    memory: ContentId | None = None,
    label: str = "",
) -> AgentTasks:
    """Turn rows into episodes of an environment, each under an id that follows from all that it depends on.

    ``first`` and ``count`` choose rows, going around the end of the file; with a ``seed`` each time around is in an
    order of its own, which follows from it. Runs of other ``draws`` have episodes of their own, and so have those of
    another ``limit``, the longest sequence that the engine takes, or of another ``memory`` to begin with.
    """
    # More attempts at them leave episodes what they are.
    settings = {name: value for name, value in identity(environment).items() if name != "max_attempts"}
    decides = ["environment", model, source.id, settings, identity(sampling), identity(backend), mode, draws, limit]
    if memory is not None:
        decides.append({"memory": memory})
    chosen = {"first": first, "count": count, "rollouts_per_task": episodes_per_row, "seed": seed}
    record = file_rollouts(current_stage().objects, rows, model, decides, **chosen)
    stage_logger().info("%d rows are %d episodes for model %s", record.num_tasks, record.num_rollouts, model.short)
    return record


@stage(version=1, concurrency="engine", optional=("limit", "memory"), time="generating")
def play(
    episodes: AgentTasks,
    source: EnvironmentSource,
    environment: EnvironmentConfig,
    sampling: SamplingParams,
    backend: EngineConfig,
    *,
    mode: RolloutMode = "train",
    limit: int | None = None,
    memory: ContentId | None = None,
    label: str = "",
) -> AgentRollouts:
    """Play every episode to its end, each beginning with ``memory``, where the environment has one. One that has ended
    is never played again, and what the model answered in one that has not is kept, so an interrupted run resumes with
    what is left."""
    objects = current_stage().objects
    code, folder = EnvironmentCode.filed(objects, source), connections.working_folder()
    code.check(source, environment, folder)
    offer = look_at(code, environment)
    rows = [orjson.loads(line) for line in objects.get_bytes(episodes.rollouts).splitlines()]
    asked = [Episode(row["rollout_id"], row["task"]) for row in rows]
    tally = generate_on_demand(
        play_episodes,
        code,
        environment,
        offer,
        sampling,
        asked,
        model=episodes.model,
        backend=backend,
        mode=mode,
        what="Episodes",
        limit=limit,
        memory=read_memory(objects, memory),
        base=folder,
        index_folder=connections.cache_folder() / "search",
        metadata={"environment": source.path, "environment_id": source.id, "model": episodes.model},
        # A refresh is asked for to have what failed tried again, too.
        retry_failed=refresh_name() is not None,
    )
    record = run_async(_look_up([episode.rollout_id for episode in asked], episodes.model))
    if open_ones := record.num_rollouts - sum(record.statuses.get(status, 0) for status in ("succeeded", "failed")):
        raise Recoverable(f"{open_ones} of {record.num_rollouts} episodes have not ended: something else changed them")
    _show(record, tally, source, label)
    return record


@stage(version=1, optional=("memory",), time="scoring")
def merge_memory(
    played: AgentRollouts,
    source: EnvironmentSource,
    environment: EnvironmentConfig,
    *,
    memory: ContentId | None,
    number: int,
    algorithm: str,
    label: str = "",
) -> EpisodicMemory:
    """What an environment remembers after iteration ``number`` (from 0): ``memory`` with what its episodes left."""
    run = current_stage()
    notes = notes_of(played)
    about = {"run_id": run.run_id, "step": number + 1, "algorithm": algorithm, "meta": {RUN_NAME: flow_run.name or ""}}
    code = EnvironmentCode.filed(run.objects, source)
    saved = merge_notes(run.objects, code, environment, memory, notes, **about)
    stage_logger().info("%s: memory %s, with what %d episodes left", label, saved.id.short, len(notes))
    return EpisodicMemory(memory=saved.id, num_notes=len(notes), size_bytes=saved.size_bytes)


@stage(version=1, cached=False)
def write_episodes(episodes: AgentTasks, played: AgentRollouts, config: InferBatchConfig, run_id: str) -> OutputFile:
    """Write what came of all episodes in input order, unless it is there; the file is replaced at once."""
    objects = current_stage().objects
    folder = output_folder(config.output.dir, connections.working_folder(), objects)
    written = write_played(objects, folder, config, episodes, played, connections.open_store, run_id)
    stage_logger().info("%d episodes in %s", written.num_rows, written.path)
    row = {"file": written.path, "rows": written.num_rows, "failed": written.num_failed}
    artifacts.table("output", [row], "Episodes written")
    return written


async def _look_up(rollout_ids: list[str], model: ContentId) -> AgentRollouts:
    async with connections.open_store() as store:
        return await look_up(store, current_stage().objects, rollout_ids, model)


def _show(record: AgentRollouts, tally: Tally, source: EnvironmentSource, label: str) -> None:
    if tally.failed:
        stage_logger().warning(
            "%d of %d episodes of %s failed in every attempt; first: %s",
            tally.failed,
            record.num_rollouts,
            source.path,
            tally.first_failure or "in an earlier run",
        )
    stage_logger().info(
        "%d episodes of %s ended, mean reward %.4f", record.num_rollouts, source.path, record.mean_reward
    )
    figures = {
        "mean reward": round(record.mean_reward, 4),
        "episodes with a reward": record.num_rewards,
        "turns and calls of tools (spans)": record.num_spans,
        "attempts that failed now": tally.attempts_failed,
        **{f"status: {status}": count for status, count in record.statuses.items()},
        **{f"ended now: {reason}": count for reason, count in sorted(tally.endings.items())},
    }
    artifacts.figures("episodes", figures, f"Episodes of {source.path} {label}".strip())

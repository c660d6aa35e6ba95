"""Training flows: one per algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from prefect import flow

from flows.learning import learn_from_rows, policy_iterations
from flows.partial_rollouts import resume_partial
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.config import (
    TrainConfig,
    TrainDPOConfig,
    TrainGRPOConfig,
    TrainIPOConfig,
    TrainKTOConfig,
    TrainPPOConfig,
    TrainRMConfig,
    TrainSFTConfig,
)
from rollout_core.config.runs import ReferencedAlgorithm
from rollout_core.data.partial_rollouts import Carried
from rollout_core.inference.engines import close_engine
from rollout_core.objects.records import Checkpoint
from rollout_core.objects.snapshots import MODEL_FOLDER, SnapshotStore
from rollout_core.plans.learner_plan import plan_training
from rollout_core.rewards.kept import close_rewards
from rollout_core.rewards.source_ids import source_id
from tasks.imports import (
    import_model,
    import_prompts,
    import_reward,
    start_snapshot,
)
from tasks.runtime.connections import objects, working_folder
from tasks.runtime.dry_run import end_of_stages
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal, Outcome
from tasks.runtime.kept_states import keeping
from tasks.runtime.report import Curve, shown_curve
from tasks.runtime.run_record import record_refusal

ConfigT = TypeVar("ConfigT", bound=TrainConfig[Any])


@flow(name="train-sft", flow_run_name="{config.run.name}", persist_result=False, on_failure=[record_refusal])
def train_sft(config: TrainSFTConfig) -> dict[str, Any]:
    """Supervised fine-tuning of one model on one data set; returns the checkpoint record."""
    return _train_from_rows(config)


@flow(name="train-rm", flow_run_name="{config.run.name}", persist_result=False, on_failure=[record_refusal])
def train_rm(config: TrainRMConfig) -> dict[str, Any]:
    """A reward model from preference pairs; returns the checkpoint record."""
    return _train_from_rows(config)


@flow(name="train-dpo", flow_run_name="{config.run.name}", persist_result=False, on_failure=[record_refusal])
def train_dpo(config: TrainDPOConfig) -> dict[str, Any]:
    """DPO of one model on preference pairs; returns the checkpoint record."""
    return _train_from_rows(config)


@flow(name="train-ipo", flow_run_name="{config.run.name}", persist_result=False, on_failure=[record_refusal])
def train_ipo(config: TrainIPOConfig) -> dict[str, Any]:
    """IPO of one model on preference pairs; returns the checkpoint record."""
    return _train_from_rows(config)


@flow(name="train-kto", flow_run_name="{config.run.name}", persist_result=False, on_failure=[record_refusal])
def train_kto(config: TrainKTOConfig) -> dict[str, Any]:
    """KTO of one model on labelled answers; returns the checkpoint record."""
    return _train_from_rows(config)


@flow(name="train-ppo", flow_run_name="{config.run.name}", persist_result=False, on_failure=[record_refusal])
def train_ppo(config: TrainPPOConfig) -> dict[str, Any]:
    """PPO of one model on its own completions; returns the last checkpoint record and the reward of each iteration."""
    return _train_on_policy(config)


@flow(name="train-grpo", flow_run_name="{config.run.name}", persist_result=False, on_failure=[record_refusal])
def train_grpo(config: TrainGRPOConfig) -> dict[str, Any]:
    """GRPO of one model on groups of its completions; returns the last checkpoint and the reward of each iteration."""
    return _train_on_policy(config)


@pipeline(partial(plan_training, keep=True))
@keeping
def _train_from_rows(config: TrainConfig[Any], journal: Journal) -> dict[str, Any]:
    settings, kind = config.algorithm, config.algorithm.family
    models = [import_model(settings.base_model).model]
    if isinstance(settings, ReferencedAlgorithm):
        models.append(import_model(settings.reference or settings.base_model).model)
    checkpoint = learn_from_rows(config, kind, settings, *models, start_from=start_snapshot(config.run, kind))
    end_of_stages()
    journal.outcome = Outcome(facts=_facts(checkpoint))
    return checkpoint.model_dump(mode="json")


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    """What the run's summary says of a checkpoint."""
    step, last = str(checkpoint.step), checkpoint.summary.get("last_step")
    if last is not None:
        step = f"{step}, of {last:.0f} the one with the lowest held-out loss"
    return {"checkpoint": checkpoint.model, "train state": checkpoint.train_state, "step": step}


@dataclass(frozen=True)
class _Start:
    """What iterations start from."""

    model: ContentId | None = None
    train_state: ContentId | None = None
    num_done: int = 0
    carried: Carried | None = None


def _start_iteration(config: TrainPPOConfig | TrainGRPOConfig, prompts: ContentId) -> _Start:
    settings = config.algorithm
    train_state = start_snapshot(config.run, settings.family, steps_per_iteration=settings.known_steps_per_iteration)
    if train_state is None:
        return _Start()
    snapshots = SnapshotStore(objects())
    if settings.partial_rollouts is None:
        carried, num_done = None, snapshots.get(train_state).step // settings.steps_per_iteration
    else:
        carried = resume_partial(objects(), train_state, settings, prompts)
        num_done = carried.number + 1
    if num_done >= settings.iterations:
        raise ConfigError(
            f"snapshot {train_state.short} has {num_done} iterations behind it; raise algorithm.iterations above that"
        )
    return _Start(snapshots.subtree(train_state, MODEL_FOLDER), train_state, num_done, carried)


@pipeline(partial(plan_training, keep=True), closes=(close_engine, close_rewards))
@keeping
def _train_on_policy(config: TrainPPOConfig | TrainGRPOConfig, journal: Journal) -> dict[str, Any]:
    settings = config.algorithm
    model = import_model(settings.base_model).model
    prompts = import_prompts(settings.prompts)
    started = _start_iteration(config, prompts.data)
    reward = import_reward(settings.reward)
    iterations = policy_iterations(
        started.model or model,
        model,
        prompts.data,
        settings,
        config.backend,
        reward,
        source_id(reward, base=working_folder()),
        seed=config.seed,
        num_threads=config.num_threads,
        run_name=config.run.name,
        train_state=started.train_state,
        num_done=started.num_done,
        carried=started.carried,
    )
    end_of_stages()
    last, rewards = iterations[-1].checkpoint, [iteration.mean_reward for iteration in iterations]
    curve = Curve("mean training reward", rewards, f"{settings.family.upper()} iteration")
    journal.outcome = Outcome(facts=_facts(last), pictures=shown_curve(objects(), config.run.name, curve))
    return {**last.model_dump(mode="json"), "rewards": rewards}

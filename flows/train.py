"""Training flows: one per algorithm."""

from __future__ import annotations

from functools import partial
from typing import Any

from prefect import flow

from flows.evaluation import judge_of
from flows.learning import learn_from_rows, policy_iterations
from flows.playing import Environment, Playing
from flows.suites import RunSuites, suites_of
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
from rollout_core.data.first_iteration import first_iteration
from rollout_core.evaluation.moments import START
from rollout_core.inference.engines import close_engine
from rollout_core.objects.records import Checkpoint
from rollout_core.objects.snapshots import find_start
from rollout_core.plans.learner_plan import plan_training
from rollout_core.rewards.kept import close_rewards
from tasks.imports import import_model, import_prompts
from tasks.runtime.connections import objects
from tasks.runtime.dry_run import end_of_stages, is_placeholder
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal, Outcome, stage_logger
from tasks.runtime.kept_states import keeping
from tasks.runtime.report import Curve, shown_curve
from tasks.runtime.run_record import record_refusal
from tasks.runtime.suite_report import suite_curves, suite_facts


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


@pipeline(partial(plan_training, keep=True), closes=(close_engine, close_rewards))
@keeping
def _train_from_rows(config: TrainConfig[Any], journal: Journal) -> dict[str, Any]:
    settings = config.algorithm
    suites = suites_of(config)
    models = [import_model(settings.base_model).model]
    if isinstance(settings, ReferencedAlgorithm):
        models.append(import_model(settings.reference or settings.base_model).model)
    run, start_from = config.run, None
    if run.resume is not None:
        start_from = find_start(objects(), run.resume, algorithm=settings.family, run_name=run.name).id
    suites.evaluate(models[0], START)
    checkpoint = learn_from_rows(config, settings, *models, start_from=start_from)
    suites.evaluate(checkpoint.model, f"after {settings.family.upper()}")
    end_of_stages()
    journal.outcome = Outcome(
        facts=_facts(checkpoint) | suite_facts(suites.reports), pictures=_pictures(config, suites)
    )
    return checkpoint.model_dump(mode="json")


def _pictures(config: TrainConfig[Any], suites: RunSuites, *curves: Curve) -> dict[str, bytes]:
    """Of the run's curves, by their titles."""
    shown = [shown_curve(objects(), config.run.name, curve) for curve in (*curves, *suite_curves(suites.reports))]
    return {title: png for each in shown for title, png in each.items()}


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    """What the run's summary says of a checkpoint."""
    step, last = str(checkpoint.step), checkpoint.summary.get("last_step")
    if last is not None:
        step = f"{step}, of {last:.0f} the one with the lowest held-out loss"
    return {"checkpoint": checkpoint.model, "train state": checkpoint.train_state, "step": step}


@pipeline(partial(plan_training, keep=True), closes=(close_engine, close_rewards))
@keeping
def _train_on_policy(config: TrainPPOConfig | TrainGRPOConfig, journal: Journal) -> dict[str, Any]:
    settings = config.algorithm
    model = import_model(settings.base_model).model
    playing, judge = None, None
    if config.environment is None:
        prompts, judge = import_prompts(settings.prompts).data, judge_of(settings.reward)
    else:
        environment = Environment.of(config.environment, config.backend, config.seed)
        prompts = environment.rows(settings.prompts)
        playing = Playing.of(environment, settings, prompts)
    known = None if is_placeholder(prompts) else prompts
    start = first_iteration(objects(), config.run, settings, model, known, stage_logger().warning)
    suites = suites_of(config)
    suites.evaluate(start.model, START)
    iterations = policy_iterations(config, settings, judge, prompts, start, suites, reference=model, playing=playing)
    last, rewards = iterations.outcome, iterations.rewards
    suites.evaluate(last.model, f"after {settings.family.upper()}")
    end_of_stages()
    curve = Curve("mean training reward", rewards, f"{settings.family.upper()} iteration")
    pictures = _pictures(config, suites, curve)
    journal.outcome = Outcome(facts=_facts(last) | suite_facts(suites.reports) | suites.facts, pictures=pictures)
    return {**last.model_dump(mode="json"), "rewards": rewards}

"""The stages that train: supervised fine-tuning, learning from preferences, one PPO or GRPO iteration."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_core.base.ids import ContentId
from rollout_core.config import (
    AnyGroupSettings,
    AnyPairSettings,
    IPOSettings,
    KTOSettings,
    PPOSettings,
    RewardModelSettings,
    SFTSettings,
)
from rollout_core.objects.records import Checkpoint, Scores
from tasks.runtime.stage import Stage, stage
from tasks.runtime.updates import UpdateJob


@stage(
    version=4, concurrency="learner", optional=("held_out", "start_from", "teacher"), time="learning", place="learning"
)
def sft_update(
    model: ContentId,
    dataset: ContentId,
    settings: SFTSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    held_out: ContentId | None = None,
    start_from: ContentId | None = None,
    teacher: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """Fine-tune a model on prompt/completion or chat rows; resumes from its last snapshot."""
    inputs = {"model": model, "dataset": dataset, "held_out": held_out, "teacher": teacher}
    return UpdateJob("sft", settings, inputs, seed, num_threads, label, start_from).learn_from_rows()


@stage(version=4, concurrency="learner", optional=("held_out", "start_from"), time="learning", place="learning")
def rm_update(
    model: ContentId,
    dataset: ContentId,
    settings: RewardModelSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    held_out: ContentId | None = None,
    start_from: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """Train a reward model on pairs; resumes from its last snapshot."""
    inputs = {"model": model, "dataset": dataset, "held_out": held_out}
    return UpdateJob("rm", settings, inputs, seed, num_threads, label, start_from).learn_from_rows()


@stage(version=3, concurrency="learner", optional=("held_out", "start_from"), time="learning", place="learning")
def dpo_update(
    model: ContentId,
    reference: ContentId,
    dataset: ContentId,
    settings: AnyPairSettings | IPOSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    held_out: ContentId | None = None,
    start_from: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """DPO or IPO of a model on pairs; resumes from its last snapshot."""
    inputs = {"model": model, "reference": reference, "dataset": dataset, "held_out": held_out}
    return UpdateJob("preference", settings, inputs, seed, num_threads, label, start_from).learn_from_rows()


@stage(version=3, concurrency="learner", optional=("held_out", "start_from"), time="learning", place="learning")
def kto_update(
    model: ContentId,
    reference: ContentId,
    dataset: ContentId,
    settings: KTOSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    held_out: ContentId | None = None,
    start_from: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """KTO of a model on labelled answers; resumes from its last snapshot."""
    inputs = {"model": model, "reference": reference, "dataset": dataset, "held_out": held_out}
    return UpdateJob("preference", settings, inputs, seed, num_threads, label, start_from).learn_from_rows()


@stage(version=5, concurrency="learner", optional=("replayed",), time="learning", place="learning")
def ppo_update(
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    scores: Scores,
    samples: ContentId,
    settings: PPOSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    replayed: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """One PPO iteration over scored completions of ``model``; resumes from its last snapshot."""
    inputs = {"model": model, "train_state": train_state, "reference": reference, "scores": scores, "samples": samples}
    inputs["replayed"] = replayed
    return UpdateJob("ppo", settings, inputs, seed, num_threads, label).learn_on_policy()


@stage(version=5, concurrency="learner", optional=("teacher", "replayed"), time="learning", place="learning")
def grpo_update(
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    scores: Scores,
    samples: ContentId,
    settings: AnyGroupSettings,
    *,
    seed: int,
    num_threads: int | None = None,
    teacher: ContentId | None = None,
    replayed: ContentId | None = None,
    label: str = "",
) -> Checkpoint:
    """One GRPO iteration over scored groups of completions of ``model``; resumes from its last snapshot."""
    inputs = {"model": model, "train_state": train_state, "reference": reference, "scores": scores, "samples": samples}
    inputs |= {"teacher": teacher, "replayed": replayed}
    return UpdateJob("grpo", settings, inputs, seed, num_threads, label).learn_on_policy()


UPDATES: Mapping[str, Stage[..., Checkpoint]] = {
    "sft": sft_update,
    "rm": rm_update,
    "dpo": dpo_update,
    "ipo": dpo_update,
    "kto": kto_update,
    "ppo": ppo_update,
    "grpo": grpo_update,
}
"""The stages that train, by the ``family`` of their settings."""

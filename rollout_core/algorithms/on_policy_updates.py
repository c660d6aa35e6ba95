"""PPO and GRPO updates from content ids to content ids: fetch, restore, train, snapshot, file the checkpoint.

An interrupted update continues from its own last snapshot, which is found under the update's key; everything else it
needs is a pure function of its inputs, so the outcome is the same bytes as without the interruption.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rollout_core.algorithms.advantages import Groups
from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.experience import Trajectory, build_batch, punish_overlong
from rollout_core.algorithms.loop import build_accelerator, build_optimizer
from rollout_core.algorithms.on_policy import GRPO, PPO, KLController, RewardParts, assign_credit, compare_groups
from rollout_core.algorithms.parallel import divided, parts_per_minibatch, shard, world_size
from rollout_core.algorithms.policy import Policy, ValueModel, zero_head
from rollout_core.algorithms.state import TrainState, load_state
from rollout_core.algorithms.training import train_to_end
from rollout_core.base.determinism import seed_everything
from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.ids import ContentId
from rollout_core.base.locks import scratch_folder
from rollout_core.config import GRPOSettings, OnPolicySettings, PPOSettings
from rollout_core.data.samples import decode_completions_blob, decode_samples
from rollout_core.models.architecture import WithoutAdapters, with_lora
from rollout_core.models.pretrained import load_causal_lm
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Checkpoint, Scores
from rollout_core.objects.snapshots import SnapshotStore

VALUES = "value_function"  # "values" is a method of ModuleDict


def ppo_update(
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    scores: Scores,
    samples: ContentId,
    settings: PPOSettings,
    context: UpdateContext,
) -> Checkpoint:
    """One PPO iteration on scored completions of ``model``.

    ``train_state`` is the previous iteration's (optimizer, values, KL coefficient); None for the first iteration.
    """
    trajectories = punish_overlong(load_trajectories(context.objects, samples, scores), settings)
    seed_everything(context.seed, num_threads=context.num_threads)
    accelerator = build_accelerator(settings.precision)
    device, settings = accelerator.device, divided(settings)
    trained = load_on_policy(model, reference, settings, context).to(device)
    values = ValueModel(copy.deepcopy(trained.base_model)) if settings.values == "model" else zero_head(trained)
    policy = shard(Policy(trained, values.to(device)), settings.parallel, device)
    state = _on_policy_state(trained, {VALUES: values}, train_state, settings, context)
    controller = KLController(settings.kl, state.extras.get("kl_coef"))
    options = {"first_step": state.step, "seed": context.seed, "device": device}
    with accelerator.autocast():  # as the loss will be computed
        batch, figures, mean_kl = assign_credit(
            policy,
            _reference_policy(trained, reference, settings, context, device),
            build_batch(trajectories, missing_eos_penalty=settings.missing_eos_penalty),
            settings,
            kl_coef=controller.coef,
            **options,
        )
    controller.update(mean_kl, len(trajectories))
    state.extras = {"kl_coef": controller.coef}
    algorithm = PPO(policy, batch, settings, **options)
    figures["completions/num_left_out"] = scores.num_left_out
    check_guards(figures, settings, scores)
    options = {"total_steps": settings.total_steps, "figures": figures}
    return train_to_end(algorithm, state, settings, accelerator, context, context.model(model), **options)


def grpo_update(
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    scores: Scores,
    samples: ContentId,
    settings: GRPOSettings,
    context: UpdateContext,
) -> Checkpoint:
    """One GRPO iteration on scored groups of completions of ``model``; ``reference`` counts only where kl_coef is set.

    ``train_state`` is the previous iteration's optimizer; None for the first iteration. Raises ConfigError for scores
    that were gathered in groups of another size.
    """
    trajectories = punish_overlong(load_trajectories(context.objects, samples, scores), settings)
    groups = load_groups(context.objects, scores, settings)
    seed_everything(context.seed, num_threads=context.num_threads)
    accelerator = build_accelerator(settings.precision)
    device = accelerator.device
    parts = parts_per_minibatch(settings.minibatch_size, settings.gradient_accumulation, world_size())
    settings = divided(settings)
    trained = load_on_policy(model, reference, settings, context).to(device)
    policy = shard(Policy(trained), settings.parallel, device)
    state = _on_policy_state(trained, {}, train_state, settings, context)
    parts_of_reward = load_parts(context.objects, scores) if settings.reward_normalization == "each" else None
    options = {"groups": groups, "first_step": state.step, "seed": context.seed, "device": device}
    with accelerator.autocast():  # as the loss will be computed
        batch, figures = compare_groups(
            policy,
            _reference_policy(trained, reference, settings, context, device) if settings.kl_coef else None,
            build_batch(trajectories, missing_eos_penalty=settings.missing_eos_penalty),
            settings,
            parts=parts_of_reward,
            **options,
        )
    algorithm = GRPO(policy, batch, settings, parts=parts, **options)
    figures["completions/num_left_out"] = scores.num_left_out
    check_guards(figures, settings, scores)
    options = {"total_steps": settings.total_steps, "figures": figures}
    return train_to_end(algorithm, state, settings, accelerator, context, context.model(model), **options)


def check_guards(figures: Mapping[str, float], settings: OnPolicySettings, scores: Scores) -> None:
    """Raises Fatal, with what was seen, where completions are past a bound of ``settings.guards``."""
    bounds = {
        "max_kl": (settings.guards.max_kl, "objective/kl", "nats per completion to the starting policy"),
        "max_mean_length": (settings.guards.max_mean_length, "completions/mean_length", "tokens per completion"),
    }
    for name, (bound, figure, unit) in bounds.items():
        if bound is not None and figures[figure] > bound:
            seen = ", ".join(f"{key} {value:.4g}" for key, value in sorted(figures.items()))
            raise Fatal(
                f"guards.{name}: {figures[figure]:.4g} {unit}, above the bound of {bound:g}; this update trained "
                f"nothing, and checkpoints before it stay. Seen: {seen}; completions {scores.completions}, scores "
                f"{scores.scores}. "
                "Lower optimizer.lr, hold the policy closer to its start, or look at what the reward pays for"
            )


def load_on_policy(model: ContentId, reference: ContentId, settings: OnPolicySettings, context: UpdateContext) -> Any:
    """The model that drew an iteration's completions, without dropout: the engine had none, and with it the ratio of
    new to old probabilities would not start at 1.

    With adapters it is the reference, which every iteration starts from, and those of the iteration's train state;
    ``model`` has them merged.
    """
    start = model if settings.lora is None else reference
    return with_lora(load_causal_lm(context.model(start)), settings.lora, seed=context.seed).eval()


def _reference_policy(
    trained: Any, reference: ContentId, settings: OnPolicySettings, context: UpdateContext, device: torch.device
) -> nn.Module:
    """What the policy is held close to; with adapters, which are put into it, no second model."""
    if settings.lora is not None:
        return WithoutAdapters(Policy(trained))
    frozen = load_causal_lm(context.model(reference)).to(device).eval().requires_grad_(False)
    return shard(Policy(frozen), settings.parallel, device)


def _on_policy_state(
    trained: Any,
    modules: Mapping[str, nn.Module],
    train_state: ContentId | None,
    settings: OnPolicySettings,
    context: UpdateContext,
) -> TrainState:
    """The state an iteration starts from: that of the iteration before, without its rows of figures."""
    extra = nn.ModuleDict(modules)
    optimizer = build_optimizer(settings.optimizer, [*trained.parameters(), *extra.parameters()])
    state = TrainState(trained, optimizer, extra, seed=context.seed)
    if train_state is not None:
        with scratch_folder("restore") as scratch:
            folder = scratch / "state"
            SnapshotStore(context.objects).restore(train_state, folder)
            load_state(state, folder)
    state.metrics = []
    return state


def load_trajectories(objects: ObjectStore, samples: ContentId, scores: Scores) -> list[Trajectory]:
    """Prompts, completions and scores of an iteration, token ids as the engine gave them."""
    prompts = decode_samples(objects.get_bytes(samples))
    completions = decode_completions_blob(objects.get_bytes(scores.completions))
    values: Sequence[float] = json.loads(objects.get_bytes(scores.scores))
    return [
        Trajectory(
            prompt_token_ids=sample.prompt_token_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            score=value,
            truncated=completion.finish_reason == "length",
            written=completion.written,
        )
        for sample, completion, value in zip(prompts, completions, values, strict=True)
    ]


def load_parts(objects: ObjectStore, scores: Scores) -> RewardParts:
    """The parts of a composite reward. Raises ConfigError where scores came without them."""
    if scores.parts is None:
        raise ConfigError('reward_normalization = "each" needs scores by part, which these are not; score them by_part')
    found = objects.get_json(scores.parts)
    return RewardParts(found["names"], torch.tensor(found["weights"]).float(), torch.tensor(found["values"]).float())


def load_groups(objects: ObjectStore, scores: Scores, settings: GRPOSettings) -> Groups:
    """Which of the trajectories are compared; those of batch inference are groups as they stand."""
    size = settings.samples_per_prompt
    if scores.rollouts is None:
        return Groups.of_neighbours(scores.num_samples, size)
    if scores.group_size != size:
        raise ConfigError(
            f"these rollouts were collected in groups of {scores.group_size}, and samples_per_prompt is {size}; "
            "set both to the same number"
        )
    return Groups(objects.get_json(scores.rollouts), size)

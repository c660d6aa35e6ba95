"""Updates on a policy's own completions, by PPO and the family of GRPO, from content ids to content ids: fetch,
restore, train, snapshot, file the checkpoint.

An interrupted update continues from its own last snapshot, which is found under the update's key; everything else it
needs is a pure function of its inputs, so the outcome is the same bytes as without the interruption.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from rollout_core.algorithms.advantages import Groups
from rollout_core.algorithms.context import OwnLossFunction, UpdateContext
from rollout_core.algorithms.dataset_updates import load_teacher
from rollout_core.algorithms.experience import (
    OnPolicyUpdate,
    PolicyBatch,
    Trajectory,
    build_batch,
    punish_overlong,
)
from rollout_core.algorithms.layers import layer_rates
from rollout_core.algorithms.loop import NORMS_BEFORE, build_accelerator, build_optimizer, norms_before
from rollout_core.algorithms.masters import lay_out
from rollout_core.algorithms.on_policy import (
    GKD,
    GRPO,
    PPO,
    KLController,
    OnlineDPO,
    RewardParts,
    assign_credit,
    best_and_worst,
    compare_groups,
)
from rollout_core.algorithms.parallel import (
    any_rank,
    data_ranks,
    divided,
    is_first,
    is_sharded,
    load_to_train,
    parts_per_minibatch,
    shard,
    world_size,
)
from rollout_core.algorithms.policy import Policy, ValueModel, zero_head
from rollout_core.algorithms.state import TrainState, device_of, load_all_but_tensors, load_state
from rollout_core.algorithms.training import train_to_end
from rollout_core.algorithms.turn_credit import EpisodeTurns
from rollout_core.base.determinism import seed_everything
from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.ids import ContentId
from rollout_core.config import AnyGroupSettings, GroupSettings, GRPOSettings, OnPolicySettings, PPOSettings
from rollout_core.data.samples import TURN_REWARDS, TURNS, decode_completions_blob, decode_samples
from rollout_core.models.architecture import WithoutAdapters, with_lora
from rollout_core.models.facts import known_ids, vocab_size
from rollout_core.models.pretrained import borrowed_tokenizer, tokenizer_id
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Checkpoint, Scores

VALUES = "value_function"  # "values" is a method of ModuleDict
_KNOWN_IDS: dict[tuple[ContentId, int], int | None] = {}
"""`known_ids` by tokenizer and number of outputs, the same in all iterations: a tokenizer takes a second to read."""


def ppo_update(
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    scores: Scores,
    samples: ContentId,
    settings: PPOSettings,
    context: UpdateContext,
    *,
    replayed: ContentId | None = None,
) -> Checkpoint:
    """One PPO iteration on scored completions of ``model``.

    ``train_state`` is the previous iteration's (optimizer, values, KL coefficient); None for the first iteration.
    ``replayed`` says what completions count, where some are replayed.
    """
    return _update(model, train_state, reference, scores, samples, settings, context, None, replayed)


def grpo_update(
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    scores: Scores,
    samples: ContentId,
    settings: AnyGroupSettings,
    context: UpdateContext,
    *,
    teacher: ContentId | None = None,
    replayed: ContentId | None = None,
) -> Checkpoint:
    """One iteration on scored groups of completions of ``model``, by the algorithm of GRPO's family that ``settings``
    are of; ``reference`` counts only where ``settings.loads_reference``, ``teacher`` only with
    ``settings.distillation``. ``replayed`` says what completions count, where some are replayed.

    ``train_state`` is the previous iteration's optimizer; None for the first iteration. Raises ConfigError for scores
    that were gathered in groups of another size, or a teacher that does not fit.
    """
    return _update(model, train_state, reference, scores, samples, settings, context, teacher, replayed)


def _update(
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    scores: Scores,
    samples: ContentId,
    settings: OnPolicySettings,
    context: UpdateContext,
    teacher: ContentId | None,
    replayed: ContentId | None,
) -> Checkpoint:
    trajectories = load_trajectories(context.objects, samples, scores, replayed)
    known = _known_ids(context.model(model), trajectories)
    seed_everything(context.seed, num_threads=context.num_threads)
    accelerator = build_accelerator(settings.precision, settings.parallel)
    parts = parts_per_minibatch(settings.minibatch_size, settings.gradient_accumulation, data_ranks())
    settings = divided(settings)
    learner = _learner(model, train_state, reference, known, settings, context, accelerator.device)
    start = _Start(
        settings, learner, trajectories, samples, model, reference, teacher, scores, context, accelerator, parts
    )
    algorithm, figures = _ALGORITHMS[settings.variant](start)
    about = {**_left_out(scores), **replay_figures(context.objects, replayed)}
    check_guards(figures | about, settings, scores)
    options = {
        "total_steps": settings.total_steps,
        "figures": lambda: {**figures, **algorithm.end_first_step(), **about},
    }
    checkpoint = train_to_end(algorithm, learner.state, settings, accelerator, context, context.model(model), **options)
    learner.keep(checkpoint, context)
    return _with_advantages(checkpoint, algorithm, context.objects)


@dataclass(frozen=True)
class _Start:
    """What an iteration's algorithm begins with."""

    settings: Any
    """Of the algorithm, as one of several processes has them."""
    learner: _Learner
    trajectories: Sequence[Trajectory]
    samples: ContentId
    model: ContentId
    reference: ContentId
    teacher: ContentId | None
    scores: Scores
    context: UpdateContext
    accelerator: Accelerator
    parts: int
    """As of `GRPO`."""

    @property
    def options(self) -> dict[str, Any]:
        """What every algorithm takes."""
        return {
            "first_step": self.learner.state.step,
            "seed": self.context.seed,
            "device": self.accelerator.device,
        }

    @property
    def own_loss(self) -> OwnLossFunction | None:
        """The loss of the user's own, where the settings name one."""
        return self.context.loss_of(self.settings)

    @property
    def batch(self) -> PolicyBatch:
        """Of the trajectories as they are."""
        return build_batch(self.trajectories)

    @property
    def rewarded(self) -> PolicyBatch:
        """The same, with what the settings take off rewards."""
        trajectories = punish_overlong(self.trajectories, self.settings)
        return build_batch(trajectories, missing_eos_penalty=self.settings.missing_eos_penalty)

    @property
    def groups(self) -> Groups:
        """Trajectories that are learned from together."""
        return load_groups(self.context.objects, self.scores, self.settings)

    @property
    def turns(self) -> EpisodeTurns | None:
        """What the turns of episodes earned, where credit goes by turn."""
        if self.settings.turn_credit is None:
            return None
        return load_turns(self.context.objects, self.samples, self.scores, self.trajectories)

    def reference_policy(self) -> nn.Module:
        """What the policy is held close to."""
        device = self.accelerator.device
        return _reference_policy(self.learner.policy, self.reference, self.settings, self.context, device)


_Algorithm = tuple[OnPolicyUpdate[Any], dict[str, float]]
"""What the loop trains by, and the figures of what it learns from."""


def _ppo(start: _Start) -> _Algorithm:
    settings, state, policy = start.settings, start.learner.state, start.learner.policy
    controller = KLController(settings.kl, state.extras.get("kl_coef"))
    held_to = start.reference_policy()
    with start.accelerator.autocast():  # as the loss will be computed
        coef = controller.coef
        options = {**start.options, "turns": start.turns, "kl_coef": coef}
        batch, figures, kl = assign_credit(policy, held_to, start.rewarded, settings, **options)
    controller.update(kl, len(start.trajectories))
    state.extras["kl_coef"] = controller.coef
    return PPO(policy, batch, settings, own_loss=start.own_loss, **start.options), figures


def _grpo(start: _Start) -> _Algorithm:
    settings, context, policy = start.settings, start.context, start.learner.policy
    parts_of_reward = load_parts(context.objects, start.scores) if settings.scores_parts else None
    options = {**start.options, "groups": start.groups}
    credit = {"parts": parts_of_reward, "turns": start.turns}
    held_to = start.reference_policy() if settings.loads_reference else None
    in_step = _corrects_in_first_step(settings, context, start.accelerator.device)
    with start.accelerator.autocast():  # as the loss will be computed
        batch, figures = compare_groups(
            policy, held_to, start.rewarded, settings, **credit, corrects=not in_step, **options
        )
        own = {"own_loss": start.own_loss, "corrects": in_step}
        return GRPO(policy, batch, settings, parts=start.parts, **own, **options), figures


def _gkd(start: _Start) -> _Algorithm:
    settings, context, batch = start.settings, start.context, start.batch
    longest = max(len(item.prompt_token_ids) + len(item.token_ids) for item in start.trajectories)
    student, device = context.model(start.model), start.accelerator.device
    teacher = load_teacher(student, start.teacher, settings, context, device, longest)
    assert teacher is not None, "its settings have a teacher"
    algorithm = GKD(start.learner.policy, teacher, batch, settings, groups=start.groups, **start.options)
    return algorithm, batch.figures()


def _online_dpo(start: _Start) -> _Algorithm:
    _ = start.groups  # raises where there is another number of them, which pairs would be made of all the same
    held_to = start.reference_policy()
    with start.accelerator.autocast():  # as the loss will be computed
        pairs, figures = best_and_worst(held_to, start.rewarded, start.settings, **start.options)
    own_loss = start.own_loss
    return OnlineDPO(start.learner.policy, pairs, start.settings, own_loss=own_loss, **start.options), figures


_ALGORITHMS: dict[str, Callable[[_Start], _Algorithm]] = {
    "ppo": _ppo,
    "grpo": _grpo,
    "rloo": _grpo,
    "gkd": _gkd,
    "online_dpo": _online_dpo,
}
"""By the ``variant`` of the settings."""


def _corrects_in_first_step(settings: GRPOSettings, context: UpdateContext, device: torch.device) -> bool:
    """Whether the update's first step finds the policy's own log-probabilities (see `FirstStep`).

    Not where their divergence from the reference is needed before it, nor where the update resumes behind it: its own
    weights then replace those it starts from, so a pass of these comes first. Collective.
    """
    before = settings.kl_coef > 0 and (settings.kl_in == "reward" or settings.guards.max_kl is not None)
    return settings.correction is not None and not before and not any_rank(context.has_progress(), device)


def _with_advantages(checkpoint: Checkpoint, algorithm: OnPolicyUpdate[Any], objects: ObjectStore) -> Checkpoint:
    """The same, with the advantages that were learned from kept with its figures."""
    kept = algorithm.kept_advantages() if is_first() else None  # the first process returns the outcome
    return checkpoint if kept is None else checkpoint.model_copy(update={"advantages": objects.put_bytes(kept)})


def check_guards(figures: Mapping[str, float], settings: OnPolicySettings, scores: Scores) -> None:
    """Raises Fatal, with what was seen, where completions are past a bound of ``settings.guards``."""
    passed = settings.guards.passed(figures)
    if passed is not None:
        seen = ", ".join(f"{key} {value:.4g}" for key, value in sorted(figures.items()))
        raise Fatal(
            f"{passed}. This update trained nothing, and checkpoints before it stay. Seen: {seen}; completions "
            f"{scores.completions}, scores {scores.scores}"
        )


def load_on_policy(
    model: ContentId, reference: ContentId, settings: OnPolicySettings, context: UpdateContext, device: torch.device
) -> Any:
    """The model that drew an iteration's completions, without dropout: the engine had none, and with it the ratio of
    new to old probabilities would not start at 1.

    With adapters it is the reference, which every iteration starts from, and those of the iteration's train state;
    ``model`` has them merged.
    """
    start = model if settings.lora is None else reference
    loaded = load_to_train(context.model(start), settings.parallel, device)
    trained = with_lora(loaded, settings.lora, seed=context.seed).eval()
    if not is_sharded(settings.parallel):
        _take_into_memory(trained)
    return trained


def _take_into_memory(model: nn.Module) -> None:
    """Copy what is trained out of the model's file, which it is a view of on a CPU.

    Where a tensor begins in a file, and so how it lies in memory, is another matter in each file, and kernels may round
    by it: a learner that stays in memory would come to other bits than one that is read again. And the first step would
    have the kernel copy each page of the file when it is written to, at several times the cost.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def _reference_policy(
    policy: Policy, reference: ContentId, settings: OnPolicySettings, context: UpdateContext, device: torch.device
) -> nn.Module:
    """What the policy is held close to; with adapters, which are put into it, no second model."""
    if settings.lora is not None:
        # Weights that are cut are whole only in a call of what they were cut for. Elsewhere values need no pass.
        is_cut = is_sharded(settings.parallel)
        return WithoutAdapters(policy if is_cut else Policy(policy.model, known_ids=policy.known_ids))
    frozen = load_to_train(context.model(reference), settings.parallel, device).eval()
    frozen.requires_grad_(False)
    held_to = shard(Policy(frozen, known_ids=policy.known_ids), settings, device)
    lay_out(frozen, settings)
    return held_to


@dataclass(frozen=True)
class _Learner:
    """A policy and what trains it, which stay in memory from one iteration to the next where that may be."""

    policy: Policy
    state: TrainState
    made_for: tuple[Any, ...]
    """What it was built from in addition to weights."""

    def keep(self, checkpoint: Checkpoint, context: UpdateContext) -> None:
        """Leave it to the update that continues from ``checkpoint``.

        Not on a GPU, whose memory is the engine's meanwhile, nor where several processes have parts of it.
        """
        device = device_of(self.state)
        if context.held is not None and device.type == "cpu" and world_size() == 1:
            context.held.keep_learner(checkpoint.train_state, self.made_for, self)


def _learner(
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    known: int | None,
    settings: OnPolicySettings,
    context: UpdateContext,
    device: torch.device,
) -> _Learner:
    """What an iteration trains, in the state that it starts from: that of the iteration before, whose rows of figures
    are its own. It is the one of that iteration where this process has kept it, and of the same bits where not."""
    made_for = (type(settings).__name__, settings.model_dump_json(), reference, known)
    kept: _Learner | None = None if context.held is None else context.held.take_learner(train_state, made_for)
    learner = kept or _Learner(*_built(model, reference, known, settings, context, device), made_for)
    state = learner.state
    if train_state is not None:
        with context.state(train_state) as folder:
            (load_state if kept is None else load_all_but_tensors)(state, folder)
    state.seed, state.seconds = context.seed, 0.0
    if settings.skip_spikes is not None:  # iterations are of few steps
        state.extras[NORMS_BEFORE] = norms_before(state, settings.skip_spikes)
    state.metrics = []
    return learner


def _built(
    model: ContentId,
    reference: ContentId,
    known: int | None,
    settings: OnPolicySettings,
    context: UpdateContext,
    device: torch.device,
) -> tuple[Policy, TrainState]:
    """A policy with the weights of ``model``, and an optimizer that has done no step."""
    trained = load_on_policy(model, reference, settings, context, device)
    values: nn.Module | None = None
    if settings.value_function == "head":
        values = zero_head(trained)
    elif settings.value_function == "model" and is_sharded(settings.parallel):
        # Of weights that are still to be read there is no copy.
        values = ValueModel(load_on_policy(model, reference, settings, context, device).base_model)
    elif settings.value_function == "model":
        values = ValueModel(copy.deepcopy(trained.base_model))
    policy = shard(Policy(trained, values, known_ids=known), settings, device)
    extra = nn.ModuleDict({} if values is None else {VALUES: values})
    lay_out(trained, settings)
    rates = layer_rates(settings.optimizer, trained, *extra.values())
    optimizer = build_optimizer(settings.optimizer, [*trained.parameters(), *extra.parameters()], rates)
    return policy, TrainState(trained, optimizer, extra, seed=context.seed, device=device)


def load_trajectories(
    objects: ObjectStore, samples: ContentId, scores: Scores, replayed: ContentId | None = None
) -> list[Trajectory]:
    """Prompts, completions and scores of an iteration, token ids as the engine gave them; a score is None where the
    reward abstained."""
    prompts = decode_samples(objects.get_bytes(samples))
    completions = decode_completions_blob(objects.get_bytes(scores.completions))
    values: Sequence[float | None] = json.loads(objects.get_bytes(scores.scores))
    weights = [1.0] * len(values) if replayed is None else objects.get_json(replayed)["weights"]
    return [
        Trajectory(
            prompt_token_ids=sample.prompt_token_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            score=value,
            truncated=completion.finish_reason == "length",
            written=completion.written,
            weight=weight,
        )
        for sample, completion, value, weight in zip(prompts, completions, values, weights, strict=True)
    ]


def _known_ids(folder: Path, trajectories: Sequence[Trajectory]) -> int | None:
    """`known_ids` of the model in ``folder``. Raises ConfigError for a completion that has others."""
    key = tokenizer_id(folder), vocab_size(folder)
    if key not in _KNOWN_IDS:
        with borrowed_tokenizer(folder) as tokenizer:
            _KNOWN_IDS[key] = known_ids(folder, tokenizer)
    known = _KNOWN_IDS[key]
    highest = max((token for item in trajectories for token in item.token_ids), default=-1) if known else -1
    if known is not None and highest >= known:
        raise ConfigError(
            f"a completion has the token id {highest}, and the tokenizer in {folder} has {known} ids: the rest of the "
            "model's vocabulary is padding, which no backend here draws; complete the prompts again"
        )
    return known


def _left_out(scores: Scores) -> dict[str, float]:
    """How many samples are not learned from, by why."""
    unscored = {"num_abstained": scores.num_abstained, "num_reward_failed": scores.num_reward_failed}
    counts = {"num_left_out": scores.num_left_out, **{name: count for name, count in unscored.items() if count}}
    return {f"completions/{name}": count for name, count in counts.items()}


def replay_figures(objects: ObjectStore, replayed: ContentId | None) -> dict[str, float]:
    """How many of the completions are replayed, and what they count in the mean."""
    if replayed is None:
        return {}
    found = objects.get_json(replayed)
    again = found["weights"][found["num_fresh"] :]
    mean = sum(again) / len(again) if again else 0.0
    return {"replay/share": len(again) / len(found["weights"]), "replay/weight_mean": mean}


def load_parts(objects: ObjectStore, scores: Scores) -> RewardParts:
    """The parts of a composite reward. Raises ConfigError where scores came without them."""
    if scores.parts is None:
        raise ConfigError('reward_normalization = "each" needs scores by part, which these are not; score them by_part')
    found = objects.get_json(scores.parts)
    values = [[math.nan if value is None else value for value in row] for row in found["values"]]
    return RewardParts(found["names"], torch.tensor(found["weights"]).float(), torch.tensor(values).float())


def load_turns(
    objects: ObjectStore, samples: ContentId, scores: Scores, trajectories: Sequence[Trajectory]
) -> EpisodeTurns:
    """What the turns of the episodes earned of which these are the trajectories. Raises ConfigError where samples do
    not say it."""
    extras = [sample.extras for sample in decode_samples(objects.get_bytes(samples))]
    if scores.rollouts is None or not all(TURNS in known and TURN_REWARDS in known for known in extras):
        raise ConfigError(
            'credit = "turn" needs samples that say what each turn earned, which these do not; collect episodes of an '
            'environment with credit = "turn"'
        )
    groups = Groups(objects.get_json(scores.rollouts), scores.group_size)
    return EpisodeTurns.of(
        trajectories, groups, [known[TURNS] for known in extras], [known[TURN_REWARDS] for known in extras]
    )


def load_groups(objects: ObjectStore, scores: Scores, settings: GroupSettings) -> Groups:
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

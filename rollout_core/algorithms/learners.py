"""Updates from content ids to content ids: fetch, restore, train, snapshot, file the checkpoint.

An interrupted update goes on from its own last snapshot, which is found under the update's key; everything else it
needs is a pure function of its inputs, so the outcome is the same bytes as without the interruption.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from rollout_core.algorithms import ppo as ppo_module
from rollout_core.algorithms import sft as sft_module
from rollout_core.algorithms.data import DataReport, tokenize_sft
from rollout_core.algorithms.loop import LoopHooks, build_accelerator, build_optimizer, train
from rollout_core.algorithms.policy import Policy
from rollout_core.algorithms.ppo import KLController, Trajectory, assign_credit, build_batch
from rollout_core.algorithms.state import TrainState, load_policy, load_state
from rollout_core.algorithms.workshop import Resumption, Workshop
from rollout_core.config import PPOSettings, SFTSettings
from rollout_core.datasets import parse_sft
from rollout_core.errors import ConfigError
from rollout_core.ids import ContentId
from rollout_core.inference.samples import decode_completions_blob, decode_samples
from rollout_core.models import load_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.records import Checkpoint, Scores
from rollout_core.seeding import seed_everything
from rollout_core.snapshots import SnapshotStore


def sft_update(
    model: ContentId, dataset: ContentId, settings: SFTSettings, workshop: Workshop
) -> tuple[Checkpoint, DataReport]:
    """Fine-tune ``model`` on the rows of ``dataset``. Raises ConfigError when rows and tokenizer do not fit."""
    folder = workshop.model(model)
    tokenizer = load_tokenizer(folder)
    rows = parse_sft(workshop.objects.get_bytes(dataset), name=f"dataset {dataset.short}")
    examples, report = tokenize_sft(tokenizer, rows, loss_on=settings.loss_on, max_seq_len=settings.packing.max_seq_len)
    seed_everything(workshop.seed, num_threads=workshop.num_threads)
    accelerator = build_accelerator(settings.precision)
    trained = load_policy(folder).to(accelerator.device).train()
    _check_sequence_length(trained, max(len(example.token_ids) for example in examples))
    state = TrainState(trained, build_optimizer(settings.optimizer, list(trained.parameters())), seed=workshop.seed)
    algorithm = sft_module.SFT(Policy(trained), examples, settings, seed=workshop.seed, device=accelerator.device)
    resumption = Resumption(workshop, "sft", settings, folder)
    resumption.restore(state)
    workshop.on_start(state.step, algorithm.num_steps)
    train(
        algorithm,
        state,
        settings,
        accelerator,
        hooks=LoopHooks(on_step=workshop.on_step, on_snapshot=resumption.save),
    )
    return resumption.finish(state), report


def ppo_update(
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    scores: Scores,
    samples: ContentId,
    settings: PPOSettings,
    workshop: Workshop,
) -> Checkpoint:
    """One PPO iteration on scored completions of ``model``.

    ``train_state`` is the previous iteration's (optimizer, value head, KL coefficient); None for the first iteration.
    """
    folder = workshop.model(model)
    trajectories = load_trajectories(workshop.objects, samples, scores)
    seed_everything(workshop.seed, num_threads=workshop.num_threads)
    accelerator = build_accelerator(settings.precision)
    device = accelerator.device
    trained = load_policy(folder).to(device).train()
    value_head = _value_head(trained).to(device)
    modules = nn.ModuleDict({ppo_module.VALUE_HEAD: value_head})
    state = TrainState(
        trained,
        build_optimizer(settings.optimizer, [*trained.parameters(), *modules.parameters()]),
        modules,
        seed=workshop.seed,
    )
    policy = Policy(trained, value_head)
    if train_state is not None:
        _continue_from(state, train_state, workshop.objects)
    state.metrics = []
    controller = KLController(settings.kl, state.extras.get("kl_coef"))

    batch = build_batch(trajectories, missing_eos_penalty=settings.missing_eos_penalty)
    reference_policy = Policy(load_policy(workshop.model(reference)).to(device).eval())
    credit = assign_credit(policy, reference_policy, batch, settings, kl_coef=controller.coef, device=device)
    del reference_policy
    controller.update(credit.mean_kl, len(trajectories))
    state.extras = {"kl_coef": controller.coef}

    algorithm = ppo_module.PPO(
        policy, batch, credit, settings, first_step=state.step, seed=workshop.seed, device=device
    )
    first_step = state.step
    resumption = Resumption(workshop, "ppo", settings, folder)
    resumption.restore(state)
    workshop.on_start(state.step - first_step, algorithm.num_steps - first_step)
    train(
        algorithm,
        state,
        settings,
        accelerator,
        total_steps=settings.iterations * ppo_module.steps_per_iteration(settings),
        hooks=LoopHooks(
            on_step=lambda row: workshop.on_step({**row, "step": row["step"] - first_step}),
            on_snapshot=resumption.save,
        ),
    )
    for row in state.metrics:
        row.update(credit.figures)
    return resumption.finish(state)


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
        )
        for sample, completion, value in zip(prompts, completions, values, strict=True)
    ]


def _continue_from(state: TrainState, snapshot_id: ContentId, objects: ObjectStore) -> None:
    with tempfile.TemporaryDirectory(prefix="rollout-restore-") as scratch:
        folder = Path(scratch) / "state"
        SnapshotStore(objects).restore(snapshot_id, folder)
        load_state(state, folder)


def _value_head(policy: Any) -> nn.Linear:
    """Starts at zero, so that the first advantages are plain returns."""
    head = nn.Linear(policy.config.get_text_config().hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _check_sequence_length(policy: Any, longest: int) -> None:
    limit = getattr(policy.config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"the longest row has {longest} tokens, the model has {limit} positions; "
            f"set packing.max_seq_len to at most {limit}"
        )

"""An on-policy algorithm of one's own in the pipeline's loop: RLOO, that is REINFORCE with a leave-one-out baseline.

    python examples/make_tiny.py
    python examples/library/own_algorithm.py data/example/model data/example/prompts.jsonl data/own-algorithm

Each iteration draws a few completions of each prompt, scores them and takes one optimizer step. Kill it and run it
again: completions follow from their seeds, finished iterations are found by their keys, and it ends in the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_core.algorithms import (
    MinibatchLoss,
    Policy,
    PolicyBatch,
    TrainState,
    Trajectory,
    UpdateContext,
    build_accelerator,
    build_batch,
    build_optimizer,
    completion_forward,
    train_to_end,
)
from rollout_core.base.determinism import seed_everything
from rollout_core.base.ids import content_id
from rollout_core.config import LearnerSettings, OptimizerConfig, SamplingParams, TransformersBackend, identity
from rollout_core.data import PromptRow, parse_rows
from rollout_core.inference import InferenceBackend, ModelRef, Request, build_backend
from rollout_core.models import load_causal_lm, load_tokenizer
from rollout_core.objects import ObjectStore

GROUP_SIZE = 4
PROMPTS_PER_ITERATION = 8
SAMPLING = SamplingParams(max_tokens=14)


def reward(completion: str) -> float:
    """Share of characters that are digits or blanks: what a model with random weights can find out."""
    return sum(character in "0123456789 " for character in completion) / max(1, len(completion))


def leave_one_out(scores: Tensor, group_size: int) -> Tensor:
    """A_i = R_i - mean of the R_j of the other completions of its prompt; arXiv:2402.14740, section 3.

    scores: [N] float32, completions of one prompt side by side. Returns [N].
    """
    groups = scores.view(-1, group_size)
    return (groups - (groups.sum(1, keepdim=True) - groups) / (group_size - 1)).flatten()


@dataclass(frozen=True)
class Minibatch:
    """What `minibatches` yields and `loss` takes may be anything."""

    rows: PolicyBatch
    advantages: Tensor
    """[N] float32."""


class RLOO:
    """`Algorithm` of one iteration: -mean over completions of A_i log pi(y_i | x_i), in one optimizer step."""

    name = "rloo"

    def __init__(
        self, policy: Policy, batch: PolicyBatch, settings: LearnerSettings, *, first_step: int, device: torch.device
    ) -> None:
        self.policy = policy
        self.batch = batch
        self.advantages = leave_one_out(batch.scores, GROUP_SIZE)
        self.minibatch_size = settings.minibatch_size
        self.device = device
        self.num_steps = first_step + 1  # counted over all iterations

    def minibatches(self, step: int) -> list[Minibatch]:
        """Of optimizer step ``step``. Depends on nothing else: a resumed run must get the same ones."""
        parts = torch.arange(len(self.batch.scores)).split(self.minibatch_size)
        return [Minibatch(self.batch.rows(part.tolist()), self.advantages[part]) for part in parts]

    def loss(self, batch: Minibatch, step_batches: Sequence[Minibatch]) -> MinibatchLoss:
        """The share of one minibatch in the loss of the step, and figures with their weights."""
        output = completion_forward(self.policy, batch.rows, temperature=SAMPLING.temperature, device=self.device)
        logprobs = output.logprobs.masked_fill(~batch.rows.mask.to(self.device), 0.0).sum(1)
        num_completions = sum(len(other.advantages) for other in step_batches)
        loss = -(batch.advantages.to(self.device) * logprobs).sum() / num_completions
        return MinibatchLoss(loss, {"logprob": (logprobs.mean(), len(logprobs))})

    def num_tokens(self, batch: Minibatch) -> int:
        """Real tokens, for the figures."""
        return batch.rows.num_tokens

    def sequences(self, batch: Minibatch) -> list[list[int]]:
        """Token ids, kept for people to look at when a loss is not finite."""
        return [[*prompt, *rest] for prompt, rest in zip(batch.rows.prompts, batch.rows.completions, strict=True)]


def draw(backend: InferenceBackend, tokenizer: Any, rows: Sequence[PromptRow], iteration: int) -> list[Trajectory]:
    """A group of completions of each prompt, drawn with seeds that follow from the iteration."""
    prompts = [tokenizer(row.prompt).input_ids for row in rows for _ in range(GROUP_SIZE)]
    requests = [
        Request(str(number), prompt, SAMPLING, seed=iteration * len(prompts) + number)
        for number, prompt in enumerate(prompts)
    ]
    return [
        Trajectory(prompt, found.token_ids, found.logprobs, reward(found.text), found.finish_reason == "length")
        for prompt, found in zip(prompts, backend.generate(requests), strict=True)
    ]


def train(
    model: Path, prompts: Path, folder: Path, settings: LearnerSettings, *, iterations: int, seed: int = 1
) -> str:
    """The content id of the last policy; everything is kept under ``folder``."""
    objects = ObjectStore.from_url(f"file://{(folder / 'objects').absolute()}")
    start = objects.put_tree(model)
    rows = parse_rows(prompts.read_bytes(), prompts.name, PromptRow)[: iterations * PROMPTS_PER_ITERATION]
    tokenizer = load_tokenizer(model)
    seed_everything(seed, num_threads=1)
    accelerator = build_accelerator(settings.precision)
    trained = load_causal_lm(model).to(accelerator.device).eval()  # no dropout: the engine has none either
    policy = Policy(trained)
    state = TrainState(trained, build_optimizer(settings.optimizer, list(trained.parameters())), seed=seed)
    backend = build_backend(TransformersBackend(), ModelRef(start, model))
    checkpoint = None
    for iteration in range(iterations):
        chosen = rows[iteration * PROMPTS_PER_ITERATION : (iteration + 1) * PROMPTS_PER_ITERATION]
        batch = build_batch(draw(backend, tokenizer, chosen, iteration))
        context = UpdateContext(
            objects=objects,
            cache=folder / "cache",
            key=content_id("rloo/1", [start, [row.prompt for row in rows], identity(settings), seed, iteration]),
            run_id="own-algorithm",
            seed=seed,
        )
        algorithm = RLOO(policy, batch, settings, first_step=iteration, device=accelerator.device)
        checkpoint = train_to_end(
            algorithm, state, settings, accelerator, context, tokenizer_from=model, total_steps=iterations
        )
        print(f"iteration {iteration + 1:3}  reward {batch.figures()['reward']:.3f}  model {checkpoint.model.short}")
        backend.update_weights(ModelRef(checkpoint.model, context.model(checkpoint.model)))
    backend.close()
    assert checkpoint is not None, "there is an iteration"
    return checkpoint.model


if __name__ == "__main__":
    model, prompts, folder = map(Path, sys.argv[1:])
    settings = LearnerSettings(optimizer=OptimizerConfig(lr=1e-2), minibatch_size=16)
    print(f"model {train(model, prompts, folder, settings, iterations=8)}")

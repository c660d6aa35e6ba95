"""On-policy cases on exact prompts: a step generates, scores, assigns credit and updates.

Rows of work are JSON lines with ``prompt_ids``. The generator is transformers' own batched ``generate`` on the weights
that are trained, so that another library can be given the same; every completion has the same length. The reward is the
share of even tokens, which costs nothing. Old log-probabilities are the generator's, as in training.
"""

from __future__ import annotations

import copy
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cases import Figure

POLICY_CASES = ("grpo", "ppo")


@dataclass(frozen=True)
class Shape:
    """What an on-policy step is made of."""

    prompts: int
    completions: int = 8
    """Of each prompt."""
    tokens: int = 64
    """Of each completion."""
    epochs: int = 1
    values: str = "head"
    """Of PPO: ``head`` or ``model``."""
    alike: float = 0.0
    """Share of prompts whose completions all have one reward, as 0/1 rewards have it where a prompt is easy or hard."""

    @property
    def num_rows(self) -> int:
        """Completions of a step."""
        return self.prompts * self.completions


def make_generator(model: Any) -> Any:
    """The same parameters in a model with the attention that ``generate`` expects."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa"
    twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    twin.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    twin.tie_weights()
    return twin.eval()


def generate(generator: Any, prompts: Sequence[Sequence[int]], shape: Shape) -> tuple[Any, Any]:
    """[N,T] token ids and their log-probabilities, N = prompts x completions; prompts padded at the left."""
    import torch

    longest = max(map(len, prompts))
    rows = [list(prompt) for prompt in prompts for _ in range(shape.completions)]
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    with torch.no_grad():
        found = generator.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=shape.tokens,
            min_new_tokens=shape.tokens,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    tokens = found.sequences[:, longest:]
    logprobs = [
        torch.log_softmax(logits.float(), -1).gather(1, column[:, None])[:, 0]
        for logits, column in zip(found.logits, tokens.T, strict=True)
    ]
    return tokens, torch.stack(logprobs, 1)


def prompts_of(rows: Sequence[dict[str, Any]], step: int, count: int) -> list[list[int]]:
    """Those of a step, around the end of the work."""
    return [rows[position % len(rows)]["prompt_ids"] for position in range(step * count, (step + 1) * count)]


def rewards_of(tokens: Any, shape: Shape) -> Any:
    """[N,T] to [N]."""
    rewards = (tokens % 2 == 0).float().mean(1)
    rewards[: round(shape.alike * shape.prompts) * shape.completions] = 1.0
    return rewards


def run_policy_case(
    name: str, model: Any, rows: Sequence[dict[str, Any]], shape: Shape, *, steps: int, warm: int = 1
) -> Figure:
    """``steps`` steps after ``warm`` that do not count. Tokens are those of all sequences, a prompt's each time."""
    from rollout_core.algorithms.experience import Trajectory, build_batch

    update = (_GRPO if name == "grpo" else _PPO)(model, shape)
    generator = make_generator(model)
    seconds, processor, generating, tokens_done = [], 0.0, 0.0, 0
    for step in range(steps + warm):
        prompts = prompts_of(rows, step, shape.prompts)
        started, begun = time.perf_counter(), time.process_time()
        tokens, logprobs = generate(generator, prompts, shape)
        generated = time.perf_counter()
        rewards = rewards_of(tokens, shape).tolist()
        repeated = [prompt for prompt in prompts for _ in range(shape.completions)]
        batch = build_batch(
            [
                Trajectory(prompt, ids, logps, reward, truncated=False)
                for prompt, ids, logps, reward in zip(
                    repeated, tokens.tolist(), logprobs.tolist(), rewards, strict=True
                )
            ]
        )
        update(batch)
        seconds.append(time.perf_counter() - started)
        if step >= warm:
            processor += time.process_time() - begun
            generating += generated - started
            tokens_done += batch.num_tokens
    return Figure(
        step_ms=1e3 * statistics.median(seconds[warm:]),
        tokens_per_second=tokens_done / sum(seconds[warm:]),
        tokens_per_processor_second=tokens_done / processor,
        peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        losses=[row["loss"] for row in update.state.metrics],
        generating=generating / sum(seconds[warm:]),
    )


class _Update:
    """What both algorithms keep between steps."""

    def __init__(self, model: Any, settings: Any, values: Any = None) -> None:
        import torch
        from torch import nn

        from rollout_core.algorithms.loop import build_accelerator, build_optimizer
        from rollout_core.algorithms.on_policy_updates import VALUES
        from rollout_core.algorithms.policy import Policy
        from rollout_core.algorithms.state import TrainState

        self.settings = settings
        self.device = torch.device("cpu")
        self.accelerator = build_accelerator("float32")
        self.policy = Policy(model.eval(), values)
        extra = nn.ModuleDict({} if values is None else {VALUES: values})
        optimizer = build_optimizer(settings.optimizer, [*model.parameters(), *extra.parameters()])
        self.state = TrainState(model, optimizer, extra)

    def train(self, algorithm: Any) -> None:
        from rollout_core.algorithms.loop import train

        train(algorithm, self.state, self.settings, self.accelerator)


def _settings(kind: type[Any], shape: Shape, **changes: Any) -> Any:
    return kind.model_validate(
        {
            "prompts": {"path": "none"},
            "minibatch_size": shape.num_rows,
            "prompts_per_iteration": shape.prompts,
            "samples_per_prompt": shape.completions,
            "epochs": shape.epochs,
            "sampling": {"max_tokens": shape.tokens},
            "optimizer": {"lr": 1e-5},
            "precision": "float32",
            "snapshots": {"every_steps": 1_000_000},
            **changes,
        }
    )


class _GRPO(_Update):
    def __init__(self, model: Any, shape: Shape) -> None:
        from rollout_core.config import GRPOSettings

        super().__init__(model, _settings(GRPOSettings, shape))

    def __call__(self, batch: Any) -> None:
        from rollout_core.algorithms.on_policy import GRPO, compare_groups

        batch, _ = compare_groups(self.policy, None, batch, self.settings, device=self.device)
        options = {"first_step": self.state.step, "seed": 0, "device": self.device}
        self.train(GRPO(self.policy, batch, self.settings, **options))


class _PPO(_Update):
    def __init__(self, model: Any, shape: Shape) -> None:
        from rollout_core.algorithms.on_policy import KLController
        from rollout_core.algorithms.policy import Policy, ValueModel, zero_head
        from rollout_core.config import PPOSettings

        values = ValueModel(copy.deepcopy(model.base_model)) if shape.values == "model" else zero_head(model)
        super().__init__(model, _settings(PPOSettings, shape, values=shape.values), values)
        self.reference = Policy(copy.deepcopy(model).requires_grad_(False).eval())
        self.controller = KLController(self.settings.kl)

    def __call__(self, batch: Any) -> None:
        from rollout_core.algorithms.on_policy import PPO, assign_credit

        batch, _, mean_kl = assign_credit(
            self.policy, self.reference, batch, self.settings, kl_coef=self.controller.coef, device=self.device
        )
        self.controller.update(mean_kl, len(batch.mask))
        options = {"first_step": self.state.step, "seed": 0, "device": self.device}
        self.train(PPO(self.policy, batch, self.settings, **options))

"""PPO on a language model in one file, to be read from top to bottom.

A small transformer learns to sort digits: it should continue `sort 3 0 7 3 5 =` with `0 3 3 5 7`. Supervised
fine-tuning on right answers gives it a start. From there it improves by reinforcement learning alone: it writes
answers, a function scores them, and PPO makes what scored well more likely.

    1  the task: prompts, right answers, a reward
    2  the model: a policy with a value head
    3  a forward pass: log-probabilities and values of completion tokens
    4  rollouts: the policy writes completions, the reward scores them
    5  credit: a KL penalty for every token, then advantages by GAE
    6  the update: clipped policy and value losses
    7  the loop, with a controller of the KL penalty

Losses and advantages come from `rollout_core.algorithms`, which the pipeline trains with too. The pipeline adds what a
tutorial can do without: vLLM, packed sequences without padding, several GPUs, and work that survives a kill. Given the
same completions both compute the same losses, step by step; `tests/algorithms/test_ppo_in_one_file.py` checks that.

Run: python examples/ppo_in_one_file.py [--iterations 40] [--plot curve.png]        (about a minute on two CPU cores)

Axes of tensors: B completions, P prompt tokens, T completion tokens.
"""

from __future__ import annotations

import argparse
import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rollout_core.algorithms import gae, masked_whiten, ppo_policy_loss, ppo_value_loss, sft_loss, token_logprobs


@dataclass(frozen=True)
class Settings:
    """Named as in the pipeline's ``[algorithm]`` table, where that has them: see docs/ppo.md."""

    seed: int = 7
    num_digits: int = 5
    warm_up_steps: int = 50
    iterations: int = 40
    prompts_per_iteration: int = 256
    epochs: int = 2
    """Passes over the completions of an iteration."""
    minibatch_size: int = 64
    """Completions in one optimizer step."""
    max_tokens: int = 8
    lr: float = 5e-4
    max_grad_norm: float = 1.0
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """GAE's lambda."""
    clip: float = 0.2
    value_clip: float = 0.2
    value_coef: float = 0.5
    kl_init_coef: float = 0.02
    kl_target: float = 6.0
    """Nats per completion."""
    kl_horizon: int = 10_000
    """Completions over which the KL coefficient reacts."""


# 1  The task ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str


def make_problems(count: int, num_digits: int, seed: int) -> list[Problem]:
    """Rows of digits to sort, all different."""
    rng = random.Random(seed)
    rows = {tuple(rng.choices("0123456789", k=num_digits)): None for _ in range(2 * count)}
    assert len(rows) >= count, f"there are not {count} different rows of {num_digits} digits"
    return [Problem(f"sort {' '.join(row)} =", " ".join(sorted(row))) for row in list(rows)[:count]]


def reward(completion: str, answer: str) -> float:
    """Share of places that hold the right digit; what stands beyond the answer's length counts against it.

    A reward of 1 for the whole answer and 0 otherwise would give most completions of a weak policy the same 0, and
    little could be learnt from them.
    """
    found, wanted = completion.split(), answer.split()
    right = sum(a == b for a, b in zip(found, wanted, strict=False))
    return right / max(len(found), len(wanted))


# 2  The model --------------------------------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: the ten digits, ``sort``, ``=``, the end and padding."""
    words = ["<pad>", "<end>", "sort", "=", *"0123456789"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


def make_model(tokenizer: Any) -> Qwen2ForCausalLM:
    """A Qwen2 of about 0.1 million random parameters; any causal language model of transformers would do."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class Policy(nn.Module):
    """A language model, and a linear head on its last hidden states that estimates the value of a prefix.

    The head starts at zero, so that the first advantages are plain returns. (InstructGPT, arXiv:2203.02155, gives the
    values a model of their own; the pipeline's ``values = "model"``.)
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.value_head = nn.Linear(model.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)


def warm_up(model: Any, tokenizer: Any, problems: list[Problem], settings: Settings) -> None:
    """Supervised fine-tuning: cross entropy on the answers' tokens (arXiv:2203.02155, section 3.5)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    rng = random.Random(settings.seed)
    for _ in range(settings.warm_up_steps):
        batch = rng.sample(problems, 64)
        texts = [f"{problem.prompt} {problem.answer} {tokenizer.eos_token}" for problem in batch]
        tokens = tokenizer(texts, return_tensors="pt", padding=True)
        num_prompt_tokens = len(tokenizer(batch[0].prompt).input_ids)  # here all prompts are of one length
        labels = tokens.input_ids.clone()
        labels[:, :num_prompt_tokens] = -100  # the prompt is given, not learnt
        loss = sft_loss(model(tokens.input_ids, attention_mask=tokens.attention_mask).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# 3  A forward pass ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """Prompts, padded at the left, and their completions, padded at the right: what is real is in the middle."""

    ids: Tensor
    """[B,P+T] int64."""
    attention_mask: Tensor
    """[B,P+T] int64, 1 = real token."""
    mask: Tensor
    """[B,T] bool, True = real completion token, the end among them."""

    def rows(self, index: Tensor) -> Tokens:
        """Some of the completions."""
        return Tokens(self.ids[index], self.attention_mask[index], self.mask[index])


def forward(policy: Policy, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Of every completion token its log-probability log pi(a_t | s_t) and the value V(s_t); both [B,T].

    A state s_t is the prompt and the completion so far, an action a_t the next token: the hidden state that stands on
    the token before predicts both.
    """
    width = tokens.mask.shape[1]
    hidden = policy.model.base_model(
        input_ids=tokens.ids,
        attention_mask=tokens.attention_mask,
        position_ids=(tokens.attention_mask.cumsum(1) - 1).clamp(min=0),
    ).last_hidden_state[:, -width - 1 :]
    logits = policy.model.get_output_embeddings()(hidden)
    logprobs = token_logprobs(logits, tokens.ids[:, -width - 1 :])
    values = policy.value_head(hidden[:, :-1]).squeeze(-1)
    return logprobs, values


# 4  Rollouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollouts:
    """What the policy wrote, and what it got for it."""

    tokens: Tokens
    texts: list[str]
    scores: Tensor
    """[B] float32."""


@torch.no_grad()
def generate(policy: Policy, tokenizer: Any, prompts: list[str], max_tokens: int) -> Tokens:
    """One completion a prompt, drawn from the policy itself: temperature 1, no top-k, no top-p.

    PPO needs that. Its ratio compares how likely the policy is to draw a token now and was then; for a token drawn from
    a bent distribution it would not start at 1.
    """
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    ids = policy.model.generate(
        input_ids=encoded.input_ids,
        attention_mask=encoded.attention_mask,
        max_new_tokens=max_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    completions = ids[:, encoded.input_ids.shape[1] :]
    is_end = completions == tokenizer.eos_token_id
    mask = is_end.cumsum(1) - is_end.long() == 0  # up to the first end, which counts
    return Tokens(ids, torch.cat([encoded.attention_mask, mask.long()], dim=1), mask)


def collect(policy: Policy, tokenizer: Any, problems: list[Problem], settings: Settings) -> Rollouts:
    """Generate and score."""
    tokens = generate(policy, tokenizer, [problem.prompt for problem in problems], settings.max_tokens)
    width = tokens.mask.shape[1]
    texts = tokenizer.batch_decode(tokens.ids[:, -width:], skip_special_tokens=True)
    scores = [reward(text, problem.answer) for text, problem in zip(texts, problems, strict=True)]
    return Rollouts(tokens, texts, torch.tensor(scores))


# 5  Credit -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experience:
    """What an update learns from; all tensors [B,T] float32, 0 where no token stands."""

    tokens: Tokens
    old_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
    kl: float
    """To the reference policy, nats per completion."""


@torch.no_grad()
def assign_credit(
    policy: Policy, reference: Policy, rollouts: Rollouts, settings: Settings, kl_coef: float
) -> Experience:
    """Which token is to be praised or blamed for a completion's score.

    The reward of a token is a penalty for leaving the reference policy, -beta (log pi - log pi_ref), whose sum over a
    completion is an estimate of -beta KL(pi || pi_ref); the last token also gets the score (arXiv:1909.08593, eq. 2).
    Without the penalty a policy forgets how to write anything but what the reward function happens to like.

    Advantages by GAE (arXiv:1506.02438, eq. 16): delta_t = r_t + gamma V(s_{t+1}) - V(s_t) and
    A_t = sum over l of (gamma lambda)^l delta_{t+l}; returns R_t = A_t + V(s_t) are what the values are trained on.
    """
    mask = rollouts.tokens.mask
    logprobs, values = (found.masked_fill(~mask, 0.0) for found in forward(policy, rollouts.tokens))
    ref_logprobs, _ = forward(reference, rollouts.tokens)
    log_ratio = (logprobs - ref_logprobs).masked_fill(~mask, 0.0)

    rewards = -kl_coef * log_ratio
    last = mask.sum(1) - 1
    rewards[torch.arange(len(rewards)), last] += rollouts.scores

    advantages, returns = gae(rewards, values, mask, gamma=settings.gamma, lam=settings.lam)
    # Scaled to mean 0 and variance 1, so that the step size does not depend on the scale of rewards.
    advantages = masked_whiten(advantages, mask)
    return Experience(rollouts.tokens, logprobs, values, advantages, returns, float(log_ratio.sum(1).mean()))


# 6  The update -------------------------------------------------------------------------------------------------------


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
    orders: list[Tensor],
    settings: Settings,
) -> list[dict[str, float]]:
    """Passes over the completions in minibatches, each pass in one of ``orders`` ([B] each); a row of figures a step.

    With the ratio r = pi(a|s) / pi_old(a|s) the policy loss is max(-A r, -A clip(r, 1 - eps, 1 + eps)), which gives no
    gradient to a token that has moved far enough already (arXiv:1707.06347, eq. 7, negated); the value loss
    max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2 likewise (arXiv:2005.12729, section 3).
    """
    rows = []
    for order in orders:
        for index in order.split(settings.minibatch_size):
            tokens = experience.tokens.rows(index)
            logprobs, values = forward(policy, tokens)
            policy_loss = ppo_policy_loss(
                logprobs,
                experience.old_logprobs[index],
                experience.advantages[index],
                tokens.mask,
                clip=settings.clip,
            )
            value_loss = ppo_value_loss(
                values, experience.old_values[index], experience.returns[index], tokens.mask, clip=settings.value_clip
            )
            loss = policy_loss.loss + settings.value_coef * value_loss.loss
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
            optimizer.step()
            rows.append(
                {
                    "loss": loss.item(),
                    "policy_loss": policy_loss.loss.item(),
                    "value_loss": value_loss.loss.item(),
                    "clip_ratio/policy": float(policy_loss.clip_fraction),
                    "approx_kl": float(policy_loss.approx_kl),
                    "grad_norm": float(norm),
                }
            )
    return rows


# 7  The loop ---------------------------------------------------------------------------------------------------------


def adapt_kl_coef(coef: float, kl: float, num_completions: int, settings: Settings) -> float:
    """Raise the penalty where the policy is farther from the reference than wished for, lower it where it is nearer.

    beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon); arXiv:1909.08593, section 2.2.
    """
    error = min(max(kl / settings.kl_target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * num_completions / settings.kl_horizon)


def make_optimizer(policy: Policy, settings: Settings) -> torch.optim.Optimizer:
    """Adam over language model and value head together."""
    return torch.optim.AdamW(policy.parameters(), lr=settings.lr, weight_decay=0.0)


def train(model: Any, tokenizer: Any, problems: list[Problem], settings: Settings) -> list[float]:
    """PPO, changing ``model``; the mean reward of each iteration's completions, drawn before its update."""
    torch.manual_seed(settings.seed)
    # Without dropout: with it, the ratio of new to old probabilities would not start at 1.
    policy = Policy(model).eval()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = make_optimizer(policy, settings)
    kl_coef, curve = settings.kl_init_coef, []
    for iteration in range(settings.iterations):
        first = iteration * settings.prompts_per_iteration
        chosen = [problems[(first + n) % len(problems)] for n in range(settings.prompts_per_iteration)]
        rollouts = collect(policy, tokenizer, chosen, settings)
        experience = assign_credit(policy, reference, rollouts, settings, kl_coef)
        orders = [torch.randperm(len(chosen)) for _ in range(settings.epochs)]
        steps = update(policy, optimizer, experience, orders, settings)
        kl_coef = adapt_kl_coef(kl_coef, experience.kl, len(chosen), settings)

        curve.append(float(rollouts.scores.mean()))
        print(
            f"iteration {iteration + 1:3}  reward {curve[-1]:.3f}  kl {experience.kl:6.3f}  kl_coef {kl_coef:.4f}  "
            f"value loss {steps[-1]['value_loss']:.4f}  clipped {steps[-1]['clip_ratio/policy']:.3f}  "
            f"e.g. {chosen[0].prompt} {rollouts.texts[0]}"
        )
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on a language model in one file")
    parser.add_argument("--iterations", type=int, default=Settings.iterations)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--plot", type=Path, help="write the curve of rewards to this PNG file")
    options = parser.parse_args()
    settings = Settings(seed=options.seed, iterations=options.iterations)

    torch.manual_seed(settings.seed)
    problems = make_problems(4_000, settings.num_digits, settings.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, tokenizer, problems, settings)
    curve = train(model, tokenizer, problems, settings)
    if options.plot is not None:
        from matplotlib.figure import Figure

        axes = (figure := Figure()).subplots()
        axes.plot(range(1, len(curve) + 1), curve)
        axes.set(xlabel="iteration", ylabel="mean reward", title="PPO: sorting digits")
        figure.savefig(options.plot)


if __name__ == "__main__":
    main()

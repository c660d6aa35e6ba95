"""Speed of the training loop against loops one would write by hand, on the same rows, in one process.

Ours is `train` with the algorithm as its stage runs it. The baselines are plain PyTorch: rows right-padded to the
longest of their batch, logits of every position, cross entropy or log-softmax, clip, fused AdamW; DPO and IPO with the
reference's pass in every step on both sides. Tokens are real ones. Losses of both sides are compared in every round.

Run: python benchmarks/training.py [--quick]
One side alone, on given work (see cases.py and policy_cases.py), for other libraries to be measured beside it in the
same run; grpo and ppo take a batch of prompts and generate as many completions of each as asked for:
     python benchmarks/training.py --case dpo --work rows.jsonl --model FOLDER --batch 8 --steps 20 --json out.json
     python benchmarks/training.py --case grpo --work prompts.jsonl --model FOLDER --batch 4 --completions 8 --tokens 64
     python benchmarks/training.py --case ppo --work prompts.jsonl --model FOLDER --batch 32 --epochs 4 --values model
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cases import CASES, num_tokens, read_rows, run_case
from harness import Figures, no_collection
from policy_cases import POLICY_CASES, Shape, generate, prompts_of, rewards_of, run_policy_case

Row = dict[str, Any]


def make_policy(vocabulary: int = 512) -> Any:
    """A Qwen2 of 3.2 million parameters beside its embeddings, random, float32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=0,
        )
    )


def sft_rows(count: int, lengths: tuple[int, int], *, trained: float = 1.0, vocabulary: int = 512) -> list[Row]:
    """Random sequences of which the last share ``trained`` is trained."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        ids = [rng.randrange(vocabulary) for _ in range(rng.randint(*lengths))]
        first = round(len(ids) * (1 - trained))
        rows.append({"input_ids": ids, "labels": [-100] * first + ids[first:]})
    return rows


def pair_rows(count: int, *, equal: bool = False) -> list[Row]:
    """Random pairs: prompts of 32 to 96 tokens, answers of 16 to 64; or ``equal`` ones of 64 and 40."""
    rng = random.Random(1)

    def draw(least: int, most: int) -> list[int]:
        return [rng.randrange(1, 512) for _ in range(rng.randint(least, most))]

    prompts, answers = ((64, 64), (40, 40)) if equal else ((32, 96), (16, 64))
    keys = {"prompt_ids": prompts, "chosen_ids": answers, "rejected_ids": answers}
    return [{key: draw(*lengths) for key, lengths in keys.items()} for _ in range(count)]


def bare_sft(model: Any, rows: Sequence[Row]) -> Any:
    """Mean cross entropy over trained tokens."""
    import torch
    import torch.nn.functional as F
    from torch.nn.utils.rnn import pad_sequence

    ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    labels = pad_sequence([torch.tensor(row["labels"]) for row in rows], batch_first=True, padding_value=-100)
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def bare_dpo(model: Any, rows: Sequence[Row], reference: Any) -> Any:
    """DPO with beta 0.1, chosen and rejected sequences in one padded batch."""
    import torch
    import torch.nn.functional as F
    from torch.nn.utils.rnn import pad_sequence

    answers = [(row["prompt_ids"], row[key]) for key in ("chosen_ids", "rejected_ids") for row in rows]
    ids = pad_sequence([torch.tensor(prompt + answer) for prompt, answer in answers], batch_first=True)
    masks = [torch.tensor([0] * (len(prompt) - 1) + [1] * len(answer)) for prompt, answer in answers]
    mask = pad_sequence(masks, batch_first=True).float()

    def logps(policy: Any) -> Any:
        logprobs = torch.log_softmax(policy(input_ids=ids, use_cache=False).logits[:, :-1], -1)
        return (logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1) * mask).sum(1)

    with torch.no_grad():
        before = logps(reference)
    ratio = logps(model) - before
    chosen, rejected = ratio.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def run_bare(
    loss_of: Callable[..., Any], model: Any, rows: Sequence[Row], *, batch: int, steps: int, warm: int = 2
) -> tuple[float, list[float]]:
    """Real tokens per second of the steps after ``warm``, and the losses of all."""
    import torch

    reference = (copy.deepcopy(model).requires_grad_(False),) if loss_of is bare_dpo else ()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    losses, seconds, tokens = [], 0.0, 0
    for step in range(steps + warm):
        chosen = [rows[position % len(rows)] for position in range(step * batch, (step + 1) * batch)]
        started = time.perf_counter()
        loss = loss_of(model, chosen, *reference)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step >= warm:
            seconds += time.perf_counter() - started
            tokens += sum(map(num_tokens, chosen))
    return tokens / seconds, losses


def compare(
    figures: Figures,
    what: str,
    case: str,
    loss_of: Callable[..., Any],
    model: Any,
    rows: list[Row],
    size: argparse.Namespace,
) -> None:
    """One row. Raises RuntimeError when the sides did not train the same."""
    ours: list[float] = []
    bare: list[float] = []
    steps = size.steps
    for number in range(size.rounds):
        with no_collection():
            sides = [
                lambda: run_case(case, copy.deepcopy(model), rows, batch=8, steps=steps),
                lambda: run_bare(loss_of, copy.deepcopy(model).train(), rows, batch=8, steps=steps),
            ]
            found = {index: sides[index]() for index in ((0, 1) if number % 2 else (1, 0))}
        mine, (rate, losses) = found[0], found[1]
        worst = max(abs(one - other) for one, other in zip(mine.losses, losses, strict=True))
        if worst > 1e-3:
            raise RuntimeError(f"{what}: losses differ by up to {worst:.1e}, so the times do not compare")
        ours.append(mine.tokens_per_second)
        bare.append(rate)
    figures.compare(f"{what}, tokens/s", ours, bare)


def bare_policy_step(name: str, models: Any, optimizer: Any, prompts: list[list[int]], shape: Shape) -> float:
    """Generate with ``models.policy``, then GRPO, or PPO with a value model of its own, over padded rows."""
    import torch
    from torch.nn.utils import clip_grad_norm_

    from rollout_core.algorithms.advantages import gae, group_advantages, masked_whiten
    from rollout_core.algorithms.policy_losses import grpo_loss, ppo_policy_loss, ppo_value_loss

    tokens, _ = generate(models.policy, prompts, shape)
    repeated = torch.tensor([prompt for prompt in prompts for _ in range(shape.completions)])
    ids, start = torch.cat([repeated, tokens], 1), repeated.shape[1] - 1
    mask = torch.ones_like(tokens, dtype=torch.bool)

    def logprobs(model: Any) -> Any:
        logits = model(input_ids=ids, use_cache=False).logits[:, start:-1]
        return torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0]

    def values() -> Any:
        hidden = models.values.trunk(input_ids=ids, use_cache=False).last_hidden_state[:, start:-1]
        return models.values.head(hidden)[..., 0]

    if name == "grpo":
        advantages = group_advantages(rewards_of(tokens, shape), shape.completions, normalize=True, eps=1e-4)
        new = logprobs(models.policy)
        loss = grpo_loss(new, new.detach(), advantages[:, None].expand(mask.shape), mask).loss
        losses = [loss]
    else:
        with torch.no_grad():
            old, reference, old_values = logprobs(models.policy), logprobs(models.reference), values()
        rewards = -0.05 * (old - reference)
        rewards[:, -1] += rewards_of(tokens, shape)
        advantages, returns = gae(rewards, old_values, mask, gamma=1.0, lam=0.95)
        advantages = masked_whiten(advantages, mask)
        losses = (
            ppo_policy_loss(logprobs(models.policy), old, advantages, mask).loss
            + 0.5 * ppo_value_loss(values(), old_values, returns, mask).loss
            for _ in range(shape.epochs)
        )
    for loss in losses:
        loss.backward()
        clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return len(ids) * ids.shape[1]


def run_bare_policy(name: str, model: Any, rows: Sequence[Row], shape: Shape, *, steps: int, warm: int = 1) -> float:
    """Real tokens per second of the steps after ``warm``, by plain PyTorch and transformers."""
    import torch

    trunk = copy.deepcopy(model.base_model)
    head = torch.nn.Linear(model.config.hidden_size, 1)
    models = argparse.Namespace(
        policy=model.eval(),
        reference=copy.deepcopy(model).requires_grad_(False),
        values=argparse.Namespace(trunk=trunk, head=head),
    )
    trained = [*model.parameters(), *([] if name == "grpo" else [*trunk.parameters(), *head.parameters()])]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0, fused=True)
    seconds, tokens = 0.0, 0.0
    for step in range(steps + warm):
        started = time.perf_counter()
        done = bare_policy_step(name, models, optimizer, prompts_of(rows, step, shape.prompts), shape)
        if step >= warm:
            seconds += time.perf_counter() - started
            tokens += done
    return tokens / seconds


def compare_policies(figures: Figures, model: Any, size: argparse.Namespace) -> None:
    """GRPO and PPO, generation by the same batched ``generate`` on both sides."""
    rng = random.Random(2)
    rows = [{"prompt_ids": [rng.randrange(1, 512) for _ in range(32)]} for _ in range(64)]
    for what, name, shape in (
        ("GRPO, 4 x 8 of 32 + 64", "grpo", Shape(4)),
        ("GRPO, the same, equal rewards in 2 of 4 groups", "grpo", Shape(4, alike=0.5)),
        ("PPO, 32 of 32 + 64, value head (baseline: model)", "ppo", Shape(32, 1, epochs=4)),
        ("PPO, 32 of 32 + 64, value model", "ppo", Shape(32, 1, epochs=4, values="model")),
    ):
        ours, bare, shares = [], [], []
        steps = max(2, size.steps // 3)
        for number in range(size.rounds):
            with no_collection():
                for side in (0, 1) if number % 2 else (1, 0):
                    if side == 0:
                        found = run_policy_case(name, copy.deepcopy(model), rows, shape, steps=steps)
                        ours.append(found.tokens_per_second)
                        shares.append(found.generating)
                    else:
                        bare.append(run_bare_policy(name, copy.deepcopy(model), rows, shape, steps=steps))
        figures.compare(f"{what}, tokens/s", ours, bare)
        figures.add(f"{what}: share that generates", f"{100 * sorted(shares)[len(shares) // 2]:.0f} %")


def compare_all(size: argparse.Namespace) -> None:
    """The table."""
    figures = Figures("The training loop against bare padded PyTorch loops, float32, batches of 8")
    small, large = make_policy(), make_policy(151_936)
    count = 8 * (size.steps + 2)
    compare(figures, "SFT, 256 tokens each", "sft", bare_sft, small, sft_rows(count, (256, 256)), size)
    compare(figures, "SFT, 32 to 256 tokens", "sft", bare_sft, small, sft_rows(count, (32, 256)), size)
    rows = sft_rows(count, (256, 256), trained=0.3, vocabulary=151_936)
    compare(figures, "SFT, vocabulary 151,936, 30 % trained", "sft", bare_sft, large, rows, size)
    compare(figures, "DPO, inline reference", "dpo", bare_dpo, small, pair_rows(count), size)
    compare_policies(figures, small, size)
    figures.show()


def run_one(arguments: argparse.Namespace) -> None:
    """One case on given work; the table's figures as JSON where asked for."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32")
    rows = read_rows(arguments.work)
    if arguments.case in POLICY_CASES:
        shape = Shape(arguments.batch, arguments.completions, arguments.tokens, arguments.epochs, arguments.values)
        found = run_policy_case(arguments.case, model, rows, shape, steps=arguments.steps)
    else:
        options = {"precision": arguments.precision, "lora": arguments.lora, "warm": arguments.warm}
        found = run_case(arguments.case, model, rows, batch=arguments.batch, steps=arguments.steps, **options)
    figures = Figures(f"{arguments.case}: {arguments.steps} steps of {arguments.batch} rows")
    figures.add("median step", f"{found.step_ms:,.1f} ms")
    figures.add("real tokens", f"{found.tokens_per_second:,.0f} /s")
    if arguments.case in POLICY_CASES:
        figures.add("share that generates", f"{100 * found.generating:.0f} %")
    figures.add("peak memory", f"{found.peak_rss_mib:,.0f} MiB")
    figures.show()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(dataclasses.asdict(found)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small form, to see that it runs")
    parser.add_argument("--case", choices=(*CASES, *POLICY_CASES))
    parser.add_argument("--work", type=Path, help="JSON lines of token ids")
    parser.add_argument("--model", type=Path, help="folder of the model that starts the case")
    parser.add_argument("--batch", type=int, default=8, help="rows of work in a step")
    parser.add_argument("--completions", type=int, help="grpo, ppo: of each prompt; default 8 and 1")
    parser.add_argument("--tokens", type=int, default=64, help="grpo, ppo: of each completion")
    parser.add_argument("--epochs", type=int, help="grpo, ppo: passes over a step's completions; default 1 and 4")
    parser.add_argument("--values", choices=("head", "model"), default="head", help="ppo")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of rows' cases")
    parser.add_argument("--lora", type=int, help="rank of adapters, which are then what is trained; of rows' cases")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warm", type=int, default=2, help="steps before them that do not count; of rows' cases")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    arguments.completions = arguments.completions or (1 if arguments.case == "ppo" else 8)
    arguments.epochs = arguments.epochs or (4 if arguments.case == "ppo" else 1)
    arguments.rounds = 2 if arguments.quick else 5
    arguments.steps = arguments.steps or (2 if arguments.quick else 10)
    if arguments.case is None:
        compare_all(arguments)
        return
    if arguments.work is None or arguments.model is None:
        parser.error("--case needs --work and --model")
    run_one(arguments)


if __name__ == "__main__":
    main()

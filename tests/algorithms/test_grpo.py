"""GRPO on a real tiny model: an independent reference of loss and gradient, exact resume, and reward that rises."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from transformers import GPT2Config, GPT2LMHeadModel

from rollout_core.algorithms import on_policy, on_policy_updates
from rollout_core.algorithms.context import HeldStates, UpdateContext
from rollout_core.algorithms.experience import Trajectory, build_batch, importance_weights
from rollout_core.algorithms.on_policy import GRPO, PPO, RewardParts, assign_credit, compare_groups, scaled_advantages
from rollout_core.algorithms.policy import Policy, ValueModel
from rollout_core.base.errors import Fatal
from rollout_core.base.ids import canonical_json, hash_bytes
from rollout_core.config import (
    AnyGroupSettings,
    GRPOSettings,
    ImportanceCorrection,
    JsonlDataset,
    LoRAConfig,
    OptimizerConfig,
    PPOSettings,
    SamplingParams,
    SnapshotPolicy,
    SpikeRule,
)
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.models.pretrained import copy_tokenizer, load_causal_lm
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Scores
from rollout_core.objects.snapshots import SnapshotStore

CPU = torch.device("cpu")
GROUP = 3


def grpo_settings(**changes) -> Any:
    fields = {
        "prompts": JsonlDataset(path="x"),
        "optimizer": OptimizerConfig(lr=1e-3),
        "samples_per_prompt": GROUP,
        "prompts_per_iteration": 2,
        "minibatch_size": 6,
        "gradient_accumulation": 1,
        "sampling": SamplingParams(temperature=0.8, max_tokens=6),
        "snapshots": SnapshotPolicy(every_steps=1),
    }
    return TypeAdapter(AnyGroupSettings).validate_python({**fields, **changes})


def trajectories(model, temperature: float = 0.8, drift: float = 0.0) -> list[Trajectory]:
    """Two groups of three, with the model's own log-probabilities moved by up to ``drift``."""
    draw = random.Random(3)
    items = []
    for prompt_length in (4, 7):
        prompt = [draw.randrange(2, 250) for _ in range(prompt_length)]
        for length in (2, 6, 4):
            completion = [draw.randrange(2, 250) for _ in range(length)]
            logprobs = plain_logprobs(model, prompt, completion, temperature).detach()
            moved = [value + draw.uniform(-drift, drift) for value in logprobs.tolist()]
            items.append(Trajectory(prompt, completion, moved, draw.random(), truncated=length == 6))
    return items


def plain_logprobs(model, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)


def plain_entropy(model, item: Trajectory) -> torch.Tensor:
    ids = torch.tensor([[*item.prompt_token_ids, *item.token_ids]])
    logits = model(input_ids=ids).logits[0, len(item.prompt_token_ids) - 1 : -1] / 0.8
    return torch.distributions.Categorical(logits=logits).entropy()


def reference_loss(model, reference, items: list[Trajectory], settings: GRPOSettings) -> torch.Tensor:
    """The loss written out row by row, from the papers."""
    scores = [item.score for item in items]
    total, count, rows = torch.zeros(()), 0, []
    for number, item in enumerate(items):
        group = [value for value in scores[number // GROUP * GROUP :][:GROUP] if value is not None]
        mean = sum(group) / len(group)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in group) / (len(group) - 1))
        score = 0.0 if item.score is None else item.score
        advantage = (score - mean) / (deviation + 1e-4)
        if settings.baseline == "leave_one_out":
            advantage = score - (sum(group) - score) / (len(group) - 1)
        now = plain_logprobs(model, item.prompt_token_ids, item.token_ids, 0.8)
        ratio = torch.exp(now - torch.tensor(item.logprobs))
        clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        if settings.loss == "gspo":
            ratio = torch.exp((now - torch.tensor(item.logprobs)).mean())
            clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        tokens = -torch.minimum(ratio * advantage, clipped * advantage) * torch.ones_like(now)
        if settings.loss in ("cispo", "reinforce"):
            tokens = -(clipped.detach() if settings.loss == "cispo" else 1.0) * advantage * now
        if settings.entropy_coef:
            tokens = tokens - settings.entropy_coef * plain_entropy(model, item)
        if settings.kl_coef:
            log_r = plain_logprobs(reference, item.prompt_token_ids, item.token_ids, 0.8).detach() - now
            tokens = tokens + settings.kl_coef * (torch.exp(log_r) - 1 - log_r)
        if item.score is None or (settings.truncated == "mask" and item.truncated):
            tokens = tokens * 0
            length = 0
        else:
            length = len(item.token_ids)
        rows.append(tokens.sum() / max(1, length))
        total, count = total + tokens.sum(), count + length
    if settings.loss_type == "grpo":
        return sum(rows) / len(rows)
    return total / (len(items) * settings.sampling.max_tokens if settings.loss_type == "dr_grpo" else count)


@pytest.mark.parametrize("minibatch_size", [6, 2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_type": "dapo", "clip_high": 0.3},
        {"loss_type": "dr_grpo", "kl_coef": 0.1},
        {"kl_coef": 0.05, "truncated": "mask"},
        {"loss_type": "dapo", "truncated": "mask"},
        {"loss_type": "dapo", "kl_coef": 0.1, "max_tokens_per_microbatch": 14},
        {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.04, "truncated": "mask"},
        {"loss": "cispo", "loss_type": "dapo", "clip_low": 1.0, "entropy_coef": 0.1},
        {"loss": "reinforce", "loss_type": "dr_grpo", "baseline": "leave_one_out", "advantage_scaling": "none"},
    ],
)
def test_loss_and_gradient_equal_an_independent_reference_however_the_step_is_cut(
    tiny_model, other_tiny_model, changes, minibatch_size
):
    settings = grpo_settings(**changes, minibatch_size=minibatch_size, gradient_accumulation=6 // minibatch_size)
    plain, other = load_causal_lm(tiny_model), load_causal_lm(other_tiny_model)
    items = trajectories(plain, drift=0.4)
    expected = reference_loss(plain, other, items, settings)
    expected.backward()

    model = load_causal_lm(tiny_model)
    policy, reference = Policy(model), Policy(load_causal_lm(other_tiny_model)) if settings.kl_coef else None
    batch, _ = compare_groups(policy, reference, build_batch(items), settings, device=CPU)
    learner = GRPO(policy, batch, settings, first_step=0, seed=1, device=CPU)
    parts = learner.minibatches(0)
    losses = [learner.loss(part, parts).loss for part in parts]
    for loss in losses:
        loss.backward()
    assert sum(losses).item() == pytest.approx(expected.item(), abs=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-5), name


@pytest.mark.parametrize("minibatch_size", [6, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {"kl_coef": 0.1},
        {"loss_type": "dapo", "truncated": "mask"},
        {"loss_type": "dr_grpo", "loss": "reinforce", "baseline": "leave_one_out", "advantage_scaling": "none"},
    ],
)
def test_a_completion_without_a_score_is_neither_trained_nor_compared(
    changes, minibatch_size, tiny_model, other_tiny_model
):
    settings = grpo_settings(minibatch_size=minibatch_size, gradient_accumulation=6 // minibatch_size, **changes)
    plain, reference = map(load_causal_lm, (tiny_model, other_tiny_model))
    items = trajectories(plain, drift=0.3)
    items[2] = replace(items[2], score=None)
    policy, held_to = (Policy(load_causal_lm(folder)) for folder in (tiny_model, other_tiny_model))
    batch, figures = compare_groups(policy, held_to, build_batch(items), settings, device=CPU)
    learner = GRPO(policy, batch, settings, first_step=0, seed=0, device=CPU)
    parts = learner.minibatches(0)
    loss = torch.stack([learner.loss(part, parts).loss for part in parts]).sum()
    expected = reference_loss(plain, reference, items, settings)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    scores = [item.score for item in items if item.score is not None]
    assert figures["reward"] == pytest.approx(sum(scores) / 5)
    assert learner.kept_advantages().splitlines()[2] == b"null"


def test_groups_of_fewer_than_two_scores_teach_nothing(tiny_model):
    items = trajectories(load_causal_lm(tiny_model))
    items = [*(replace(item, score=None) for item in items[:2]), *items[2:]]
    policy = Policy(load_causal_lm(tiny_model))
    batch, figures = compare_groups(policy, None, build_batch(items), grpo_settings(), device=CPU)
    assert figures["frac_reward_zero_std"] == 0.5
    spread = torch.tensor([item.score for item in items[3:]]).std().item()
    assert figures["reward_std"] == pytest.approx(spread), "of the one group that is compared"
    assert (batch.columns["advantages"][:3] == 0).all()


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize("scaling", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.1, 0.3, 7.3, 100.1, 1000.1])
def test_equal_rewards_have_no_advantage_however_they_are_scaled(value, scaling, baseline):
    settings = grpo_settings(samples_per_prompt=8, advantage_scaling=scaling, baseline=baseline)
    scores = torch.tensor([value] * 8 + [0.0] * 7 + [1.0])
    assert scaled_advantages(scores, settings)[:8].tolist() == [0.0] * 8
    parts = RewardParts(["a", "b"], torch.tensor([0.7, 0.3]), torch.stack([scores, scores], 1))
    each = scaled_advantages((parts.values.double() @ parts.weights.double()).float(), settings, parts)
    assert each[:8].tolist() == [0.0] * 8


@pytest.mark.parametrize("changes", [{}, {"loss_type": "dr_grpo", "advantage_scaling": "batch"}, {"loss": "gspo"}])
def test_an_update_on_equal_rewards_moves_no_weight(changes, tiny_model, tmp_path):
    """Adam makes a full step of the smallest gradient, such as what rounding left of 100.1 less the mean."""
    place = update_context(tmp_path)
    model = place.objects.put_tree(tiny_model)
    items = [replace(item, score=100.1) for item in trajectories(load_causal_lm(tiny_model))]
    scores, samples = file_scores(place.objects, items)
    settings = grpo_settings(optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0), **changes)
    checkpoint = on_policy_updates.grpo_update(model, None, model, scores, samples, settings, place)
    before, after = (load_causal_lm(folder).state_dict() for folder in (tiny_model, place.model(checkpoint.model)))
    assert all(torch.equal(before[name], after[name]) for name in before)
    [row] = [json.loads(line) for line in place.objects.get_bytes(checkpoint.metrics).splitlines()]
    assert (row["frac_reward_zero_std"], row["reward_std"], row["grad_norm"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_steps_have_a_divergence_from_the_reference_where_one_is_loaded(kl_coef, tiny_model, tmp_path):
    place = update_context(tmp_path)
    model = place.objects.put_tree(tiny_model)
    scores, samples = file_scores(place.objects, trajectories(load_causal_lm(tiny_model)))
    settings = grpo_settings(kl_coef=kl_coef, epochs=2)
    checkpoint = on_policy_updates.grpo_update(model, None, model, scores, samples, settings, place)
    first, second = (json.loads(line) for line in place.objects.get_bytes(checkpoint.metrics).splitlines())
    assert "approx_kl" in first and "approx_kl" in second
    assert (first.get("kl"), second.get("kl", 0.0) > 0) == ((0.0, True) if kl_coef else (None, False))


class Watched(Policy):
    """Notes how many sequences each forward pass has, and whether with a gradient."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[int, bool]] = []

    def forward(self, batch, **options):
        self.seen.append((batch.num_rows, torch.is_grad_enabled()))
        return super().forward(batch, **options)


def without_signal(items: list[Trajectory], group: int) -> list[Trajectory]:
    """The same with equal scores in one group."""
    alike = range(group * GROUP, (group + 1) * GROUP)
    return [replace(item, score=0.5) if number in alike else item for number, item in enumerate(items)]


@pytest.mark.parametrize("alike", [0, 1])
@pytest.mark.parametrize("minibatch_size", [6, 3])
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("changes", [{}, {"loss_type": "dapo"}, {"loss": "gspo", "loss_type": "dr_grpo"}])
def test_a_group_that_teaches_nothing_is_computed_without_gradient_and_changes_no_figure(
    alike, minibatch_size, corrects, changes, tiny_model
):
    correction = ImportanceCorrection() if corrects else None
    settings = grpo_settings(
        minibatch_size=minibatch_size, gradient_accumulation=6 // minibatch_size, correction=correction, **changes
    )
    items = without_signal(trajectories(load_causal_lm(tiny_model), drift=0.2), alike)

    def a_step(*, of_all: bool):
        policy = Watched(load_causal_lm(tiny_model))
        batch, _ = compare_groups(policy, None, build_batch(items), settings, device=CPU, corrects=not corrects)
        assert batch.learned is not None and batch.learned.view(2, GROUP).all(1).tolist() == [alike != 0, alike != 1]
        batch = replace(batch, learned=None) if of_all else batch
        learner = GRPO(policy, batch, settings, first_step=0, seed=1, device=CPU, corrects=corrects)
        parts = learner.minibatches(0)
        results = [learner.loss(part, parts) for part in parts]
        for result in results:
            assert result.loss.requires_grad is result.learned
            if result.learned:
                result.loss.backward()
        figures = [{name: float(value) for name, (value, _) in result.metrics.items()} for result in results]
        gradients = [parameter.grad for parameter in policy.parameters()]
        return policy.seen, [result.loss.item() for result in results], figures, learner.end_first_step(), gradients

    seen, losses, figures, at_end, gradients = a_step(of_all=False)
    assert sorted(seen) == [(GROUP, False), (GROUP, True)]
    seen, expected_losses, expected_figures, expected_at_end, expected = a_step(of_all=True)
    assert all(with_gradient for _, with_gradient in seen)
    assert losses == pytest.approx(expected_losses, abs=1e-6)
    for found, wanted in zip([*figures, at_end], [*expected_figures, expected_at_end], strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "scores", "learned"),
    [
        ({}, [1.0, 1.0, 1.0, 0.0, 0.5, 1.0], [False] * 3 + [True] * 3),  # a group stays whole around its mean
        ({}, [None, None, 1.0, 0.0, None, 1.0], [False] * 3 + [True] * 3),
        ({"baseline": "none", "advantage_scaling": "none"}, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0], [False] * 3 + [True] * 3),
        ({"advantage_scaling": "whiten", "baseline": "none"}, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0], [True] * 6),
        ({"kl_coef": 0.1}, [1.0] * 6, None),
        ({"entropy_coef": 0.1}, [1.0] * 6, None),
    ],
)
def test_of_which_completions_something_is_learned(changes, scores, learned, tiny_model):
    items = trajectories(load_causal_lm(tiny_model))
    items = [replace(item, score=score) for item, score in zip(items, scores, strict=True)]
    policy, reference = Policy(load_causal_lm(tiny_model)), Policy(load_causal_lm(tiny_model))
    settings = grpo_settings(**changes)
    held_to = reference if settings.kl_coef else None
    batch, _ = compare_groups(policy, held_to, build_batch(items), settings, device=CPU)
    assert (None if batch.learned is None else batch.learned.tolist()) == learned
    if learned is not None:
        assert batch.rows([1, 4]).learned.tolist() == [learned[1], learned[4]]


def test_a_group_of_cut_completions_alone_is_computed_without_gradient_where_these_are_masked(tiny_model):
    items = [
        replace(item, truncated=number < GROUP) for number, item in enumerate(trajectories(load_causal_lm(tiny_model)))
    ]
    policy = Policy(load_causal_lm(tiny_model))
    batch, _ = compare_groups(policy, None, build_batch(items), grpo_settings(truncated="mask"), device=CPU)
    assert batch.learned is not None and batch.learned.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("correction", [None, ImportanceCorrection()])
def test_an_update_ends_the_same_with_and_without_the_backward_pass_of_what_teaches_nothing(
    correction, tiny_model, tmp_path, monkeypatch
):
    """Two passes of two steps of two minibatches, each a group; of the four groups two have equal rewards."""
    items = trajectories(load_causal_lm(tiny_model), drift=0.2)
    items = without_signal([*items, *items], 0)
    items = without_signal(items, 3)
    changes = {"optimizer": OptimizerConfig(kind="sgd", lr=1e-2), "epochs": 2, "correction": correction}
    settings = grpo_settings(minibatch_size=GROUP, gradient_accumulation=2, prompts_per_iteration=4, **changes)
    backward, plain = [], torch.Tensor.backward

    def noted(loss: torch.Tensor, *args, **options) -> None:
        backward.append(loss)
        plain(loss, *args, **options)

    monkeypatch.setattr(torch.Tensor, "backward", noted)

    def weights_after(name: str) -> dict[str, torch.Tensor]:
        backward.clear()
        place = update_context(tmp_path / name)
        model = place.objects.put_tree(tiny_model)
        scores, samples = file_scores(place.objects, items)
        checkpoint = on_policy_updates.grpo_update(model, None, model, scores, samples, settings, place)
        assert len(place.objects.get_bytes(checkpoint.metrics).splitlines()) == 4
        return load_causal_lm(place.model(checkpoint.model)).state_dict()

    found = weights_after("some")
    assert len(backward) < 8
    monkeypatch.setattr(on_policy, "_learned", lambda *args: None)
    expected = weights_after("all")
    assert len(backward) == 8
    before = load_causal_lm(tiny_model).state_dict()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5)
    assert any(not torch.equal(found[name], before[name]) for name in found)


def test_several_processes_compute_all_with_a_gradient(tiny_model, monkeypatch):
    monkeypatch.setattr(on_policy, "world_size", lambda: 2)
    items = without_signal(trajectories(load_causal_lm(tiny_model)), 0)
    batch, _ = compare_groups(Policy(load_causal_lm(tiny_model)), None, build_batch(items), grpo_settings(), device=CPU)
    assert batch.learned is None


def test_a_step_in_which_nothing_is_learned_moves_weights_by_the_optimizers_moments_alone(tiny_model, tmp_path):
    """The second update begins with the moments of the first; its gradients are 0, and not missing."""
    place = update_context(tmp_path)
    model = place.objects.put_tree(tiny_model)
    items = trajectories(load_causal_lm(tiny_model))
    settings = grpo_settings(optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0))
    scores, samples = file_scores(place.objects, items)
    first = on_policy_updates.grpo_update(model, None, model, scores, samples, settings, place)
    alike, samples = file_scores(place.objects, [replace(item, score=1.0) for item in items])
    place = update_context(tmp_path, key=hash_bytes(b"second"))
    second = on_policy_updates.grpo_update(first.model, first.train_state, model, alike, samples, settings, place)
    [row] = [json.loads(line) for line in place.objects.get_bytes(second.metrics).splitlines()]
    assert (row["frac_reward_zero_std"], row["grad_norm"]) == (1.0, 0.0)
    before, after = (load_causal_lm(place.model(checkpoint.model)).state_dict() for checkpoint in (first, second))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_parts_that_abstain_leave_their_weight_to_the_others():
    """Weights 1 and 0.5: alone the first counts 1.5 times, alone the second 3 times; the third row has no part."""
    nan = math.nan
    parts = RewardParts(
        ["right", "short"], torch.tensor([1.0, 0.5]), torch.tensor([[2.0, nan], [nan, 4.0], [nan, nan], [0.0, 2.0]])
    )
    sums = parts.summed(parts.values)
    assert sums.tolist() == [3.0, 6.0, 0.0, 1.0]
    settings = grpo_settings(samples_per_prompt=4, reward_normalization="each")
    counted = torch.tensor([True, True, False, True])
    found = scaled_advantages(sums, settings, parts, counted)
    one = 1 / (math.sqrt(2) + 1e-4)  # both parts: two values that are 2 apart
    assert found.tolist() == pytest.approx([1.5 * one, 3 * 0.5 * one, 0.0, -one - 0.5 * one], abs=1e-5)
    assert parts.figures()["rewards/right/mean"] == 1.0


def test_groups_stay_together_and_share_their_prompt(tiny_model):
    settings = grpo_settings(minibatch_size=3)
    items = trajectories(load_causal_lm(tiny_model))
    policy = Policy(load_causal_lm(tiny_model))
    batch, _ = compare_groups(policy, None, build_batch(items), settings, device=CPU)
    learner = GRPO(policy, batch, settings, first_step=0, seed=1, device=CPU)
    assert learner.num_steps == 2
    for step in range(2):
        [part] = learner.minibatches(step)
        assert len(part.mask) == 3 and len(set(map(tuple, part.prompts))) == 1


def test_advantages_by_hand():
    scores = torch.tensor([1.0, 0.0, 0.0, 2.0, 2.0, 2.0])
    none = scaled_advantages(scores, grpo_settings(advantage_scaling="none"))
    assert none.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0, 0])
    group = scaled_advantages(scores, grpo_settings())
    assert group.tolist() == pytest.approx([x / (math.sqrt(1 / 3) + 1e-4) for x in (2 / 3, -1 / 3, -1 / 3, 0, 0, 0)])
    deviation = math.sqrt(sum((x - 7 / 6) ** 2 for x in scores.tolist()) / 5)
    batch = scaled_advantages(scores, grpo_settings(advantage_scaling="batch"))
    assert batch.tolist() == pytest.approx([x / (deviation + 1e-4) for x in none.tolist()])


def test_figures_name_groups_without_signal(tiny_model):
    items = trajectories(load_causal_lm(tiny_model))
    items[3:] = [
        Trajectory(item.prompt_token_ids, item.token_ids, item.logprobs, 1.0, item.truncated) for item in items[3:]
    ]
    policy = Policy(load_causal_lm(tiny_model))
    _, figures = compare_groups(policy, None, build_batch(items), grpo_settings(), device=CPU)
    assert figures["frac_reward_zero_std"] == 0.5
    assert figures["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert (figures["completions/min_length"], figures["completions/max_length"]) == (2, 6)


def test_importance_weights_by_hand():
    trainer = torch.tensor([[0.0, math.log(3.0), 5.0], [math.log(0.5), 0.0, 0.0]])
    engine, mask = torch.zeros(2, 3), torch.tensor([[True, True, False], [True, True, True]])

    def weights(**fields) -> list[list[float]]:
        return importance_weights(trainer, engine, mask, ImportanceCorrection(**fields)).tolist()

    assert weights(cap=2.0) == [pytest.approx([1, 2, 0]), pytest.approx([0.5, 1, 1])]
    assert weights(cap=2.0, mode="mask") == [pytest.approx([1, 0, 0]), pytest.approx([0.5, 1, 1])]
    assert weights(cap=2.0, level="sequence") == [pytest.approx([2, 2, 0]), pytest.approx([0.5, 0.5, 0.5])]
    assert weights(cap=2.0, level="sequence", mode="mask") == [[0, 0, 0], pytest.approx([0.5, 0.5, 0.5])]
    assert weights(cap=2.0, floor=0.8) == [pytest.approx([1, 2, 0]), pytest.approx([0.8, 1, 1])]
    assert weights(cap=2.0, floor=0.8, mode="mask") == [pytest.approx([1, 0, 0]), pytest.approx([0, 1, 1])]
    assert weights(cap=9.0, floor=0.6, level="sequence") == [pytest.approx([3, 3, 0]), pytest.approx([0.6, 0.6, 0.6])]


def test_the_correction_takes_the_trainers_own_logprobs_as_old(tiny_model):
    items = trajectories(load_causal_lm(tiny_model), drift=0.3)
    settings = grpo_settings(correction=ImportanceCorrection(cap=1.1))
    policy = Policy(load_causal_lm(tiny_model))
    batch, figures = compare_groups(policy, None, build_batch(items), settings, device=CPU)
    exact = build_batch(trajectories(load_causal_lm(tiny_model))).columns["old_logprobs"]
    assert torch.allclose(batch.columns["old_logprobs"], exact, atol=1e-5)
    assert 0.1 < figures["sampling/logprob_difference_max"] < 0.31
    plain, _ = compare_groups(
        policy, None, build_batch(items), settings.model_copy(update={"correction": None}), device=CPU
    )
    engine = build_batch(items).columns["old_logprobs"]
    expected = (exact - engine).exp().clamp(max=1.1) * plain.columns["advantages"]
    assert torch.allclose(batch.columns["advantages"], expected.masked_fill(~batch.mask, 0.0), atol=1e-5)


def test_logprobs_that_are_not_finite_are_refused(tiny_model):
    items = trajectories(load_causal_lm(tiny_model))
    items[0] = Trajectory(items[0].prompt_token_ids, items[0].token_ids, [float("nan")] * 2, 0.0, False)
    policy, settings = Policy(load_causal_lm(tiny_model)), grpo_settings(correction=ImportanceCorrection())
    with pytest.raises(Fatal, match="not finite; nothing"):
        compare_groups(policy, None, build_batch(items), settings, device=CPU)
    batch, _ = compare_groups(policy, None, build_batch(items), settings, device=CPU, corrects=False)
    with pytest.raises(Fatal, match="not finite; nothing"):  # before anything is trained
        GRPO(policy, batch, settings, first_step=0, seed=0, device=CPU, corrects=True)


def test_values_from_a_model_of_their_own_leave_the_policys_trunk_alone(tiny_model):
    settings = PPOSettings(
        prompts=JsonlDataset(path="x"), optimizer=OptimizerConfig(lr=1e-3), minibatch_size=6, values="model"
    )
    items = trajectories(load_causal_lm(tiny_model), temperature=1.0)
    grads = []
    for value_coef in (0.0, 1.0):
        model = load_causal_lm(tiny_model)
        values = ValueModel(load_causal_lm(tiny_model).base_model)
        torch.nn.init.ones_(values.head.weight)
        policy = Policy(model, values)
        changed = settings.model_copy(update={"value_coef": value_coef})
        batch, _, _ = assign_credit(policy, policy, build_batch(items), changed, kl_coef=0.1, device=CPU)
        learner = PPO(policy, batch, changed, first_step=0, seed=0, device=CPU)
        [part] = learner.minibatches(0)
        learner.loss(part, [part]).loss.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
        assert (values.head.weight.grad.abs().sum() > 0) == (value_coef > 0)
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


# Whole updates


class Interrupted(Exception):
    pass


def update_context(folder, **changes) -> UpdateContext:
    objects = ObjectStore.from_url(str(folder / "objects"))
    fields = {"key": hash_bytes(b"key"), "run_id": "run", "seed": 1, "num_threads": 1, **changes}
    return UpdateContext(objects=objects, cache=folder / "cache", **fields)


def file_scores(objects: ObjectStore, items: list[Trajectory]) -> tuple[Scores, str]:
    samples = [
        Sample(hash_bytes(b"%d" % number), "p", list(item.prompt_token_ids), number, None, {})
        for number, item in enumerate(items)
    ]
    lines = [
        encode_completion(
            Completion(sample.id, item.token_ids, item.logprobs, "", "length" if item.truncated else "stop")
        )
        for sample, item in zip(samples, items, strict=True)
    ]
    values = [item.score for item in items]
    scores = Scores(
        scores=objects.put_bytes(canonical_json(values)),
        completions=objects.put_bytes(b"".join(lines)),
        num_samples=len(items),
        mean=0.0,
        std=0.0,
    )
    return scores, objects.put_bytes(encode_samples(samples))


@pytest.mark.parametrize("stop_after", [1, 3])
@pytest.mark.parametrize("kind", ["grpo", "ppo", "ppo with a value model"])
def test_an_interrupted_update_ends_in_the_same_record(tiny_model, tmp_path, kind, stop_after):
    """Stopped inside several passes over one batch too."""
    fields = {"minibatch_size": 3, "epochs": 2, "kl_coef": 0.1}
    settings = grpo_settings(**fields)
    update = on_policy_updates.grpo_update
    if kind != "grpo":
        update = on_policy_updates.ppo_update
        settings = PPOSettings(
            prompts=JsonlDataset(path="x"),
            optimizer=OptimizerConfig(lr=1e-3),
            prompts_per_iteration=6,
            minibatch_size=3,
            gradient_accumulation=1,
            epochs=2,
            snapshots=SnapshotPolicy(every_steps=1),
            values="model" if "model" in kind else "head",
            sampling=SamplingParams(temperature=0.8, max_tokens=6),
        )
    items = trajectories(load_causal_lm(tiny_model))

    def run(place: UpdateContext):
        model = place.objects.put_tree(tiny_model)
        scores, samples = file_scores(place.objects, items)
        return update(model, None, model, scores, samples, settings, place)

    expected = run(update_context(tmp_path / "quiet"))
    assert expected.step == 4

    def stop(row):
        if row["step"] == stop_after:
            raise Interrupted

    with pytest.raises(Interrupted):
        run(update_context(tmp_path / "stormy", on_step=stop))
    started = []
    resumed = run(update_context(tmp_path / "stormy", on_start=lambda first, last: started.append(first)))
    assert 0 <= started[0] <= stop_after, "snapshots are written beside training"
    assert resumed == expected


@pytest.mark.parametrize("guards", [{"max_mean_length": 3.5}, {"max_kl": 1e-3}])
def test_a_guard_ends_the_run_with_what_it_saw(tiny_model, other_tiny_model, tmp_path, guards):
    place = update_context(tmp_path)
    model, reference = place.objects.put_tree(tiny_model), place.objects.put_tree(other_tiny_model)
    scores, samples = file_scores(place.objects, trajectories(load_causal_lm(tiny_model)))
    [(name, bound)] = guards.items()
    settings = grpo_settings(guards=guards, kl_coef=0.1)
    with pytest.raises(
        Fatal, match=rf"guards\.{name}: .*, above the bound of {bound:g}\. .* This update trained nothing"
    ) as told:
        on_policy_updates.grpo_update(model, None, reference, scores, samples, settings, place)
    assert "completions/mean_length 4, " in str(told.value) and scores.completions in str(told.value)
    assert place.objects.ref_names("progress") == []
    settings = grpo_settings(guards={name: 1e9}, kl_coef=0.1)
    assert on_policy_updates.grpo_update(model, None, reference, scores, samples, settings, place).step == 1
    with pytest.raises(ValueError, match=r"guards\.max_kl needs the starting policy"):
        grpo_settings(guards={"max_kl": 1.0})


def test_a_single_completion_has_its_score_for_an_advantage_where_a_batch_scales():
    settings = grpo_settings(samples_per_prompt=1, baseline="none", advantage_scaling="batch")
    assert scaled_advantages(torch.tensor([0.5]), settings).tolist() == pytest.approx([0.5], abs=1e-3)


def test_spikes_are_told_by_the_gradients_of_iterations_before(tiny_model, tmp_path):
    """Three iterations of a step each; the third has rewards of another scale, and is skipped."""
    model = load_causal_lm(tiny_model)
    outcomes, place = {}, update_context(tmp_path)
    first = place.objects.put_tree(tiny_model)
    for factor in (3.0, 1e6):
        settings = grpo_settings(advantage_scaling="none", skip_spikes={"factor": factor, "after_steps": 2})
        at, state = first, None
        for number, scale in enumerate((1.0, 1.0, 1e3)):
            items = [replace(item, score=item.score * scale) for item in trajectories(model)]
            scores, samples = file_scores(place.objects, items)
            context = replace(place, key=hash_bytes(f"{factor} {number}".encode()))
            done = on_policy_updates.grpo_update(at, state, first, scores, samples, settings, context)
            at, state = done.model, done.train_state
        outcomes[factor] = done.summary["skipped"]
    assert outcomes == {3.0: 1.0, 1e6: 0.0}


class Forgetful(HeldStates):
    """Keeps no learner in memory, as where updates are processes of their own."""

    def keep_learner(self, *given) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("grpo", {}),
        ("grpo", {"kl_coef": 0.1, "epochs": 2, "skip_spikes": SpikeRule(after_steps=1)}),
        ("grpo", {"lora": LoRAConfig(r=4, alpha=8), "gradient_checkpointing": True}),
        ("grpo", {"precision": "bfloat16", "weights": "bfloat16", "offload": True}),
        ("ppo", {}),
        ("ppo", {"values": "model", "gradient_checkpointing": True}),
        ("ppo", {"optimizer": OptimizerConfig(kind="sgd", lr=1e-2), "lora": LoRAConfig(r=4)}),
    ],
)
def test_an_update_goes_on_from_what_the_one_before_has_lent_to_the_same_bytes(
    kind, changes, tiny_model, tmp_path, monkeypatch
):
    """From the object store; from files of this machine, which spares fetching them; and from memory, where only what
    is no tensor is read."""
    items, settings = trajectories(load_causal_lm(tiny_model)), grpo_settings(**changes if kind == "grpo" else {})
    update = on_policy_updates.grpo_update
    if kind == "ppo":
        shared = settings.model_dump(include={"prompts", "optimizer", "sampling", "minibatch_size"})
        settings, update = PPOSettings.model_validate({**shared, **changes}), on_policy_updates.ppo_update
    outcomes, calls = [], Counter()
    restore, load = SnapshotStore.restore, on_policy_updates.load_state
    monkeypatch.setattr(SnapshotStore, "restore", lambda *given: (calls.update(["fetched"]), restore(*given))[1])
    monkeypatch.setattr(on_policy_updates, "load_state", lambda *given: (calls.update(["loaded"]), load(*given))[1])
    for name, held in (("none", None), ("files", Forgetful(tmp_path / "a")), ("memory", HeldStates(tmp_path / "b"))):
        place = update_context(tmp_path / name)
        first = model = place.objects.put_tree(tiny_model)
        scores, samples = file_scores(place.objects, items)
        state = None
        calls.clear()
        for number in range(3):
            context = replace(place, key=hash_bytes(b"%d" % number), held=held, seed=number)
            done = update(model, state, first, scores, samples, settings, context)
            model, state = done.model, done.train_state
            assert SnapshotStore(place.objects).is_present(state)
            if held is not None:
                assert [folder.name for folder in held.folder.iterdir()] == [state], "the last one alone"
        outcomes.append((done.cache_identity(), [calls["fetched"], calls["loaded"]]))
    identities, counts = zip(*outcomes, strict=True)
    assert len(set(map(str, identities))) == 1 and list(counts) == [[2, 2], [0, 2], [0, 0]]


def test_a_learner_in_memory_goes_to_the_update_that_follows_it_alone(tiny_model, tmp_path):
    place, held = update_context(tmp_path), HeldStates(tmp_path / "held")
    model = place.objects.put_tree(tiny_model)
    scores, samples = file_scores(place.objects, trajectories(load_causal_lm(tiny_model)))
    taken = []
    take = held.take_learner
    held.take_learner = lambda *given: taken.append(take(*given)) or taken[-1]

    def update(number: int, state, **changes):
        context = replace(place, key=hash_bytes(b"%d" % number), held=held)
        return on_policy_updates.grpo_update(model, state, model, scores, samples, grpo_settings(**changes), context)

    first = update(0, None)
    second = update(1, first.train_state)
    update(2, first.train_state)  # what is kept has come to the second one's state
    third = update(3, second.train_state, epochs=2)  # other settings
    update(4, None, epochs=2)
    assert [learner is not None for learner in taken] == [False, True, False, False, False]
    assert held.take_learner(third.train_state, None) is None, "the last one left another state"


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_model_with_dropout_starts_from_a_ratio_of_one(tiny_model, tmp_path, kind):
    folder = tmp_path / "gpt2"
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=262, n_embd=32, n_layer=2, n_head=2, n_positions=64)).save_pretrained(folder)
    copy_tokenizer(tiny_model, folder)
    items = trajectories(load_causal_lm(folder).eval())
    place = update_context(tmp_path)
    model = place.objects.put_tree(folder)
    scores, samples = file_scores(place.objects, items)
    settings = grpo_settings()
    update = on_policy_updates.grpo_update
    if kind == "ppo":
        shared = settings.model_dump(include={"prompts", "optimizer", "sampling", "minibatch_size"})
        settings, update = PPOSettings.model_validate(shared), on_policy_updates.ppo_update
    checkpoint = update(model, None, model, scores, samples, settings, place)
    [row] = [json.loads(line) for line in place.objects.get_bytes(checkpoint.metrics).splitlines()]
    assert row["approx_kl"] == pytest.approx(0, abs=1e-9)


def test_reward_rises(tiny_model, tmp_path):
    """Six rounds of sampling by hand, reward for odd tokens."""
    settings = grpo_settings(
        samples_per_prompt=8,
        prompts_per_iteration=4,
        minibatch_size=32,
        sampling=SamplingParams(temperature=1.0, max_tokens=3),
        optimizer=OptimizerConfig(lr=1e-2),
        epochs=4,
    )
    place = update_context(tmp_path)
    model_id, state = place.objects.put_tree(tiny_model), None
    generator = torch.Generator().manual_seed(0)
    means = []
    for round_ in range(6):
        model = load_causal_lm(place.model(model_id))
        items = []
        for start in range(4):
            prompt = [10 + start, 20, 30]
            for _ in range(8):
                ids, logprobs = list(prompt), []
                for _ in range(3):
                    found = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1).detach()
                    token = int(torch.multinomial(found.exp(), 1, generator=generator))
                    ids.append(token)
                    logprobs.append(float(found[token]))
                reward = sum(token % 2 for token in ids[3:]) / 3
                items.append(Trajectory(prompt, ids[3:], logprobs, reward, False))
        means.append(sum(item.score for item in items) / len(items))
        scores, samples = file_scores(place.objects, items)
        here = update_context(tmp_path, key=hash_bytes(b"%d" % round_))
        checkpoint = on_policy_updates.grpo_update(model_id, state, model_id, scores, samples, settings, here)
        rows = [json.loads(line) for line in place.objects.get_bytes(checkpoint.metrics).splitlines()]
        assert rows[0]["sampling/logprob_difference"] < 1e-4, "engine and trainer agree on the first step"
        model_id, state = checkpoint.model, checkpoint.train_state
    assert means[-1] > means[0] + 0.25, means

"""Online DPO: pairs of the best and the worst completion, an independent reference of loss and gradient, and a run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from test_grpo import CPU, GROUP, file_scores, grpo_settings, plain_logprobs, trajectories
from updates import rows_of, update_context

from rollout_core.algorithms.experience import Trajectory, build_batch
from rollout_core.algorithms.on_policy import OnlineDPO, best_and_worst
from rollout_core.algorithms.on_policy_updates import grpo_update
from rollout_core.algorithms.policy import Policy
from rollout_core.config import identity
from rollout_core.models.pretrained import load_causal_lm

OPTIONS = {"first_step": 0, "seed": 5, "device": CPU}
BETA = 0.3


def scored(items: list[Trajectory], scores: list[float]) -> list[Trajectory]:
    return [replace(item, score=score) for item, score in zip(items, scores, strict=True)]


def reference_loss(model, reference, pairs: list[tuple[Trajectory, Trajectory]]) -> torch.Tensor:
    """-log sigmoid(beta h) written out, a mean over pairs of best and worst."""

    def log_ratio(item: Trajectory) -> torch.Tensor:
        given = item.prompt_token_ids, item.token_ids, 0.8
        return plain_logprobs(model, *given).sum() - plain_logprobs(reference, *given).sum().detach()

    margins = [log_ratio(best) - log_ratio(worst) for best, worst in pairs]
    return torch.stack([torch.log1p(torch.exp(-BETA * margin)) for margin in margins]).mean()


CASES = {
    "both prompts": ({}, [0.1, 0.9, 0.4, 0.7, 0.2, 0.2], [(1, 0), (3, 4)]),
    "equal scores make no pair": ({}, [0.5, 0.5, 0.5, 0.1, 0.2, 0.3], [(5, 3)]),
    "a completion that was cut": ({"truncated": "mask"}, [0.1, 0.9, 0.4, 0.3, 0.2, 0.1], [(3, 5)]),
}


@pytest.mark.parametrize("minibatch_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_paper(case, minibatch_size, tiny_model: Path, other_tiny_model: Path):
    changes, scores, expected_pairs = CASES[case]
    model, reference = (load_causal_lm(folder).eval() for folder in (tiny_model, other_tiny_model))
    plain, plain_reference = (load_causal_lm(folder).eval() for folder in (tiny_model, other_tiny_model))
    items = scored(trajectories(plain), scores)
    count = {"minibatch_size": minibatch_size, "gradient_accumulation": 2 // minibatch_size}
    settings = grpo_settings(loss="online_dpo", beta=BETA, **count, **changes)
    pairs, figures = best_and_worst(Policy(reference), build_batch(items), settings, **OPTIONS)
    algorithm = OnlineDPO(Policy(model), pairs, settings, **OPTIONS)
    assert algorithm.num_steps == settings.steps_per_iteration == 1
    batches = algorithm.minibatches(0)
    assert len(batches) == 2 // minibatch_size
    loss = torch.stack([algorithm.loss(batch, batches).loss for batch in batches]).sum()
    expected = reference_loss(plain, plain_reference, [(items[best], items[worst]) for best, worst in expected_pairs])
    own, theirs = (
        torch.autograd.grad(value, list(of.parameters())) for value, of in ((loss, model), (expected, plain))
    )
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(own, theirs, strict=True))
    assert figures["reward"] == pytest.approx(sum(scores) / 6), "of all completions"


@pytest.mark.parametrize("alike", [False, True])
def test_an_update_widens_the_margin_or_without_a_pair_changes_nothing(alike: bool, tiny_model: Path, tmp_path: Path):
    place = update_context(tmp_path)
    start = place.objects.put_tree(tiny_model)
    items = scored(trajectories(load_causal_lm(tiny_model)), [0.5] * 6 if alike else [0.1, 0.9, 0.4, 0.7, 0.2, 0.3])
    scores, samples = file_scores(place.objects, items)
    settings = grpo_settings(loss="online_dpo", epochs=4, minibatch_size=2, samples_per_prompt=GROUP)
    checkpoint = grpo_update(start, None, start, scores, samples, settings, place)
    rows = rows_of(checkpoint, place.objects)
    assert len(rows) == 4
    if alike:
        assert [row["grad_norm"] for row in rows] == [0.0] * 4
        assert rows[0]["frac_reward_zero_std"] == 1.0
        return
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5), "the policy is its own reference"
    assert rows[-1]["rewards/margins"] > 0 and rows[-1]["loss"] < rows[0]["loss"]


def test_a_completion_without_a_score_is_in_no_pair(tiny_model: Path):
    """Of the first group the best abstained, of the second all but one: a pair of one with itself does not count."""
    model = load_causal_lm(tiny_model)
    items = scored(trajectories(model), [0.1, 0.5, 0.3, 0.7, 0.2, 0.3])
    items = [replace(item, score=None) if place in (1, 3, 5) else item for place, item in enumerate(items)]
    settings = grpo_settings(loss="online_dpo", minibatch_size=2, samples_per_prompt=GROUP)
    pairs, figures = best_and_worst(Policy(model), build_batch(items), settings, **OPTIONS)
    assert pairs.scores.tolist() == pytest.approx([0.3, 0.1, 0.2, 0.2])
    algorithm = OnlineDPO(Policy(model), pairs, settings, **OPTIONS)
    assert algorithm._counted(pairs).tolist() == [True, False]
    assert figures["frac_reward_zero_std"] == 0.5 and figures["reward"] == pytest.approx(0.2)


def test_keys_of_other_losses_are_refused():
    with pytest.raises(ValidationError, match=r'"online_dpo" has no use for kl_coef \(of grpo\); leave out'):
        grpo_settings(loss="online_dpo", kl_coef=0.1)
    with pytest.raises(ValidationError, match=r'"grpo" has no use for beta \(of online_dpo\); leave out'):
        grpo_settings(beta=0.2)
    with pytest.raises(ValidationError, match="samples_per_prompt is 1"):
        grpo_settings(loss="online_dpo", samples_per_prompt=1)
    assert "beta" not in identity(grpo_settings())
    assert grpo_settings(loss="online_dpo").loads_reference and not grpo_settings().loads_reference

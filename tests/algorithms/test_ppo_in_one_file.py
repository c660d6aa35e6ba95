"""The tutorial and the pipeline are one algorithm: equal losses on equal completions, and rewards that rise alike."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ppo_in_one_file as tutorial
import pytest
import torch
from updates import rows_of, update_context

from rollout_core.algorithms import ppo_update
from rollout_core.base.ids import ContentId, canonical_json, hash_bytes
from rollout_core.config import PPOSettings, TrainPPOConfig, parse_config
from rollout_core.data import Completion, Sample, encode_completion, encode_samples, epoch_order
from rollout_core.models import load_causal_lm, load_tokenizer
from rollout_core.objects import ObjectStore, Scores


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory) -> Path:
    """Folder of the tutorial's model after its warm-up."""
    settings = tutorial.Settings()
    folder = tmp_path_factory.mktemp("tutorial") / "model"
    torch.manual_seed(settings.seed)
    tokenizer = tutorial.make_tokenizer()
    model = tutorial.make_model(tokenizer)
    tutorial.warm_up(model, tokenizer, problems(settings), settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def problems(settings: tutorial.Settings) -> list[tutorial.Problem]:
    return tutorial.make_problems(1_000, settings.num_digits, settings.seed)


def load(folder: Path) -> tuple[Any, Any]:
    # AutoTokenizer would make Qwen2's own tokenizer of any that lies beside a Qwen2.
    tokenizer = load_tokenizer(folder)
    tokenizer.padding_side = "left"
    return load_causal_lm(folder), tokenizer


def algorithm_table(settings: tutorial.Settings) -> dict[str, Any]:
    """The tutorial's settings as the pipeline's ``[algorithm]`` table."""
    same = ("iterations", "prompts_per_iteration", "epochs", "minibatch_size", "gamma", "lam", "clip", "value_clip")
    values = asdict(settings)
    return {
        **{name: values[name] for name in (*same, "value_coef")},
        "gradient_accumulation": 1,
        "optimizer": {"lr": settings.lr, "max_grad_norm": settings.max_grad_norm},
        "sampling": {"max_tokens": settings.max_tokens},
        "kl": {"init_coef": settings.kl_init_coef, "target": settings.kl_target, "horizon": settings.kl_horizon},
    }


def filed(
    objects: ObjectStore, rollouts: tutorial.Rollouts, experience: tutorial.Experience
) -> tuple[Scores, ContentId]:
    """The tutorial's rollouts as the stages before an update file them."""
    samples, completions = [], []
    width = rollouts.tokens.mask.shape[1]
    for row, (ids, attention, mask) in enumerate(
        zip(rollouts.tokens.ids, rollouts.tokens.attention_mask.bool(), rollouts.tokens.mask, strict=True)
    ):
        key = hash_bytes(b"%d" % row)
        samples.append(Sample(key, "", ids[:-width][attention[:-width]].tolist(), row, None, {}))
        token_ids, logprobs = ids[-width:][mask].tolist(), experience.old_logprobs[row][mask].tolist()
        completions.append(Completion(key, token_ids, logprobs, rollouts.texts[row], "stop"))
    scores = Scores(
        scores=objects.put_bytes(canonical_json(rollouts.scores.tolist())),
        completions=objects.put_bytes(b"".join(map(encode_completion, completions))),
        num_samples=len(samples),
        mean=float(rollouts.scores.mean()),
        std=float(rollouts.scores.std()),
    )
    return scores, objects.put_bytes(encode_samples(samples))


def test_on_the_same_completions_every_step_has_the_pipelines_losses(warmed_up, tmp_path):
    settings = tutorial.Settings(prompts_per_iteration=48, minibatch_size=16, epochs=2)
    table = {**algorithm_table(settings), "prompts": {"path": "x"}}
    place = update_context(tmp_path)
    start = place.objects.put_tree(warmed_up)
    model, tokenizer = load(warmed_up)
    policy, reference = tutorial.Policy(model).eval(), tutorial.Policy(load(warmed_up)[0]).eval()
    optimizer, kl_coef = tutorial.make_optimizer(policy, settings), settings.kl_init_coef
    torch.manual_seed(settings.seed)
    pipeline_model, train_state, step = start, None, 0
    for iteration in range(2):
        chosen = problems(settings)[iteration * 48 : (iteration + 1) * 48]
        rollouts = tutorial.collect(policy, tokenizer, chosen, settings)
        experience = tutorial.assign_credit(policy, reference, rollouts, settings, kl_coef)
        orders = [
            torch.tensor(epoch_order(len(chosen), seed=iteration, epoch=step + epoch))
            for epoch in range(settings.epochs)
        ]
        own = tutorial.update(policy, optimizer, experience, orders, settings)
        kl_before, kl_coef = kl_coef, tutorial.adapt_kl_coef(kl_coef, experience.kl, len(chosen), settings)

        scores, samples = filed(place.objects, rollouts, experience)
        here = update_context(tmp_path, key=hash_bytes(b"%d" % iteration), seed=iteration)
        checkpoint = ppo_update(
            pipeline_model, train_state, start, scores, samples, PPOSettings.model_validate(table), here
        )
        rows = rows_of(checkpoint, place.objects)
        assert len(rows) == len(own) == 6
        for mine, theirs in zip(own, rows, strict=True):
            assert {name: theirs[name] for name in mine} == pytest.approx(mine, rel=1e-4, abs=1e-5), iteration
        assert rows[0]["objective/kl"] == pytest.approx(experience.kl, abs=1e-4)
        assert rows[0]["objective/kl_coef"] == pytest.approx(kl_before, rel=1e-6)
        assert rows[0]["sampling/logprob_difference_max"] < 1e-5
        # Adam's first steps make much of what two orders of a sum differ by; the next iteration begins with one model.
        trained = load(place.objects.local_tree(checkpoint.model, tmp_path / "cache"))[0].state_dict()
        for name, weights in model.state_dict().items():
            assert torch.allclose(weights, trained[name], rtol=0.0, atol=settings.lr), name
        model.load_state_dict(trained)
        pipeline_model, train_state, step = checkpoint.model, checkpoint.train_state, checkpoint.step
    assert experience.kl > 0.0, "the second iteration starts away from the reference"


@pytest.mark.campaign
@pytest.mark.server
def test_on_the_same_prompts_both_curves_rise_alike(warmed_up, tmp_path, prefect_server):
    from flows import train_ppo

    settings = tutorial.Settings(iterations=10, prompts_per_iteration=192, epochs=3)
    rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems(settings)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        f"{inspect.getsource(tutorial.reward)}\n\n"
        "def score(sample):\n    return reward(sample.completion, sample.extras['answer'])\n"
    )
    config = {
        "schema_version": 1,
        "seed": settings.seed,
        "num_threads": 1,
        "numerics": "native",
        "run": {"name": "tutorial"},
        "backend": {"kind": "transformers"},
        "algorithm": {
            "kind": "ppo",
            **algorithm_table(settings),
            "base_model": {"uri": str(warmed_up)},
            "prompts": {"path": str(prompts)},
            "reward": {"kind": "function", "callable": f"{tmp_path / 'rewards.py'}:score"},
        },
    }
    pipeline = train_ppo(parse_config(config, TrainPPOConfig))["rewards"]
    model, tokenizer = load(warmed_up)
    own = tutorial.train(model, tokenizer, problems(settings), settings)
    for curve in (own, pipeline):
        assert sum(curve[-3:]) / 3 > sum(curve[:2]) / 2 + 0.04, curve
    # The same policy on the same prompts; only the draws differ.
    assert own[0] == pytest.approx(pipeline[0], abs=0.1)
    assert sum(own[-3:]) / 3 == pytest.approx(sum(pipeline[-3:]) / 3, abs=0.1)

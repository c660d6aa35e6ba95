"""Distillation (GKD): the divergence by hand, by TRL's formula and by gradcheck; updates from rows and on policy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from test_grpo import file_scores, grpo_settings, trajectories
from updates import rows_of, sft_rows, sft_settings, update_context

from rollout_core.algorithms import output_layer
from rollout_core.algorithms.dataset_updates import sft_update
from rollout_core.algorithms.on_policy_updates import grpo_update
from rollout_core.algorithms.output_layer import TeacherOutput, weighted_jsd
from rollout_core.base.errors import ConfigError
from rollout_core.config import BudgetConfig, Distillation, HeldOutRows, JsonlDataset, LoRAConfig, identity
from rollout_core.data.datasets import to_jsonl
from rollout_core.models.facts import check_teacher
from rollout_core.models.pretrained import load_causal_lm, load_tokenizer
from tests.support.rows import tokenize_sft

BETAS = [0.0, 0.1, 0.5, 1.0]
HELD_OUT = HeldOutRows(dataset=JsonlDataset(path="x"))


def trl_jsd(student: torch.Tensor, teacher: torch.Tensor, beta: float, temperature: float) -> torch.Tensor:
    """[M]: `GKDTrainer.generalized_jsd_loss` of TRL, written out again, before its reduction."""
    student, teacher = (torch.log_softmax(logits / temperature, -1) for logits in (student, teacher))
    if beta == 0:
        return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    if beta == 1:
        return F.kl_div(teacher, student, reduction="none", log_target=True).sum(-1)
    of_both = torch.stack([student + math.log(1 - beta), teacher + math.log(beta)])
    mixture = torch.logsumexp(of_both, dim=0)
    kl_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    kl_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    return (beta * kl_teacher + (1 - beta) * kl_student).sum(-1)


def by_logits(student: torch.Tensor, teacher: torch.Tensor, beta: float, **options: Any) -> Any:
    """`weighted_jsd` of logits, by output layers that change nothing."""
    count = len(student)
    layers = torch.eye(student.shape[1], dtype=student.dtype), torch.eye(teacher.shape[1], dtype=student.dtype)
    weights = options.pop("weights", torch.ones(count, dtype=student.dtype))
    targets = torch.zeros(count, dtype=torch.int64)
    return weighted_jsd(
        student, layers[0], None, TeacherOutput(teacher, layers[1]), targets, weights, beta=beta, **options
    )


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        # Teacher (3/4, 1/4), student (1/2, 1/2).
        (0.0, 0.75 * math.log(1.5) + 0.25 * math.log(0.5)),
        (1.0, 0.5 * math.log(2 / 3) + 0.5 * math.log(2)),
        # Mixture (5/8, 3/8).
        (
            0.5,
            0.5 * (0.75 * math.log(6 / 5) + 0.25 * math.log(2 / 3))
            + 0.5 * (0.5 * math.log(4 / 5) + 0.5 * math.log(4 / 3)),
        ),
    ],
)
def test_the_divergence_by_hand(beta: float, expected: float):
    teacher, student = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    found = by_logits(student, teacher, beta, weights=torch.tensor([2.0]))
    assert float(found.divergence) == pytest.approx(expected, abs=1e-6)
    assert float(found.loss) == pytest.approx(2 * expected, abs=1e-6)
    assert float(found.logprobs) == pytest.approx(math.log(0.5)) and bool(found.is_best)
    assert float(by_logits(teacher, teacher, beta).loss) == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("in_chunks", [False, True])
def test_value_and_gradient_are_those_of_trl(beta: float, in_chunks: bool, monkeypatch: pytest.MonkeyPatch):
    if in_chunks:
        monkeypatch.setattr(output_layer, "CHUNK_ELEMENTS", 60)
    torch.manual_seed(0)
    hidden, layer = torch.randn(9, 4, requires_grad=True), torch.nn.Linear(4, 7)
    other, other_layer = torch.randn(9, 3), torch.nn.Linear(3, 7)
    weights, targets = torch.rand(9), torch.arange(9) % 7
    teacher = TeacherOutput(other, other_layer.weight.detach(), other_layer.bias.detach())
    found = weighted_jsd(hidden, layer.weight, layer.bias, teacher, targets, weights, beta=beta, temperature=0.7)
    parameters = [hidden, layer.weight, layer.bias]
    own = torch.autograd.grad(found.loss, parameters)
    expected = trl_jsd(layer(hidden), other_layer(other).detach(), beta, 0.7)
    assert torch.allclose(found.divergence, expected, atol=1e-6)
    for mine, theirs in zip(own, torch.autograd.grad((weights * expected).sum(), parameters), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_outputs_that_only_one_of_the_two_has_do_not_count(beta: float):
    """As in families whose larger models pad their output layers further."""
    torch.manual_seed(0)
    student, teacher = torch.randn(3, 5, dtype=torch.double, requires_grad=True), torch.randn(3, 8, dtype=torch.double)
    found = by_logits(student, teacher, beta)
    assert torch.allclose(found.divergence, by_logits(student, teacher[:, :5], beta).divergence)
    wide = torch.randn(3, 9, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda logits: by_logits(logits, teacher, beta).loss, [wide])
    assert float(torch.autograd.grad(by_logits(wide, teacher, beta).loss, wide)[0][:, 8].abs().max()) == 0


def dense_divergence(student: Any, teacher: Any, rows: list[tuple[list[int], list[bool]]], beta: float) -> float:
    """Mean over all trained tokens of TRL's divergence, a row at a time by transformers' own logits."""
    total, count = 0.0, 0
    for token_ids, trained in rows:
        ids, mask = torch.tensor([token_ids]), torch.tensor(trained[1:])
        with torch.no_grad():
            logits, other = (model(input_ids=ids).logits[0, :-1] for model in (student, teacher))
        total += float(trl_jsd(logits[mask], other[mask], beta, 1.0).sum())
        count += int(mask.sum())
    return total / count


def test_rows_teach_a_student_its_teachers_distribution(tiny_model: Path, other_tiny_model: Path, tmp_path: Path):
    place = update_context(tmp_path)
    student, teacher = place.objects.put_tree(tiny_model), place.objects.put_tree(other_tiny_model)
    distillation = Distillation.model_validate({"teacher": {"uri": "x"}, "beta": 0.5})
    settings = sft_settings(distillation=distillation, evaluation=HELD_OUT, minibatch_size=3, gradient_accumulation=2)
    dataset, held_out = (place.objects.put_bytes(to_jsonl(sft_rows(count))) for count in (6, 4))
    options: dict[str, Any] = {"held_out": held_out, "teacher": teacher}
    checkpoint, _ = sft_update(student, dataset, settings, place, **options)
    rows = rows_of(checkpoint, place.objects)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"], "the first step has all rows, and so has the last"

    examples, _ = tokenize_sft(load_tokenizer(tiny_model), sft_rows(6), loss_on=settings.loss_on, max_seq_len=64)
    plain = [(list(item.token_ids), list(item.trained)) for item in examples]
    models = [load_causal_lm(folder).eval() for folder in (tiny_model, other_tiny_model, place.model(checkpoint.model))]
    assert rows[0]["loss"] == pytest.approx(dense_divergence(models[0], models[1], plain, 0.5), abs=1e-5)
    assert rows[-1]["eval_loss"] == pytest.approx(dense_divergence(models[2], models[1], plain[:4], 0.5), abs=1e-5)
    assert checkpoint.summary.keys() >= {"nll", "mean_token_accuracy", "eval_nll"}

    with pytest.raises(ConfigError, match="needs the content id of its teacher"):
        sft_update(student, dataset, settings, update_context(tmp_path, key=student), held_out=held_out)


@pytest.mark.parametrize("changes", [{}, {"lora": LoRAConfig(r=4)}, {"truncated": "mask"}])
def test_completions_of_the_student_teach_it_its_teachers_distribution(
    changes: dict[str, Any], tiny_model: Path, other_tiny_model: Path, tmp_path: Path
):
    place = update_context(tmp_path)
    student, teacher = place.objects.put_tree(tiny_model), place.objects.put_tree(other_tiny_model)
    items = trajectories(load_causal_lm(tiny_model))
    scores, samples = file_scores(place.objects, items)
    settings = grpo_settings(
        loss="gkd", distillation={"teacher": {"uri": "x"}, "beta": 0.1}, epochs=4, minibatch_size=2,
        gradient_accumulation=3, **changes,
    )  # fmt: skip
    checkpoint = grpo_update(student, None, student, scores, samples, settings, place, teacher=teacher)
    rows = rows_of(checkpoint, place.objects)
    assert len(rows) == 4 and rows[-1]["loss"] < rows[0]["loss"]
    kept = [item for item in items if not (item.truncated and settings.truncated == "mask")]
    plain = [
        ([*item.prompt_token_ids, *item.token_ids], [False] * len(item.prompt_token_ids) + [True] * len(item.token_ids))
        for item in kept
    ]
    models = [load_causal_lm(folder).eval() for folder in (tiny_model, other_tiny_model)]
    assert rows[0]["loss"] == pytest.approx(dense_divergence(*models, plain, 0.1), abs=1e-5)
    assert rows[0]["divergence"] == pytest.approx(rows[0]["loss"], abs=1e-6) and "reward" in rows[0]


def test_a_teacher_of_other_tokens_or_too_few_positions_is_refused(tiny_model: Path, tmp_path: Path):
    from make_tiny import make_model

    make_model(tmp_path / "teacher", hidden_size=64, num_layers=1, seed=1)
    check_teacher(tiny_model, tmp_path / "teacher", 8)
    with pytest.raises(ConfigError, match=r"the longest row has 99999 tokens, the teacher in .* has \d+ positions"):
        check_teacher(tiny_model, tmp_path / "teacher", 99_999)
    file = tmp_path / "teacher" / "tokenizer.json"
    file.write_text(file.read_text().replace('"9"', '"nine"'))
    with pytest.raises(ConfigError, match=r"the tokenizer of the teacher in .* has another vocabulary"):
        check_teacher(tiny_model, tmp_path / "teacher", 8)


def test_keys_that_belong_together():
    teacher = {"teacher": {"uri": "x"}}
    assert grpo_settings(loss="gkd", distillation=teacher, samples_per_prompt=1).distillation is not None
    with pytest.raises(ValidationError, match=r"distillation\n  Field required"):
        grpo_settings(loss="gkd")
    with pytest.raises(ValidationError, match=r'"grpo" has no use for distillation \(of gkd\); leave out'):
        grpo_settings(distillation=teacher)
    with pytest.raises(ValidationError, match=r'"gkd" has no use for kl_coef \(of grpo\), dual_clip \(of grpo\)'):
        grpo_settings(loss="gkd", distillation=teacher, kl_coef=0.1, dual_clip=3.0)
    assert "distillation" not in identity(sft_settings()) and "distillation" not in identity(grpo_settings())
    named = identity(sft_settings(distillation=Distillation.model_validate(teacher), budget=BudgetConfig(max_steps=1)))
    assert named["distillation"] == {"teacher": None, "beta": 0.5, "temperature": 1.0}

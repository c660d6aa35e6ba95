"""Evaluation during training: the loss of all held-out rows at once, and no trace in what is trained."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from updates import KINDS, preference_data, preference_update as update, rows_of, sft_rows, sft_settings, update_context

from rollout_core.algorithms import training
from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.dataset_updates import sft_update
from rollout_core.base.errors import Fatal
from rollout_core.config import HeldOutRows, JsonlDataset, identity
from rollout_core.data.datasets import to_jsonl
from rollout_core.models.pretrained import load_causal_lm, load_tokenizer
from rollout_core.objects.records import Checkpoint
from tests.rows import tokenize_sft

HELD_OUT = HeldOutRows(dataset=JsonlDataset(path="x"), every_steps=2)
ROWS = sft_rows(5, first=40)


def sft(place: UpdateContext, model: Path, rows: HeldOutRows | None, **changes: Any) -> Checkpoint:
    settings = sft_settings(evaluation=rows, **changes)
    dataset = place.objects.put_bytes(to_jsonl(sft_rows(20)))
    held_out = place.objects.put_bytes(to_jsonl(ROWS)) if rows else None
    return sft_update(place.objects.put_tree(model), dataset, settings, place, held_out=held_out)[0]


def preference(kind: str, place: UpdateContext, model: Path, rows: HeldOutRows | None) -> Checkpoint:
    if rows is None:
        return update(kind, model, place)
    held_out = place.objects.put_bytes(preference_data(kind, count=10, seed=9))
    return update(kind, model, place, held_out=held_out, evaluation=rows.model_dump())


def run(kind: str, place: UpdateContext, model: Path, rows: HeldOutRows | None = HELD_OUT) -> Checkpoint:
    return (sft if kind == "sft" else partial(preference, kind))(place, model, rows)


@pytest.mark.parametrize("kind", ["sft", *KINDS])
def test_what_is_trained_does_not_depend_on_what_is_looked_at(kind: str, tiny_model: Path, tmp_path: Path):
    """Equal models, and equal rows but for the figures that are added."""
    plain_place, place = update_context(tmp_path / "plain"), update_context(tmp_path / "looked")
    plain, looked = run(kind, plain_place, tiny_model, None), run(kind, place, tiny_model)
    assert looked.model == plain.model
    plain_rows, looked_rows = rows_of(plain, plain_place.objects), rows_of(looked, place.objects)
    for before, row in zip(plain_rows, looked_rows, strict=True):
        added = {name: row.pop(name) for name in list(row) if name.startswith("eval_")}
        assert row == before
        assert bool(added) == (row["step"] % 2 == 0)
        if added:
            assert added.keys() >= {"eval_loss"} and all(map(math.isfinite, added.values()))
            assert added.keys() <= {f"eval_{name}" for name in before}


@pytest.mark.parametrize("kind", ["sft", *KINDS])
def test_an_interrupted_run_with_evaluation_ends_in_the_same_record(kind: str, tiny_model: Path, tmp_path: Path):
    expected = run(kind, update_context(tmp_path / "quiet"), tiny_model)

    class Interrupted(Exception):
        pass

    def stop(row: dict[str, float]) -> None:
        if row["step"] == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        run(kind, update_context(tmp_path / "disturbed", on_step=stop), tiny_model)
    assert run(kind, update_context(tmp_path / "disturbed"), tiny_model) == expected


def test_the_loss_is_that_of_transformers_over_all_rows(tiny_model: Path, tmp_path: Path):
    place = update_context(tmp_path)
    checkpoint = sft(place, tiny_model, HELD_OUT, minibatch_size=2)
    folder = place.model(checkpoint.model)
    model = load_causal_lm(folder).eval()
    examples, _ = tokenize_sft(load_tokenizer(folder), ROWS, loss_on=sft_settings().loss_on, max_seq_len=64)
    total, count = 0.0, 0
    for example in examples:
        ids = torch.tensor([example.token_ids])
        trained = torch.tensor([example.trained])
        number = int(trained[0, 1:].sum())
        total += float(model(input_ids=ids, labels=ids.masked_fill(~trained, -100)).loss.detach()) * number
        count += number
    assert rows_of(checkpoint, place.objects)[-1]["eval_loss"] == pytest.approx(total / count, abs=1e-5)


def test_without_every_steps_only_the_last_step_is_looked_at(tiny_model: Path, tmp_path: Path):
    place = update_context(tmp_path)
    checkpoint = sft(place, tiny_model, HELD_OUT.model_copy(update={"every_steps": None}))
    looked = ["eval_loss" in row for row in rows_of(checkpoint, place.objects)]
    assert looked == [False] * 5 + [True] and "eval_loss" in checkpoint.summary


def test_a_figure_that_is_not_finite_ends_the_run(tiny_model: Path, tmp_path: Path, monkeypatch):
    class NoNumbers(training.StepFigures):
        def row(self) -> dict[str, float]:
            return {"loss": math.nan}

    monkeypatch.setattr(training, "StepFigures", NoNumbers)
    with pytest.raises(Fatal, match=r"sft step 2: figures of the held-out rows are not finite: {'eval_loss': nan}"):
        sft(update_context(tmp_path), tiny_model, HELD_OUT)


def test_a_run_without_evaluation_keeps_its_identity():
    assert "evaluation" not in identity(sft_settings())
    named = identity(sft_settings(evaluation=HELD_OUT))
    assert named["evaluation"] == {"dataset": None, "every_steps": 2}

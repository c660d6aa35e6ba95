"""Evaluation during training: the loss of all held-out rows at once, and no trace in what is trained."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from updates import KINDS, preference_data, preference_update as update, rows_of, sft_rows, sft_settings, update_context

from rollout_core.algorithms import training
from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.dataset_updates import sft_update
from rollout_core.base.errors import Fatal
from rollout_core.config import BudgetConfig, HeldOutRows, JsonlDataset, OptimizerConfig, SnapshotPolicy, identity
from rollout_core.data.datasets import to_jsonl
from rollout_core.models.pretrained import load_causal_lm, load_tokenizer
from rollout_core.objects.records import Checkpoint
from rollout_core.objects.snapshots import SnapshotStore
from tests.support.rows import tokenize_sft

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


BEST = HELD_OUT.model_copy(update={"every_steps": 1, "select": "best"})
FALLS_THEN_RISES: dict[str, Any] = {
    "optimizer": OptimizerConfig(lr=3e-2),
    "budget": BudgetConfig(max_steps=8),
    "snapshots": SnapshotPolicy(every_steps=1, keep_last=1),
}


def losses(checkpoint: Checkpoint, place: UpdateContext) -> dict[int, float]:
    return {int(row["step"]): row["eval_loss"] for row in rows_of(checkpoint, place.objects) if "eval_loss" in row}


def test_the_best_step_is_the_result_and_stays_though_later_snapshots_push_it_out(tiny_model: Path, tmp_path: Path):
    place = update_context(tmp_path / "best")
    checkpoint = sft(place, tiny_model, BEST, **FALLS_THEN_RISES)
    found = losses(checkpoint, place)
    best = min(found, key=found.__getitem__)
    assert 1 < best < 7 and len(found) == 8, "or it tests nothing"
    assert (checkpoint.step, checkpoint.summary["last_step"]) == (best, 8)
    assert checkpoint.summary["eval_loss"] == checkpoint.summary["eval_best_loss"] == found[best]
    assert [row["eval_best_step"] for row in rows_of(checkpoint, place.objects)][best - 1 :] == [best] * (9 - best)
    snapshots = SnapshotStore(place.objects)
    assert sorted(item.step for item in snapshots.list()) == [best, 8]
    assert snapshots.subtree(checkpoint.train_state, "model") == checkpoint.model
    assert [name for name in place.objects.ref_names("progress") if name.endswith("best")] == []

    ended = update_context(tmp_path / "ended")
    shorter = FALLS_THEN_RISES | {"budget": BudgetConfig(max_steps=best)}
    assert sft(ended, tiny_model, None, **shorter).model == checkpoint.model


def test_an_interrupted_run_chooses_the_same_step(tiny_model: Path, tmp_path: Path):
    class Interrupted(Exception):
        pass

    def stop(row: dict[str, float]) -> None:
        if row["step"] == 7:
            raise Interrupted

    expected = sft(update_context(tmp_path / "quiet"), tiny_model, BEST, **FALLS_THEN_RISES)
    with pytest.raises(Interrupted):
        sft(update_context(tmp_path / "disturbed", on_step=stop), tiny_model, BEST, **FALLS_THEN_RISES)
    starts: list[int] = []
    place = update_context(tmp_path / "disturbed", on_start=lambda first, last: starts.append(first))
    assert sft(place, tiny_model, BEST, **FALLS_THEN_RISES) == expected
    assert starts[0] > 0
    assert sft(place, tiny_model, BEST, **FALLS_THEN_RISES) == expected, "finished, and its record was lost"


def test_without_the_snapshot_of_its_best_step_an_update_starts_over(tiny_model: Path, tmp_path: Path):
    place = update_context(tmp_path)
    expected = sft(place, tiny_model, BEST, **FALLS_THEN_RISES)
    assert expected.step < 8
    SnapshotStore(place.objects).delete(expected.train_state)
    starts: list[int] = []
    place = update_context(tmp_path, on_start=lambda first, last: starts.append(first))
    assert sft(place, tiny_model, BEST, **FALLS_THEN_RISES) == expected
    assert starts == [0]


def test_patience_ends_a_run_whose_held_out_loss_falls_no_more(tiny_model: Path, tmp_path: Path):
    rows = HELD_OUT.model_copy(update={"every_steps": 1, "patience": 2})
    place = update_context(tmp_path)
    checkpoint = sft(place, tiny_model, rows, **FALLS_THEN_RISES)
    found = losses(checkpoint, place)
    best = min(found, key=found.__getitem__)
    assert checkpoint.step == max(found) == best + 2 < 8, "the last step is the result, unless the best is asked for"
    assert sft(place, tiny_model, rows, **FALLS_THEN_RISES) == checkpoint, "also when it is taken up at its end"


@pytest.mark.parametrize("keys", [{"select": "best"}, {"patience": 2}])
def test_a_comparison_needs_several_evaluations(keys: dict[str, Any]):
    with pytest.raises(ValidationError, match=r"compares evaluations, .*; set every_steps"):
        HeldOutRows.model_validate({"dataset": {"path": "x"}, **keys})


def test_another_choice_is_another_result():
    plain, best = sft_settings(evaluation=HELD_OUT), sft_settings(evaluation=BEST)
    assert identity(plain)["evaluation"] == {"dataset": None, "every_steps": 2}
    assert identity(best)["evaluation"] == {"dataset": None, "every_steps": 1, "select": "best"}

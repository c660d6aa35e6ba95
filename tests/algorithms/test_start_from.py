"""Training that starts from a given snapshot: as if it had never stopped, and refused where it does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from updates import preference_update, sft_rows, sft_settings, update_context

from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.dataset_updates import sft_update
from rollout_core.algorithms.supervised import SFT
from rollout_core.base.errors import ConfigError, NotFound, Stopped
from rollout_core.base.ids import hash_bytes
from rollout_core.config import BudgetConfig
from rollout_core.data.datasets import to_jsonl
from rollout_core.data.examples import positions_between
from rollout_core.objects.records import Checkpoint
from rollout_core.objects.snapshots import Snapshot, SnapshotStore, find_start


def sft(place: UpdateContext, model: Path, max_steps: int) -> Checkpoint:
    dataset = place.objects.put_bytes(to_jsonl(sft_rows(20)))
    settings = sft_settings(budget=BudgetConfig(max_steps=max_steps))
    key = hash_bytes(b"%d, %s" % (max_steps, str(place.start_from).encode()))
    return sft_update(place.objects.put_tree(model), dataset, settings, replace(place, key=key))[0]


def test_a_run_that_goes_on_under_a_larger_budget_ends_as_if_it_had_never_stopped(tiny_model: Path, tmp_path: Path):
    whole = sft(update_context(tmp_path / "whole"), tiny_model, 8)
    started: list[int] = []
    place = update_context(tmp_path / "parts", on_start=lambda first, last: started.append(first))
    first = sft(place, tiny_model, 5)
    assert sft(replace(place, start_from=first.train_state), tiny_model, 8) == whole
    assert started == [0, 5]


@pytest.mark.parametrize(
    ("budgets", "rows"),
    [
        # 20 rows, 8 a step.
        ([{"epochs": 1}, {"epochs": 2}, {"epochs": 3}], [8, 8, 4, 8, 8, 4, 8, 8, 4]),
        ([{"epochs": 1}, {"max_steps": 7}, {"epochs": 4}], [8, 8, 4, 8, 8, 8, 8, 8, 8, 8, 4]),
    ],
)
def test_passes_go_on_behind_a_smaller_last_step(budgets, rows, tiny_model: Path, tmp_path: Path, monkeypatch):
    """No row is left out and none comes twice, also where an update stops on the way and is taken up."""
    steps: list[list[int]] = []

    def noted(learner: SFT, positions: list[int]) -> Any:
        steps.append(positions)
        return cut(learner, positions)

    cut = SFT.cut
    monkeypatch.setattr(SFT, "cut", noted)
    place = update_context(tmp_path)
    dataset, model = place.objects.put_bytes(to_jsonl(sft_rows(20))), place.objects.put_tree(tiny_model)
    start = None
    for number, budget in enumerate(budgets):
        settings = sft_settings(budget=BudgetConfig(**budget))
        own = replace(place, key=hash_bytes(b"%d" % number), start_from=start)
        with pytest.raises(Stopped):
            sft_update(model, dataset, settings, replace(own, is_stopping=lambda: True))
        start = sft_update(model, dataset, settings, own)[0].train_state
    assert list(map(len, steps)) == rows
    assert [row for step in steps for row in step] == positions_between(0, sum(rows), num_items=20, seed=1)


def test_what_does_not_fit_is_refused_in_one_line(tiny_model: Path, tmp_path: Path):
    from make_tiny import make_model

    place = update_context(tmp_path)
    first = sft(place, tiny_model, 2)
    with pytest.raises(ConfigError, match=r"is of step 2, and the budget ends at step 2; raise algorithm.budget"):
        sft(replace(place, start_from=first.train_state), tiny_model, 2)
    narrow = tmp_path / "narrow"
    make_model(narrow, hidden_size=32, num_layers=2, seed=1)
    with pytest.raises(
        ConfigError, match=r"model tensor .* is of shape \[262, 64\] there, of shape \[262, 32\] here"
    ) as caught:
        sft(replace(place, start_from=first.train_state), narrow, 4)
    assert len(str(caught.value).splitlines()) == 1


def test_the_snapshot_is_found_by_latest_and_by_first_digits(tiny_model: Path, tmp_path: Path):
    place = update_context(tmp_path, run_name="mine")
    objects = place.objects
    with pytest.raises(NotFound, match="no sft snapshot of a run named 'mine'"):
        find_start(objects, "latest", algorithm="sft", run_name="mine")
    first = sft(place, tiny_model, 3)
    second = sft(place, tiny_model, 5)
    sft(replace(place, run_name="other", seed=2), tiny_model, 1)
    dpo = preference_update("dpo", tiny_model, replace(place, key=hash_bytes(b"dpo")), budget={"max_steps": 1})

    def found(wanted: str, **options: int) -> Snapshot:
        return find_start(objects, wanted, algorithm="sft", run_name="mine", **options)

    assert found("latest").id == second.train_state
    assert found("latest", steps_per_iteration=3).step == 3
    assert found(first.train_state[:8]).id == first.train_state == found(first.train_state).id
    with pytest.raises(NotFound, match="no sft snapshot of a run named 'nightly'"):
        find_start(objects, "latest", algorithm="sft", run_name="nightly")
    snapshots = SnapshotStore(objects)
    for run in ("nightly", "third"):  # which find the update cached
        snapshots.set_label(first.train_state, f"{run}/sft", by_stage=True)
    for run in ("nightly", "third"):
        assert find_start(objects, "latest", algorithm="sft", run_name=run).id == first.train_state
    with pytest.raises(ConfigError, match="is a train_state of dpo; this run trains sft"):
        found(dpo.train_state[:12])
    with pytest.raises(ConfigError, match="is of step 5, within an iteration of 3 steps"):
        found(second.train_state, steps_per_iteration=3)
    with pytest.raises(NotFound):
        found("0" * 64)


def test_the_model_within_a_snapshot_is_the_model_of_the_checkpoint(tiny_model: Path, tmp_path: Path):
    place = update_context(tmp_path)
    checkpoint = sft(place, tiny_model, 1)
    snapshots = SnapshotStore(place.objects)
    assert snapshots.subtree(checkpoint.train_state, "model") == checkpoint.model
    with pytest.raises(NotFound, match="has no folder 'nothing'"):
        snapshots.subtree(checkpoint.train_state, "nothing")

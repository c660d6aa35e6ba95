"""Trackers: each step once and in order, whatever happens to the process, and never at the cost of training."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from updates import ppo, rows_of, sft_rows, sft_settings, update_context

from rollout_core.algorithms import training
from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.dataset_updates import sft_update
from rollout_core.base.ids import hash_bytes
from rollout_core.config import OptimizerConfig, identity
from rollout_core.data.datasets import to_jsonl
from rollout_core.objects.records import Checkpoint


class Interrupted(Exception):
    pass


def sft(place: UpdateContext, model: Path) -> Checkpoint:
    dataset = place.objects.put_bytes(to_jsonl(sft_rows(20)))
    settings = sft_settings(trackers=("tensorboard",))
    return sft_update(place.objects.put_tree(model), dataset, settings, place)[0]


def told(folder: Path, figure: str = "loss") -> list[tuple[int, float]]:
    """Steps and values in the order TensorBoard reads them."""
    [series] = (folder / "tensorboard").iterdir()
    events = EventAccumulator(str(series)).Reload()
    return [(event.step, event.value) for event in events.Scalars(figure)]


def test_a_run_that_was_interrupted_tells_each_step_once(tiny_model: Path, tmp_path: Path):
    def stop(row: dict[str, float]) -> None:
        if row["step"] == 5:
            raise Interrupted

    curves = tmp_path / "curves"
    with pytest.raises(Interrupted):
        sft(update_context(tmp_path, on_step=stop, tracking=curves, run_name="mine"), tiny_model)
    assert [step for step, _ in told(curves)] == [1, 2, 3, 4, 5]
    place = update_context(tmp_path, tracking=curves, run_name="mine")
    rows = rows_of(sft(place, tiny_model), place.objects)
    assert told(curves) == [(row["step"], pytest.approx(row["loss"])) for row in rows] and len(rows) == 6
    assert [path.name for path in (curves / "tensorboard").iterdir()] == [
        f"mine-sft, lr=0.001 max_steps=6, {place.key[:8]}"
    ]
    sft(place, tiny_model)
    assert len(told(curves)) == 6, "nor is a finished update told again"


def test_iterations_draw_one_curve(tiny_model: Path, tmp_path: Path):
    ppo(update_context(tmp_path, tracking=tmp_path, series=hash_bytes(b"all")), tiny_model, trackers=("tensorboard",))
    assert [step for step, _ in told(tmp_path)] == list(range(1, 13))
    assert len(told(tmp_path, "reward")) == 12, "figures of the whole iteration too"


def test_a_tracker_that_fails_is_given_up_and_training_goes_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    class Full(training.TensorBoardTracker):
        def log(self, values: dict, step: int | None = None, **kwargs) -> None:
            if step == 3:
                raise OSError("no space left on device")
            super().log(values, step=step, **kwargs)

    quiet = sft(update_context(tmp_path / "quiet"), tiny_model)
    monkeypatch.setattr(training, "TensorBoardTracker", Full)
    with caplog.at_level(logging.WARNING):
        assert sft(update_context(tmp_path / "full", tracking=tmp_path / "curves"), tiny_model) == quiet
    assert caplog.text.count("tensorboard is dropped: OSError: no space left on device") == 1
    assert [step for step, _ in told(tmp_path / "curves")] == [1, 2]


def test_they_stay_out_of_the_cache_key():
    assert identity(sft_settings(trackers=("tensorboard", "wandb"))) == identity(sft_settings())


def test_the_name_of_a_series_tells_run_model_and_what_is_not_as_by_default(tmp_path: Path):
    settings = sft_settings(trackers=("tensorboard",), minibatch_size=9, optimizer=OptimizerConfig(lr=0.0005))
    series = training.Series(
        tmp_path, "night-sft", hash_bytes(b"series"), hash_bytes(b"update"), hash_bytes(b"model"), settings
    )
    run, model, differing, identity_of_series = series.title.split(", ")
    assert (run, model) == ("night-sft", f"model {hash_bytes(b'model')[:8]}")
    assert "minibatch_size=9" in differing and "lr=0.0005" in differing
    assert "tensorboard" not in differing and "dataset" not in differing
    assert identity_of_series == hash_bytes(b"series")[:8]


def test_the_name_of_a_series_stays_short_enough_for_a_folder_however_much_differs(tmp_path: Path):
    settings = sft_settings(
        optimizer=OptimizerConfig(lr=0.123456789, weight_decay=0.123456789, max_grad_norm=0.123456789)
    )
    series = training.Series(tmp_path, "night/sft", hash_bytes(b"s"), hash_bytes(b"u"), None, settings)
    assert len(series.title) < 120

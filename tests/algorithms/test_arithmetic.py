"""An update that goes on under other arithmetic: noticed, said, and refused where bytes were promised."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from updates import sft, update_context

from rollout_core.algorithms import resumption
from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.resumption import ARITHMETIC
from rollout_core.base.determinism import arithmetic
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.ids import hash_bytes
from rollout_core.objects.snapshots import SnapshotStore


@pytest.fixture
def begun(tiny_model: Path, tmp_path: Path) -> UpdateContext:
    """The place of an update that was stopped after its third step, with one CPU thread."""
    place = update_context(tmp_path, num_threads=1)
    steps: list[float] = []
    with pytest.raises(Recoverable, match="asked to stop"):
        stopping = replace(place, on_step=lambda row: steps.append(row["step"]), is_stopping=lambda: len(steps) == 3)
        sft(stopping, tiny_model)
    return place


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "arithmetic" in record.message]


def of_another_process(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """What a machine or a version that cannot be had here would say of itself."""
    monkeypatch.setattr(resumption, "arithmetic", lambda: {**arithmetic(), **changes})


def test_the_same_arithmetic_is_no_news(begun: UpdateContext, tiny_model: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        done = sft(begun, tiny_model)
    assert warnings(caplog) == []
    [computed] = SnapshotStore(begun.objects).get(done.train_state).meta[ARITHMETIC]
    assert computed["threads"] == 1 and computed["torch"] == torch.__version__


def test_other_threads_are_said_in_one_line_and_both_are_recorded(
    begun: UpdateContext, tiny_model: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        done = sft(replace(begun, num_threads=2), tiny_model)
    [line] = warnings(caplog)
    assert line.startswith("sft update continues with other arithmetic: started with threads 1 (here 2).")
    assert len(line.splitlines()) == 1
    parts = SnapshotStore(begun.objects).get(done.train_state).meta[ARITHMETIC]
    assert [part["threads"] for part in parts] == [1, 2]


def test_another_machine_and_another_torch_are_said(
    begun: UpdateContext, tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    of_another_process(monkeypatch, instructions="AVX1024", torch="9.9")
    with caplog.at_level(logging.WARNING):
        sft(begun, tiny_model)
    [line] = warnings(caplog)
    assert f"torch {torch.__version__} (here 9.9)" in line and "(here AVX1024)" in line


def test_portable_training_refuses_to_go_on_under_another_torch_and_says_what_to_do(
    begun: UpdateContext, tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    of_another_process(monkeypatch, torch="9.9")
    monkeypatch.setattr(resumption, "is_portable_here", lambda: True)
    with pytest.raises(ConfigError, match=r"started with torch .* \(here 9\.9\)") as caught:
        sft(begun, tiny_model)
    snapshot = SnapshotStore(begun.objects).list()[0]
    assert "run.refresh = true" in str(caught.value) and f'run.resume = "{snapshot.id.short}"' in str(caught.value)
    other = replace(begun, key=hash_bytes(b"other"), start_from=snapshot.id)
    with caplog.at_level(logging.WARNING):
        assert sft(other, tiny_model).step == 6
    assert len(warnings(caplog)) == 1

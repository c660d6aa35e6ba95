"""The short form of ``kills.py``: driver, Prefect server and database of a batch are killed at random moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.kills import Setting, run_campaigns


@pytest.mark.campaign
def test_a_batch_whose_parts_are_killed_again_and_again_is_complete_and_the_same(tiny_model: Path, tmp_path: Path):
    setting = Setting(
        samples=240,
        backend={"kind": "scripted", "delay_seconds": 0.02},
        sampling={"max_tokens": 64},
        model=tiny_model,
        parts=("driver", "prefect", "postgres"),
    )
    kills, _ = run_campaigns(setting, tmp_path / "kills", kills=3, seed=3, spread=2.5)
    assert len(kills) >= 3
    assert all(kill.ended_run for kill in kills if kill.part == "driver")

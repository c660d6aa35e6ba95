"""What the tests of plans share: files to damage, and a guard against any work."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rollout_core.inference import engines
from rollout_core.models import deferred
from tests.plan.planning import jsonl


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch: pytest.MonkeyPatch, weights_stay_unread: None) -> None:
    """Neither an engine nor a model's weights: whoever tries fails the test."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a plan must build no engine and load no weights")

    for owner, name in (
        (engines, "build_backend"),
        (deferred, "safe_open"),
    ):
        monkeypatch.setattr(owner, name, refuse)


@pytest.fixture
def work(tmp_path: Path, tiny_model: Path) -> Path:
    """A folder with a model, data and a reward, to be damaged."""
    shutil.copytree(tiny_model, tmp_path / "model")
    jsonl(tmp_path / "sft.jsonl", {"prompt": "sort 2 1 =", "completion": " 1 2"})
    jsonl(tmp_path / "prompts.jsonl", {"prompt": "sort 2 1 =", "answer": "1 2"}, {"prompt": "sort 3 =", "answer": "3"})
    jsonl(tmp_path / "held-out.jsonl", {"prompt": "sort 5 4 =", "answer": "4 5"})
    (tmp_path / "mine.py").write_text("def reward(sample): return 0.0\ndef two(sample, other): return 0.0\n")
    return tmp_path

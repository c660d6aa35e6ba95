"""A nightly run small enough to be killed many times."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_core.objects import ObjectStore


@pytest.fixture
def small_nightly(tiny_model, sorting_task, tmp_path) -> dict[str, Any]:
    """Configuration of a nightly run of some 20 s on plain transformers."""
    return nightly_config(
        tiny_model,
        sft=str(sorting_task.sft),
        prompts=str(sorting_task.prompts),
        held_out=str(sorting_task.held_out),
        report_dir=str(tmp_path / "report"),
    )


def nightly_config(model: Path, *, sft: str, prompts: str, held_out: str, report_dir: str) -> dict[str, Any]:
    """What `small_nightly` is, of any model and files."""
    return {
        "schema_version": 1,
        "seed": 5,
        "num_threads": 1,
        "report_dir": report_dir,
        "run": {"name": "small"},
        "model": {"uri": str(model)},
        "backend": {"kind": "transformers"},
        "sft": {
            "minibatch_size": 16,
            "dataset": {"path": sft},
            "budget": {"max_steps": 24},
            "sequence": {"max_length": 64},
            "optimizer": {"lr": 1e-3},
            "snapshots": {"every_steps": 2},
        },
        "ppo": {
            "iterations": 2,
            "prompts_per_iteration": 160,
            "epochs": 3,
            "minibatch_size": 20,
            "gradient_accumulation": 1,
            "prompts": {"path": prompts},
            "sampling": {"max_tokens": 14},
            "optimizer": {"lr": 1e-4},
            "snapshots": {"every_steps": 1},
        },
        "evaluation": {
            "prompts": {"path": held_out},
            "sampling": {"temperature": 0.0, "max_tokens": 14},
        },
    }


def write_toml(path: Path, document: dict[str, Any]) -> Path:
    """Write nested tables of plain values as TOML."""

    def lines(table: dict[str, Any], prefix: str) -> list[str]:
        plain = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
        out = ([f"[{prefix}]"] if prefix else []) + plain
        for key, value in table.items():
            if isinstance(value, dict):
                out += lines(value, f"{prefix}.{key}" if prefix else key)
        return out

    path.write_text("\n".join(lines(document, "")) + "\n")
    return path


PATIENCE_SECONDS = 300.0
"""With what may be slow on a busy machine and is no less right for it; what never comes is told by then."""


def wait_for(
    condition: Callable[[], Any],
    what: str,
    *,
    process: subprocess.Popen[str] | None = None,
    seconds: float = PATIENCE_SECONDS,
) -> Any:
    """The first true value of ``condition``, while ``process`` runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the process ended before {what}:\n{process.communicate()[0][-4000:]}")
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds} s")


def objects() -> ObjectStore:
    """The object store of the test's settings."""
    return ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])


def finished_samples() -> int:
    """Samples the store has acknowledged."""
    path = os.environ["ROLLOUT_DATABASE"].removeprefix("sqlite:///")
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5) as database:
            return database.execute("SELECT count(*) FROM rollouts WHERE status = 'succeeded'").fetchone()[0]
    except sqlite3.OperationalError:
        return 0


def snapshots_of(algorithm: str) -> list[Any]:
    """Snapshots of an algorithm, newest first."""
    from rollout_core.objects.snapshots import SnapshotStore

    return [snapshot for snapshot in SnapshotStore(objects()).list() if snapshot.algorithm == algorithm]


def small_grpo(tiny_model: Path, sorting_task: Any, name: str, **algorithm: Any) -> dict[str, Any]:
    """The configuration of a GRPO run of seconds; ``algorithm`` are the keys by which one differs from another."""
    return {
        "schema_version": 1,
        "seed": 5,
        "num_threads": 1,
        "run": {"name": name},
        "backend": {"kind": "transformers"},
        "algorithm": {
            "kind": "grpo",
            "gradient_accumulation": 1,
            "base_model": {"uri": str(tiny_model)},
            "prompts": {"path": str(sorting_task.prompts)},
            "reward": {"kind": "expression", "expression": "num_characters / 10"},
            **algorithm,
        },
    }

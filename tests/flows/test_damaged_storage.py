"""A finished run whose storage is damaged, file by file: the next run ends with the same completions."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.server

PROMPTS = [f"sort {number} 1 =" for number in range(6)]


def flipped(data: bytes, other: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "flipped": flipped,
    "cut": lambda data, other: data[: len(data) // 2],
    "emptied": lambda data, other: b"",
    "another's": lambda data, other: other,
}


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path, prefect_server: str) -> Callable[[], list[dict[str, Any]]]:
    """Run the batch and return its rows, without what differs from run to run."""
    from flows.batch import batch_inference
    from rollout_core.config import InferBatchConfig, parse_config

    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    config = parse_config(
        {
            "model": {"uri": str(tiny_model)},
            "sampling": {"max_tokens": 8},
            "input": {"glob": str(tmp_path / "prompts.jsonl")},
            "output": {"dir": str(tmp_path / "out")},
            "workers": {"shard_size": 3},
            "backend": {"kind": "scripted"},
        },
        InferBatchConfig,
    )

    def start() -> list[dict[str, Any]]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        batch_inference(config)
        rows = (tmp_path / "out" / "completions.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(row).items() if key != "generated_at"} for row in rows]

    return start


def stored_files(kind: str) -> list[Path]:
    root = Path(os.environ["ROLLOUT_STORAGE"].removeprefix("file://"))
    return sorted(path for path in (root / kind).rglob("*") if path.is_file())


def test_time(run):
    first = run()
    print(len(stored_files("cas")), len(stored_files("refs")), [str(p)[-100:] for p in stored_files("refs")])
    for _ in range(4):
        t = time.time()
        assert run() == first
        print(time.time() - t)
    for f in stored_files("cas"):
        print(f.stat().st_size, f.read_bytes()[:60])

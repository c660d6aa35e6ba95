"""A finished run whose storage is damaged, file by file: the next run ends with the same completions."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollout_core.objects import ObjectStore
from rollout_core.objects.verification import verify_store

pytestmark = pytest.mark.server

PROMPTS = [f"sort {number} 1 =" for number in range(3)]


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
    """Run the batch where nothing is but its storage and database; gives its rows, without when they were made."""
    from flows.batch import batch_inference
    from rollout_core.config import InferBatchConfig, parse_config

    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    config = parse_config(
        {
            "model": {"uri": str(tiny_model)},
            "sampling": {"max_tokens": 8},
            "input": {"glob": str(tmp_path / "prompts.jsonl")},
            "output": {"dir": str(tmp_path / "out")},
            "backend": {"kind": "scripted"},
        },
        InferBatchConfig,
    )

    def start() -> list[dict[str, Any]]:
        (tmp_path / "out" / "completions.jsonl").unlink(missing_ok=True)
        shutil.rmtree(os.environ["ROLLOUT_CACHE"], ignore_errors=True)
        batch_inference(config)
        rows = (tmp_path / "out" / "completions.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(row).items() if key != "generated_at"} for row in rows]

    return start


def stored_files(kind: str) -> list[Path]:
    root = Path(os.environ["ROLLOUT_STORAGE"].removeprefix("file://"))
    return sorted(path for path in (root / kind).rglob("*") if path.is_file())


def damage(files: Sequence[Path], kind: str) -> None:
    """Damage each of these files; another's content is that of the file before it."""
    contents = [file.read_bytes() for file in files]
    for place, file in enumerate(files):
        file.write_bytes(DAMAGES[kind](contents[place], contents[place - 1]))


def found_damaged() -> set[str]:
    return {found.name for found in verify_store(ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])).damage}


def test_a_run_over_storage_that_is_damaged_everywhere_ends_with_the_same_completions(run):
    first = run()
    assert len(first) == len(PROMPTS) and run() == first
    num_files = len([*stored_files("cas"), *stored_files("refs")])
    for folder, kind in itertools.product(("cas", "refs"), ("flipped", "another's")):
        files = stored_files(folder)
        damage(files, kind)
        assert len(found_damaged()) >= num_files / 4
        assert run() == first, f"all of {folder}, {kind}"


@pytest.mark.campaign
def test_a_run_over_storage_of_which_one_file_is_damaged_ends_with_the_same_completions(run):
    """Each file in turn, by each kind of damage in turn."""
    first = run()
    pristine = {file: file.read_bytes() for file in [*stored_files("cas"), *stored_files("refs")]}
    kinds = list(DAMAGES)
    for place, file in enumerate(pristine):
        kind, others = kinds[place % len(kinds)], [data for item, data in pristine.items() if item != file]
        whole = file.read_bytes()
        file.write_bytes(DAMAGES[kind](whole, others[place - 1]))
        assert run() == first, f"{file}, {kind}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(whole)  # what the run had no need to read is damaged still
    assert found_damaged() == set()


def num_attempts() -> int:
    with closing(sqlite3.connect(os.environ["ROLLOUT_DATABASE"].removeprefix("sqlite:///"))) as database:
        return database.execute("SELECT COUNT(*) FROM attempts").fetchone()[0]


def test_housekeeping_takes_old_results_but_not_completions_that_the_database_names(run):
    from flows.housekeeping import housekeeping

    before, long_ago = run(), time.time() - 20 * 86400
    for file in [*stored_files("refs"), *stored_files("cas")]:
        os.utime(file, (long_ago, long_ago))
    logs = Path(os.environ["ROLLOUT_CACHE"], "agent-logs")
    logs.mkdir(parents=True)
    for name, days in (("runner-1-0.log", 31), ("runner-2-0.log", 29)):
        (logs / name).write_text("what an agent printed")
        os.utime(logs / name, (time.time() - days * 86400,) * 2)
    told = housekeeping(dry_run=True)
    assert len(list(logs.iterdir())) == 2
    done = housekeeping()
    assert [log.name for log in logs.iterdir()] == ["runner-2-0.log"]
    assert (told["results"], told["garbage"]["deleted_bytes"]) == (done["results"], done["garbage"]["deleted_bytes"])
    assert done["results"] > 0 and done["garbage"]["deleted_blobs"] > 0
    assert run() == before
    assert num_attempts() == len(PROMPTS), "nothing was generated again"
    assert housekeeping()["results"] == 0, "they are new"

"""Scratch files and folders: gone with their process, also where that was killed; never while it lives."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_core.base import locks
from rollout_core.base.locks import scratch_folder, sweep
from rollout_core.inference.folders import LocalFolder
from rollout_core.objects import ObjectStore
from rollout_core.objects.backends import LEFTOVER_AFTER_SECONDS
from tests.conftest import PROJECT
from tests.objects.object_files import keys

HOLDER = """
import sys, time
from rollout_core.base.locks import scratch_folder
with scratch_folder("state") as folder:
    (folder / "weights").write_bytes(bytes(100))
    print(folder, flush=True)
    time.sleep(120)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's place for temporary files, of this test alone."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(locks, "_swept", set())
    return folder


def kill_once_it_says(process, what: str = "") -> str:
    """Kill a process after its first line with ``what`` in it; gives the line."""
    line = next(line for line in process.stdout if what in line)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return line.strip()


def test_a_scratch_folder_ends_with_its_block(temporary: Path) -> None:
    with pytest.raises(OSError, match="full"), scratch_folder("state") as folder:
        (folder / "file").write_text("x")
        assert folder.parent == temporary and "state" in folder.name
        raise OSError("full")
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_uses_is_not(
    temporary: Path, start_process: Callable
) -> None:
    left = Path(kill_once_it_says(start_process("-c", HOLDER)))
    living = Path(start_process("-c", HOLDER).stdout.readline().strip())
    assert (left / "weights").exists() or not left.exists(), "the second may have swept it already"
    with scratch_folder("restore") as own:
        assert sorted(temporary.iterdir()) == sorted([living, own])
        assert sweep(temporary, "*") == []
    assert (living / "weights").stat().st_size == 100


def test_a_sweep_spares_links_and_other_names(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    (temporary / f"{locks.SCRATCH_PREFIX}link").symlink_to(tmp_path / "precious")
    (temporary / "rollout-of-somebody").mkdir()
    os.mkfifo(temporary / f"{locks.SCRATCH_PREFIX}pipe")
    (temporary / f"{locks.SCRATCH_PREFIX}dead").mkdir()
    locks.sweep_scratch()
    assert (tmp_path / "precious" / "file").exists()
    assert not (temporary / f"{locks.SCRATCH_PREFIX}dead").exists() and (temporary / "rollout-of-somebody").exists()


def test_processes_that_sweep_and_make_folders_at_once_never_lose_one(temporary: Path, start_process: Callable) -> None:
    code = """
import tempfile
from pathlib import Path
from rollout_core.base.locks import scratch_folder, sweep
for _ in range(300):
    with scratch_folder("busy") as folder:
        sweep(Path(tempfile.gettempdir()), "rollout-scratch-*")
        (folder / "file").write_text("x")
        assert (folder / "file").exists()
print("done")
"""
    started = [start_process("-c", code) for _ in range(3)]
    assert [process.communicate(timeout=300)[0] for process in started] == ["done\n"] * 3
    assert list(temporary.iterdir()) == []


def test_no_temporary_folder_is_made_but_by_the_one_function() -> None:
    makes = re.compile(r"mkdtemp|TemporaryDirectory|mkstemp|NamedTemporaryFile")
    sources = [file for room in ("rollout_core", "blocks", "tasks", "flows") for file in (PROJECT / room).rglob("*.py")]
    assert [file.name for file in sources if makes.search(file.read_text())] == ["locks.py"]


def test_an_output_file_that_a_killed_process_began_is_removed_by_the_next_writer(
    tmp_path: Path, start_process: Callable
) -> None:
    code = """
import sys, time
from pathlib import Path
from rollout_core.inference.folders import LocalFolder
def chunks():
    yield b"begun"
    print("begun", flush=True)
    time.sleep(120)
LocalFolder(Path(sys.argv[1])).replace("completions.jsonl", chunks())
"""
    kill_once_it_says(start_process("-c", code, str(tmp_path / "out")))
    assert len(list((tmp_path / "out").iterdir())) == 1
    LocalFolder(tmp_path / "out").replace("completions.jsonl", [b"whole"])
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["completions.jsonl"]


def test_a_model_that_a_killed_process_began_to_fetch_is_removed_by_the_next_that_fetches_any(
    tmp_path: Path, start_process: Callable
) -> None:
    objects = ObjectStore.from_url(str(tmp_path / "objects"))
    trees = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
        trees.append(objects.put_tree(tmp_path / name))
    code = """
import sys, time
from pathlib import Path
from rollout_core.objects import ObjectStore
def slowly(self, manifest, folder):
    (folder / "weights").write_text("half")
    print("begun", flush=True)
    time.sleep(120)
ObjectStore.get_files = slowly
ObjectStore.from_url(sys.argv[1]).local_tree(sys.argv[2], Path(sys.argv[3]))
"""
    kill_once_it_says(start_process("-c", code, objects.url, trees[0], str(tmp_path / "cache")))
    assert [file for file in (tmp_path / "cache").iterdir() if file.suffix == ".tmp"]
    objects.local_tree(trees[1], tmp_path / "cache")
    assert not [file for file in (tmp_path / "cache").iterdir() if file.suffix == ".tmp"]


def test_what_killed_writers_left_in_a_store_is_removed_by_a_later_process(
    tmp_path: Path, start_process: Callable
) -> None:
    url = f"file://{tmp_path}/objects"
    writer = """
import sys, time
from rollout_core.objects import ObjectStore
def chunks():
    yield bytes(5 * 2**20)
    yield bytes(5 * 2**20)
    print("begun", flush=True)
    time.sleep(120)
ObjectStore.from_url(sys.argv[1]).put_stream(chunks())
"""
    kill_once_it_says(start_process("-c", writer, url))
    living = start_process("-c", writer, url)
    living.stdout.readline()
    objects = ObjectStore.from_url(url)
    put = """
import os, sys
from rollout_core.objects import ObjectStore
ObjectStore.from_url(sys.argv[1]).put_bytes(os.urandom(9))
"""

    def put_elsewhere() -> list[str]:
        assert start_process("-c", put, url).wait(timeout=300) == 0
        return keys(objects, "tmp")

    assert len(put_elsewhere()) == 2, "they may be another machine's, whose locks are not seen here"
    moment = time.time() - LEFTOVER_AFTER_SECONDS - 60
    for key in keys(objects, "tmp"):
        os.utime(objects.files.where(key), (moment, moment))
    assert len(put_elsewhere()) == 1
    assert living.poll() is None


def test_segments_of_shared_memory_go_with_their_scratch_folder_and_names_that_lead_elsewhere_are_left(tmp_path):
    segment, other = locks.SHARED_MEMORY / f"psm_{tmp_path.name}"[:60], tmp_path / "other"
    segment.write_bytes(b"x")
    other.write_bytes(b"x")
    with locks.scratch_folder("test") as folder:
        for name in (segment.name, f"../..{other}", "", ".."):
            locks.note_shared_memory(folder, name)
    assert not segment.exists()
    assert other.exists()

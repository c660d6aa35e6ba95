"""What a vLLM engine leaves outside its processes when it is killed: sockets, and segments of shared memory.

Sockets are put into a scratch folder, and segments are noted there by name, so that whoever sweeps scratch folders of
dead processes removes both.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_core.base.scratch import SHARED_MEMORY, note_shared_memory, scratch_folder
from rollout_core.base.stopping import children

SOCKETS = "VLLM_RPC_BASE_PATH"
"""Environment variable: vLLM's folder of sockets."""
LONGEST_FOLDER = 60
"""Characters: a socket's whole path may have 107, of which vLLM needs 37 for a name."""
_MAPPED = re.compile(rf"{re.escape(str(SHARED_MEMORY))}/((?:psm_|sem\.mp-)[\w.-]+)")
_LOOK_SECONDS = 0.5


@contextmanager
def engine_files() -> Iterator[Path]:
    """A folder for the files of the engine that is started inside the block, gone with it or swept later."""
    with scratch_folder("engine") as folder:
        before = os.environ.pop(SOCKETS, None)
        if len(str(folder)) <= LONGEST_FOLDER:
            os.environ[SOCKETS] = str(folder)
        try:
            yield folder
        finally:
            os.environ.pop(SOCKETS, None)
            if before is not None:
                os.environ[SOCKETS] = before


@contextmanager
def noting_segments(folder: Path) -> Iterator[None]:
    """Note in ``folder`` which segments of shared memory the processes map that are started inside the block."""
    ended = threading.Event()
    before = children()

    def look() -> None:
        while not ended.wait(_LOOK_SECONDS):
            _note(folder, before)

    thread = threading.Thread(target=look, name="rollout-engine-segments", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _note(folder, before)


def _note(folder: Path, before: set[int]) -> None:
    names: set[str] = set()
    for child in children() - before:
        try:
            names.update(_MAPPED.findall(Path(f"/proc/{child}/maps").read_text(encoding="utf-8", errors="replace")))
        except OSError:
            continue  # it has ended
    note_shared_memory(folder, names)

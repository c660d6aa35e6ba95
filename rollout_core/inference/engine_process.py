"""vLLM's engine process and its workers end when their owner does, also by ``kill -9``, and leave nothing behind.

Left alone, vLLM's engine waits forever for requests of its dead owner, and keeps its memory. This module imports
nothing heavy: the child imports it first, so from then on its owner's end ends it, long before vLLM itself is imported
there.

Outside its processes a killed engine leaves sockets and segments of shared memory. Sockets are put into a scratch
folder, and segments are noted there by name, so that whoever sweeps scratch folders of dead processes removes both.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rollout_core.base.determinism import hide_wider_instructions, is_portable_here
from rollout_core.base.garbage import collect_seldom
from rollout_core.base.locks import note_shared_memory, noted_shared_memory, scratch_folder
from rollout_core.base.process_tree import signal_at_parents_end
from rollout_core.base.processes import in_environment
from rollout_core.base.stopping import kill_children

SOCKETS = "VLLM_RPC_BASE_PATH"
"""Environment variable: vLLM's folder of sockets."""
LONGEST_FOLDER = 60
"""Characters: a socket's whole path may have 107, of which vLLM needs 37 for a name."""
_FILES = "ROLLOUT_ENGINE_FILES"
"""Environment variable: the folder in which an engine's processes note their segments."""
_SEMAPHORE = "sem."
"""What the system puts before the name of a semaphore."""
_LOOK_SECONDS = 0.5


def _hold_kernels() -> None:
    """Before vLLM loads the kernels that suit the CPU it finds."""
    if is_portable_here():
        hide_wider_instructions()


def _note_segments(folder: Path) -> None:
    """Note in ``folder`` each segment and semaphore that this process makes, before Python's tracker knows of it."""
    register = resource_tracker.register

    def note_and_register(name: str, kind: str) -> None:
        prefix = _SEMAPHORE if kind == "semaphore" else ""
        note_shared_memory(folder, prefix + name.removeprefix("/"))
        register(name, kind)

    resource_tracker.register = note_and_register


# vLLM's own names: an owner may be a child process itself, such as a Dask worker. A child has its name before it
# unpickles what it runs, and `parent_process` only after that.
if multiprocessing.current_process().name.startswith(("EngineCore", "VllmWorker")):
    signal_at_parents_end(signal.SIGKILL)
    collect_seldom()
    # Its owner must not let vLLM configure logging (see the backend); here nobody else has handlers.
    os.environ.pop("VLLM_CONFIGURE_LOGGING", None)
    # vLLM still takes over that its owner's was not configured, and then warns whatever its level is, with each update
    # of weights too.
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    _hold_kernels()
    if folder := os.environ.get(_FILES):
        _note_segments(Path(folder))


def end_with_owner() -> None:
    """Make the engine processes that this one starts from now on end with it. Comes before vLLM is imported."""
    _hold_kernels()
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """What vLLM's engine process runs."""
    # The kernel would end this process alone; its workers would run until they notice.
    threading.Thread(target=_end_with_owner, name="rollout-owner-watch", daemon=True).start()
    signal_at_parents_end(None)

    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    from rollout_core.inference import vllm_worker  # noqa: F401 - it changes how vLLM's layers compute

    WorkerProc.worker_main = staticmethod(worker_main)
    sleep_while_waiting()
    EngineCoreProc.run_engine_core(*args, **kwargs)


def worker_main(*args: Any, **kwargs: Any) -> None:
    """What the engine's worker process runs, in which the model computes."""
    from rollout_core.inference import vllm_worker

    vllm_worker.prepare_worker()
    sleep_while_waiting()

    from vllm.v1.executor.multiproc_executor import WorkerProc

    WorkerProc.worker_main(*args, **kwargs)


def sleep_while_waiting() -> None:
    """On a CPU, have this engine process sleep until the other one has written, from a second after its start on.

    vLLM's two processes exchange a message a step, and spin for a second after each message before they sleep. On a CPU
    a step is long, and the core that the waiting process spins on is one that could compute. In the first second they
    spin still, since a notification that is sent before the reader's socket is connected is lost.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        SpinCondition.record_read = _forget_read


def _forget_read(self: Any) -> None:
    """In place of noting when a message was read, which begins a second of spinning."""


def _end_with_owner() -> None:
    owner = multiprocessing.parent_process()
    assert owner is not None, "the engine is a child process"
    owner.join()
    kill_children()
    os.kill(os.getpid(), signal.SIGKILL)


class HangWatch:
    """Kills the processes of an engine that gives no answer while one is waited for; what they hold ends with them.

    Args:
        processes: of the engine; those that they started end with them.
        seconds: longest wait for one answer, unless `waiting` is told another; may be changed.
    """

    def __init__(self, processes: Sequence[BaseProcess], seconds: float) -> None:
        self.seconds = seconds
        self.has_killed = False
        self._processes = processes
        self._deadline: float | None = None
        threading.Thread(target=self._look, name="rollout-engine-hangs", daemon=True).start()

    @contextmanager
    def waiting(self, seconds: float | None = None) -> Iterator[None]:
        """Around whatever waits for one answer, ``seconds`` at most."""
        self._deadline = time.monotonic() + (self.seconds if seconds is None else seconds)
        try:
            yield
        finally:
            self._deadline = None

    def _look(self) -> None:
        sentinels = [process.sentinel for process in self._processes]
        while not multiprocessing.connection.wait(sentinels, timeout=_LOOK_SECONDS):
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self.has_killed = True
                for process in self._processes:
                    process.kill()
                return


@contextmanager
def engine_files() -> Iterator[Path]:
    """A folder for an engine's files, gone with the segments noted there when the block ends, or swept later."""
    segments: list[str] = []
    try:
        with scratch_folder("engine") as folder:
            try:
                yield folder
            finally:
                segments += noted_shared_memory(folder)
    finally:
        _forget(segments)


def engine_environment(folder: Path) -> AbstractContextManager[None]:
    """Have the engine that is started inside the block keep its sockets in ``folder`` and note its segments there."""
    names = (_FILES, SOCKETS) if len(str(folder)) <= LONGEST_FOLDER else (_FILES,)
    return in_environment(dict.fromkeys(names, str(folder)))


def _forget(segments: Iterable[str]) -> None:
    """Have Python not remove segments once more when this process ends, and warn of each that it does not find.

    vLLM's processes end without a word of their segments to the tracker, which they share with this one.
    """
    for name in segments:
        # Registered once more at first: to forget what is not known would be an error, too.
        is_semaphore = name.startswith(_SEMAPHORE)
        for tell in (resource_tracker.register, resource_tracker.unregister):
            tell(f"/{name.removeprefix(_SEMAPHORE)}", "semaphore" if is_semaphore else "shared_memory")

"""The main functions of vLLM's engine process and its workers, which end when their owner does, also by ``kill -9``.

Left alone, vLLM's engine waits for requests of its dead owner for ever, with its memory. This module imports nothing
heavy: the child imports it first, so from then on its owner's end ends it, long before vLLM itself is imported there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any

from rollout_core.base.numerics import hide_wider_instructions, is_portable_here
from rollout_core.base.process_tree import signal_at_parents_end
from rollout_core.base.stopping import kill_children


def _hold_kernels() -> None:
    """Before vLLM loads the kernels that suit the CPU it finds."""
    if is_portable_here():
        hide_wider_instructions()


# vLLM's own names: an owner may be a child process itself, such as a Dask worker. A child has its name before it
# unpickles what it runs, and `parent_process` only after that.
if multiprocessing.current_process().name.startswith(("EngineCore", "VllmWorker")):
    signal_at_parents_end(signal.SIGKILL)
    # Its owner must not let vLLM configure logging (see the backend); here nobody else has handlers.
    os.environ.pop("VLLM_CONFIGURE_LOGGING", None)
    _hold_kernels()


def end_with_owner() -> None:
    """Make the engine processes that this one starts from now on end with it. Comes before vLLM is imported."""
    _hold_kernels()
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """What vLLM's engine process runs."""
    # The kernel would end this process alone; its workers would go on until they notice.
    threading.Thread(target=_end_with_owner, name="rollout-owner-watch", daemon=True).start()
    signal_at_parents_end(None)

    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    from rollout_core.inference import vllm_worker  # noqa: F401 - it changes how vLLM's layers compute

    WorkerProc.worker_main = staticmethod(worker_main)
    EngineCoreProc.run_engine_core(*args, **kwargs)


def worker_main(*args: Any, **kwargs: Any) -> None:
    """What the engine's worker process runs, in which the model computes."""
    from rollout_core.inference import vllm_worker

    vllm_worker.prepare_worker()

    from vllm.v1.executor.multiproc_executor import WorkerProc

    WorkerProc.worker_main(*args, **kwargs)


def _end_with_owner() -> None:
    owner = multiprocessing.parent_process()
    assert owner is not None, "the engine is a child process"
    owner.join()
    kill_children()
    os.kill(os.getpid(), signal.SIGKILL)

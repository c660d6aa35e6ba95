"""Runs inside vLLM's own processes: the engine's and the worker's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any

import vllm._custom_ops
from vllm.v1.engine.core import EngineCoreProc

# On a CPU, linear layers keep pre-packed oneDNN copies of their weights, which a reload in place does not refresh: the
# engine would go on with the old weights, silently. Without oneDNN they use the weights themselves.
vllm._custom_ops._supports_onednn = False

_run_engine_core = EngineCoreProc.run_engine_core


class InPlaceReload:
    """Marks the worker as safe for `reload_weights`; importing this module, before the model loads, is what matters."""


def die_with_owner() -> None:
    """Make the engine processes that are started from now on end when this process does, also by ``kill -9``.

    Left alone, vLLM's engine waits for requests of its dead owner for ever, with its memory. Its workers watch it.
    """
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Main function of the engine's process."""
    threading.Thread(target=_wait_for_owner, name="rollout-owner-watch", daemon=True).start()
    _run_engine_core(*args, **kwargs)


def _wait_for_owner() -> None:
    owner = multiprocessing.parent_process()
    assert owner is not None, "the engine is a child process"
    owner.join()
    os.kill(os.getpid(), signal.SIGKILL)

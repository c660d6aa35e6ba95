"""vLLM's engine process and its workers end when their owner does, also by ``kill -9``, and leave nothing behind.

Left alone, vLLM's engine waits forever for requests of its dead owner, and keeps its memory. This module imports
nothing heavy: the child imports it first, so from then on its owner's end ends it, long before vLLM itself is imported
there.

Most of an engine's start on a CPU is imports: of the owner, of the engine's process, and of its worker, 10 s each and
one after the other as vLLM has it. Here the engine's process starts before its owner imports vLLM, so both import at
the same time; and where the number of threads is known, as with one, the worker is a fork of the engine's process,
which has imported all that it needs.

Outside its processes a killed engine leaves sockets and segments of shared memory. Sockets are put into a scratch
folder, and segments are noted there by name, so that whoever sweeps scratch folders of dead processes removes both.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from rollout_core.base.collector import collect_seldom
from rollout_core.base.determinism import hide_wider_instructions, is_portable_here
from rollout_core.base.locks import note_shared_memory, noted_shared_memory, scratch_folder
from rollout_core.base.logs import is_json
from rollout_core.base.process_tree import signal_at_parents_end
from rollout_core.base.processes import in_environment
from rollout_core.base.stopping import kill_children

SOCKETS = "VLLM_RPC_BASE_PATH"
"""Environment variable: vLLM's folder of sockets."""
LONGEST_FOLDER = 60
"""Characters: a socket's whole path may have 107, of which vLLM needs 37 for a name."""
_FILES = "ROLLOUT_ENGINE_FILES"
"""Environment variable: the folder in which an engine's processes note their segments."""
EAGER = "ROLLOUT_ENGINE_EAGER"
"""Environment variable: set where an engine's processes compile nothing."""
THREADS, BINDING = "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"
"""Environment variables: CPU threads of a process, and to which cores vLLM binds its worker's."""
MAKES_PROCESSES = "get_mp_context"
"""vLLM's function that gives the context of multiprocessing by which it makes a process."""
_SEMAPHORE = "sem."
"""What the system puts before the name of a semaphore."""
_LOOK_SECONDS = 0.5
_WORKERS, ENGINES = "worker-failure", "engine-failure"
"""How the names of files begin in which an engine's processes leave why they end."""
_REASON_LETTERS = 600
_ENDS_WITH_ANOTHER = ("WorkerProc initialization failed", "Executor failed", "cancelled", "Worker failed with error")
"""How the messages of exceptions begin that say only that another process has failed."""


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


class _Reasons(logging.Handler):
    """Writes the exceptions that vLLM logs as the end of this process, for the engine's owner."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.ERROR)
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or str(error).startswith(_ENDS_WITH_ANOTHER):
            return
        _write_reason(self._folder, _WORKERS if record.name.endswith("multiproc_executor") else ENGINES, error)


def _write_reason(folder: Path, kind: str, error: BaseException) -> None:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    with suppress(OSError):  # it is logged all the same
        (folder / f"{kind}-{os.getpid()}").write_text(reason[:_REASON_LETTERS], encoding="utf-8")


@contextmanager
def noting_reason(kind: str) -> Iterator[None]:
    """Around what a process of an engine runs, for what is raised before vLLM would log it."""
    try:
        yield
    except Exception as error:
        folder = os.environ.get(_FILES)
        if folder and not str(error).startswith(_ENDS_WITH_ANOTHER) and engine_failure(Path(folder)) is None:
            _write_reason(Path(folder), kind, error)
        raise


def engine_failure(folder: Path) -> str | None:
    """The exception that ended an engine with these files, its worker's before its own. None: its processes raised
    nothing, so somebody killed them, such as the kernel where memory runs out, or native code ended them."""
    for kind in (_WORKERS, ENGINES):
        for file in sorted(folder.glob(f"{kind}-*")):
            return file.read_text(encoding="utf-8")
    return None


def _correct_environment() -> None:
    """Set what an engine's process needs otherwise than its owner: logging is configured, and nothing is compiled on a
    CPU."""
    # The owner must not let vLLM configure logging (see the backend); here nobody else has handlers, but for JSON.
    if is_json():
        os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    else:
        os.environ.pop("VLLM_CONFIGURE_LOGGING", None)
    if os.environ.get(EAGER):
        # vLLM compiles a function of its sampler though it is to be eager, which takes 5 s of the first token.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


# vLLM's own names: an owner may be a child process itself, such as a Dask worker. A child has its name before it
# unpickles what it runs, and `parent_process` only after that.
if multiprocessing.current_process().name.startswith(("EngineCore", "VllmWorker")):
    signal_at_parents_end(signal.SIGKILL)
    # Ctrl-C in a terminal is its owner's to answer; until vLLM sets its own handlers, traces of imports would be shown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    collect_seldom()
    _correct_environment()
    # vLLM still takes over that its owner's was not configured, and then warns whatever its level is, with each update
    # of weights too.
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    _hold_kernels()
    if folder := os.environ.get(_FILES):
        _note_segments(Path(folder))
        # Not at "vllm" itself, whose handlers vLLM replaces when it is imported.
        logging.getLogger("vllm.v1").addHandler(_Reasons(Path(folder)))


class EngineProcess(SpawnProcess):
    """vLLM's engine process. It runs from the moment that it is made, and imports vLLM; vLLM starts it when it has the
    arguments for it."""

    is_taken = False
    has_arguments = False

    def __init__(self, environment: Mapping[str, str]) -> None:
        arguments, sender = multiprocessing.Pipe(duplex=False)
        super().__init__(target=_await_arguments, args=(arguments,), name="EngineCore")
        try:
            with arguments, in_environment(environment):
                super().start()
        except BaseException:
            sender.close()
            raise
        # Not earlier: the process would have these too, and with the sender never learn that this one ended.
        self._sender, self._own = sender, environment
        self._given: dict[str, Any] = {}

    def take(self, *, target: Any, name: str, kwargs: dict[str, Any]) -> EngineProcess:
        """As vLLM makes one."""
        assert target is run_engine_core, f"vLLM runs {target}"
        self.is_taken, self.name, self._given = True, name, kwargs
        return self

    def start(self) -> None:
        """As vLLM starts one. It gets the environment as it is now, with its own variables."""
        with self._sender, suppress(BrokenPipeError):  # of one that has died; vLLM looks whether it lives
            self._sender.send((os.environ | self._own, self._given))
        self.has_arguments = True


def _await_arguments(arguments: Connection) -> None:
    """What an `EngineProcess` runs."""
    with noting_reason(ENGINES):
        for module in ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "rollout_core.inference.vllm_worker"):
            importlib.import_module(module)  # what it and its worker are going to need
    with arguments:
        try:
            environment, kwargs = arguments.recv()
        except EOFError:  # its owner needs no engine
            return
    _take_on(environment)
    run_engine_core(**kwargs)


def _take_on(environment: Mapping[str, str]) -> None:
    """Have these variables and no others. Those that stay are not touched: vLLM names its processes by a library that
    finds the place of the name from the environment's."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    _correct_environment()


_ahead: ContextVar[EngineProcess | None] = ContextVar("rollout_engine_ahead", default=None)


@contextmanager
def started_ahead(environment: Mapping[str, str]) -> Iterator[None]:
    """Start the process of the engine that vLLM starts inside the block, with these variables besides this process's
    own. One that vLLM has not started then ends with the block."""
    process = EngineProcess(environment)
    token = _ahead.set(process)
    try:
        yield
    finally:
        _ahead.reset(token)
        if not process.has_arguments:
            process.kill()
            process.join()


class _Processes:
    """In place of the context by which vLLM makes processes: the engine's is one that runs."""

    def __init__(self, context: Any, process: EngineProcess) -> None:
        self._context = context
        self.Process = process.take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def end_with_owner() -> None:
    """Make the engine processes that this one starts from now on end with it, and take what `started_ahead` has. Comes
    before vLLM is imported."""
    _hold_kernels()
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.engine import utils
    from vllm.v1.engine.core import EngineCoreProc

    def context() -> Any:
        process = _ahead.get()
        return get_mp_context() if process is None or process.is_taken else _Processes(get_mp_context(), process)

    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    setattr(utils, MAKES_PROCESSES, context)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """What vLLM's engine process runs."""
    # The kernel would end this process alone; its workers would run until they notice.
    threading.Thread(target=_end_with_owner, name="rollout-owner-watch", daemon=True).start()
    signal_at_parents_end(None)
    with noting_reason(ENGINES):
        _run_engine_core(*args, **kwargs)


def _run_engine_core(*args: Any, **kwargs: Any) -> None:
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor import multiproc_executor

    from rollout_core.inference import vllm_worker  # noqa: F401 - it changes how vLLM's layers compute
    from rollout_core.inference.engine_waits import sleep_while_waiting

    multiproc_executor.WorkerProc.worker_main = staticmethod(worker_main)
    if _has_its_workers_threads():
        setattr(multiproc_executor, MAKES_PROCESSES, lambda: multiprocessing.get_context("fork"))
    sleep_while_waiting()
    EngineCoreProc.run_engine_core(*args, **kwargs)


def _has_its_workers_threads() -> bool:
    """Whether this process has the number of threads, and the cores, that its worker is to have, so that it may fork
    it. It never computes, so it has no thread pool yet, and its fork makes one. An existing pool would not survive."""
    from vllm.platforms import current_platform

    is_known = THREADS in os.environ and os.environ.get(BINDING) == "nobind"
    return sys.platform == "linux" and current_platform.is_cpu() and is_known


def worker_main(*args: Any, **kwargs: Any) -> None:
    """What the engine's worker process runs, in which the model computes."""
    # A fork has not asked for it yet, and its engine may have ended before. It holds the engine's end of the pipe by
    # which the owner notices that end, so a fork that stayed would have the owner wait.
    signal_at_parents_end(signal.SIGKILL)
    engine = multiprocessing.parent_process()
    if engine is not None and os.getppid() != engine.pid:
        os._exit(1)
    with noting_reason(_WORKERS):
        from rollout_core.inference import vllm_worker
        from rollout_core.inference.engine_waits import sleep_while_waiting

        vllm_worker.prepare_worker()
        sleep_while_waiting()
        vllm_worker.worker_main(*args, **kwargs)


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
        seconds: longest wait for one answer, unless `waiting` is given another; may be changed.
    """

    def __init__(self, processes: Sequence[BaseProcess], seconds: float) -> None:
        self.seconds = seconds
        self.has_killed = False
        self._processes = processes
        self._deadline: float | None = None
        threading.Thread(target=self._look, name="rollout-engine-hangs", daemon=True).start()

    @property
    def exit_codes(self) -> list[int]:
        """Of those processes that have ended."""
        return [process.exitcode for process in self._processes if process.exitcode is not None]

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


def end_with_engine(code: int) -> NoReturn:
    """End a process that is an engine's owner and nothing else, once the engine has ended.

    Python's own end would have Triton print what is left of it, and the tracker warn of segments that are gone.
    """
    if folder := os.environ.get(_FILES):
        _forget(noted_shared_memory(Path(folder)))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _forget(segments: Iterable[str]) -> None:
    """Have Python not remove segments once more when this process ends, and warn of each that it does not find.

    vLLM's processes end without a word of their segments to the tracker, which they share with this one.
    """
    for name in segments:
        # Registered once more at first: to forget what is not known would be an error, too.
        is_semaphore = name.startswith(_SEMAPHORE)
        for tell in (resource_tracker.register, resource_tracker.unregister):
            tell(f"/{name.removeprefix(_SEMAPHORE)}", "semaphore" if is_semaphore else "shared_memory")

"""Python processes for tests, forked from one that has imported the heavy libraries once.

A command that trains spends ten seconds of a processor on importing torch, transformers and Prefect, and some tests
start and kill a dozen. `Process` is `subprocess.Popen` whose child comes from a server instead: a process of its own
with the arguments, environment, folder and files it is given, a child of the caller, killed and waited for as any
other, always in a session of its own. Of this project, what is forked has imported parts of ``rollout_core``, which
reads no variable at import.

Where the start itself matters (an interpreter's flags, variables that libraries read when they are imported, portable
arithmetic, another checkout), `Process` starts a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.abc
import importlib.machinery
import json
import multiprocessing.process
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from rollout_core.base.collector import collect_seldom

PROJECT = Path(__file__).resolve().parents[2]
LIBRARIES = (
    "accelerate",
    "aiohttp",
    "alembic",
    "datasets",
    "inspect_ai",
    "inspect_ai.dataset",
    "inspect_ai.model",
    "inspect_ai.scorer",
    "inspect_ai.tool",
    "jsonschema",
    "matplotlib.figure",
    "msgspec",
    "numpy",
    "opentelemetry.proto.trace.v1.trace_pb2",
    "orjson",
    "prefect",
    "prefect.cli",
    "prefect.flow_engine",
    "prefect.task_engine",
    "prefect.task_runners",
    "prefect.server.api.server",
    "prefect.task_worker",
    "psutil",
    "pyarrow.parquet",
    "rich.console",
    "rich.progress",
    "safetensors.torch",
    "sqlalchemy.ext.asyncio",
    "sqlalchemy.orm",
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "typer",
    "uvicorn",
    "yaml",
    "rollout_core.config",
    "rollout_core.inference.batch",
    "rollout_core.inference.batch_runs",
    "rollout_core.promotion.history",
    "rollout_core.rewards.scoring",
    "rollout_core.runs.run_records",
    "rollout_core.store.sql.by_url",
)
HIDDEN = ("accelerate", "datasets", "inspect_ai", "matplotlib", "pandas", "prefect", "pyarrow", "torch", "transformers")
"""Packages that look as if they were not imported until a program imports them. Prefect reads its variables then."""
SENSITIVE = (
    "ACCELERATE_", "ATEN_", "CUBLAS", "CUDA", "DNNL_", "GCSFS_", "HF_", "KMP_", "LANG", "LC_", "LD_", "MALLOC", "MKL_",
    "MPL", "NUMEXPR", "OMP_", "ONEDNN_", "OPENBLAS", "PREFECT_PROFILE", "PYTHON", "ROLLOUT_NUMERICS", "TORCH", "TQDM",
    "TRANSFORMERS_", "TZ",
)  # fmt: skip
"""Beginnings of variables that the interpreter or a library reads when it starts."""
APPLIED = (
    "PYTHONPATH", "PYTHONUNBUFFERED", "LD_LIBRARY_PATH", "PYTHONWARNINGS", "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS", "TORCH_CPP_LOG_LEVEL", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK",
    "LD_PRELOAD", "NUMEXPR_MAX_THREADS", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
)  # fmt: skip
"""Exceptions: a forked process applies the first two; transformers, vLLM, our backend for it and scikit-learn set the
others."""
START = subprocess.Popen
"""As it is while no test has put something else in its place: the server is none of what a test starts."""
MOST_FILES = 16
"""That one process is given."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER: orphans among a process's descendants become its children."""

_PARENTS_DEATH = 1
"""PR_SET_PDEATHSIG."""


class Process(subprocess.Popen[Any]):
    """`subprocess.Popen` of a Python program, forked where that makes no difference to it."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *rest: Any):
        (
            cwd, env, _startupinfo, _creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
            _restore_signals, gid, gids, uid, umask, _start_new_session, process_group,
        ) = rest  # fmt: skip
        plain = not (shell or executable or preexec_fn) and (gid, gids, uid, umask) == (
            None,
            None,
            None,
            -1,
        )
        words = [os.fspath(word) for word in args] if not isinstance(args, str | bytes) else [args]
        environment = dict(os.environ if env is None else env)
        if not (plain and process_group in (None, -1) and _SERVER.suits(words, environment, cwd)):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *rest)
            return
        files = [given if given != -1 else number for number, given in enumerate((p2cread, c2pwrite, errwrite))]
        files += pass_fds
        asked = {
            "arguments": words[1:],
            "numbers": [0, 1, 2, *pass_fds],
            "environment": environment,
            "folder": os.fspath(cwd) if cwd is not None else os.getcwd(),
            "parent": os.getpid(),
        }
        self.pid = _SERVER.fork(asked, files)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def run(
    command: Sequence[str | os.PathLike[str]], *, timeout: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a `Process`, whose output is text."""
    if options.pop("capture_output", True):
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with Process(command, text=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


WARDENS = ("rollout_core.evaluation.inspect_process:handle", "rollout_core.models.bounded.inspecting:handle")
"""Handlers of child processes that spend their time on importing inspect_ai or transformers."""


def start_warden(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """As `subprocess.Popen` for `rollout_core.base.isolation`, whose processes import little but for these."""
    is_forked = "-m" in command and json.loads(command[-1])["handler"] in WARDENS
    return (Process if is_forked else subprocess.Popen)(command, **options)


class _Server:
    """The process that forks, started when it is first needed; it ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._environment: dict[str, str] = {}
        self.tests: dict[int, str] = {}
        """Which test each process was forked for; its environment is seen from outside as the server's."""

    def begin(self) -> None:
        """Take the environment as it is before the first test. What differs from it later, a test has changed."""
        self._environment = dict(os.environ)

    def suits(self, words: Sequence[str], environment: Mapping[str, str], folder: Any) -> bool:
        """Whether a forked process does what a new interpreter would."""
        paths = [Path(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
        if any(
            (path / "rollout_core").exists() and path != PROJECT for path in (*paths, Path(folder or ".").absolute())
        ):
            return False
        program = words[1 + len(_flags(words[1:])) :]
        if words[0] != sys.executable or not program or (program[0][0] == "-" and program[0] not in ("-c", "-m")):
            return False
        names = {*environment, *self._environment}
        differing = {name for name in names if environment.get(name) != self._environment.get(name)}
        return not any(name.startswith(SENSITIVE) for name in differing - set(APPLIED))

    def fork(self, asked: Mapping[str, Any], files: Sequence[int]) -> int:
        """Process id of a new child of this process, with these files as its standard ones."""
        with self._lock:
            server = self._running()
            message = json.dumps(asked).encode()
            _prctl(_SUBREAPER, 1)
            try:
                socket.send_fds(server, [len(message).to_bytes(4, "big")], files)
                server.sendall(message)
                answer = server.recv(4)
            except BaseException:
                self._socket = None  # its answer may still come, and would be taken for the next one's
                raise
            finally:
                _prctl(_SUBREAPER, 0)
            assert len(answer) == 4, "the server of forked processes has ended"
            pid = int.from_bytes(answer, "big")
            self.tests[pid] = os.environ.get("PYTEST_CURRENT_TEST", "")
            return pid

    def _running(self) -> socket.socket:
        if self._process is None or self._process.poll() is not None or self._socket is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                code = f"from tests.support.forked import serve; serve({theirs.fileno()})"
                self._process = START(
                    [sys.executable, "-c", code],
                    env=self._environment, pass_fds=[theirs.fileno()], cwd=PROJECT, start_new_session=True,
                )  # fmt: skip
            self._socket = ours
        return self._socket

    def close(self) -> None:
        """End it; forked processes live on."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait(120)
            self._socket = self._process = None


_SERVER = _Server()
begin, close = _SERVER.begin, _SERVER.close
tests = _SERVER.tests


def serve(number: int) -> None:
    """Import the libraries, and fork a process for each request on the socket of this number, until it is closed.

    In a forked process this runs the program that was asked for and does not return.
    """
    gc.disable()
    for name in LIBRARIES:
        importlib.import_module(name)
    collect_seldom()
    gc.collect()
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=number) as requests:
        while True:
            size, files, _, _ = socket.recv_fds(requests, 4, MOST_FILES)
            if len(size) < 4:
                os._exit(0)  # nothing is to be said of what the libraries leave
            wanted, message = int.from_bytes(size, "big"), b""
            while len(message) < wanted:
                message += requests.recv(wanted - len(message))
            middle = os.fork()
            if middle == 0:
                middle = os.getpid()
                if os.fork() != 0:
                    os._exit(0)
                break
            os.waitpid(middle, 0)
            for file in files:
                os.close(file)
        asked = json.loads(message)
        while os.getppid() == middle:
            os.sched_yield()
        if os.getppid() != asked["parent"]:
            os._exit(0)  # the tests were killed meanwhile
        # Not left behind, however the tests end.
        _prctl(_PARENTS_DEATH, signal.SIGKILL)
        requests.sendall(os.getpid().to_bytes(4, "big"))
    _become(asked, files)


def _become(asked: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Be the program, as a new interpreter would, and end."""
    os.setsid()  # a group of its own in any case: that of the server is not the caller's
    # Above all the numbers that are asked for, so that none is taken before it is copied.
    above = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 1 + max(asked["numbers"])) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(asked["numbers"], above, strict=True):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    multiprocessing.process.ORIGINAL_DIR = asked["folder"]
    tempfile.tempdir = None
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or "-u" in _flags(asked["arguments"])
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writing(1, unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writing(2, True)  # type: ignore[misc]
    _Hidden().hide()
    program = _program(list(asked["arguments"]), asked["folder"])
    sys.orig_argv = [sys.executable, *asked["arguments"]]
    code = 0
    try:
        program()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:  # noqa: BLE001 - nothing is above the program
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
    # What an interpreter does at its end, but for taking its modules apart, object by object.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _program(arguments: list[str], folder: str) -> Callable[[], object]:
    """What an interpreter with these arguments runs; sets the path and the arguments that it sees."""
    safe_path = "-P" in _flags(arguments)
    arguments = arguments[len(_flags(arguments)) :]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    # Of this process the first is its own working folder, and what PYTHONPATH named follows.
    mine = [entry for entry in sys.path[1:] if entry not in _SERVERS_PATH]
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    what = arguments[0]
    first = {"-m": folder, "-c": ""}.get(what, str(Path(what).resolve().parent))
    sys.path[:] = [*([] if safe_path else [first]), *given, *mine]
    if what == "-m":
        sys.argv = ["-m", *arguments[2:]]
        return lambda: runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # as the interpreter does
    if what == "-c":
        sys.argv = ["-c", *arguments[2:]]
        code = compile(arguments[1], "<string>", "exec")
    else:
        sys.argv = arguments
        module.__dict__["__file__"] = what
        code = compile(Path(what).read_bytes(), what, "exec")
    return lambda: exec(code, module.__dict__)


def _flags(arguments: Sequence[str]) -> list[str]:
    """The flags that an interpreter's arguments begin with, of those that a forked process can follow."""
    return list(takewhile(lambda word: word in ("-P", "-u"), arguments))


_SERVERS_PATH = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _writing(number: int, now: bool) -> Any:
    return open(number, "w", encoding="utf-8", errors="backslashreplace" if number == 2 else "strict",
                buffering=1 if now or os.isatty(number) else -1, closefd=False)  # fmt: skip


class _Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imported modules that are found again by the next import, all of a package together."""

    def __init__(self) -> None:
        self._modules: dict[str, dict[str, types.ModuleType]] = {name: {} for name in HIDDEN}

    def hide(self) -> None:
        for name in list(sys.modules):
            package = name.partition(".")[0]
            if package in self._modules:
                self._modules[package][name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        module = self._modules.get(fullname, {}).get(fullname)
        if module is None or module.__spec__ is None:
            return None  # what is below a package is there once the package is
        own = module.__spec__
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=own.origin, is_package=True)
        spec.submodule_search_locations = own.submodule_search_locations
        spec.loader_state = own
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._modules[spec.name][spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        own = module.__spec__.loader_state
        module.__spec__, module.__loader__ = own, own.loader
        sys.modules.update(self._modules.pop(own.name))
        if own.name == "prefect":
            _renew_prefect()


def _renew_prefect() -> None:
    """Prefect reads its variables when it is imported."""
    import prefect.context
    from prefect.logging.configuration import setup_logging

    prefect.context.refresh_global_settings_context()
    setup_logging(incremental=False)

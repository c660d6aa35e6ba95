"""Starts the ranks of an update, watches them, and sees to it that none is left when one ends.

Ranks are plain child processes that meet at a file, so there is no port to lose to another process. They get ids,
settings and places in one JSON file, and secrets in the environment. Their output goes to the caller's log as it comes;
what they report comes back in the caller's own thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter

from rollout_core.base import traces
from rollout_core.base.determinism import default_threads
from rollout_core.base.errors import ConfigError, Recoverable, RolloutError, error_of, is_own_error
from rollout_core.base.ids import ContentId
from rollout_core.base.locks import scratch_folder
from rollout_core.base.logs import text_of
from rollout_core.base.machine import usable_cores
from rollout_core.base.processes import search_path, signal_name
from rollout_core.base.settings import stop_seconds
from rollout_core.config.learning import UpdateName
from rollout_core.launch.own_loss import load_own_loss

if TYPE_CHECKING:
    from rollout_core.algorithms.context import UpdateContext
    from rollout_core.config import LearnerSettings
    from rollout_core.objects import ObjectStore


log = logging.getLogger(__name__)

LAST_LINES = 5
SETTLE_SECONDS = 1.0
"""After the first failure: the time others', one of which may be the cause, get to arrive."""
LINES_SECONDS = 0.05
"""After the end of a job: the time that the last lines of a process that stays get to arrive."""
GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL where a rank has failed: the others wait for it and will not get to their next step."""
STORAGE_OPTIONS = "ROLLOUT_RANK_STORAGE_OPTIONS"
"""Environment variable: options of the object store, as JSON; they may hold secrets."""
RENDEZVOUS = "ROLLOUT_RANK_RENDEZVOUS"
"""Environment variable: where ranks of one machine meet; default: MASTER_ADDR and MASTER_PORT."""
PIPE = "ROLLOUT_RANK_PIPE"
"""Environment variable: number of the open file that a rank's messages go to."""
LAUNCHER = "ROLLOUT_RANK_LAUNCHER"
"""Environment variable: process id of the launcher, without which there is no reason to live."""
STAYS = "ROLLOUT_RANK_STAYS"
"""Environment variable, where set: more jobs may come by standard input, a line of JSON each, until that ends."""

IDENTITY = ("key", "run_id", "seed", "run_name", "start_from", "series", "base_model")
"""Fields that ranks have of the caller's context as they are."""


def run_update(
    name: UpdateName,
    context: UpdateContext,
    *,
    on_line: Callable[[str], None] = log.info,
    on_data: Callable[[Any], None] | None = None,
    **inputs: Any,
) -> Any:
    """What the update ``name`` returns for ``inputs``: computed here, or by ``settings.parallel.nproc`` processes, or
    by a single one where this one draws samples meanwhile (``settings.async_depth``).

    The processes share out the threads of ``context``. ``on_line`` gets each line they write; ``on_data`` is the
    argument of that name that updates from data sets have. Raises what the update raises, and Recoverable when a
    process dies: the next try then resumes from the last snapshot.
    """
    settings: LearnerSettings = inputs["settings"]
    nproc = settings.parallel.nproc
    if not settings.has_own_processes:
        callbacks = {} if on_data is None else {"on_data": on_data}
        context = replace(context, own_loss=load_own_loss(settings))
        return update_function(name)(**inputs, **callbacks, context=context)
    if context.objects.url.startswith("memory://"):
        raise ConfigError(
            f"processes of its own need an object store that they reach; {context.objects.url} exists "
            "in this one only: set ROLLOUT_STORAGE to a folder or bucket"
        )
    with scratch_folder("ranks") as folder:
        job = Job(
            update=name,
            algorithm=settings.family,
            inputs=encode_inputs(name, inputs),
            storage=context.objects.url,
            cache=context.cache.absolute(),
            tracking=context.tracking and context.tracking.absolute(),
            **{field: getattr(context, field) for field in IDENTITY},
            num_threads=context.num_threads and max(1, context.num_threads // nproc),
            nproc=nproc,
            held=context.held and context.held.folder,
            stores_state=context.stores_state,
            result=folder / "result.json",
        )
        (folder / "job.json").write_text(job.model_dump_json(indent=1), encoding="utf-8")
        with _ranks_for(job, folder, context.objects) as ranks:
            for message in ranks.messages(context.is_stopping):
                if message.kind == "line":
                    on_line(message.content if nproc == 1 else f"rank {message.rank}: {message.content}")
                elif message.kind == "start":
                    context.on_start(*message.content)
                elif message.kind == "step":
                    context.on_step(message.content)
                elif message.kind == "data" and on_data is not None:
                    on_data(report_type(name).validate_python(message.content))
        return outcome_type(name).validate_json(job.result.read_bytes())


@contextmanager
def kept_process() -> Iterator[None]:
    """Inside the block an update that has one process of its own leaves it for the next one, which is spared its start:
    imports take longer than a small update. The process ends with the block.

    An update is the same in a process that has computed others: it sets all seeds itself.
    """
    with _kept.wanted():
        yield


@contextmanager
def _ranks_for(job: Job, folder: Path, objects: ObjectStore) -> Iterator[_Ranks]:
    """The processes of ``job``, at work; none is left at the end but one that is kept."""
    environment = _environment(job, objects)
    ranks = _kept.take(environment) if job.nproc == 1 else None
    ranks = ranks or _Ranks(environment, _kept.starter if job.nproc == 1 else None)
    with ranks.at_work(job, folder):
        yield ranks
    if ranks.stay:
        _kept.keep(ranks)


@dataclass(frozen=True)
class _Message:
    rank: int
    kind: str
    """``line``, ``data``, ``start``, ``step``, ``error``, ``done`` of a process that stays, or ``exit``."""
    content: Any


@dataclass
class _Rank:
    process: subprocess.Popen[str]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))


# Not torch.distributed.elastic: its agent meets by a TCP store, whose port another process may take, and its ranks
# report by an error file at their end, not step by step.
class _Ranks:
    """The processes of a job, or of one job after the other."""

    _job: Job

    def __init__(self, environment: Mapping[str, str], starter: Executor | None) -> None:
        """With a ``starter`` they stay when a job is done."""
        self.environment = environment
        self.stay = starter is not None
        self._starter = starter
        self._ranks: list[_Rank] = []
        self._queue: queue.SimpleQueue[_Message] = queue.SimpleQueue()

    @contextmanager
    def at_work(self, job: Job, folder: Path) -> Iterator[None]:
        """Inside the block they work on ``job``. All are ended when it is left, whatever the reason, but where they
        stay and nothing went wrong."""
        self._job = job
        try:
            if self._ranks:
                self._give(folder)
            else:
                for rank in range(job.nproc):
                    self._start(rank, folder)
            yield
        except BaseException as error:
            # What is no Exception is a signal, or the flow's end: they are well, and can keep what they have done.
            self.end(GRACE_SECONDS if isinstance(error, Exception) else stop_seconds())
            raise
        if not self.stay:
            self.end(GRACE_SECONDS)

    @property
    def are_alive(self) -> bool:
        """Whether none has ended."""
        return all(rank.process.poll() is None for rank in self._ranks)

    def messages(self, is_stopping: Callable[[], bool]) -> Iterable[_Message]:
        """What the ranks write and report, until all are done. Raises the error of the one that failed.

        Once ``is_stopping`` says so, the ranks are asked to end after their step, which they report as an error."""
        running = set(range(self._job.nproc))
        asked = False
        while running:
            message = self._next(timeout=0.5)
            if not asked and is_stopping():
                asked = True
                for rank in self._ranks:
                    rank.process.terminate()
            if message is None:
                continue
            if message.kind in ("exit", "done"):
                running.discard(message.rank)
            if message.kind == "error" or (message.kind == "exit" and message.content != 0):
                failures = [message]
                for later in self._settle(SETTLE_SECONDS):
                    yield later
                    failures.append(later)
                raise self._error(failures)
            yield message
        if self.stay:
            yield from self._settle(LINES_SECONDS)

    def _settle(self, seconds: float) -> Iterable[_Message]:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            message = self._next(timeout=left)
            if message is not None:
                yield message

    def _next(self, *, timeout: float) -> _Message | None:
        try:
            message = self._queue.get(timeout=timeout)
        except queue.Empty:
            return None
        if message.kind == "line":
            self._ranks[message.rank].last_lines.append(message.content)
        return message

    def _error(self, messages: list[_Message]) -> RolloutError:
        """Of the rank that failed first: the others lose their connection to it and fail as well.

        A signal is nobody's consequence, and an error of this project says what is wrong; a lost connection comes last.
        """

        def suspicion(message: _Message) -> int:
            if message.kind == "error":
                return 0 if is_own_error(message.content) else 2
            return 1 if message.content < 0 else 3

        failures = [item for item in messages if item.kind == "error" or (item.kind == "exit" and item.content != 0)]
        first = min(failures, key=suspicion)
        where = f"rank {first.rank} of {self._job.nproc} of the {self._job.algorithm} update"
        if self._job.nproc == 1:
            where = f"the process of the {self._job.algorithm} update"
        if first.kind == "error":
            return error_of(first.content, where)
        code = first.content
        end = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        lines = " / ".join(self._ranks[first.rank].last_lines) or "none"
        others = "; the others were ended too" if self._job.nproc > 1 else ""
        return Recoverable(
            f"{where} {end}{others}. Run again, the update resumes from its last snapshot. Its last lines: {lines}"
        )

    def _give(self, folder: Path) -> None:
        """The next job. Raises Recoverable where its process has just ended."""
        [rank] = self._ranks
        assert rank.process.stdin is not None, "piped"
        job = {"job": str(folder / "job.json"), "traceparent": traces.environment().get(traces.TRACEPARENT)}
        try:
            rank.process.stdin.write(json.dumps(job) + "\n")
            rank.process.stdin.flush()
        except OSError as error:
            raise Recoverable(f"the process of the {self._job.algorithm} update ended before it: {error}") from error

    def _start(self, rank: int, folder: Path) -> None:
        reading, writing = os.pipe()
        of_job = {RENDEZVOUS: f"file://{folder / 'rendezvous'}", **traces.environment(), PIPE: str(writing)}
        start = partial(
            subprocess.Popen,
            # -P: a module in the folder it runs in that is called like a dependency is not imported.
            [sys.executable, "-P", "-m", "rollout_core.launch.rank", str(folder / "job.json")],
            stdin=subprocess.PIPE if self.stay else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**self.environment, **_place(rank, self._job.nproc), **of_job, **({STAYS: "1"} if self.stay else {})},
            pass_fds=(writing,),
            # Its own session: Ctrl-C in the terminal reaches the launcher, which ends the ranks.
            start_new_session=True,
        )
        try:
            process = start() if self._starter is None else self._starter.submit(start).result()
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._ranks.append(_Rank(process))
        assert process.stdout is not None, "piped"
        readers = [
            threading.Thread(target=self._read_lines, args=(rank, process.stdout), daemon=True),
            threading.Thread(
                target=self._read_messages, args=(rank, os.fdopen(reading, encoding="utf-8")), daemon=True
            ),
        ]
        for thread in (*readers, threading.Thread(target=self._wait, args=(rank, process, readers), daemon=True)):
            thread.start()

    def _read_lines(self, rank: int, output: IO[str]) -> None:
        with output:
            for line in output:
                if line.strip():
                    self._queue.put(_Message(rank, "line", text_of(line.rstrip())))

    def _read_messages(self, rank: int, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                if line.endswith("\n"):  # or it was killed while it wrote
                    self._queue.put(_Message(rank, *json.loads(line)))

    def _wait(self, rank: int, process: subprocess.Popen[str], readers: list[threading.Thread]) -> None:
        code = process.wait()
        if code == 0:  # a failure is reported at once, a normal end after all that came before
            for reader in readers:
                reader.join(timeout=GRACE_SECONDS)
        self._queue.put(_Message(rank, "exit", code))

    def end(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Ask the ranks to end, and then make them; also when this is interrupted itself."""
        for rank in self._ranks:
            rank.process.terminate()
            if rank.process.stdin is not None:
                with contextlib.suppress(OSError):
                    rank.process.stdin.close()
        deadline = time.monotonic() + grace_seconds
        try:
            for rank in self._ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        finally:
            for rank in self._ranks:
                rank.process.kill()
                rank.process.wait()


class _KeptProcess:
    """The process of the last update that had one of its own, while somebody wants it kept. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._ranks: _Ranks | None = None
        self.starter: Executor | None = None
        """Its thread starts processes that stay: one that is to end with its parent ends with the thread of it that
        started it, and an update may be asked for by a thread that is gone before the next one."""

    @contextmanager
    def wanted(self) -> Iterator[None]:
        with self._lock:
            self._wanted += 1
            self.starter = self.starter or ThreadPoolExecutor(1, "rollout-launcher")
        try:
            yield
        finally:
            with self._lock:
                self._wanted -= 1
                ranks = starter = None
                if not self._wanted:
                    ranks, self._ranks, starter, self.starter = self._ranks, None, self.starter, None
            if ranks is not None:
                ranks.end()
            if starter is not None:
                starter.shutdown()

    def take(self, environment: Mapping[str, str]) -> _Ranks | None:
        """The kept process, if it is alive and has this environment; another is ended."""
        with self._lock:
            ranks, self._ranks = self._ranks, None
        if ranks is not None and not (ranks.are_alive and ranks.environment == environment):
            ranks.end()
            return None
        return ranks

    def keep(self, ranks: _Ranks) -> None:
        """For the next update; ended at once where nobody wants it."""
        with self._lock:
            if self._wanted and self._ranks is None:
                self._ranks = ranks
                return
        ranks.end()


_kept = _KeptProcess()
"""Of this process."""


def _environment(job: Job, objects: ObjectStore) -> dict[str, str]:
    """Of all ranks, but for what is a job's own. Threads are shared out where nothing says how many there should be."""
    threads = job.num_threads or default_threads() or max(1, usable_cores() // job.nproc)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONHASHSEED": "0",
        "TQDM_DISABLE": "1",
        **os.environ,
        "PYTHONPATH": search_path(),
        "PYTHONUNBUFFERED": "1",
        LAUNCHER: str(os.getpid()),
    }
    if objects.storage_options:
        environment[STORAGE_OPTIONS] = json.dumps(objects.storage_options)
    return environment


def _place(rank: int, nproc: int) -> dict[str, str]:
    """Which rank of how many a process is. One by itself is none: accelerate would look for others to meet."""
    if nproc == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
    }


class Job(BaseModel):
    """One update, for `rollout_core.launch.rank`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    update: UpdateName
    algorithm: str
    """Its usual name: one update serves DPO, IPO and KTO."""
    inputs: dict[str, Any]
    """Arguments of the update by name, as `encode_inputs` gives them."""
    storage: str
    """URL of the object store; its options are in the environment."""
    cache: Path
    key: ContentId
    run_id: str
    seed: int
    run_name: str
    start_from: ContentId | None
    tracking: Path | None
    series: ContentId | None
    base_model: ContentId | None
    num_threads: int | None
    """CPU threads of each rank."""
    nproc: int
    held: Path | None
    """Folder of training states that are not stored."""
    stores_state: bool
    result: Path
    """Where the first rank writes the outcome."""


def import_updates() -> None:
    """Import what every update does, before another thread imports: of transformers, whose modules load their parts
    when these are asked for, the later of two threads may find a part missing."""
    update_function("grpo")


def update_function(name: UpdateName) -> Callable[..., Any]:
    """The update of that name."""
    module = "on_policy_updates" if name in ("ppo", "grpo") else "dataset_updates"
    # Not at the top: it imports torch.
    return getattr(import_module(f"rollout_core.algorithms.{module}"), f"{name}_update")


def encode_inputs(name: UpdateName, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an update as JSON values: of settings only what the update itself declares."""
    hints = get_type_hints(update_function(name), include_extras=True)
    return {key: TypeAdapter(hints[key]).dump_python(value, mode="json") for key, value in inputs.items()}


def decode_inputs(name: UpdateName, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `encode_inputs`."""
    hints = get_type_hints(update_function(name), include_extras=True)
    return {key: TypeAdapter(hints[key]).validate_python(value) for key, value in inputs.items()}


def outcome_type(name: UpdateName) -> TypeAdapter[Any]:
    """What an update returns, to and from JSON."""
    return TypeAdapter(get_type_hints(update_function(name))["return"])


def report_type(name: UpdateName) -> TypeAdapter[Any]:
    """The same of what an update from a data set says of its rows before it trains: it returns that, too."""
    return TypeAdapter(get_args(get_type_hints(update_function(name))["return"])[1])

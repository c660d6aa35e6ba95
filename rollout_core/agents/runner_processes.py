"""Runner processes, forked by a fresh interpreter (`rollout_core.agents.nursery`), which replaces those that die.

To fork this process would copy locks of its threads in whatever state they are, and share its open connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollout_core.agents.handover import packed
from rollout_core.agents.nursery import ENDED, GIVEN_UP, MISCONFIGURED, receive, send
from rollout_core.base import process_tree
from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.base.logs import is_json
from rollout_core.base.processes import exit_reason, signal_name

logger = logging.getLogger(__name__)

RunnerMain = Callable[[int, str, Callable[[], None]], None]
"""What a runner process does: its number, the store's URL, and what it calls when it is ready for work; ends by
returning or by an exception."""

OnDeath = Callable[[int], Awaitable[None]]

_POLL_SECONDS = 0.05
_LASTING_SECONDS = 60.0
"""What lived so long did not die of what it was started with."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0


class Restarts:
    """Whether what has died is started again: at most ``most`` times in a row, at once and then after growing pauses.

    ``num_ended`` says how many tasks have ended so far. A death after which the count is another begins a new row, for
    the agent can work; without the count, one of what has lived for a while does.
    """

    def __init__(self, most: int, num_ended: Callable[[], int] | None = None) -> None:
        self._most, self._num_ended = most, num_ended
        self._num_deaths = 0
        self._ended_before = -1

    def pause(self, reason: str, lived_seconds: float = 0.0) -> float:
        """Seconds to wait before it is started again. Raises Fatal where it has died too often of ``reason``."""
        ended = self._ended_before if self._num_ended is None else self._num_ended()
        if ended != self._ended_before or (self._num_ended is None and lived_seconds > _LASTING_SECONDS):
            self._num_deaths = 0
        self._ended_before = ended
        self._num_deaths += 1
        if self._num_deaths > self._most:
            limit = f"; it was started again {self._most} times in a row, the limit (max_restarts)"
            raise Fatal(f"{reason}{limit if self._most else ''}")
        return min(_FIRST_PAUSE * (2 ** (self._num_deaths - 1) - 1), _LONGEST_PAUSE)


class Death(NamedTuple):
    """A runner process that ended otherwise than by returning."""

    number: int
    exit_code: int
    reason: str
    """Empty if it could not say."""
    output: str | None

    def __str__(self) -> str:
        code = self.exit_code
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with {exit_reason(code)}"
        where = "" if self.output in (None, os.devnull) else f"; what it wrote is in {self.output}"
        return f"runner {self.number} {how}{': ' if self.reason else ''}{self.reason}{where}"


class RunnerProcesses:
    """``numbers`` of runners, each a process, kept alive until they return.

    Args:
        main: what each of them does.
        max_restarts, num_ended: how often a runner that dies is started again, see `Restarts`.
        allowed_exit_codes: those that count as a return.
        imports: modules that they share, see `Tracer.imports`.
        start_seconds: longest time until a runner says that it is ready for work, before all have been once; None: no
            limit.
        reload_seconds: the same for one that is started again later, which is killed then, as one that has died; None:
            no limit.
        output: the file that a runner of a number writes to; None: where this process does.

    Raises CannotBeImported where ``main`` cannot be handed to another process.
    """

    def __init__(
        self,
        main: RunnerMain,
        numbers: Sequence[int],
        *,
        max_restarts: int,
        num_ended: Callable[[], int] | None = None,
        allowed_exit_codes: Sequence[int] = (0,),
        imports: Sequence[str] = (),
        start_seconds: float | None = None,
        reload_seconds: float | None = None,
        output: Callable[[int], str | None] = lambda number: None,
    ) -> None:
        work = packed(main)
        self.all_ready = asyncio.Event()
        """Set when all have said that they are."""
        self._restarts = {number: Restarts(max_restarts, num_ended) for number in numbers}
        self._allowed = frozenset(allowed_exit_codes)
        self._start_seconds, self._reload_seconds, self._output = start_seconds, reload_seconds, output
        self._started: dict[int, float] = {}
        self._alive: set[int] = set()
        self._loading: set[int] = set()
        """Of them, those that are not ready."""
        self._due: dict[int, float] = {}
        """When those that have died are started again."""
        self._stopping = False
        self._connection, theirs = multiprocessing.Pipe()
        with theirs, _blocked_stop_signals():
            # By its own path, not by PYTHONPATH: agents start processes too, of which this is not to be seen.
            path = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})"
            serve = f"from rollout_core.agents.nursery import serve; serve({theirs.fileno()}, {os.getpid()})"
            self._nursery = subprocess.Popen(
                [sys.executable, "-P", "-c", f"{path}; {serve}"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            send(self._connection, {"logging": _logging(), "imports": list(imports)})
            self._connection.send_bytes(work)
        except OSError:
            pass  # it has died, which `run` says
        except BaseException:
            self.end()
            raise

    async def run(self, url: str, on_death: OnDeath | None = None) -> None:
        """Start all runners on the store at ``url`` and return when they have returned; ``on_death`` is awaited with
        the number of one that has died.

        Raises Fatal when one has died too often, Recoverable when the nursery has, and ConfigError where what the
        runners work with cannot be loaded.
        """
        self._due = {} if self._stopping else dict.fromkeys(self._restarts, 0.0)
        while self._alive or self._due:
            self._start_those_due(url)
            if not self._connection.poll():
                if self._nursery.poll() is not None and not self._connection.poll():
                    raise Recoverable(
                        f"the process that starts the runners has died (exit code {self._nursery.returncode})"
                    )
                await asyncio.sleep(_POLL_SECONDS)
                continue
            try:
                what, number, *more = receive(self._connection)
            except (EOFError, OSError):
                raise Recoverable("the process that starts the runners has died") from None
            self._loading.discard(number)
            if what == ENDED:
                exit_code, reason = more
                await self._note_end(Death(number, exit_code, reason, self._output(number)), on_death)
            elif not self._loading and not self._due:
                self.all_ready.set()

    def _start_those_due(self, url: str) -> None:
        now = time.monotonic()
        for number in [number for number, due in self._due.items() if due <= now]:
            del self._due[number]
            self._alive.add(number)
            self._loading.add(number)
            self._started[number] = now
            with contextlib.suppress(OSError):  # it has died, which `run` sees
                send(self._connection, ["start", number, url, self._output(number)])
        limit = self._reload_seconds if self.all_ready.is_set() else self._start_seconds
        late = [] if limit is None else [number for number in self._loading if now - self._started[number] > limit]
        if not late:
            return
        why = f"the agent was not loaded within {limit:g} s; what takes so long at its import belongs into the function"
        if not self.all_ready.is_set():
            raise ConfigError(why)
        for number in late:
            self._loading.discard(number)
            with contextlib.suppress(OSError):
                send(self._connection, ["kill", number, why])

    async def _note_end(self, death: Death, on_death: OnDeath | None) -> None:
        number = death.number
        self._alive.discard(number)
        if death.exit_code in self._allowed or self._stopping:
            return
        if death.exit_code == MISCONFIGURED:
            raise ConfigError(death.reason or str(death))
        logger.warning("%s", death)
        if on_death is not None:
            await on_death(number)
        if death.exit_code == GIVEN_UP:
            raise Fatal(str(death))
        if not self._stopping:
            now = time.monotonic()
            self._due[number] = now + self._restarts[number].pause(str(death), now - self._started[number])

    @contextlib.asynccontextmanager
    async def running(
        self, url: str, *, end_seconds: float, on_death: OnDeath | None = None
    ) -> AsyncIterator[asyncio.Future[None]]:
        """`run`, for as long as the block lasts. Then the runners are asked to end, and killed after
        ``end_seconds``."""
        work = asyncio.ensure_future(self.run(url, on_death))
        try:
            yield work
        finally:
            self.stop(signal.SIGTERM)
            try:
                await asyncio.wait([work], timeout=end_seconds)
            finally:
                work.cancel()
                await asyncio.to_thread(self.end)

    def stop(self, number: signal.Signals) -> None:
        """Send all runners a signal: SIGTERM lets the rollout under way end, SIGINT cancels it. None is started
        again."""
        self._stopping = True
        self._due.clear()
        with contextlib.suppress(OSError):
            send(self._connection, ["signal", number])

    def end(self) -> None:
        """Kill whatever still runs, each with its process group."""
        self._stopping = True
        with contextlib.suppress(OSError):
            send(self._connection, ["end"])
        try:
            self._nursery.wait(process_tree.END_SECONDS)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        self._connection.close()


@contextlib.contextmanager
def _blocked_stop_signals() -> Iterator[None]:
    """A process that is started meanwhile has them blocked until it unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, process_tree.STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _logging() -> dict[str, Any] | None:
    """What of this program's logging its runners do alike: the level and form of the root logger's lines, to stderr.
    None: it has configured none."""
    root = logging.getLogger()
    if is_json():
        return {"level": root.level}
    streams = [handler for handler in root.handlers if type(handler) is logging.StreamHandler]
    if not streams:
        return None
    formatter = streams[0].formatter
    if type(formatter) is not logging.Formatter or type(formatter._style) is not logging.PercentStyle:
        return {"level": root.level}
    try:
        formatter.format(logging.makeLogRecord({}))
    except Exception:  # noqa: BLE001 - of fields that only this program's filters add
        return {"level": root.level}
    return {"level": root.level, "text_format": formatter._fmt, "datefmt": formatter.datefmt}

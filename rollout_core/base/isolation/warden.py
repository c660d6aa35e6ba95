"""Between a caller and the code that it does not trust: a warden, which starts the code's process, counts, and ends
everything; and what this process does, which is to call the handler with each request and answer with its value or its
error.

``python -P -m rollout_core.base.isolation.warden OPTIONS`` with OPTIONS in JSON. Orphans of the code's processes
become the warden's children, so none gets away by forking twice or in a session of its own. The warden ends when its
pipe from the caller ends or the caller's process does, and takes all of them along.

Requests and answers are JSON in frames, eight bytes of length and then the text; never pickle, as what comes back is
not trusted.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from rollout_core.base import process_tree

FRAME_LENGTH = struct.Struct("<Q")
MAX_FRAME_BYTES = 2**32
"""Of a frame; more is no frame but something else that was written into the pipe."""


class BadFrame(ValueError):
    """Bytes that are no frame."""


def encode_frame(value: Any) -> bytes:
    """A frame. Floats and integers cross exactly, and so do strings that are not valid Unicode."""
    text = json.dumps(value, separators=(",", ":")).encode("ascii")
    return FRAME_LENGTH.pack(len(text)) + text


def frame_size(head: bytes) -> int:
    """Bytes that follow the first eight. Raises BadFrame."""
    (size,) = FRAME_LENGTH.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {size} bytes; expected at most {MAX_FRAME_BYTES}")
    return size


def decode_frame(text: bytes) -> Any:
    """The value of a frame without its length. Raises BadFrame."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFrame("a frame that is no JSON") from error


def read_frame(file: BinaryIO) -> Any:
    """The next value; None where the file ends. Raises BadFrame."""
    head = file.read(FRAME_LENGTH.size)
    if len(head) < FRAME_LENGTH.size:
        return None
    size = frame_size(head)
    text = file.read(size)
    return decode_frame(text) if len(text) == size else None


_PLACE = struct.Struct("<q")
NO_PLACE, STARTING = -1, -2
"""Before the handler's first step; before the handler is called."""
PROGRESS_BYTES = mmap.PAGESIZE


class Progress:
    """A number in memory that the caller sees: how far the handler is, also after a sudden end."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, PROGRESS_BYTES)
        os.close(descriptor)

    @property
    def place(self) -> int:
        """From 0 on a step's; below that `NO_PLACE` or `STARTING`."""
        return _PLACE.unpack_from(self._memory)[0]

    @place.setter
    def place(self, value: int) -> None:
        _PLACE.pack_into(self._memory, 0, value)

    def close(self) -> None:
        """The number is gone."""
        self._memory.close()


Handler = Callable[[Any, Callable[[int], None]], Any]
"""Called with a request and a function to call with the index of each step before it; returns what JSON can hold."""


def serve(handler: str, requests: int, answers: int, progress: int) -> None:
    """Answer requests until there are none."""
    own = os.getpid()
    for descriptor in (requests, answers):
        os.set_inheritable(descriptor, False)
    place = Progress(progress)

    def report(step: int) -> None:
        place.place = step

    with os.fdopen(requests, "rb") as incoming, os.fdopen(answers, "wb") as outgoing:
        call: Handler | None = None
        while (frame := read_frame(incoming)) is not None:
            try:
                call = call or _find(handler)
                report(NO_PLACE)
                answer = encode_frame({"value": call(frame["request"], report)})
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's to judge
                answer = encode_frame({"error": _described(error)})
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            if os.getpid() != own:
                os._exit(0)  # a copy that the code forked and let run on; the first one answers
            outgoing.write(answer)
            outgoing.flush()


def _find(handler: str) -> Handler:
    module, _, name = handler.partition(":")
    return getattr(importlib.import_module(module), name)


def _described(error: BaseException) -> dict[str, Any]:
    from rollout_core.base.errors import error_message

    with contextlib.suppress(BaseException):
        traceback.print_exception(error)
    return error_message(error)


BUSY, IDLE, END = b"b", b"i", b"e"
"""What the caller sends: a call has begun, has ended, everything is to end."""
BUSY_SECONDS, IDLE_SECONDS = 0.03, 0.5
"""Between looks at processes and memory. A look takes about a millisecond for each hundred processes of the machine,
or a few microseconds where there is no new process."""
SHARE = 20
"""Looking takes at most this part of the time."""


@dataclass(frozen=True)
class Options:
    """What the caller asks for; descriptors are those of open pipes."""

    caller: int
    """Its process id."""
    control: int
    verdict: int
    requests: int
    answers: int
    progress: int
    handler: str
    search_path: list[str] | None
    """Where the code's modules are; None: where this interpreter finds them."""
    memory_bytes: int
    max_processes: int
    address_space: bool


def main() -> None:
    """Start the code's process and watch it to its end."""
    options = Options(**json.loads(sys.argv[1]))
    caught, heard = _listen_to_signals()
    process_tree.adopt_orphans()
    # Sent when the *thread* that started us ends, too; so it only wakes us, to look whether the caller is there.
    process_tree.signal_at_parents_end(signal.SIGUSR1)
    warden = os.getpid()
    worker = os.fork()
    if worker == 0:
        _become_worker(options, warden, caught, heard)
    for descriptor in (options.requests, options.answers, options.progress):
        os.close(descriptor)
    _give_up_output()
    with contextlib.suppress(OSError):  # the right to be quicker than what it counts is root's
        os.nice(-5)
    watch = _Watch(options, worker, heard)
    try:
        watch.run()
    except BaseException as error:  # noqa: BLE001 - its own output has been given up
        watch.tell(fault=f"{type(error).__name__}: {error}")
    finally:
        # Once it was waited for, its number may be another's.
        process_tree.end_all(warden, None if watch.worker_ended else worker)
    os._exit(0)


def _listen_to_signals() -> tuple[int, int]:
    """A pipe that any of the signals writes to; SIGTERM and SIGINT are the caller's to give by ending its pipe."""
    heard, caught = os.pipe()
    os.set_blocking(caught, False)
    os.set_blocking(heard, False)
    for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(caught, warn_on_full_buffer=False)
    return caught, heard


def _give_up_output() -> None:
    """Only the code's own processes hold its output open."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def _become_worker(options: Options, warden: int, *own: int) -> None:
    """Never returns."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        process_tree.signal_at_parents_end(signal.SIGKILL)
        if os.getppid() != warden:
            os._exit(1)
        os.setsid()
        for descriptor in (options.control, options.verdict, *own):
            os.close(descriptor)
        _bound(options)
        if options.search_path is not None:
            sys.path[:] = options.search_path
        serve(options.handler, options.requests, options.answers, options.progress)
    finally:
        os._exit(1)


def _bound(options: Options) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if options.address_space:
        resource.setrlimit(resource.RLIMIT_AS, (options.memory_bytes, options.memory_bytes))
    with contextlib.suppress(OSError):
        # If the machine runs out of memory all the same, this process is the one to end.
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")


class _Watch:
    """Looks at the code's processes until there is a reason to end them."""

    def __init__(self, options: Options, worker: int, heard: int) -> None:
        self._options = options
        self._worker = worker
        self._heard = heard
        self._interval = IDLE_SECONDS
        self._found: list[int] = []
        self._newest = ""
        self.worker_ended = False

    def run(self) -> None:
        """Until then; the caller gets the reason where it does not know it."""
        pause = self._interval
        poll = select.poll()  # not select(): a caller with a thousand open files gives higher numbers than that takes
        for descriptor in (self._options.control, self._heard):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(1000 * pause)}
            if self._heard in ready:
                with contextlib.suppress(BlockingIOError):
                    if signal.SIGTERM in os.read(self._heard, 4096):
                        return
            if self._options.control in ready and not self._hear():
                return
            if os.getppid() != self._options.caller:
                return
            status = process_tree.reap().get(self._worker)
            if status is not None:
                self.worker_ended = True
                return self.tell(exit_code=os.waitstatus_to_exitcode(status))
            started = time.monotonic()
            problem = self._problem()
            if problem:
                return self.tell(**problem)
            pause = max(self._interval, SHARE * (time.monotonic() - started))

    def _hear(self) -> bool:
        """Whether to continue."""
        received = os.read(self._options.control, 4096)
        if not received or END in received:
            return False
        self._interval = BUSY_SECONDS if received[-1:] == BUSY else IDLE_SECONDS
        return True

    def _problem(self) -> dict[str, Any] | None:
        newest = process_tree.newest()
        if newest != self._newest:
            self._newest, self._found = newest, process_tree.below(os.getpid())
        if len(self._found) > self._options.max_processes:
            return {"processes": len(self._found)}
        # The quick figure counts shared memory more than once, so it is held against the other before it counts.
        used = process_tree.resident_bytes(self._found)
        if used > self._options.memory_bytes and (used := process_tree.own_bytes(self._found) or used):
            return {"memory_bytes": used} if used > self._options.memory_bytes else None
        return None

    def tell(self, **verdict: Any) -> None:
        """Give the caller the reason of the end."""
        with contextlib.suppress(OSError):
            os.write(self._options.verdict, json.dumps(verdict).encode() + b"\n")


if __name__ == "__main__":
    main()

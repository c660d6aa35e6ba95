"""How an engine's two processes wait for each other's messages on a CPU. To be imported in vLLM's own processes.

vLLM's processes exchange two messages a step, and spin for a second after each message before they sleep. On a CPU a
step is long, and the core that the waiting process spins on is one that could compute. So here they spin for a
millisecond, as long as the other one takes between two messages of a step, and then sleep until they are notified.

A notification is ZeroMQ's, and vLLM lets one wait to be sent: a second one within a millisecond is dropped, as the
socket looks no more often at what has been sent. Every step has such a second one. Who never sleeps amid work does not
notice; who does would look by itself after 5 s.
"""

from __future__ import annotations

import time
from typing import Any

import zmq
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

SPIN_SECONDS = 0.001
"""After a message."""
FIRST_SPIN_SECONDS = 1.0
"""At first: a notification that is sent before the reader's socket is connected is lost."""
LONGEST_SLEEP_MS = 5
"""Until a process looks whether there is a message of which it was not notified."""
_NO_LIMIT = 0
"""To notifications that wait to be sent, instead of one. They are few, as each message waits for an answer, and the
reader keeps the last."""

_vllm_init = shm_broadcast.SpinCondition.__init__


def sleep_while_waiting() -> None:
    """On a CPU, have this engine process sleep while the other one computes."""
    if current_platform.is_cpu():
        shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = LONGEST_SLEEP_MS
        shm_broadcast.SpinCondition.__init__ = _init  # pyright: ignore[reportAttributeAccessIssue]


def _init(self: Any, is_reader: bool, context: zmq.Context[Any], notify_address: str) -> None:
    """In place of `SpinCondition.__init__`."""
    _vllm_init(self, is_reader, _Roomy(context), notify_address, busy_loop_s=SPIN_SECONDS)  # pyright: ignore[reportArgumentType]
    if is_reader:
        self.last_read = time.monotonic() + FIRST_SPIN_SECONDS


class _RoomySocket(zmq.Socket[Any]):
    """One whose limit is not the one notification that vLLM asks for."""

    def setsockopt(self, option: int, value: Any, **more: Any) -> None:
        super().setsockopt(option, _NO_LIMIT if option == zmq.SNDHWM else value, **more)


class _Roomy:
    """A context whose sockets are roomy."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context = context

    def socket(self, kind: int) -> Any:
        return self._context.socket(kind, socket_class=_RoomySocket)

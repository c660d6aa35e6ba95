"""Ports for servers that are told one, such as those that are started again at their old address."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port of those that the system gives to whoever asks for any."""
HOST = "127.0.0.1"


@contextmanager
def own_port() -> Iterator[int]:
    """A port that nobody listens at, and that is only this test's inside the block.

    The system gives it to nobody who asks for any port. Other tests see by its twin of UDP, which is held here, that it
    is taken.
    """
    first, last = map(int, EPHEMERAL.read_text().split())
    ports = [port for port in range(10_000, 65_536) if not first <= port <= last] or list(range(10_000, 65_536))
    start = secrets.randbelow(len(ports))
    for port in (*ports[start:], *ports[:start]):
        with socket.socket(type=socket.SOCK_DGRAM) as held:
            if _can_bind(held, port) and _is_free(port):
                yield port
                return
    raise AssertionError("all ports are taken")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _can_bind(probe, port)


def _can_bind(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind((HOST, port))
    except OSError:
        return False
    return True

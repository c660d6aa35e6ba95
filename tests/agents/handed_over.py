"""Agents that are handed to runner processes, or cannot be."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

from rollout_core.agents import LitAgent, rollout


@rollout
def doubles(task, llm):
    """A global of its module."""
    return 2.0 * task


class Holds(LitAgent):
    """An instance holds a value."""

    def __init__(self, factor=1.0, lock=None):
        super().__init__()
        self.factor, self.lock = factor, lock

    def rollout(self, task, resources, rollout):
        """Multiplies."""
        return self.factor * task


LOCKED = Holds(3.0, threading.Lock())


def waits_beside_a_child(number: int, url: str, is_ready) -> None:
    """A runner that notes itself and a process of its own in the folder ``url``, prints, and works for ever."""
    child = subprocess.Popen(["sleep", "3600"])
    (Path(url) / f"{number}-{os.getpid()}").write_text(str(child.pid))
    os.write(1, b"runner %d works\n" % number)
    is_ready()
    time.sleep(3600)


def returns_at_once(number: int, url: str, is_ready) -> None:
    """A runner that is never ready."""


def never_ready(number: int, url: str, is_ready) -> None:
    """A runner whose agent takes for ever to load."""
    time.sleep(3600)


def waits_for_a_word_the_second_time(number: int, url: str, is_ready) -> None:
    """A runner that notes itself in the folder ``url``; one that comes later is ready once there is a file ``word``."""
    folder = Path(url)
    if not (folder / "first").exists():
        (folder / "first").write_text(str(os.getpid()))
    else:
        (folder / "second").touch()
        while not (folder / "word").exists():
            time.sleep(0.01)
        (folder / "ready").touch()
    is_ready()
    time.sleep(3600)

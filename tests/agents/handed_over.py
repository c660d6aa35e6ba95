"""Agents that are handed to runner processes, or cannot be."""

from __future__ import annotations

import threading

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

"""Alarms: for each name at most one time, and which of them have passed, at a cost that does not depend on how many."""

from __future__ import annotations

from itertools import islice

from sortedcontainers import SortedSet


class Alarms:
    """Times by name."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._order = SortedSet()

    def set(self, name: str, time: float | None) -> None:
        """Set the time of ``name``, or clear it."""
        before = self._times.pop(name, None)
        if before is not None:
            self._order.remove((before, name))
        if time is not None:
            self._times[name] = time
            self._order.add((time, name))

    def passed(self, now: float, limit: int) -> list[str]:
        """Up to ``limit`` names whose time is before ``now``, the earliest first."""
        found: list[str] = []
        for time, name in islice(self._order, max(limit, 0)):
            if time >= now:
                break
            found.append(name)
        return found

"""A run that is held to a plan: each call of a stage, and what each import brings in, is what was planned."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.config import identity
from rollout_core.objects.lineage import named_in
from rollout_core.objects.records import Record
from rollout_core.plans.lock import PlanLock, PlannedCall, PlannedInput, call_differences, differences, titled


class HeldRun:
    """A run under way that is held to ``plan``, which was read from ``path``."""

    def __init__(self, plan: PlanLock, path: Path) -> None:
        self.plan, self.path = plan, path
        self._calls: dict[tuple[str, str], list[PlannedCall]] = {}
        self._inputs: dict[tuple[str, str], list[PlannedInput]] = {}
        for call in plan.calls:
            self._calls.setdefault((call.stage, call.label), []).append(call)
        for item in plan.inputs:
            self._inputs.setdefault((item.stage, item.label), []).append(item)
        self._lock = threading.Lock()
        self._unplanned: dict[str, None] = {}

    def check(self, now: PlanLock) -> None:
        """Raises ConfigError where ``now``, a plan of the run as it is about to begin, differs."""
        lines = differences(self.plan, now)
        if lines:
            raise ConfigError(
                "\n".join(
                    [f"the run is held to plan {self.plan.id.short} of {self.path}, and differs from it:", *lines]
                ),
                [f"{self.path}: {line}" for line in lines],
            )

    def call(self, stage: str, version: int, label: str, inputs: Mapping[str, Any], *, is_cached: bool) -> None:
        """A stage is about to be called. Raises ConfigError where it was planned otherwise."""
        planned = self._calls.get((stage, label))
        if planned is None:  # results have decided so; or it makes none, as what helps a worker or writes the output
            if is_cached:
                self._note(titled(stage, label))
            return
        found = [call_differences(call, inputs, version) for call in planned]
        if all(found):
            self._refuse(titled(stage, label), found[0])

    def imported(self, stage: str, label: str, record: Record) -> None:
        """An import gave ``record``. Raises ConfigError where other content was planned."""
        given, planned = imported_ids(record), self._inputs.get((stage, label))
        if planned is None:
            self._note(titled(stage, label))
        elif all(item.ids != given for item in planned):
            had = ", ".join(planned[0].ids)
            self._refuse(titled(stage, label), [f"planned content {had}, now {', '.join(given)}: edited meanwhile?"])

    def unplanned(self) -> list[str]:
        """Calls that the plan does not have, as results decided that they are made."""
        with self._lock:
            return list(self._unplanned)

    def _note(self, title: str) -> None:
        with self._lock:
            self._unplanned[title] = None

    def _refuse(self, title: str, lines: list[str]) -> None:
        raise ConfigError(
            f"{title}: the run is held to plan {self.plan.id.short} of {self.path}, and differs from it: "
            + "; ".join(lines)
        )


def imported_ids(record: Record) -> tuple[str, ...]:
    """Content of what an import gave, wherever it was read."""
    return tuple(sorted(named_in(identity(record))))


HELD: ContextVar[HeldRun | None] = ContextVar("rollout_held_run", default=None)
"""The run that this is part of, if it is held to a plan."""


@contextmanager
def holding(held: HeldRun) -> Iterator[None]:
    """Stages that are called inside the block are held to a plan."""
    token = HELD.set(held)
    try:
        yield
    finally:
        HELD.reset(token)

"""Around every flow: plan, keep a journal, and recompute what storage lost.

A blob whose bytes do not match its id is set aside when it is read; the stage that made it then no longer counts as
cached. So running the flow's body again computes exactly that, and what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rollout_core.errors import CorruptObject, MissingObject
from tasks.journal import Journal, keep_journal
from tasks.stage import refreshing, stage_logger

R = TypeVar("R")

TRIES = 3


def run_body(body: Callable[[Journal], R], *, refresh: bool | str) -> R:
    """Run a flow's ``body``; again, up to three times in all, when an object it needs is damaged or gone."""
    for remaining in reversed(range(TRIES)):
        with keep_journal() as journal, refreshing(refresh):
            try:
                return body(journal)
            except (CorruptObject, MissingObject) as error:
                if not remaining:
                    raise
                stage_logger().warning("%s; computing again what is missing", error)
    raise AssertionError("the last try returns or raises")

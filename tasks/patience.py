"""What stages do by themselves, for the little that is done around them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rollout_core.base.errors import Recoverable
from rollout_core.base.stopping import is_stopping
from tasks.logs import stage_logger

T = TypeVar("T")

RETRY_DELAYS_SECONDS = [1.0, 4.0, 16.0]


def patiently(call: Callable[[], T]) -> T:
    """The result of ``call``, which is tried again with growing pauses as long as it raises Recoverable."""
    for delay in RETRY_DELAYS_SECONDS:
        try:
            return call()
        except Recoverable as error:
            if is_stopping():
                raise
            stage_logger().warning("%s; tried again in %g s", error, delay)
            time.sleep(delay)
    return call()

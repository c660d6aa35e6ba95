"""Where stages and flows write their log lines."""

from __future__ import annotations

import logging
from typing import Any

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger


def stage_logger() -> logging.Logger | logging.LoggerAdapter[Any]:
    """The run's logger, whose lines appear in the Prefect UI; a plain one outside a run."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("rollout")

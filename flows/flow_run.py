"""Around every flow: its tags, its journal, and the recomputation of what storage lost.

A blob whose bytes do not match its id is set aside when it is read; the stage that made it then no longer counts as
cached. So running the flow's body again computes exactly that, and what follows from it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from prefect import get_client
from prefect.context import FlowRunContext

from rollout_core.base.errors import CorruptObject, MissingObject
from rollout_core.base.numerics import require_numerics
from rollout_core.base.scratch import sweep_scratch
from rollout_core.base.stopping import is_stopping, watching
from rollout_core.config import Run
from tasks.journal import Journal, keep_journal
from tasks.logs import stage_logger
from tasks.stage import refreshing

R = TypeVar("R")

TRIES_FOR_AN_OBJECT = 3
WORKERS_RUN = "PREFECT__FLOW_RUN_ID"
"""Environment variable by which a Prefect worker names the run to the process that it starts."""


def recompute_missing(body: Callable[[Journal], R], config: Run) -> R:
    """Run a flow's ``body``; again for every object that it finds damaged or missing, until one is found a third time.

    The flow run gets the tags of ``config``. What a refresh computed stays cached for its next try, and for `prefect
    flow-run retry`. Raises ConfigError where this process does not compute as ``config`` asks.
    """
    require_numerics(config.numerics)
    run = config.run
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("recompute_missing is called inside a flow")
    flow_run = context.flow_run
    if set(run.tags) - set(flow_run.tags):
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, tags=sorted({*flow_run.tags, *run.tags}))
    sweep_scratch()
    # The id of a flow run stays the same when it is retried.
    name = f"flow run {flow_run.id}" if run.refresh is True else run.refresh or None
    # A worker starts a process for each run, which is then that run's alone.
    with watching(ends_process=WORKERS_RUN in os.environ):
        return _repeat(body, name)


def _repeat(body: Callable[[Journal], R], name: str | None) -> R:
    found: Counter[str] = Counter()
    while True:
        with keep_journal() as journal, refreshing(name):
            try:
                return body(journal)
            except (CorruptObject, MissingObject) as error:
                found[error.content_id] += 1
                # Each object that is set aside is one less, so this ends, however many are damaged.
                if found[error.content_id] == TRIES_FOR_AN_OBJECT or is_stopping():
                    raise
                stage_logger().warning("%s; recomputing what is missing", error)

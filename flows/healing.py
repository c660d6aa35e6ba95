"""Around every flow: plan, keep a journal, and recompute what storage lost.

A blob whose bytes do not match its id is set aside when it is read; the stage that made it then no longer counts as
cached. So running the flow's body again computes exactly that, and what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from prefect import get_client
from prefect.context import FlowRunContext

from rollout_core.config import Run
from rollout_core.errors import CorruptObject, MissingObject
from rollout_core.numerics import require_numerics
from tasks.journal import Journal, keep_journal
from tasks.logs import stage_logger
from tasks.stage import refreshing

R = TypeVar("R")

TRIES = 3


def run_body(body: Callable[[Journal], R], config: Run) -> R:
    """Run a flow's ``body``; again, up to three times in all, when an object it needs is damaged or gone.

    The flow run gets the tags of ``config``. What a refresh computed stays cached for its next try, and for `prefect
    flow-run retry`. Raises ConfigError where this process does not compute as ``config`` asks.
    """
    require_numerics(config.numerics)
    run = config.run
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("run_body is called inside a flow")
    flow_run = context.flow_run
    if set(run.tags) - set(flow_run.tags):
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, tags=sorted({*flow_run.tags, *run.tags}))
    # The id of a flow run stays the same when it is retried.
    name = f"flow run {flow_run.id}" if run.refresh is True else run.refresh or None
    for remaining in reversed(range(TRIES)):
        with keep_journal() as journal, refreshing(name):
            try:
                return body(journal)
            except (CorruptObject, MissingObject) as error:
                if not remaining:
                    raise
                stage_logger().warning("%s; computing again what is missing", error)
    raise AssertionError("the last try returns or raises")

"""Hooks: a user's code at four moments of each rollout."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rollout_core.agents.lit_agent import CurrentRunner, LitAgent
from rollout_core.agents.tracing import Tracer
from rollout_core.base.errors import in_words
from rollout_core.store import AttemptedRollout, Span

logger = logging.getLogger(__name__)


class Hook:
    """Override what is needed. Hooks run in the order in which they were given; one that raises is logged, and neither
    the others nor the rollout are harmed."""

    async def on_rollout_start(self, *, agent: LitAgent[Any], runner: CurrentRunner, rollout: AttemptedRollout) -> None:
        """An attempt has been claimed."""

    async def on_trace_start(
        self, *, agent: LitAgent[Any], runner: CurrentRunner, tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """The trace has begun, the agent has not. Spans that are emitted here are the attempt's."""

    async def on_trace_end(
        self, *, agent: LitAgent[Any], runner: CurrentRunner, tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """The agent has ended, also by an error; the trace is about to. Spans emitted here are the attempt's."""

    async def on_rollout_end(
        self, *, agent: LitAgent[Any], runner: CurrentRunner, rollout: AttemptedRollout, spans: Sequence[Span]
    ) -> None:
        """All spans are in the store, the final reward included; the attempt's status is not yet written."""


async def call_hooks(hooks: Sequence[Hook], moment: str, **arguments: Any) -> None:
    """Call this method of each hook."""
    for hook in hooks:
        try:
            await getattr(hook, moment)(**arguments)
        except Exception as error:
            logger.exception("%s.%s failed: %s", type(hook).__name__, moment, in_words(error))

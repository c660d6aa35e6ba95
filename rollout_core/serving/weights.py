"""Weights that a server answers with: how it comes by them, and what is looked at before an engine takes them.

The parity canary is a few log-probabilities of the trainer's own implementation of the model. An engine has to agree
with them before it answers anybody.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId
from rollout_core.base.processes import exit_reason, search_path
from rollout_core.config import VLLMBackend
from rollout_core.inference.backend import ModelRef

CANARY_TOKENS = 16
REMEMBERED = 16
"""Models, and pairs of them."""


class Canary(BaseModel):
    """Tokens, and what the trainer says of them."""

    token_ids: list[int]
    logprobs: list[float]
    """Of each token but the first, after those before it; nats."""

    def check(self, found: Sequence[float], tolerance: float) -> None:
        """Raises Fatal where an engine's log-probabilities of the same tokens are others by more than ``tolerance``."""
        pairs = zip(found, self.logprobs, strict=True) if len(found) == len(self.logprobs) else ()
        worst = max((abs(got - wanted) for got, wanted in pairs), default=math.inf)
        if not worst <= tolerance:
            raise Fatal(
                f"engine and trainer disagree by {worst:.2e} nats about these weights; backend.canary_tolerance is "
                f"{tolerance:.0e}. Far above it the engine does not run these weights. Slightly above it the model is "
                "sensitive to its dtype: raise the tolerance"
            )


class Examined(BaseModel):
    """What an `Examine` found."""

    canary: Canary | None = None
    """None: the engine is not compared with the trainer."""
    fits: bool = False
    """Whether an engine with the weights that it replaces can take them in place: all else of the two models,
    tokenizer and chat template included, is the same."""


class ExamineJob(BaseModel):
    """The one argument of `rollout_core.serving.examining`, as JSON."""

    owner: int
    """The process that started it."""
    model: ModelRef
    instead_of: ModelRef | None
    backend: VLLMBackend
    num_tokens: int
    """Of the canary; 0: none."""


Examine = Callable[[ModelRef, ModelRef | None], Awaitable[Examined]]
"""Looks at a model that is to be served after another one, or after none."""


@dataclass(frozen=True)
class Weights:
    """How a server comes by weights, given their id."""

    fetch: Callable[[ContentId], Path]
    """A folder with the model's files, each of which is what the id says. Called in a thread."""
    examine: Examine


def examine_apart(backend: VLLMBackend, *, canary: bool) -> Examine:
    """An `Examine` by a child process: loading a model in transformers would hold up this one's event loop. What was
    found of the last `REMEMBERED` models is remembered, so that one can go back from a model at once."""
    most = CANARY_TOKENS if backend.max_model_len is None else backend.max_model_len - 1
    num_tokens = max(2, min(CANARY_TOKENS, most)) if canary else 0
    canaries: dict[ContentId, Canary | None] = {}
    fits: dict[frozenset[ContentId], bool] = {}

    async def examine(model: ModelRef, instead_of: ModelRef | None) -> Examined:
        pair = frozenset({model.content_id, instead_of.content_id} if instead_of is not None else ())
        is_known = model.content_id in canaries or not canary
        if not is_known or (pair and pair not in fits):
            found = await _examine(
                ExamineJob(
                    owner=os.getpid(),
                    model=model,
                    instead_of=instead_of,
                    backend=backend,
                    num_tokens=0 if is_known else num_tokens,
                )
            )
            if not is_known:
                canaries[model.content_id] = found.canary
            if pair:
                fits[pair] = found.fits
            _forget_oldest(canaries)
            _forget_oldest(fits)
        return Examined(canary=canaries.get(model.content_id), fits=bool(pair) and fits[pair])

    return examine


def _forget_oldest(remembered: dict[Any, Any]) -> None:
    while len(remembered) > REMEMBERED:
        del remembered[next(iter(remembered))]


async def _examine(job: ExamineJob) -> Examined:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "rollout_core.serving.examining", job.model_dump_json()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": search_path()},
    )
    seconds = job.backend.start_timeout_seconds
    try:
        async with asyncio.timeout(seconds):
            written, _ = await process.communicate()
    except TimeoutError:
        raise Fatal(
            f"the trainer's own implementation said nothing of model {job.model.content_id} within {seconds:g} s; set "
            "backend.start_timeout_seconds higher, or serve with --no-canary"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise Fatal(
            f"the model {job.model.content_id} could not be run by the trainer's own implementation "
            f"({exit_reason(process.returncode)}); the lines above say why. --no-canary serves without that"
        )
    return Examined.model_validate_json(written)

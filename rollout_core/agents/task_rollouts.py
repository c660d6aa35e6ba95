"""Tasks as rollouts of an agent: which rows, under which ids, and how they come into the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rollout_core.agents.algorithm import AGENT_KIND, retrying
from rollout_core.agents.run_queue import INTERRUPTIONS
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config import AgentConfig, identity
from rollout_core.data.datasets import TaskRow, parse_rows
from rollout_core.data.examples import positions_between
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import AgentPrompt, AgentSource, AgentTasks
from rollout_core.store import EnqueueRolloutRequest, LightningStore, PromptTemplate
from rollout_core.store.types import RolloutMode

_CHUNK = 1_000


def file_rollouts(
    objects: ObjectStore,
    tasks: ContentId,
    model: ContentId,
    decides: Sequence[Any],
    *,
    first: int,
    count: int | None,
    rollouts_per_task: int,
    seed: int | None,
) -> AgentTasks:
    """The rollouts of rows of ``tasks``, filed with their ids, which follow from the task, its place, and what
    ``decides`` how it is worked on.

    ``first`` and ``count`` choose rows, going around the end of the file; with a ``seed`` each time around is in an
    order of its own, which follows from it.
    """
    rows = parse_rows(objects.get_bytes(tasks), f"tasks {tasks.short}", TaskRow)
    last = len(rows) if count is None else first + count
    chosen = (
        [position % len(rows) for position in range(first, last)]
        if seed is None
        else positions_between(first, last, num_items=len(rows), seed=seed)
    )
    lines = []
    for place, row in enumerate(chosen, start=first):
        task = rows[row].task
        ids = (content_id("agent-rollout/1", [*decides, task, place, n]) for n in range(rollouts_per_task))
        lines += [orjson.dumps({"rollout_id": rollout_id, "task": task}) + b"\n" for rollout_id in ids]
    return AgentTasks(
        rollouts=objects.put_bytes(b"".join(lines)), model=model, num_tasks=len(chosen), num_rollouts=len(lines)
    )


def what_decides(
    model: ContentId,
    source: AgentSource,
    settings: Sequence[Any],
    mode: RolloutMode,
    draws: int,
    prompt: AgentPrompt | None,
    limit: int | None,
) -> list[Any]:
    """What the outcome of a rollout rests on besides its task. What came later stands last and only where it is given,
    so that ids stay."""
    decides: list[Any] = [model, source.id, *map(identity, settings), mode, draws]
    if prompt is not None:
        decides.append(identity(prompt))
    if limit is not None:
        decides.append({"limit": limit})
    return decides


async def enqueue(
    store: LightningStore,
    objects: ObjectStore,
    tasks: AgentTasks,
    source: AgentSource,
    agent: AgentConfig,
    mode: RolloutMode,
) -> list[str]:
    """Make sure that the store has the rollouts of ``tasks``; their ids. Enqueueing one twice is one rollout."""
    config = retrying(agent.timeout_seconds, agent.max_attempts + INTERRUPTIONS)
    metadata = {"kind": AGENT_KIND, "agent": source.function, "agent_id": source.id, "model": tasks.model}
    rows: list[Mapping[str, Any]] = [orjson.loads(line) for line in objects.get_bytes(tasks.rollouts).splitlines()]
    requests = [
        EnqueueRolloutRequest(
            input=row["task"], mode=mode, config=config, metadata=metadata, rollout_id=row["rollout_id"]
        )
        for row in rows
    ]
    for start in range(0, len(requests), _CHUNK):
        await store.enqueue_many_rollouts(requests[start : start + _CHUNK])
    return [row["rollout_id"] for row in rows]


def template_of(objects: ObjectStore, prompt: AgentPrompt) -> PromptTemplate:
    """The template itself, as agents get it."""
    return PromptTemplate(template=objects.get_bytes(prompt.text).decode(), engine=prompt.engine)

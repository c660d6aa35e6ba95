"""Episodes that were played, read from the run's store again as they were then."""

from __future__ import annotations

import json
from typing import Any

import orjson

from rollout_core.agents.adapters.ended import as_they_were, ended_rollouts, read_rollouts
from rollout_core.base.stopping import run_async
from rollout_core.environments.transcripts import Outcome
from rollout_core.objects.records import AgentRollouts, AgentTasks
from rollout_core.store.semconv import EPISODE_MEMORY
from tasks.runtime import connections
from tasks.runtime.stage import current_stage


def outcomes_of(episodes: AgentTasks, played: AgentRollouts, episodes_per_row: int = 1) -> list[Outcome]:
    """What each episode came to, in order. Raises Fatal where its spans are not the same any more."""
    return run_async(_read(episodes, played, episodes_per_row))


def notes_of(played: AgentRollouts) -> list[Any]:
    """What episodes left for later ones, in their order, without those that failed or left nothing. Raises Fatal where
    their spans are not the same any more."""
    return run_async(_notes(played))


async def _notes(played: AgentRollouts) -> list[Any]:
    ended, notes = {row.rollout_id: row for row in ended_rollouts(current_stage().objects, played)}, []
    async with connections.open_store() as store:
        async for name, _, spans in read_rollouts(store, list(ended)):
            if ended[name].status == "succeeded":
                attributes = [span.attributes for span in as_they_were(ended[name], spans)]
                notes += [json.loads(str(each[EPISODE_MEMORY])) for each in attributes if EPISODE_MEMORY in each]
    return notes


async def _read(episodes: AgentTasks, played: AgentRollouts, episodes_per_row: int) -> list[Outcome]:
    objects = current_stage().objects
    rows = [orjson.loads(line)["task"] for line in objects.get_bytes(episodes.rollouts).splitlines()]
    ended = ended_rollouts(objects, played)
    outcomes: list[Outcome] = []
    async with connections.open_store() as store:
        async for name, _, spans in read_rollouts(store, [row.rollout_id for row in ended]):
            place = len(outcomes)
            had = as_they_were(ended[place], spans)
            outcomes.append(Outcome(name, rows[place], place % episodes_per_row, had, ended[place].reward))
    return outcomes

"""Episodes that earlier runs played in environments, as conversations to learn from.

A run names its episodes by content: which rollouts, with a digest of their spans. So the rows are what was played then,
or an error.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from rollout_core.agents.adapters.ended import EndedRollout, as_they_were, ended_rollouts, read_rollouts
from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import EpisodesDataset
from rollout_core.data.datasets import SftRow
from rollout_core.environments.transcripts import turns_of
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import AgentRollouts
from rollout_core.runs.run_records import RunRecords
from rollout_core.store import Rollout, Span, SqlLightningStore
from rollout_core.store.semconv import LLM_CALL, LlmCallAttributes

PLAY = "play"
"""The stage whose episodes are taken."""


@dataclass(frozen=True)
class PlayedEpisodes:
    """Conversations of a run's episodes."""

    documents: list[dict[str, Any]]
    """As `SftRow` has them."""
    left_out: dict[str, int]
    """Episodes by why they are no rows."""
    rollouts: list[ContentId]
    """Blobs that name the episodes."""

    def remark(self) -> str:
        """For people: how many are rows, and why the others are none."""
        others = "".join(f", {count} {reason}" for reason, count in sorted(self.left_out.items()))
        return f"{len(self.documents)} of {len(self.documents) + sum(self.left_out.values())} episodes are rows{others}"


def read_episodes(source: EpisodesDataset, objects: ObjectStore, database_url: str) -> PlayedEpisodes:
    """The finished training episodes of a run, each once, in the order in which they were asked for; of these the
    ones that ``source`` chooses. Raises ConfigError where there is no such run, or none of its episodes is chosen,
    Fatal where the database has lost what they were."""
    played = _played_by(source.run, objects)
    ended = {row.rollout_id: row for record in played for row in ended_rollouts(objects, record)}
    found = run_async(_conversations(list(ended.values()), database_url))
    left_out: Counter[str] = Counter(each for each in found if isinstance(each, str))
    rows = [each for each in found if not isinstance(each, str)]
    kept = [row for row in rows if source.min_reward is None or row[0] >= source.min_reward]
    left_out["below min_reward"] += len(rows) - len(kept)
    # Of equal rewards the first ones; and in the order in which they were played.
    order = sorted(range(len(kept)), key=lambda place: -kept[place][0])
    best = sorted(order[: math.ceil(Fraction(str(source.best)) * len(kept))])
    left_out["not among the best"] += len(kept) - len(best)
    documents = [kept[place][1] for place in best]
    episodes = PlayedEpisodes(documents, dict(+left_out), [ContentId(record.rollouts) for record in played])
    if not documents:
        raise ConfigError(f"run {source.run!r}: {episodes.remark()}; choose another run, or lower min_reward")
    return episodes


def _played_by(run: str, objects: ObjectStore) -> list[AgentRollouts]:
    records = RunRecords(objects)
    try:
        _, detail = records.detail(records.find(run))
    except NotFound as error:
        raise ConfigError(str(error)) from error
    played = [AgentRollouts.model_validate(result) for call, result in detail.results("AgentRollouts")
              if call.stage == PLAY]  # fmt: skip
    if not played:
        raise ConfigError(f"run {run!r} has played no episodes; expected one with an [environment]")
    return played


async def _conversations(ended: Sequence[EndedRollout], database_url: str) -> list[tuple[float, dict[str, Any]] | str]:
    """Of each episode its reward and conversation, or why it is no row."""
    then = {row.rollout_id: row for row in ended}
    async with SqlLightningStore.from_url(database_url) as store:
        return [
            _conversation(then[rollout_id], rollout, spans)
            async for rollout_id, rollout, spans in read_rollouts(store, list(then))
        ]


def _conversation(
    ended: EndedRollout, rollout: Rollout | None, spans: Sequence[Span]
) -> tuple[float, dict[str, Any]] | str:
    if ended.reward is None:
        return "failed"
    had = as_they_were(ended, spans)
    if rollout is not None and rollout.mode != "train":
        return "held out"
    turns = turns_of(had)
    if any(turn.finish_reason == "length" for turn in turns):
        return "with an answer that was cut"
    messages = [message for turn in turns for message in (*turn.messages, turn.message)]
    shown = next((span.attributes.get(LlmCallAttributes.TOOLS.value) for span in had if span.name == LLM_CALL), None)
    document = {"messages": messages, **({} if shown is None else {"tools": json.loads(str(shown))})}
    try:
        SftRow.model_validate(document)
    except ValidationError:  # such as an answer of nothing
        return "that are no conversations to learn from"
    return ended.reward, document

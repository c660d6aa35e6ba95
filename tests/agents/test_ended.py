"""Rollouts frozen when they ended: what is learnt from them later is the same, or refused."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rollout_core.agents.adapters.ended import ended_rollouts, look_up, made_of
from rollout_core.agents.adapters.span_samples import adapt_ended, adapt_rollouts
from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId, content_id, hash_bytes
from rollout_core.config import identity
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import Lineage, record_lineage
from rollout_core.objects.records import AgentRollouts
from rollout_core.store import AttemptedRollout, LightningStore, RolloutConfig, Span, SqlLightningStore
from rollout_core.store.semconv import AGL_ANNOTATION, AGL_REWARD

MODEL = hash_bytes(b"what answered")
CALL = {"prompt_token_ids": [1, 2], "response_token_ids": [3], "logprobs.content": "[-0.5]"}


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(str(tmp_path / "objects"))


@pytest.fixture
async def store(tmp_path: Path):
    async with SqlLightningStore.from_url(f"sqlite:///{tmp_path}/store.db") as store:
        yield store


async def add(store: LightningStore, rollout: AttemptedRollout, number: int, **attributes: Any) -> Span:
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    span = Span.from_attributes(**ids, sequence_id=number, name=AGL_ANNOTATION, attributes=attributes)
    assert await store.add_span(span) is not None
    return span


async def ended(store: LightningStore, status: Any = "succeeded", reward: float | None = 2.0) -> str:
    rollout = await store.start_rollout(input={"question": "?"}, config=RolloutConfig(max_attempts=1))
    await add(store, rollout, 1, **CALL)
    if reward is not None:
        await add(store, rollout, 2, **{f"{AGL_REWARD}.0.value": reward})
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status=status)
    return rollout.rollout_id


async def test_what_became_of_rollouts_is_counted_and_one_without_a_reward_counts_as_nothing(store, objects):
    ids = [
        await ended(store),
        await ended(store, reward=1.0),
        await ended(store, status="failed"),
        await ended(store, reward=None),
        "ro-unknown",
    ]
    found = await look_up(store, objects, ids, MODEL)
    assert found.statuses == {"failed": 1, "succeeded": 3, "unknown": 1}
    assert (found.num_rollouts, found.num_rewards, found.num_spans) == (5, 2, 7)
    assert found.mean_reward == 3.0 / 5
    rows = ended_rollouts(objects, found)
    assert [row.rollout_id for row in rows] == ids
    assert [row.reward for row in rows] == [2.0, 1.0, None, None, None]
    # The same rollouts give the same bytes, which is what makes later stages cached.
    assert await look_up(store, objects, ids, MODEL) == found


async def test_samples_are_of_the_spans_there_were_and_not_of_later_ones(store, objects):
    rollout_id = await ended(store)
    found = await look_up(store, objects, [rollout_id], MODEL)
    rollout = await store.get_rollout_by_id(rollout_id)
    assert isinstance(rollout, AttemptedRollout)
    await add(store, rollout, 3, **{f"{AGL_REWARD}.0.value": 9.0})
    adapted = await adapt_ended(store, objects, ended_rollouts(objects, found))
    assert [sample.reward for sample in adapted.samples] == [2.0]
    assert [sample.reward for sample in (await adapt_rollouts(store, objects, [rollout_id])).samples] == [9.0]


async def test_spans_that_were_changed_or_lost_are_refused(store, objects, tmp_path: Path):
    changed, lost = await ended(store), await ended(store)
    frozen = {name: await look_up(store, objects, [name], MODEL) for name in (changed, lost)}
    of_rollout = "rollout_key = (SELECT key FROM rollouts WHERE rollout_id = ?) AND sequence_id = 1"
    with sqlite3.connect(tmp_path / "store.db") as database:
        database.execute(f"DELETE FROM spans WHERE {of_rollout}", [lost])  # noqa: S608 - a constant
        database.execute(f"UPDATE spans SET name = 'another' WHERE {of_rollout}", [changed])  # noqa: S608
    with pytest.raises(Fatal, match=f"rollout {lost} are not all in the database"):
        await adapt_ended(store, objects, ended_rollouts(objects, frozen[lost]))
    with pytest.raises(Fatal, match=f"rollout {changed} have changed since"):
        await adapt_ended(store, objects, ended_rollouts(objects, frozen[changed]))


def record(stage: str, inputs: dict[str, Any], *outputs: ContentId, second: int) -> Lineage:
    return Lineage(
        stage=stage,
        version=1,
        key=content_id("test/1", [stage, identity(inputs)]),
        inputs=identity(inputs),
        outputs=outputs,
        created_at=datetime(2026, 1, 1, second=second, tzinfo=UTC),
        software={},
    )


async def test_from_a_rollout_to_the_checkpoints_that_were_made_of_it(store, objects):
    mine, other = await ended(store), await ended(store)
    ids = {name: hash_bytes(name.encode()) for name in ("samples", "scores", "model", "later", "others")}
    for number, rollout_id in enumerate((mine, other)):
        found: AgentRollouts = await look_up(store, objects, [rollout_id], MODEL)
        made = (ids["samples"], ids["scores"]) if rollout_id == mine else (ids["others"],)
        record_lineage(objects, record("collect_samples", {"rollouts": found}, *made, second=number))
    record_lineage(objects, record("grpo_update", {"samples": ids["samples"]}, ids["model"], second=3))
    record_lineage(objects, record("grpo_update", {"model": ids["model"]}, ids["later"], second=4))
    # An older version's, which names no record of rollouts.
    record_lineage(objects, record("collect_samples", {"rollout_ids": [mine]}, hash_bytes(b"old"), second=5))
    made = made_of(objects, mine)
    assert [(item.stage, item.outputs[0]) for item in made] == [
        ("collect_samples", ids["samples"]),
        ("grpo_update", ids["model"]),
        ("grpo_update", ids["later"]),
    ]
    assert [item.stage for item in made_of(objects, other)] == ["collect_samples"]
    assert made_of(objects, "ro-unknown") == []

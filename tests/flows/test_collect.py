"""Rollouts of the configured store, collected by the stage as a flow would."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.ids import hash_bytes
from rollout_core.objects.records import Experience
from rollout_core.store import Span
from rollout_core.store.semconv import AGL_ANNOTATION, AGL_REWARD

SOME = hash_bytes(b"some model")
pytestmark = pytest.mark.server


def test_a_stage_collects_what_the_store_holds(prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from prefect import flow

    from tasks.agents import look_up_rollouts
    from tasks.collect import collect_samples
    from tasks.runtime import connections

    monkeypatch.chdir(tmp_path)

    async def run_agent(status: Any) -> str:
        """An agent's attempt with one traced call and a reward."""
        async with connections.open_store() as store:
            rollout = await store.start_rollout(input="task")
            ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
            call = {"prompt_token_ids": [1, 2], "response_token_ids": [3], "logprobs.content": "[-0.5]"}
            for number, attributes in enumerate((call, {f"{AGL_REWARD}.0.value": 2.0}), start=1):
                span = Span.from_attributes(**ids, sequence_id=number, name=AGL_ANNOTATION, attributes=attributes)
                await store.add_span(span)
            await store.update_attempt(**ids, status=status)
            return rollout.rollout_id

    @flow(name="test", persist_result=False)
    def collect(rollouts: list[str]) -> Experience:
        return collect_samples(look_up_rollouts(rollouts, SOME), failed="leave_out", served=None)

    good, bad = asyncio.run(run_agent("succeeded")), asyncio.run(run_agent("failed"))
    experience = collect([good, bad])
    assert (experience.num_samples, experience.left_out, experience.mean) == (1, {"failed": 1}, 2.0)
    assert connections.objects().get_json(experience.scores) == [2.0]

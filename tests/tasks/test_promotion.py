"""Promotion: which checkpoint the store's latest resources serve, on a real Prefect server, store and object store."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config import PromotionConfig, Run, RunInfo
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import EvalReport
from rollout_core.store import LLM

pytestmark = pytest.mark.server


@pytest.fixture
def in_flow(prefect_server):
    """Run a body inside a flow; returns its result."""
    from prefect import flow

    from flows.flow_run import recompute_missing

    def start(body):
        @flow(name="test-promotion", persist_result=False)
        def test_promotion():
            return recompute_missing(lambda journal: body(), Run(run=RunInfo(tags=("night", "tiny"))))

        return test_promotion()

    return start


def model_tree(folder: Path, text: str) -> ContentId:
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"]).put_tree(folder)


def report(model: ContentId, reward: float) -> EvalReport:
    blob = hash_bytes(b"none")
    return EvalReport(
        model=model, completions=blob, samples=blob, scores=blob, num_samples=4, mean_reward=reward, num_tokens=9
    )


def serve(resource: str, model: str) -> None:
    from tasks import connections

    async def add() -> None:
        async with connections.open_store() as store:
            await store.add_resources({resource: LLM(endpoint="", model=model, sampling_parameters={})})

    asyncio.run(add())


@pytest.mark.parametrize(
    ("before", "latest", "after", "tolerance", "promoted", "reason"),
    [
        (0.3, None, 0.3, 0.0, True, "held-out reward 0.3000 -> 0.3000"),
        (0.3, None, 0.29, 0.0, False, "it fell: held-out reward 0.3000 -> 0.2900"),
        (0.3, None, 0.29, 0.02, True, "held-out reward 0.3000 -> 0.2900"),
        (0.3, 0.8, 0.5, 0.0, False, "the latest model is better: held-out reward 0.8000 -> 0.5000"),
        (0.3, 0.4, 0.5, 0.0, True, "held-out reward 0.3000 -> 0.5000"),
        (0.6, 0.8, 0.5, 0.1, False, "the latest model is better: held-out reward 0.8000 -> 0.5000"),
    ],
)
def test_only_what_is_no_worse_becomes_latest(
    in_flow, tmp_path, request, before, latest, after, tolerance, promoted, reason
):
    from tasks.promotion import latest_model, promote

    resource = f"policy-{abs(hash(request.node.name))}"
    base, now, new = (model_tree(tmp_path / name, request.node.name + name) for name in ("base", "now", "new"))
    if latest is not None:
        serve(resource, now)
    served = in_flow(lambda: latest_model(resource).model)
    assert served == (None if latest is None else now)

    config = PromotionConfig(resource=resource, tolerance=tolerance)
    rival = None if latest is None else report(now, latest)
    promotion = in_flow(lambda: promote(report(base, before), rival, report(new, after), config))
    assert (promotion.promoted, promotion.reason) == (promoted, reason)
    assert in_flow(lambda: latest_model(resource).model) == (new if promoted else served)


def test_promotion_can_be_switched_off(in_flow, tmp_path):
    from tasks.promotion import latest_model, promote

    base, new = model_tree(tmp_path / "base", "base"), model_tree(tmp_path / "new", "new")
    config = PromotionConfig(resource="switched-off", enabled=False)
    promotion = in_flow(lambda: promote(report(base, 0.1), None, report(new, 0.9), config))
    assert not promotion.promoted and "switched off" in promotion.reason
    assert in_flow(lambda: latest_model("switched-off").model) is None


@pytest.mark.parametrize("model", ["org/somebody-elses", hash_bytes(b"weights that are gone")])
def test_a_latest_model_that_cannot_be_evaluated_is_no_rival(in_flow, model):
    from tasks.promotion import latest_model

    serve("foreign", model)
    assert in_flow(lambda: latest_model("foreign").model) is None


def test_promoting_one_model_leaves_the_other_resources(in_flow, tmp_path):
    from tasks.promotion import latest_model, promote

    serve("other", hash_bytes(b"other"))
    new = model_tree(tmp_path / "new", "new one")
    in_flow(lambda: promote(report(new, 0.1), None, report(new, 0.1), PromotionConfig(resource="mine")))

    async def names() -> set[str]:
        from tasks import connections

        async with connections.open_store() as store:
            latest = await store.get_latest_resources()
            return set(latest.resources) if latest else set()

    assert {"other", "mine"} <= asyncio.run(names())
    assert in_flow(lambda: latest_model("mine").model) == new


def test_a_flow_run_has_the_tags_of_its_configuration_and_its_stages_have_none(in_flow):
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.runtime import flow_run

    from tasks.promotion import latest_model

    def body() -> str:
        latest_model("tagged")
        latest_model("tagged")
        return str(flow_run.id)

    run_id = in_flow(body)
    with get_client(sync_client=True) as client:
        assert set(client.read_flow_run(run_id).tags) == {"night", "tiny"}
        stages = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))
    assert len(stages) == 2 and not any(stage.tags for stage in stages)

"""Promotion: which checkpoint the store's latest resources serve, on a real Prefect server, store and object store."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rollout_core.agents.adapters.ended import EndedRollout
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, canonical_json, hash_bytes
from rollout_core.config import PromotionConfig, Run, RunInfo
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import AgentRollouts, EvalReport
from rollout_core.promotion.guards import GuardReports
from rollout_core.store import LLM
from tests.support.evaluations import evaluation
from tests.support.task_runs import ended_task_runs

pytestmark = pytest.mark.server


@pytest.fixture
def in_flow(prefect_server):
    """Run a body inside a flow; returns its result."""
    from prefect import flow

    from tasks.runtime.flow_run import recompute_missing

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


def report(model: ContentId, *rewards: float) -> EvalReport:
    objects = ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])
    return evaluation(objects, model, *((f"prompt {place}", reward, 2, "stop") for place, reward in enumerate(rewards)))


def serve(resource: str, model: str) -> None:
    from tasks.runtime import connections

    async def add() -> None:
        async with connections.open_store() as store:
            await store.add_resources({resource: LLM(endpoint="", model=model, sampling_parameters={})})

    asyncio.run(add())


@pytest.mark.parametrize(
    ("before", "latest", "after", "tolerance", "promoted", "reason"),
    [
        (0.3, None, 0.31, 0.0, True, "held-out reward 0.3000 -> 0.3100"),
        (0.0, None, 0.0, 0.0, False, "it did not rise: held-out reward 0.0000 -> 0.0000"),
        (0.3, None, 0.3, 0.02, True, "held-out reward 0.3000 -> 0.3000"),
        (0.3, None, 0.29, 0.0, False, "it fell: held-out reward 0.3000 -> 0.2900"),
        (0.3, None, 0.29, 0.02, True, "held-out reward 0.3000 -> 0.2900"),
        (0.3, 0.8, 0.5, 0.0, False, "the latest model is better: held-out reward 0.8000 -> 0.5000"),
        (0.3, 0.5, 0.5, 0.0, False, "it is no better than the latest model: held-out reward 0.5000 -> 0.5000"),
        (0.3, 0.4, 0.5, 0.0, True, "held-out reward 0.3000 -> 0.5000"),
        (0.6, 0.8, 0.5, 0.1, False, "the latest model is better: held-out reward 0.8000 -> 0.5000"),
    ],
)
def test_only_what_is_better_becomes_latest(
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
    in_flow(lambda: promote(report(new, 0.1), None, report(new, 0.2), PromotionConfig(resource="mine")))

    async def names() -> set[str]:
        from tasks.runtime import connections

        async with connections.open_store() as store:
            latest = await store.get_latest_resources()
            return set(latest.resources) if latest else set()

    assert {"other", "mine"} <= asyncio.run(names())
    assert in_flow(lambda: latest_model("mine").model) == new


def test_the_evidence_is_in_the_record_the_history_and_the_prefect_ui(in_flow, tmp_path):
    from prefect import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
    from prefect.runtime import flow_run

    from rollout_core.promotion.history import history_of
    from tasks.promotion import promote

    base, new = model_tree(tmp_path / "base", "evidence base"), model_tree(tmp_path / "new", "evidence new")
    before, after = report(base, *[0.0] * 12), report(new, *[1.0] * 11, 0.0)
    guards = ({"kind": "length", "max_growth": 0.0}, {"kind": "prompts", "prompts": {"path": "other.jsonl"}})
    config = PromotionConfig.model_validate({"resource": "evident", "confidence": 0.9, "guards": guards})
    other = GuardReports(guard=1, before=report(base, 0.5), latest=None, after=report(new, 0.5))

    def body():
        return str(flow_run.id), promote(before, None, after, config, guarded=(other,))

    run_id, promotion = in_flow(body)
    assert promotion.promoted and promotion.reason.startswith("held-out reward 0.0000 -> 0.9167, gain 0.9167, 0.9 int")
    [comparison] = promotion.evidence.comparisons
    assert (comparison.rival, comparison.num_prompts) == (base, 12) and 0 < comparison.lower < 0.9167 < comparison.upper
    assert [guard.kind for guard in promotion.evidence.guards] == ["length", "prompts"]
    objects = ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])
    assert EvalReport.model_validate(objects.get_json(comparison.report)) == after
    assert EvalReport.model_validate(objects.get_json(comparison.report_of_rival)) == before
    [entry] = history_of(objects, "evident")
    assert (entry.by, entry.reason, entry.evidence) == (f"flow run {run_id}", promotion.reason, promotion.evidence)
    with get_client(sync_client=True) as client:
        own = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
        shown = {artifact.key: str(artifact.data) for artifact in client.read_artifacts(artifact_filter=own)}
    assert {"promotion", "promotion-evidence", "promotion-guards"} <= shown.keys()
    assert base.short in shown["promotion-evidence"] and "0.9167" in shown["promotion-evidence"]


def test_a_guard_with_nothing_to_look_at_is_an_error_and_no_pass(in_flow, tmp_path):
    from tasks.promotion import promote

    base, new = hash_bytes(b"base"), hash_bytes(b"new")
    guard = {"kind": "prompts", "prompts": {"path": "other.jsonl"}}
    config = PromotionConfig.model_validate({"guards": [guard]})
    with pytest.raises(ConfigError, match=r"promotion.guards.0 \(prompts\) has no evaluation to look at"):
        in_flow(lambda: promote(report(base, 0.1), None, report(new, 0.2), config))


def test_agents_tasks_are_compared_one_by_one(in_flow, tmp_path):
    from tasks.promotion import promote

    objects = ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])

    def rollouts(model: ContentId, *rewards: float | None) -> AgentRollouts:
        ended = [
            EndedRollout(f"{model[:8]}-{place}", "succeeded", None, reward) for place, reward in enumerate(rewards)
        ]
        return AgentRollouts(
            rollouts=objects.put_bytes(b"".join(canonical_json(vars(row)) + b"\n" for row in ended)),
            model=model,
            num_rollouts=len(ended),
            num_spans=0,
            statuses={"succeeded": len(ended)},
            num_rewards=sum(row.reward is not None for row in ended),
            mean_reward=sum(row.reward or 0.0 for row in ended) / len(ended),
        )

    new = model_tree(tmp_path / "new", "agents' new")
    config = PromotionConfig(resource="agent", confidence=0.95)
    before, unsure = [*[0.0, 1.0] * 5, None], [*[1.0, 0.0] * 4, 1.0, 1.0, None]
    refused = in_flow(lambda: promote(rollouts(new, *before), None, rollouts(new, *unsure), config))
    assert not refused.promoted and "the gain is not sure" in refused.reason
    sure = in_flow(lambda: promote(rollouts(new, *before), None, rollouts(new, *[1.0] * 11), config))
    assert sure.promoted and sure.evidence.comparisons[0].num_prompts == 11


def test_what_was_gone_back_from_is_not_promoted_again_by_the_next_night(in_flow, tmp_path):
    from tasks.promotion import latest_model, promote, roll_back

    first, second = model_tree(tmp_path / "first", "one"), model_tree(tmp_path / "second", "two")
    serve("nightly-model", first)
    config = PromotionConfig(resource="nightly-model")

    def night():
        return promote(report(first, 0.1), None, report(second, 0.5), config)

    assert in_flow(night).promoted

    def back_twice():
        """As `prefect flow-run retry` would."""
        return roll_back("nightly-model", None), roll_back("nightly-model", None)

    done, again = in_flow(back_twice)
    assert done.model == again.model == first and done.previous == second
    refused = in_flow(night)
    assert not refused.promoted and "rolled back from this model on" in refused.reason
    assert f"`rollout promote {second.short}`" in refused.reason
    assert in_flow(lambda: latest_model("nightly-model").model) == first


def test_a_night_does_not_replace_a_model_that_it_was_not_compared_with(in_flow, tmp_path):
    from tasks.promotion import latest_model, promote

    old, new, by_hand = (model_tree(tmp_path / name, name) for name in ("old", "new", "by hand"))
    config = PromotionConfig(resource="contested")
    serve("contested", old)

    def night():
        seen = latest_model("contested")
        serve("contested", by_hand)
        refused = promote(report(old, 0.1), None, report(new, 0.5), config, instead_of=seen.served)
        promoted = promote(report(old, 0.1), None, report(new, 0.5), config, instead_of=by_hand)
        again = promote(report(old, 0.1), None, report(new, 0.5), config, instead_of=by_hand)
        return refused, promoted, again

    refused, promoted, again = in_flow(night)
    assert not refused.promoted and refused.reason.endswith(
        f"the latest 'contested' has changed since it was compared ({old.short} -> {by_hand.short}); the next run "
        "compares it with that"
    )
    assert promoted.promoted and again.promoted, "also where it was promoted before its stage was killed"
    assert in_flow(lambda: latest_model("contested").model) == new


def test_nothing_is_taken_back_where_another_model_is_served_by_then(in_flow, tmp_path):
    from rollout_core.promotion.history import history_of
    from tasks.promotion import latest_model, promote, roll_back

    objects = ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])
    first, second, third = (model_tree(tmp_path / name, name) for name in ("first", "second", "third"))
    config = PromotionConfig(resource="held")

    def canary():
        for model in (second, third):
            assert promote(report(first, 0.1), None, report(model, 0.5), config).promoted
        return roll_back("held", None, reason="canary: it fell", instead_of=second)

    left = in_flow(canary)
    assert (left.model, left.previous) == (third, None) and left.reason.endswith("; nothing was taken back")
    assert in_flow(lambda: latest_model("held").model) == third
    assert [entry.action for entry in history_of(objects, "held")] == ["promote", "promote"]
    done = in_flow(lambda: roll_back("held", None, reason="canary: it fell", instead_of=third))
    assert (done.model, done.previous) == (second, third)


def test_a_model_that_was_gone_back_from_is_not_promoted_because_nobody_decided(in_flow, tmp_path, monkeypatch):
    from tasks import approval
    from tasks.approval import ask_a_person, decide
    from tasks.promotion import latest_model, promote, roll_back

    monkeypatch.setattr(approval, "DEPLOYMENT", "nobody/asks")
    start, new = (model_tree(tmp_path / name, name) for name in ("start", "new"))
    asked_for = PromotionConfig(approval="person", resource="undecided")

    def body():
        serve("undecided", start)
        promotion = promote(report(start, 0.1), None, report(new, 0.4), asked_for)
        asked = ask_a_person(promotion, start, "tiny", asked_for)
        by_hand = asked_for.model_copy(update={"approval": "evidence"})
        assert promote(report(start, 0.1), None, report(new, 0.4), by_hand).promoted
        roll_back("undecided", None, reason="it is rude")
        late = decide(asked.candidate, "approve", "time-out", "nobody decided")
        assert not late.promoted and "rolled back from this model on" in late.reason and "it is rude" in late.reason
        assert latest_model("undecided").model == start
        return decide(asked.candidate, "approve", "Ada", "", even_if_latest_has_changed=True)

    assert in_flow(body).promoted


def test_a_latest_model_whose_weights_are_gone_can_be_followed_by_what_a_person_approves(
    in_flow, tmp_path, monkeypatch
):
    from tasks import approval
    from tasks.approval import ask_a_person, decide
    from tasks.promotion import latest_model, promote

    monkeypatch.setattr(approval, "DEPLOYMENT", "nobody/asks")
    start, new = (model_tree(tmp_path / name, name) for name in ("start", "new"))
    config, gone = PromotionConfig(approval="person", resource="gone"), hash_bytes(b"weights that are gone")

    def body():
        serve("gone", gone)
        seen = latest_model("gone")
        assert (seen.model, seen.served) == (None, gone)
        promotion = promote(report(start, 0.1), None, report(new, 0.4), config, instead_of=seen.served)
        return decide(ask_a_person(promotion, seen.served, "tiny", config).candidate, "approve", "Ada", "")

    assert in_flow(body).promoted


def test_what_a_person_approves_is_promoted_unless_another_model_became_latest_meanwhile(
    in_flow, tmp_path, monkeypatch
):
    from rollout_core.promotion.candidates import file_candidate, read_candidate
    from tasks import approval
    from tasks.approval import ask_a_person, decide
    from tasks.promotion import latest_model, promote

    monkeypatch.setattr(approval, "DEPLOYMENT", "nobody/asks")  # another test may have deployed the one that does
    objects = ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])
    start, new, other = (model_tree(tmp_path / name, name) for name in ("start", "new", "other"))
    config = PromotionConfig(approval="person")

    def body():
        promotion = promote(report(start, 0.1), None, report(new, 0.4), config)
        assert (promotion.promoted, promotion.waits) == (False, True) and latest_model("policy").model is None
        asked = ask_a_person(promotion, None, "tiny", config)
        assert asked.flow_run is None and f"`rollout promote {new.short}` promotes it" in asked.line
        serve("policy", other)
        refused = decide(asked.candidate, "approve", "Ada", "")
        assert not refused.promoted and "has changed since it was compared (none -> " in refused.reason
        assert latest_model("policy").model == other
        done = decide(asked.candidate, "approve", "Ada", "", even_if_latest_has_changed=True)
        assert done.promoted and latest_model("policy").model == new
        served = promote(report(start, 0.1), None, report(new, 0.4), config)
        assert not served.waits and served.reason.endswith("it is the latest already")
        again = decide(asked.candidate, "approve", "Ada", "")
        assert again.promoted, "it was tried again after it was done"
        gone = read_candidate(objects, asked.candidate).model_copy(update={"model": ContentId("0" * 64)})
        with pytest.raises(Exception, match="the weights of 0000"):
            decide(file_candidate(objects, gone), "approve", "Ada", "")
        return promote(report(start, 0.1), None, report(start, 0.1), config)

    tie = in_flow(body)
    assert not tie.waits and "it did not rise" in tie.reason, "nobody is asked about what the evidence refuses"


def test_a_person_is_asked_again_about_a_model_once_another_one_is_latest(in_flow, tmp_path, monkeypatch):
    """Else one that was approved too late would be called rejected for good, which nobody has said."""
    from prefect import get_client

    from tasks import approval
    from tasks.promotion import promote

    monkeypatch.setattr(approval, "DEPLOYMENT", "asks/asks")
    start, new, other = (model_tree(tmp_path / name, name) for name in ("start", "new", "other"))
    config = PromotionConfig(approval="person")

    def body():
        with get_client(sync_client=True) as client:
            made = client.create_deployment(client.create_flow_from_name("asks"), name="asks")
            promotion = promote(report(start, 0.1), None, report(new, 0.4), config)
            served = (None, None, other, other)
            asked = [approval.ask_a_person(promotion, latest, "tiny", config).flow_run for latest in served]
            client.delete_deployment(made)
        return asked

    first, again, after, once_more = in_flow(body)
    assert first == again != after == once_more


def test_a_flow_run_has_the_tags_of_its_configuration_and_its_stages_have_none(in_flow):
    from prefect import get_client
    from prefect.runtime import flow_run

    from tasks.promotion import latest_model

    def body() -> str:
        latest_model("tagged")
        latest_model("tagged")
        return str(flow_run.id)

    run_id = in_flow(body)
    with get_client(sync_client=True) as client:
        assert set(client.read_flow_run(run_id).tags) == {"night", "tiny"}
    assert not any(stage.tags for stage in ended_task_runs(run_id, 2))

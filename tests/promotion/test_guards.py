"""What guards refuse, by evaluations made by hand."""

from __future__ import annotations

from typing import get_args

import pytest

from rollout_core.base.ids import hash_bytes
from rollout_core.config import FinishGuard, KLGuard, LengthGuard, PromptsGuard, RewardGuard
from rollout_core.config.promotion import Guard
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Divergence
from rollout_core.promotion.guards import GUARDS, GuardFinding, Measured, Moment, judge_guard
from tests.support.evaluations import evaluation

SOME = hash_bytes(b"some")


@pytest.fixture
def objects() -> ObjectStore:
    return ObjectStore.from_url("memory://guards")


def test_guards_refuse_what_the_reward_does_not_see(objects):
    old = evaluation(objects, SOME, ("a", 0.5, 10, "stop"), ("b", 0.5, 10, "stop"))
    new = evaluation(objects, hash_bytes(b"new"), ("a", 0.9, 16, "length"), ("b", 0.4, 8, "stop"))

    def judge(guard) -> list[GuardFinding]:
        return judge_guard(guard, Measured(objects, {"before": old}, new))

    [length] = judge(LengthGuard(kind="length", max_growth=0.2))
    assert length.passed and length.line == "mean completion 10.0 (before) -> 12.0 tokens, may grow by 20%"
    assert not judge(LengthGuard(kind="length", max_growth=0.1))[0].passed
    [finish] = judge(FinishGuard(kind="finish"))
    assert not finish.passed and finish.line.startswith("50.0% of completions are cut at max_tokens, at most 10.0%")
    assert judge(FinishGuard(kind="finish", max_truncated=0.5))[0].passed
    reward = {"kind": "exact_match"}
    assert judge(RewardGuard(kind="reward", reward=reward))[0].passed  # pyright: ignore[reportArgumentType]
    guard = RewardGuard(kind="reward", reward=reward, max_drop=0.1)  # pyright: ignore[reportArgumentType]
    swapped = judge_guard(guard, Measured(objects, {"latest": new}, old))
    assert not swapped[0].passed and "0.6500 (latest) -> 0.5000" in swapped[0].line
    regression = PromptsGuard(kind="prompts", prompts={"path": "other.jsonl"}, floor=0.7)  # pyright: ignore[reportArgumentType]
    assert [(item.passed, item.line) for item in judge(regression)] == [
        (True, "mean reward 0.5000 (before) -> 0.6500 on the prompts other.jsonl, may fall by 0"),
        (False, "mean reward 0.6500 on the prompts other.jsonl, at least 0.7 is asked for"),
    ]


def test_a_guard_of_the_divergence_refuses_with_the_figure(objects):
    found = Divergence(
        model=hash_bytes(b"new"), rival=SOME, num_tokens=40, num_completions=8, exact=0.05, k1=0.0625, k3=0.03
    )
    new = evaluation(objects, hash_bytes(b"new"), ("a", 0.5, 5, "stop"))

    def judge(guard: KLGuard, moment: Moment, found: Divergence) -> GuardFinding:
        [finding] = judge_guard(guard, Measured(objects, {}, new, {moment: found}))
        return finding

    finding = judge(KLGuard(kind="kl", max_kl=0.05), "before", found)
    assert finding.passed and finding.line == (
        f"KL divergence from the model before ({SOME.short}) 0.05 nats a token (exact; 0.25 a completion) over 40 "
        "held-out tokens, at most 0.05 is allowed"
    )
    refused = judge(KLGuard(kind="kl", max_kl=0.05, estimator="k1"), "latest", found)
    assert (
        not refused.passed and "from the latest model" in refused.line and "0.0625 nats a token (k1; " in refused.line
    )
    assert judge(KLGuard(kind="kl", max_kl=0.05, estimator="k3"), "latest", found).passed
    unlike = Divergence(model=hash_bytes(b"new"), rival=SOME, num_tokens=40, num_completions=8, problem="other tokens")
    refused = judge(KLGuard(kind="kl", max_kl=9.0), "latest", unlike)
    assert not refused.passed and refused.line.endswith("can be had: other tokens")


def test_every_guard_of_the_configuration_has_a_row():
    kinds = {guard: get_args(guard.model_fields["kind"].annotation) for guard in get_args(Guard)}
    assert kinds == {row.settings: (kind,) for kind, row in GUARDS.items()}

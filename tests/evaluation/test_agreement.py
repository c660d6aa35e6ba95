"""How a judge and people agree: against published figures, and against the definitions written out."""

from __future__ import annotations

import math
import random
import statistics
from itertools import combinations
from typing import Any

import pytest
from pydantic import ValidationError

from rollout_core.base.errors import ConfigError
from rollout_core.config import identity
from rollout_core.config.judges import JudgeReward
from rollout_core.evaluation.agreement import agreement
from rollout_core.evaluation.metrics import Metric, Z
from rollout_core.rewards.source_ids import source_id

COHEN = [(1.0, [88, 14, 18]), (0.5, [10, 40, 10]), (0.0, [2, 6, 12])]
"""Table 1 of Cohen (1960): of 200 people, what two judges made of each."""


def figures(*given: Any) -> dict[str, Metric]:
    return {metric.name: metric for metric in agreement(*given)}


def test_kappa_is_that_of_cohens_paper():
    judge, human = [], []
    for value, counts in COHEN:
        for other, count in zip((1.0, 0.5, 0.0), counts, strict=True):
            judge += [value] * count
            human += [other] * count
    found = figures("pairwise", judge, human)
    equal, kappa = found["human_agreement"], found["human_kappa"]
    assert (equal.value, round(kappa.value, 3), kappa.num_questions) == (0.7, 0.492, 200)
    assert kappa.upper is not None and round((kappa.upper - kappa.value) / Z, 3) == 0.055
    assert equal.lower is not None and round(equal.lower, 4) == 0.6332, "Wilson's interval"


def test_a_mean_of_votes_is_the_choice_of_its_side_and_a_person_who_never_varies_has_no_kappa():
    found = figures("pairwise", [0.75, 1.0, 0.5, 0.25], [1.0] * 4)
    assert found["human_agreement"].value == 0.5 and found["human_kappa"].value == 0.0
    assert list(figures("pairwise", [1.0, 1.0], [1.0, 1.0])) == ["human_agreement"]


def test_the_rank_correlation_is_the_published_one():
    iq = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110]
    hours = [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    found = figures("score", iq, hours)["human_spearman"]
    assert found.value == pytest.approx(-29 / 165) and found.num_questions == 10
    error = math.sqrt((1 + (29 / 165) ** 2 / 2) / 7)
    assert found.lower == pytest.approx(math.tanh(math.atanh(-29 / 165) - Z * error))
    assert found.upper == pytest.approx(math.tanh(math.atanh(-29 / 165) + Z * error))


def concordance(judge: list[float], human: list[float]) -> float:
    counts = []
    for (one, mine), (other, theirs) in combinations(zip(judge, human, strict=True), 2):
        if mine != theirs:
            counts.append(0.5 if one == other else float((one > other) == (mine > theirs)))
    return statistics.fmean(counts)


@pytest.mark.parametrize("count", [12, 700])
def test_pairs_in_the_same_order_are_counted_with_the_jackknifes_interval(count: int):
    chance = random.Random(3)
    human = [float(chance.randrange(5)) for _ in range(count)]
    judge = [float(round(value + chance.gauss(0, 1.5))) for value in human]
    found = figures("score", judge, human)["human_concordance"]
    assert found.value == pytest.approx(concordance(judge, human))
    if count > 100:  # more rows than are compared at once
        return
    left = [
        concordance(judge[:place] + judge[place + 1 :], human[:place] + human[place + 1 :]) for place in range(count)
    ]
    error = math.sqrt((count - 1) / count * math.fsum((value - statistics.fmean(left)) ** 2 for value in left))
    assert found.lower == pytest.approx(found.value - Z * error)


def test_what_nothing_can_be_said_of_is_left_out():
    assert figures("score", [1.0], [2.0]) == {} == figures("score", [1.0, 2.0], [3.0, 3.0])
    assert list(figures("score", [1.0, 1.0], [3.0, 4.0])) == ["human_concordance"]
    same = figures("score", [1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 9.0])
    assert same["human_spearman"].value == pytest.approx(1.0) and same["human_spearman"].lower is None
    assert same["human_concordance"].value == 1.0 and same["human_concordance"].lower is None


# In a judge's settings


def judge_of(**settings: Any) -> JudgeReward:
    return JudgeReward.model_validate({"judges": [{"url": "http://127.0.0.1:1/v1", "model": "m"}], **settings})


def test_a_persons_judgement_is_read_as_the_judges_is():
    score = judge_of(human_key="people", scale={"lowest": 1, "highest": 5})
    assert [score.human_judgement(row) for row in ({"people": 4}, {"people": None}, {})] == [4.0, None, None]
    pair = judge_of(human_key="people", mode="pairwise", reference_key="other")
    assert [pair.human_judgement({"people": one}) for one in ("completion", "reference", "tie")] == [1.0, 0.0, 0.5]
    for value in (0, 6, True, "4", float("nan")):
        with pytest.raises(ConfigError, match=r"people is .*; expected a number from 1 to 5"):
            score.human_judgement({"people": value})
    for value in ("A", 1, ["tie"]):
        with pytest.raises(ConfigError, match=r"people is .*; expected 'completion', 'reference' or 'tie'"):
            pair.human_judgement({"people": value})
    with pytest.raises(ValidationError, match="leave out human_key"):
        judge_of(human_key="people", mode="ranking")


def test_without_people_a_judge_has_the_id_that_it_had():
    assert "human_key" not in judge_of().cache_identity()
    assert source_id(judge_of(human_key="people")) != source_id(judge_of())
    assert identity(judge_of(human_key="people")) == {**identity(judge_of()), "human_key": "people"}

"""What turns of an episode earn by themselves: asked of the environment, stored, and given to learners."""

from __future__ import annotations

import pytest

from rollout_core.agents.adapters.span_samples import adapt_ended
from rollout_core.agents.adapters.token_sequences import SampleForm
from rollout_core.agents.emitters import find_final_reward, get_reward_value
from rollout_core.environments.transcripts import text_of, turns_of
from rollout_core.store import SqlLightningStore
from tests.environments.acting import Scene, called

GUESSES = '''
from rollout_core.environments import Done


class Env:
    """Wants 3, and rewards each turn by how near it comes."""

    def reset(self, row, seed):
        self.row, self.last = row, None
        return "a number?"

    def guess(self, number: int):
        """Guess it."""
        self.last = number
        return Done("right") if number == 3 else "no"

    def step(self, message):
        self.last = None
        return "call guess"

    async def turn_reward(self):
        if self.row["how"] != "well":
            return {"nan": float("nan"), "text": "0.5", "dict": {"a": 1.0}}[self.row["how"]]
        return None if self.last is None else -abs(self.last - 3) / 2

    def reward(self):
        return 1.0
'''
WELL = {"how": "well"}


def counts(text: str, seed: int) -> str:
    """Says a text, then guesses 1, 2 and 3."""
    turns = text.count("assistant: ")
    return "hm" if turns == 1 else called("guess", number=turns - 1)


async def test_a_turn_is_rewarded_once_its_answer_was_handled(scene: Scene):
    scene.write(GUESSES)
    tally = await scene.play(scene.engine(counts), [WELL])
    assert dict(tally.endings) == {"done": 1}
    spans = await scene.spans(WELL)
    given = [
        (span.attributes.get("rollout.episode.turn"), get_reward_value(span))
        for span in spans
        if span.name == "agentlightning.annotation"
    ]
    assert given == [(1, -1.0), (2, -0.5), (3, 0.0), (None, 1.0)]
    assert find_final_reward(spans) == 1.0
    turns = turns_of(spans)
    assert [turn.reward for turn in turns] == [None, -1.0, -0.5, 0.0]
    assert "[reward of this turn] -0.5\n[tool] no" in text_of(turns)
    [ended] = await scene.ended([WELL])
    assert ended.reward == 1.0


@pytest.mark.parametrize(("form", "turns"), [("trajectory", [[0, 1, 2, 3]]), ("transition", [[0], [1], [2], [3]])])
async def test_samples_say_what_each_turn_earned_where_credit_goes_by_turn(
    scene: Scene, form: SampleForm, turns: list[list[int]]
):
    scene.write(GUESSES)
    await scene.play(scene.engine(counts), [WELL])
    async with SqlLightningStore.from_url(scene.database) as store:
        ended = await scene.ended([WELL])
        by_turn = (await adapt_ended(store, scene.objects, ended, form=form, by_turn=True)).samples
        by_outcome = (await adapt_ended(store, scene.objects, ended, form=form)).samples
    for number, sample in enumerate(by_turn):
        assert sample.extras["turns"] == turns[number]
        assert sample.extras["turn_rewards"] == [None, -1.0, -0.5, 0.0]
    assert [set(sample.extras) for sample in by_outcome] == [{"model_ids", "part_rewards"}] * len(turns)
    # The outcome is that of the last turn, whatever turns earned by themselves.
    parts = [reward for sample in by_outcome for reward in sample.extras["part_rewards"]]
    assert parts == [None, None, None, 1.0] and {sample.reward for sample in by_outcome} == {1.0}


@pytest.mark.parametrize("how", ["nan", "text", "dict"])
async def test_what_is_no_finite_number_costs_an_attempt(scene: Scene, how: str):
    scene.write(GUESSES)
    tally = await scene.play(scene.engine(counts), [{"how": how}, WELL], max_attempts=2)
    assert (tally.failed, tally.attempts_failed) == (1, 2)
    assert tally.first_failure is not None and "turn_reward gave" in tally.first_failure
    assert "expected a finite number" in tally.first_failure


async def test_an_answer_that_was_cut_earns_nothing_by_itself(scene: Scene):
    scene.write(GUESSES)
    tally = await scene.play(scene.engine(lambda text, seed: "x" * 200), [WELL])
    assert dict(tally.endings) == {"length": 1}
    assert [turn.reward for turn in turns_of(await scene.spans(WELL))] == [None]

"""Scores are those of the code that their cache key names, on a real Prefect server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.config.rewards import CompositeReward, FunctionReward, WeightedReward
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Completions
from rollout_core.rewards import source_ids
from rollout_core.rewards.source_ids import source_id
from tests.support.task_runs import ended_task_runs

pytestmark = pytest.mark.server
SPEC = FunctionReward(callable="mine.py:reward")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def objects() -> ObjectStore:
    return ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])


def completions(text: str, count: int = 2) -> Completions:
    """Some, of which no store knows."""
    ids = [hash_bytes(f"{text} {number}".encode()) for number in range(count)]
    samples = [Sample(key, "2+2?", [1, 2], 0, f"row-{number}", {}) for number, key in enumerate(ids)]
    made = [Completion(key, [3], [-0.5], text, "stop") for key in ids]
    return Completions(
        completions=objects().put_bytes(b"".join(map(encode_completion, made))),
        samples=objects().put_bytes(encode_samples(samples)),
        model=hash_bytes(b"model"),
        num_samples=count,
        num_tokens=count,
        finish_reasons={"stop": count},
    )


@pytest.fixture
def scored(prefect_server: str):
    """Score in a flow of its own."""
    from prefect import flow

    from rollout_core.rewards.kept import close_rewards
    from tasks.score import score_rewards

    def start(given: Completions, source: ContentId) -> list[float]:
        @flow(name="test-score", persist_result=False)
        def test_score() -> list[float]:
            return json.loads(objects().get_bytes(score_rewards(given, SPEC, source).scores))

        return test_score()

    yield start
    close_rewards()


def write(value: float, helper: float = 1.0) -> None:
    Path("mine.py").write_text(f"from helper_of_stage import H\ndef reward(sample): return {value} * H\n")
    Path("helper_of_stage.py").write_text(f"H = {helper}\n")


@pytest.mark.parametrize("change", [(2.0, 1.0), (1.0, 2.0)], ids=["the file", "a module it imports"])
def test_a_reward_edited_while_a_run_goes_scores_as_it_was(scored, change):
    given = completions("4")
    write(1.0)
    first = source_id(SPEC)
    write(*change)
    assert scored(given, first) == [1.0, 1.0]
    assert scored(given, source_id(SPEC)) == [2.0, 2.0]
    write(1.0)
    assert scored(given, source_id(SPEC)) == [1.0, 1.0]


def test_where_the_code_of_the_id_is_gone_the_stage_fails_and_stores_nothing(scored, monkeypatch):
    """As on another machine, or in a process that goes on with the work of one that ended."""
    given = completions("5")
    write(1.0)
    first = source_id(SPEC)
    monkeypatch.setattr(source_ids, "_held", {})
    write(2.0)
    with pytest.raises(ConfigError, match=r"the code of reward mine\.py:reward is not what it was when the run began"):
        scored(given, first)
    write(1.0)
    assert scored(given, first) == [1.0, 1.0], "the scores of the other code are not found"


def test_a_reward_that_ends_its_process_fails_its_stage_and_the_next_goes_on(scored):
    given = completions("6")
    Path("mine.py").write_text(
        "import os\ndef reward(sample):\n    if sample.id == 'row-1': os._exit(0)\n    return 1\n"
    )
    with pytest.raises(Fatal, match=r"reward mine\.py:reward failed on sample 1 \(row-1\): it ended its process"):
        scored(given, source_id(SPEC))
    write(3.0)
    assert scored(given, source_id(SPEC)) == [3.0, 3.0]


ABSTAINS = """
def reward(sample):
    number = int(sample.id.removeprefix("row-"))
    return [1.0, None, float("nan"), 4.0][number] if number < 4 else 1.0
"""


def test_completions_without_a_score_are_counted_and_in_no_mean(prefect_server):
    """Of 10 one has None and one NaN: the mean of 4 and seven times 1 is 11 / 8."""
    from prefect import flow

    from rollout_core.objects.records import Scores, SelectedGroups
    from rollout_core.rewards.kept import close_rewards
    from tasks.score import score_rewards, select_groups

    Path("mine.py").write_text(ABSTAINS)
    parts = (WeightedReward(weight=2.0, reward=SPEC), WeightedReward(weight=1.0, reward=SPEC))
    both = CompositeReward(parts=parts)

    @flow(name="test-score", persist_result=False)
    def test_score(share: float) -> tuple[Scores, Scores, SelectedGroups]:
        given, spec = completions("8", 10), SPEC.model_copy(update={"max_failed_share": share})
        alone = score_rewards(given, spec, source_id(spec))
        summed = score_rewards(given, both, source_id(both), by_part=True)
        kept = select_groups((alone,), (given.samples,), group_size=2, wanted=5)
        return alone, summed, kept

    alone, summed, kept = test_score(0.1)
    failed = test_score(0.05, return_state=True)
    close_rewards()
    assert objects().get_json(alone.scores) == [1.0, None, None, 4.0] + [1.0] * 6
    assert (alone.num_abstained, alone.num_reward_failed, alone.mean) == (1, 1, 11 / 8)
    assert objects().get_json(summed.scores) == [3.0, None, None, 12.0] + [3.0] * 6
    assert objects().get_json(summed.parts)["values"][:3] == [[1.0, 1.0], [None, None], [None, None]]
    assert (kept.num_groups, kept.num_drawn, kept.mean_drawn) == (0, 5, 11 / 8), "one score makes no difference"
    assert (kept.as_scores().num_abstained, kept.as_scores().num_reward_failed) == (1, 1)
    with pytest.raises(Fatal, match=r"reward mine\.py:reward returned nan for sample 2 \(row-2\)"):
        failed.result()


def test_a_reward_that_abstains_from_all_fails_its_stage(scored):
    Path("mine.py").write_text("def reward(sample): return None\n")
    with pytest.raises(Fatal, match=r"gave none of 2 completions a score: it abstained on 2; expected a number"):
        scored(completions("9"), source_id(SPEC))


@pytest.mark.parametrize("in_process", [False, True])
def test_a_reward_whose_error_cannot_be_encoded_fails_its_run_like_any_other(prefect_server, in_process, capfd):
    """A reply cut in the middle of a character is enough; the run must not stay Running for ever."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.logging.handlers import APILogHandler

    from rollout_core.rewards.kept import close_rewards
    from tasks.score import score_rewards

    Path("mine.py").write_text("def reward(sample): raise ValueError('half a \\ud83d')\n")
    spec = FunctionReward(callable="mine.py:reward", in_process=in_process)

    @flow(name="test-score", persist_result=False)
    def test_score() -> None:
        score_rewards(completions("7"), spec, source_id(spec))

    state = test_score(return_state=True)
    close_rewards()
    APILogHandler().flush()
    with pytest.raises(Fatal, match=r"reward mine\.py:reward failed on sample 0 \(row-0\): ValueError: half a"):
        state.result()
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(state.state_details.flow_run_id)
        assert run.state is not None and run.state.is_failed()
    [task] = ended_task_runs(run.id, 1)
    assert task.state.is_failed()
    assert "Error logging to API" not in capfd.readouterr().err

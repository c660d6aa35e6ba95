"""Training in the log, for who has no terminal."""

from __future__ import annotations

import logging

from tasks.runtime import journal as logs
from tasks.runtime.journal import Journal, StageEntry, StepLog, log_iteration


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "rollout"]


def test_first_and_last_step_and_evaluations_have_lines_and_others_one_in_an_interval(caplog, monkeypatch):
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    log = StepLog("SFT nightly")
    with caplog.at_level(logging.INFO, logger="rollout"):
        for step in range(1, 11):
            now = 100.0 + 10 * step
            evaluated = {"eval_loss": 0.5} if step == 3 else {}
            log.note({"step": step, "loss": 1.0 / step, "learning_rate": 1e-3, **evaluated}, 10)
    assert lines(caplog) == [
        "SFT nightly: step 1 of 10: loss 1, learning rate 0.001",
        "SFT nightly: step 3 of 10: loss 0.3333, learning rate 0.001, eval_loss 0.5, 0:01:10 left",
        "SFT nightly: step 6 of 10: loss 0.1667, learning rate 0.001, 0:00:40 left",
        "SFT nightly: step 9 of 10: loss 0.1111, learning rate 0.001, 0:00:10 left",
        "SFT nightly: step 10 of 10: loss 0.1, learning rate 0.001",
    ]


def test_an_iteration_is_one_line_with_reward_kl_entropy_length_and_value_loss(caplog):
    summary = {
        "loss": 0.25,
        "reward": 0.4125,
        "objective/kl": 0.0123,
        "entropy": 1.5,
        "completions/mean_length": 9.75,
        "value_loss": 0.03,
        "policy_loss": -0.1,
    }
    with caplog.at_level(logging.INFO, logger="rollout"):
        log_iteration("PPO iteration 2 of 4", summary)
    assert lines(caplog) == [
        "PPO iteration 2 of 4: reward 0.4125, KL to the reference 0.0123, entropy 1.5, length 9.75, value loss 0.03, "
        "loss 0.25"
    ]


def test_the_time_of_shards_beside_each_other_counts_once_and_what_was_cached_counts_nothing(monkeypatch):
    journal, now = Journal(), 0.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    for ended, seconds, state in [
        (6.0, 1.0, "Completed"),
        (7.0, 3.0, "Completed"),  # from 4 to 7, around the one before
        (8.0, 2.0, "Failed"),  # from 6 to 8
        (9.0, 5.0, "Cached"),
        (20.0, 10.0, "Checked"),
        (30.0, 2.5, "Completed"),
    ]:
        now = ended
        journal.add(StageEntry("infer_shard", "", state, seconds, (), ()))
    [totals] = journal.totals.values()
    assert totals.seconds == 4.0 + 2.5
    assert totals.calls == {"Completed": 3, "Failed": 1, "Cached": 1, "Checked": 1}
    for number in range(3000):
        now = 100.0 + number
        journal.add(StageEntry("infer_shard", "", "Completed", 0.5, (), ()))
    assert totals.seconds == 6.5 + 1500


def test_how_long_the_rest_takes_is_said_once_enough_is_done(monkeypatch):
    moments = iter(range(0, 1000, 10))
    monkeypatch.setattr(logs.time, "monotonic", lambda: float(next(moments)))
    pace, said = logs.Pace(), []
    for done in (0, 1, 7, 8, 512):
        pace.note(done)
        said.append(pace.left(512))
    assert said == ["", "", "", "0:31:30 left", ""]  # 8 in 30 s, of 512; not of the first one in 10 s

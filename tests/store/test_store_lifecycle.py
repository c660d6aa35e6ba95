"""The status machine by itself: its tables whole, and its decisions as properties."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
from hypothesis import given, settings, strategies as st

from rollout_core.store import (
    AttemptStatus,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    is_finished,
    is_queuing,
    is_running,
    lifecycle as life,
)

ATTEMPT_STATUSES = get_args(AttemptStatus)
ROLLOUT_STATUSES = get_args(RolloutStatus)

times = st.floats(min_value=0, max_value=1e10)
limits = st.none() | st.floats(min_value=0, max_value=1e6)
configs = st.builds(
    RolloutConfig,
    timeout_seconds=limits,
    unresponsive_seconds=limits,
    max_attempts=st.integers(1, 4),
    retry_condition=st.lists(st.sampled_from(["failed", "timeout", "unresponsive"]), unique=True),
)


def test_every_status_is_queued_running_or_finished():
    for status in ROLLOUT_STATUSES:
        rollout = Rollout(rollout_id="r", input=None, start_time=0, status=status)
        assert [is_queuing(rollout), is_running(rollout), is_finished(rollout)].count(True) == 1


def test_every_table_has_every_attempt_status():
    assert set(life.ROLLOUT_FOLLOWS) == set(life.WORKER_AFTER_ATTEMPT) == set(ATTEMPT_STATUSES)
    assert set(ROLLOUT_STATUSES) == life.ANY


# Rows: status of the latest attempt. What the rollout becomes if it was queuing, requeuing, preparing, running,
# succeeded, failed or cancelled; "." means it stays. Retries are off here.
@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        ("preparing", "preparing preparing . . . . ."),
        ("running", "running running running . . . ."),
        ("succeeded", "succeeded " * 7),
        ("failed", "failed " * 7),
        ("timeout", "failed " * 7),
        ("unresponsive", "failed " * 7),
    ],
)
def test_the_rollout_follows_its_latest_attempt_as_documented(attempt, expected):
    before = ["queuing", "requeuing", "preparing", "running", "succeeded", "failed", "cancelled"]
    after = [life.rollout_status_after(status, attempt, 1, RolloutConfig()) for status in before]
    assert after == [status if new == "." else new for status, new in zip(before, expected.split(), strict=True)]


@settings(deadline=None)
@given(rollout=st.sampled_from(ROLLOUT_STATUSES), number=st.integers(1, 5), config=configs)
def test_a_lost_or_failed_attempt_is_retried_exactly_when_the_config_says_so(rollout, number, config):
    for status in ("failed", "timeout", "unresponsive"):
        retry = status in config.retry_condition and number < config.max_attempts
        assert life.rollout_status_after(rollout, status, number, config) == ("requeuing" if retry else "failed")


@settings(deadline=None)
@given(config=configs, start=times, silence=st.none() | times, now=times)
def test_nothing_is_lost_before_its_alarm(config, start, silence, now):
    heartbeat = None if silence is None else start + silence
    if life.lost_status(config, start, heartbeat, now) is not None:
        alarm = life.due_time(config, start, heartbeat)
        assert alarm is not None and alarm <= now


@settings(deadline=None)
@given(config=configs, start=times, first=times, later=times)
def test_a_later_heartbeat_never_brings_the_alarm_forward(config, start, first, later):
    heartbeat = start + first
    early, late = life.due_time(config, start, heartbeat), life.due_time(config, start, heartbeat + later)
    assert (early is None) == (late is None)
    assert early is None or early <= late


@settings(deadline=None)
@given(config=configs, start=times, now=times)
def test_an_attempt_without_limits_is_never_lost(config, start, now):
    free = config.model_copy(update={"timeout_seconds": None, "unresponsive_seconds": None})
    assert life.lost_status(free, start, None, now) is None
    assert life.due_time(free, start, None) is None


def test_the_fence_lets_only_the_live_latest_attempt_of_an_open_rollout_through():
    for attempt, rollout in product(ATTEMPT_STATUSES, ROLLOUT_STATUSES):
        open_ = attempt in ("preparing", "running", "unresponsive") and rollout not in life.FINISHED
        assert (life.fence("a", "a", attempt, rollout) is None) == open_
        assert life.fence("a", "b", attempt, rollout) is not None


@settings(deadline=None)
@given(status=st.sampled_from(ATTEMPT_STATUSES), previous=st.none() | times, now=times)
def test_end_times_mark_ends_and_keep_the_first(status, previous, now):
    end = life.attempt_end_time(status, previous, now)
    assert end == (None if status not in ("succeeded", "failed") else now if previous is None else previous)
    for rollout in ROLLOUT_STATUSES:
        assert (life.rollout_end_time(rollout, previous, now) is not None) == (rollout in life.FINISHED)

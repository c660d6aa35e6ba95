"""What a person sees of a batch: speed of late, and samples that this run made apart from those it found."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_core.base.ids import hash_bytes
from rollout_core.config import InferBatchConfig, parse_config
from rollout_core.inference.batch import Progress, Work
from rollout_core.inference.batch_runs import RunWork, Tally, closing_figures
from rollout_core.objects.records import ShardCompletions
from tasks.runtime.journal import SPEED_SECONDS, Speed


def test_speed_counts_from_the_first_sample_and_forgets_what_is_long_ago():
    speed = Speed()
    assert speed.per_second == (0.0, 0.0)
    for second in range(20):
        speed.note(second, 0, 0)  # the engine starts
    speed.note(20.0, 100, 1000)
    assert speed.per_second == (100.0, 1000.0)
    for second in range(21, 21 + int(2 * SPEED_SECONDS)):
        speed.note(second, 100 + 10 * (second - 20), 1000 + 20 * (second - 20))
    assert speed.per_second == pytest.approx((10.0, 20.0))


def test_samples_that_were_done_before_are_told_apart():
    tally = Tally()
    tally.note("a", Progress(done=30, total=40, tokens=0))
    tally.note("a", Progress(done=35, total=40, tokens=50))
    tally.note("b", Progress(done=40, total=40, tokens=0))
    assert tally.earlier == 70 and tally.total().done - tally.earlier == 5


def test_the_closing_figures_add_up_over_shards():
    document = {"model": {"uri": "m"}, "sampling": {}, "input": {"glob": "x"}, "output": {"dir": "o"}}
    config = parse_config(document, InferBatchConfig, overrides={"workers.price_per_hour": 3.6})

    def shard(**fields: Any) -> ShardCompletions:
        blank = hash_bytes(b"")
        counts = {"num_passing": 0, "num_prompt_tokens": 10, "lengths": (0,)}
        return ShardCompletions(completions=blank, rows=blank, model=blank, **{**counts, **fields})

    records = [
        shard(num_samples=3, num_failed=1, num_tokens=20, finish_reasons={"stop": 2, "error": 1}),
        shard(num_samples=2, num_failed=0, num_tokens=30, finish_reasons={"stop": 1, "length": 1}),
    ]
    work = RunWork.of(Work(samples=2, tokens=30, latencies=[0.5, 1.0]), started=100.0, ended=110.0)
    figures = closing_figures(config, records, work, workers=2.5)
    assert {name: figures[name] for name in ("samples", "failed", "prompt tokens", "completion tokens")} == {
        "samples": 5,
        "failed": 1,
        "prompt tokens": 20,
        "completion tokens": 50,
    }
    assert (figures["finish: stop"], figures["finish: length"], figures["finish: error"]) == (3, 1, 1)
    assert (figures["generated now"], figures["samples/s"], figures["tokens/s"]) == (2, 0.2, 3.0)
    assert figures["latency, 99% of samples (s)"] == pytest.approx(1.0, rel=0.13)
    assert figures["cost per million tokens"] == pytest.approx(2.5e6 * 0.01 / 30, rel=1e-3)


def test_the_wait_for_an_engine_is_no_part_of_the_time_of_generation():
    config = parse_config(
        {"model": {"uri": "m"}, "sampling": {}, "input": {"glob": "x"}, "output": {"dir": "o"}}, InferBatchConfig
    )
    total = RunWork()
    # Two shards wait for the same start of 200 s, a third comes later.
    for waited, started, ended in ((200.0, 1000.0, 1205.0), (200.0, 1000.0, 1208.0), (0.0, 1206.0, 1210.0)):
        total.add(RunWork.of(Work(samples=1, tokens=100, waited_seconds=waited), started, ended))
    figures = closing_figures(config, [], total, workers=1)
    assert (figures["seconds, without the engine's start"], figures["tokens/s"]) == (10.0, 30.0)

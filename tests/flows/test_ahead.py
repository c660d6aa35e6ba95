"""Samples drawn ahead of training: by which weights, beside what, and that a killed run comes to the same bytes; with
easy prompts first, and samples that are learned from again."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.base.stopping import raise_if_stopping
from rollout_core.config import GRPOSettings, ImportanceCorrection, TrainGRPOConfig, parse_config
from rollout_core.data.replay import buffer_behind
from rollout_core.objects.lineage import trace_lineage
from rollout_core.objects.snapshots import RUN_NAME, SnapshotStore
from tasks.runtime.iterations import SamplesAhead
from tests.flows.conftest import finished_samples, objects, small_grpo, wait_for, write_toml
from tests.flows.test_resume import ROLLOUT, kill

MEASURED = 64 * 2
FIRST = MEASURED + 40 * 4 - 40 * 2
"""Samples of the curriculum and the first iteration, which takes those that are there already."""
SECOND = 32 * 2
"""At least so many more are of the second."""


def model(name: object) -> ContentId:
    return hash_bytes(str(name).encode())


@pytest.mark.parametrize(
    ("depth", "drawn_by"),
    [
        (0, "start 2 3 4 5"),
        (1, "start start 2 3 4"),
        (2, "start start start 2 3"),
        (9, "start start start start start"),
    ],
)
def test_which_weights_draw_follows_from_the_depth_alone(depth: int, drawn_by: str):
    def draw(number: int, weights: ContentId) -> tuple[int, ContentId]:
        return number, weights

    numbers, found = range(2, 7), []
    with SamplesAhead(draw, numbers, depth=depth, start=model("start")) as sampler:
        for number in numbers:
            found.append(sampler.take(number))
            sampler.learned(number, model(number))
    assert found == list(zip(numbers, map(model, drawn_by.split()), strict=True))


def test_later_samples_are_drawn_while_one_trains():
    second = threading.Event()

    def draw(number: int, weights: ContentId) -> int:
        if number == 1:
            second.set()
        return number

    with SamplesAhead(draw, range(3), depth=1, start=model("start")) as sampler:
        assert sampler.take(0) == 0
        assert second.wait(120), "asked for before the first iteration has ended"
        sampler.learned(0, model(0))
        assert [sampler.take(1), sampler.take(2)] == [1, 2]


def test_what_failed_is_raised_where_it_is_taken_and_what_is_under_way_is_given_up():
    begun: list[int] = []

    def draw(number: int, weights: ContentId) -> None:
        begun.append(number)
        if number == 0:
            raise ValueError("no engine")
        while True:
            raise_if_stopping("generation")
            time.sleep(0.01)

    with (
        pytest.raises(ValueError, match="no engine"),
        SamplesAhead(draw, range(9), depth=4, start=model("s")) as sampler,
    ):
        sampler.take(0)
    assert begun in ([0], [0, 1])


def test_a_correction_is_the_default_where_samples_are_drawn_ahead():
    fields = {"prompts": {"path": "x"}, "optimizer": {"lr": 1e-4}}
    assert GRPOSettings.model_validate(fields).correction is None
    ahead = GRPOSettings.model_validate({**fields, "async_depth": 1})
    assert ahead.correction == ImportanceCorrection() and ahead.has_own_processes
    own = GRPOSettings.model_validate({**fields, "async_depth": 1, "correction": {"cap": 4.0}})
    assert own.correction == ImportanceCorrection(cap=4.0)
    plain = GRPOSettings.model_validate({**fields, "correction": {}})
    assert ahead.cache_identity() == plain.cache_identity(), "an update of the same samples is the same update"


def grpo(tiny_model: Path, sorting_task: Any, depth: int) -> dict[str, Any]:
    return small_grpo(
        tiny_model,
        sorting_task,
        "ahead",
        async_depth=depth,
        iterations=2,
        prompts_per_iteration=40,
        samples_per_prompt=4,
        curriculum={"by": "reward", "samples": 2, "initial": 0.75, "until": 1.0},
        replay={"groups": 8},
        epochs=2,
        minibatch_size=40,
        correction={"cap": 2.0, "floor": 0.5},
        sampling={"max_tokens": 14},
        optimizer={"lr": 1e-3},
        snapshots={"every_steps": 1},
    )


def models_of(last: str) -> tuple[str, set[ContentId]]:
    """The last model of a run, and those that its updates started from."""
    made = [item for item in trace_lineage(objects(), ContentId(last)) if item.stage == "grpo_update"]
    return last, {item.inputs["model"] for item in made}


def words_of(process: psutil.Process) -> str:
    """Its command line; nothing of one that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


@pytest.mark.server
def test_killed_while_it_samples_beside_an_update_a_run_comes_to_the_same_bytes(
    tiny_model, sorting_task, tmp_path, start_process, prefect_server, monkeypatch
):
    from flows.train import train_grpo

    document = grpo(tiny_model, sorting_task, depth=1)
    config = parse_config(document, TrainGRPOConfig)
    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'undisturbed'}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / 'undisturbed.db'}")
    finished = train_grpo(config)
    expected = models_of(finished["model"])
    buffers = SnapshotStore(objects()).list(kind="buffer")
    assert [(buffer.step, buffer.algorithm, buffer.meta[RUN_NAME]) for buffer in buffers] == [
        (2, "grpo", "ahead"),
        (1, "grpo", "ahead"),
    ]
    assert buffer_behind(objects(), ContentId(finished["train_state"])) == buffers[0].id, "what --resume takes up"
    assert len(expected[1] - {expected[0]}) == 2, "each of the two updates has changed the weights"

    monkeypatch.setenv("ROLLOUT_STORAGE", f"file://{tmp_path / 'killed'}")
    monkeypatch.setenv("ROLLOUT_DATABASE", f"sqlite:///{tmp_path / 'killed.db'}")
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "killed-cache"))
    # The process beside takes up what it left itself.
    document["algorithm"] |= {"state_every": 2, "store_models": "with_states"}
    command = ("train", "grpo", "--config", str(write_toml(tmp_path / "ahead.toml", document)))
    killed = start_process(*ROLLOUT, *command, env={"PREFECT_API_URL": prefect_server})

    def samples_beside_an_update() -> bool:
        learners = [child for child in psutil.Process(killed.pid).children() if "rank" in words_of(child)]
        return bool(learners) and FIRST < finished_samples() < FIRST + SECOND

    wait_for(samples_beside_an_update, "the second iteration's samples, beside the first's update", process=killed)
    kill(killed)
    again = train_grpo(parse_config(document, TrainGRPOConfig))
    assert models_of(again["model"]) == expected and again["train_state"] == finished["train_state"]
    stored = [state.step for state in SnapshotStore(objects()).list(kind="train_state")]
    assert min(stored) > finished["step"] / 2, "none of the first iteration"
    present = [objects().tree_is_present(model) for model in expected[1] - {expected[0]}]
    assert sorted(present) == [False, True], "nor its model, but the one to begin with"
    assert [buffer.id for buffer in SnapshotStore(objects()).list(kind="buffer")] == [buffer.id for buffer in buffers]

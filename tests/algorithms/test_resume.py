"""An update that was interrupted anywhere, also by kill -9, ends in the very bytes of an undisturbed one."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from updates import ON_POLICY, UPDATES, StepCounter, sft_settings, update_context

from rollout_core.algorithms.dataset_updates import sft_update
from rollout_core.base.errors import Fatal
from rollout_core.config import OptimizerConfig, SnapshotPolicy
from rollout_core.objects.records import Checkpoint
from rollout_core.objects.snapshots import FINISHED, SnapshotStore

PROJECT = Path(__file__).parents[2]


class Interrupted(Exception):
    pass


class Undisturbed(dict[str, Checkpoint]):
    """The outcome of each update when nothing happens to it, computed once."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model

    def __missing__(self, name: str) -> Checkpoint:
        self[name] = UPDATES[name](update_context(self.folder / name), self.model)
        return self[name]


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"), tiny_model)


def disturb() -> None:
    """What other threads of a process do to the global generators must not matter."""
    random.random()
    np.random.rand()
    torch.rand(1)


def started(folder: Path, model: Path, name: str) -> tuple[Checkpoint, list[int]]:
    """Outcome of an update, and the step each part of it starts at."""
    steps: list[int] = []
    place = update_context(folder, on_start=lambda first, last: steps.append(first))
    return UPDATES[name](place, model), steps


def check_resumed(name: str, steps: list[int], last: int) -> None:
    """The part that was interrupted in step ``last`` goes on after its start; parts before it are not trained again."""
    if name in ON_POLICY and last > 6:
        assert steps[0] == 6, "the first iteration is done"
        steps, last = steps[1:], last - 6
    assert 0 < steps[0] <= last


@pytest.mark.parametrize(
    ("name", "stop_after"), [("sft", 1), ("sft", 3), ("sft", 6), ("sgd", 3), ("ppo", 3), ("ppo", 7), ("ppo", 10)]
)
def test_an_interrupted_update_ends_in_the_same_record(
    undisturbed: Undisturbed, tiny_model: Path, tmp_path: Path, name: str, stop_after: int
):
    def stop() -> None:
        disturb()
        raise Interrupted

    with pytest.raises(Interrupted):
        UPDATES[name](update_context(tmp_path, on_step=StepCounter(stop_after, stop)), tiny_model)
    disturb()
    checkpoint, steps = started(tmp_path, tiny_model, name)
    assert checkpoint == undisturbed[name]
    assert sum(steps) <= stop_after


OFTEN = ("sft", "sft-lora", "dpo", "ppo", "grpo")
"""Whose processes `make test` kills; `make campaigns` kills those of each update."""
BY_STEP = [
    name if name in OFTEN else pytest.param(name, marks=pytest.mark.campaign) for name in UPDATES if name != "sgd"
]
IN_WRITE = [(name, moment) for name in ("sft", "dpo", "grpo") for moment in ("files", "filed")]


def killed_at(name: str) -> int:
    """PPO and GRPO are killed in the second epoch of their second iteration."""
    return 9 if name in ON_POLICY else 5


@pytest.fixture(scope="module")
def killed(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Folder of an update whose process was killed at a moment."""
    folder = tmp_path_factory.mktemp("killed")
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    jobs = [
        f"{name}:{item.callspec.params['moment']}:2"
        if "moment" in item.callspec.params
        else f"{name}:step:{killed_at(name)}"
        for item in here
        if "killed" in item.fixturenames and (name := item.callspec.params["name"])
    ]
    script = str(Path(__file__).with_name("updates.py"))
    done = subprocess.run(
        [sys.executable, script, str(folder), str(tiny_model), *jobs],
        cwd=PROJECT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])

    def folder_of(name: str, moment: str) -> Path:
        assert ended[f"{name}-{moment}"] == -signal.SIGKILL, done.stderr
        return folder / f"{name}-{moment}"

    return folder_of


@pytest.mark.parametrize("name", BY_STEP)
def test_killed_and_taken_up_by_another_process_it_ends_in_the_same_record(
    undisturbed: Undisturbed, tiny_model: Path, killed: Callable[[str, str], Path], name: str
):
    """Equal records name equal snapshots, byte for byte."""
    checkpoint, steps = started(killed(name, "step"), tiny_model, name)
    assert checkpoint == undisturbed[name]
    check_resumed(name, steps, killed_at(name))


@pytest.mark.parametrize(("name", "moment"), IN_WRITE)
def test_killed_while_a_snapshot_is_written_it_goes_on_from_the_one_before(
    undisturbed: Undisturbed, tiny_model: Path, killed: Callable[[str, str], Path], name: str, moment: str
):
    place = update_context(folder := killed(name, moment))
    [(_, before)] = place.objects.list_refs("progress")
    step = SnapshotStore(place.objects).get(before).step
    checkpoint, steps = started(folder, tiny_model, name)
    assert checkpoint == undisturbed[name]
    assert steps[0] == step > 0


def test_a_finished_update_whose_record_was_lost_trains_no_step_again(
    undisturbed: Undisturbed, tiny_model: Path, tmp_path: Path
):
    started(tmp_path, tiny_model, "ppo")
    assert started(tmp_path, tiny_model, "ppo") == (undisturbed["ppo"], [6, 6])
    finished = [item for item in SnapshotStore(update_context(tmp_path).objects).list() if item.label == FINISHED]
    assert [item.step for item in finished] == [12, 6], "the second iteration pruned only what led to the first"


def test_a_loss_that_is_not_finite_is_fatal_and_the_last_good_state_stays(tiny_model: Path, tmp_path: Path):
    """The rate is so large that the first step leaves finite weights, and they a gradient that is not."""
    settings = sft_settings(
        optimizer=OptimizerConfig(kind="sgd", lr=1e30, max_grad_norm=1e9), snapshots=SnapshotPolicy(every_steps=1)
    )
    steps: list[int] = []
    place = update_context(tmp_path, on_start=lambda first, last: steps.append(first))
    model = place.objects.put_tree(tiny_model)
    dataset = place.objects.put_bytes(b'{"prompt":"sort 2 1 =","completion":" 1 2"}\n')
    for _ in range(2):
        with pytest.raises(
            Fatal, match=r"^sft step 2: loss .*, gradient norm nan; .*; lower optimizer\.lr or look at the token ids"
        ):
            sft_update(model, dataset, settings, place)
    assert steps == [0, 1], "it is taken up at the last good step, and told again"
    [last] = SnapshotStore(place.objects).list()
    assert last.step == 1 and SnapshotStore(place.objects).restore(last.id, tmp_path / "state") == last

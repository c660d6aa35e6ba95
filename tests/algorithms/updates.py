"""Small updates of real models, for tests and for the processes they kill.

``python updates.py FOLDER MODEL NAME STOP`` runs update NAME in FOLDER and kills itself after optimizer step STOP,
counted over the whole update.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout_core.algorithms.learners import ppo_update, sft_update
from rollout_core.algorithms.workshop import Workshop
from rollout_core.config import (
    BudgetConfig,
    JsonlDataset,
    OptimizerConfig,
    PPOSettings,
    SFTSettings,
    SnapshotPolicy,
)
from rollout_core.datasets import SftRow, to_jsonl
from rollout_core.ids import canonical_json, hash_bytes
from rollout_core.inference.base import Completion
from rollout_core.inference.samples import Sample, encode_completion, encode_samples
from rollout_core.objects import ObjectStore
from rollout_core.records import Checkpoint, Scores


def workshop(folder: Path, **changes: Any) -> Workshop:
    objects = ObjectStore.from_url(str(folder / "objects"))
    fields = {"key": hash_bytes(b"key"), "run_id": "run", "seed": 1, "num_threads": 1, **changes}
    return Workshop(objects=objects, cache=folder / "cache", **fields)


def sft_settings(**changes: Any) -> SFTSettings:
    return SFTSettings(
        dataset=JsonlDataset(path="x"),
        optimizer=OptimizerConfig(lr=1e-3),
        minibatch_size=8,
        budget=BudgetConfig(max_steps=6),
        snapshots=SnapshotPolicy(every_steps=2),
    ).model_copy(update=changes)


def sft_rows(count: int, *, first: int = 0) -> list[SftRow]:
    return [SftRow(prompt=f"sort {n} 1 =", completion=f" 1 {n}") for n in range(first, first + count)]


def sft(place: Workshop, model: Path, **optimizer: Any) -> Checkpoint:
    """Six steps on 20 rows, so that the third step goes around the end of the data."""
    settings = sft_settings(optimizer=OptimizerConfig(**{"lr": 1e-3, "schedule": "cosine", **optimizer}))
    dataset = place.objects.put_bytes(to_jsonl(sft_rows(20)))
    return sft_update(place.objects.put_tree(model), dataset, settings, place)[0]


def sgd(place: Workshop, model: Path) -> Checkpoint:
    """The same without moments to remember."""
    return sft(place, model, kind="sgd", lr=0.1)


PPO_SETTINGS = PPOSettings(
    prompts=JsonlDataset(path="x"),
    optimizer=OptimizerConfig(lr=1e-3, schedule="linear", warmup_steps=2),
    minibatch_size=2,
    gradient_accumulation=2,
    epochs=3,
    iterations=2,
    prompts_per_iteration=8,
    snapshots=SnapshotPolicy(every_steps=1),
)


def ppo(place: Workshop, model: Path, **changes: Any) -> Checkpoint:
    """Two iterations of three epochs of two steps; the second goes on from the state of the first."""
    start = place.objects.put_tree(model)
    policy, train_state, checkpoint = start, None, None
    for iteration in (1, 2):
        scores, samples = scored_completions(place.objects, seed=iteration)
        own = replace(place, key=hash_bytes(b"iteration %d" % iteration), seed=iteration)
        settings = PPO_SETTINGS.model_copy(update=changes)
        checkpoint = ppo_update(policy, train_state, start, scores, samples, settings, own)
        policy, train_state = checkpoint.model, checkpoint.train_state
    assert checkpoint is not None
    return checkpoint


def scored_completions(objects: ObjectStore, *, seed: int) -> tuple[Scores, Any]:
    """Eight made-up completions with rewards, as the stages before an update file them."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(2, 250) for _ in range(count)]

    samples, completions, values = [], [], []
    for number in range(8):
        key = hash_bytes(f"{seed}/{number}".encode())
        samples.append(Sample(key, "prompt", tokens(2 + number % 3), 0, None, {}))
        ids = tokens(1 + number % 4)
        completions.append(Completion(key, ids, [-5 - draw.random() for _ in ids], "text", "stop"))
        values.append(float(number % 2))
    scores = Scores(
        scores=objects.put_bytes(canonical_json(values)),
        completions=objects.put_bytes(b"".join(map(encode_completion, completions))),
        num_samples=8,
        mean=0.5,
        std=0.5,
    )
    return scores, objects.put_bytes(encode_samples(samples))


UPDATES: dict[str, Callable[[Workshop, Path], Checkpoint]] = {"sft": sft, "sgd": sgd, "ppo": ppo}


class StepCounter:
    """Calls ``stop`` after the given optimizer step, counted over all of an update."""

    def __init__(self, stop_after: int, stop: Callable[[], None]) -> None:
        self._left = stop_after
        self._stop = stop

    def __call__(self, row: dict[str, float]) -> None:
        self._left -= 1
        if self._left == 0:
            self._stop()


def main() -> None:
    folder, model, name, stop_after = sys.argv[1:]
    counter = StepCounter(int(stop_after), lambda: os.kill(os.getpid(), signal.SIGKILL))
    UPDATES[name](workshop(Path(folder), on_step=counter), Path(model))


if __name__ == "__main__":
    main()

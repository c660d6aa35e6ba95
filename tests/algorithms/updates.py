"""Small updates of real models, for tests and for the processes they kill.

``python updates.py FOLDER MODEL NAME:MOMENT:NUMBER...`` runs each update NAME in FOLDER/NAME-MOMENT, in a process that
kills itself: MOMENT step: after optimizer step NUMBER, counted over the whole update, and not before there is a
snapshot; files, filed: while it writes snapshot NUMBER. It writes how each process ended, as JSON by folder.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rollout_core.algorithms import dataset_updates
from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.dataset_updates import rm_update, sft_update
from rollout_core.algorithms.on_policy_updates import grpo_update, ppo_update
from rollout_core.algorithms.state import TrainState, copy_state, write_state
from rollout_core.base.ids import ContentId, canonical_json, hash_bytes
from rollout_core.config import (
    AnyGroupSettings,
    AnyPairSettings,
    BudgetConfig,
    Curriculum,
    GRPOSettings,
    HeldOutRows,
    ImportanceCorrection,
    IPOSettings,
    JsonlDataset,
    KTOSettings,
    LoRAConfig,
    OptimizerConfig,
    PPOSettings,
    Replay,
    RewardModelSettings,
    SFTSettings,
    SnapshotPolicy,
    SpikeRule,
)
from rollout_core.data.datasets import PairRow, SftRow, UnpairedRow, parse_rows, to_jsonl
from rollout_core.data.examples import Cursor, positions_between
from rollout_core.data.replay import Buffer, Drawn, mix
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.objects import ObjectStore, TreeManifest
from rollout_core.objects.records import Checkpoint, Scores


def positions_at(step: int, *, num_items: int, per_step: int, seed: int, epochs: int | None = None) -> list[int]:
    """Items of optimizer step ``step`` (from 0): passes over the data follow each other without a gap.

    With ``epochs`` they end after so many, and the last step has the items that are left. This is the whole data
    cursor: a resumed run needs nothing but its step.
    """
    end = None if epochs is None else epochs * num_items
    return positions_between(*Cursor().numbers(step, per_step, end), num_items=num_items, seed=seed)


def update_context(folder: Path, **changes: Any) -> UpdateContext:
    objects = ObjectStore.from_url(str(folder / "objects"))
    fields = {"key": hash_bytes(b"key"), "run_id": "run", "seed": 1, "num_threads": 1, **changes}
    return UpdateContext(objects=objects, cache=folder / "cache", **fields)


def save_state(state: TrainState, folder: Path, *, tokenizer_from: Path) -> None:
    write_state(copy_state(state), folder, tokenizer_from=tokenizer_from)


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


def sft(place: UpdateContext, model: Path, **optimizer: Any) -> Checkpoint:
    """Six steps on 20 rows, so that the third step goes around the end of the data."""
    settings = sft_settings(optimizer=OptimizerConfig(**{"lr": 1e-3, "schedule": "cosine", **optimizer}))
    dataset = place.objects.put_bytes(to_jsonl(sft_rows(20)))
    return sft_update(place.objects.put_tree(model), dataset, settings, place)[0]


def sgd(place: UpdateContext, model: Path) -> Checkpoint:
    """The same without moments to remember."""
    return sft(place, model, kind="sgd", lr=0.1)


def sft_rules(place: UpdateContext, model: Path) -> Checkpoint:
    """Rates by layer; steps cut by tokens, and skipped where their gradient is above that of the step before, which
    snapshots tell; easy rows first."""
    rule = SpikeRule(factor=1.01, window=2, after_steps=1)
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, layer_decay=0.5)
    settings = sft_settings(
        skip_spikes=rule,
        max_tokens_per_microbatch=48,
        optimizer=optimizer,
        curriculum=Curriculum(by="key", key="level", initial=0.4, until=0.8),
    )
    rows = [row.model_copy(update={"extras": {"level": 7 * n % 20}}) for n, row in enumerate(sft_rows(20))]
    dataset = place.objects.put_bytes(to_jsonl(rows))
    return sft_update(place.objects.put_tree(model), dataset, settings, place)[0]


def sft_masters(place: UpdateContext, model: Path) -> Checkpoint:
    """Weights in bfloat16 with float32 masters on the host, and their average."""
    settings = sft_settings(weights="bfloat16", precision="bfloat16", offload=True, ema_decay=0.5)
    dataset = place.objects.put_bytes(to_jsonl(sft_rows(20)))
    return sft_update(place.objects.put_tree(model), dataset, settings, place)[0]


LORA = LoRAConfig(r=4, dropout=0.1)


def sft_lora(place: UpdateContext, model: Path, lora: LoRAConfig = LORA) -> Checkpoint:
    """Adapters with dropout."""
    dataset = place.objects.put_bytes(to_jsonl(sft_rows(20)))
    return sft_update(place.objects.put_tree(model), dataset, sft_settings(lora=lora), place)[0]


def sft_chosen(place: UpdateContext, model: Path) -> Checkpoint:
    """A moving average of adapters, and the step at which it does best on other rows."""
    evaluation = HeldOutRows(dataset=JsonlDataset(path="x"), every_steps=1, select="best")
    lora = LORA.model_copy(update={"dropout": 0.0})
    settings = sft_settings(lora=lora, ema_decay=0.5, evaluation=evaluation, optimizer=OptimizerConfig(lr=0.1))
    dataset, held_out = (place.objects.put_bytes(to_jsonl(sft_rows(count))) for count in (20, 4))
    return sft_update(place.objects.put_tree(model), dataset, settings, place, held_out=held_out)[0]


PPO_SETTINGS = PPOSettings(
    prompts=JsonlDataset(path="x"),
    optimizer=OptimizerConfig(lr=1e-3, schedule="linear", warmup_steps=2, weight_decay=0.1),
    minibatch_size=2,
    gradient_accumulation=2,
    epochs=3,
    iterations=2,
    prompts_per_iteration=8,
    snapshots=SnapshotPolicy(every_steps=1),
)


def ppo(
    place: UpdateContext,
    model: Path,
    *,
    on_checkpoint: Callable[[Checkpoint], None] = lambda checkpoint: None,
    **changes,
) -> Checkpoint:
    """Two iterations of three epochs of two steps; the second goes on from the state of the first."""
    start = place.objects.put_tree(model)
    policy, train_state, checkpoint = start, None, None
    for iteration in (1, 2):
        scores, samples = scored_completions(place.objects, seed=iteration)
        own = replace(place, key=hash_bytes(b"iteration %d" % iteration), seed=iteration)
        settings = PPO_SETTINGS.model_copy(update=changes)
        checkpoint = ppo_update(policy, train_state, start, scores, samples, settings, own)
        on_checkpoint(checkpoint)
        policy, train_state = checkpoint.model, checkpoint.train_state
    assert checkpoint is not None
    return checkpoint


GRPO_SETTINGS = GRPOSettings(
    prompts=JsonlDataset(path="x"),
    optimizer=OptimizerConfig(lr=1e-3),
    samples_per_prompt=2,
    minibatch_size=4,
    gradient_accumulation=1,
    epochs=3,
    iterations=2,
    prompts_per_iteration=4,
    kl_coef=0.1,
    snapshots=SnapshotPolicy(every_steps=1),
)


def grpo(
    place: UpdateContext,
    model: Path,
    *,
    on_checkpoint: Callable[[Checkpoint], None] = lambda checkpoint: None,
    teacher: Path | None = None,
    **changes,
) -> Checkpoint:
    """As `ppo`, with groups of two and a KL to the reference."""
    settings: Any = GRPO_SETTINGS.model_copy(update=changes)
    if changes.get("loss") in ("gkd", "online_dpo"):
        settings = TypeAdapter(AnyGroupSettings).validate_python({**GRPO_SETTINGS.model_dump(), **changes})
    start = place.objects.put_tree(model)
    taught = {} if teacher is None else {"teacher": place.objects.put_tree(teacher)}
    policy, train_state, checkpoint = start, None, None
    for iteration in (1, 2):
        scores, samples = scored_completions(place.objects, seed=iteration)
        again = None
        if settings.replaying is not None and iteration == 2:
            scores, samples, again = replayed_completions(place.objects)
        own = replace(place, key=hash_bytes(b"iteration %d" % iteration), seed=iteration)
        checkpoint = grpo_update(policy, train_state, start, scores, samples, settings, own, replayed=again, **taught)
        on_checkpoint(checkpoint)
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


def replayed_completions(objects: ObjectStore) -> tuple[Scores, Any, Any]:
    """The completions of the second iteration, and two groups of the first; and what they count."""
    settings, drawn = Replay(groups=2), []
    for number in (0, 1):
        scores, samples = scored_completions(objects, seed=number + 1)
        lines = [objects.get_bytes(blob).splitlines(keepends=True) for blob in (samples, scores.completions)]
        values = objects.get_json(scores.scores)
        drawn.append(Drawn(number, hash_bytes(b"weights %d" % number), *lines, values))
    mixed = mix(Buffer(2).with_iteration(drawn[0], settings), drawn[1], settings, "seed")
    scores = Scores(
        scores=objects.put_bytes(canonical_json(mixed.scores)),
        completions=objects.put_bytes(mixed.completions),
        num_samples=len(mixed.scores),
        mean=0.5,
        std=0.5,
    )
    return scores, objects.put_bytes(mixed.samples), objects.put_json(mixed.document)


KINDS = ("rm", "dpo", "ipo", "kto")
COMMON = {
    "dataset": {"path": "x"},
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
    "minibatch_size": 4,
    "gradient_accumulation": 2,
    "budget": {"max_steps": 6},
    "sequence": {"max_length": 64},
    "snapshots": {"every_steps": 2},
}


def lines(rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def preference_data(kind: str, *, count: int = 24, seed: int = 3) -> bytes:
    from make_tiny import make_judged, make_pairs, make_problems

    problems = make_problems(count, random.Random(seed))
    if kind == "kto":
        return to_jsonl(parse_rows(lines(make_judged(problems, random.Random(4))), "judged", UnpairedRow))
    return to_jsonl(parse_rows(lines(make_pairs(problems, random.Random(4))), "pairs", PairRow))


def preference_update(
    kind: str, folder: Path, place: UpdateContext, held_out: ContentId | None = None, **changes
) -> Checkpoint:
    model = place.objects.put_tree(folder)
    dataset = place.objects.put_bytes(preference_data(kind))
    settings = {**COMMON, **changes}
    if kind == "rm":
        return rm_update(model, dataset, RewardModelSettings.model_validate(settings), place, held_out=held_out)[0]
    kinds: dict[str, Any] = {"dpo": AnyPairSettings, "ipo": IPOSettings, "kto": KTOSettings}
    parsed = TypeAdapter(kinds[kind]).validate_python(settings)
    return dataset_updates.preference_update(model, model, dataset, parsed, place, held_out=held_out)[0]


def rows_of(checkpoint: Checkpoint, objects: ObjectStore) -> list[dict[str, float]]:
    return [json.loads(line) for line in objects.get_bytes(checkpoint.metrics).splitlines()]


def _preference(kind: str, place: UpdateContext, model: Path, **changes: Any) -> Checkpoint:
    return preference_update(kind, model, place, **changes)


UPDATES: dict[str, Callable[[UpdateContext, Path], Checkpoint]] = {
    "sft": sft,
    "sgd": sgd,
    "sft-rules": sft_rules,
    "sft-lora": sft_lora,
    "sft-nf4": partial(sft_lora, lora=LORA.model_copy(update={"quantization": "nf4"})),
    "sft-masters": sft_masters,
    "sft-chosen": sft_chosen,
    "ppo": ppo,
    "grpo": grpo,
    # Of six steps an iteration half are skipped, also by gradients of the iteration before.
    "grpo-lora": partial(grpo, lora=LORA, skip_spikes=SpikeRule(factor=1.0001, after_steps=1)),
    "grpo-replay": partial(grpo, replay=Replay(groups=2), correction=ImportanceCorrection()),
    **{kind: partial(_preference, kind) for kind in KINDS},
    "orpo": partial(_preference, "dpo", loss="orpo"),
}
ON_POLICY = ("ppo", "grpo", "grpo-lora", "grpo-replay")


class StepCounter:
    """Calls ``stop`` after the given optimizer step, counted over all of an update."""

    def __init__(self, stop_after: int, stop: Callable[[], None]) -> None:
        self._left = stop_after
        self._stop = stop

    def __call__(self, row: dict[str, float]) -> None:
        self._left -= 1
        if self._left == 0:
            self._stop()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_write(number: int, *, having_filed: bool) -> None:
    """Arrange for death while snapshot ``number`` is written: with part of its files in the store, or when everything
    of it is there but the ref that leads to it."""
    writes = 0

    def put_files(self: ObjectStore, manifest: TreeManifest, paths: Mapping[str, Path], *checks: Any) -> ContentId:
        nonlocal writes
        writes += "state.json" in paths
        if writes == number and not having_filed:
            self.put_file(paths[manifest.files[0].path])
            die()
        return whole(self, manifest, paths, *checks)

    def set_ref(self: ObjectStore, name: str, content_id: ContentId) -> None:
        if writes == number and name.startswith("progress/"):
            die()
        named(self, name, content_id)

    whole, named = ObjectStore.put_files, ObjectStore.set_ref
    ObjectStore.put_files, ObjectStore.set_ref = put_files, set_ref


def run_and_die(folder: Path, model: Path, name: str, moment: str, number: int) -> None:
    place = update_context(folder)

    def stop() -> None:
        """Not before a snapshot is there to go on from."""
        parts = 2 if name in ON_POLICY else 1
        while len(place.objects.ref_names("progress")) < parts:
            time.sleep(0.01)
        die()

    counter = StepCounter(number if moment == "step" else 0, stop)
    if moment != "step":
        die_in_write(number, having_filed=moment == "filed")
    UPDATES[name](replace(place, on_step=counter), model)


def main() -> None:
    folder, model = map(Path, sys.argv[1:3])
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    ended: dict[str, int] = {}
    for name, moment, number in (job.split(":") for job in sys.argv[3:]):
        place = f"{name}-{moment}"
        # Nothing was computed yet, so no thread is lost; imports, which take most of the time, are done once.
        process = os.fork()
        if not process:
            run_and_die(folder / place, model, name, moment, int(number))
            os._exit(0)
        ended[place] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    sys.stdout.write(json.dumps(ended))


if __name__ == "__main__":
    main()

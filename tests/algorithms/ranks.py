"""Small updates by several processes: ``python -m torch.distributed.run ... ranks.py FOLDER MODEL WHOLE INTERRUPTED``.

WHOLE and INTERRUPTED are JSON lists of a kind of parallelism and the name of an update; all of them run in the same
processes, most of whose time goes into importing torch. Each has a folder of its own below FOLDER; the first process
writes what they made to checkpoints.json, and to apart.json which of some tensors were found to differ among the
processes.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from updates import (
    LORA,
    PPO_SETTINGS,
    StepCounter,
    preference_update,
    replayed_completions,
    scored_completions,
    sft_rows,
    sft_settings,
    update_context,
)

from rollout_core.algorithms import parallel
from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.dataset_updates import sft_update
from rollout_core.algorithms.on_policy_updates import grpo_update, ppo_update
from rollout_core.algorithms.parallel import differing_replicas, is_first, rank, world_size
from rollout_core.base.ids import hash_bytes
from rollout_core.config import (
    AnyGroupSettings,
    BudgetConfig,
    Curriculum,
    Distillation,
    GRPOSettings,
    HeldOutRows,
    ImportanceCorrection,
    OptimizerConfig,
    ParallelConfig,
    Replay,
    SnapshotPolicy,
    SpikeRule,
)
from rollout_core.data.datasets import to_jsonl
from rollout_core.models.pretrained import copy_tokenizer, load_causal_lm
from rollout_core.objects.records import Checkpoint

KINDS = ("ddp", "fsdp2", "tensor")
SHARING_ROWS = ("ddp", "fsdp2")


class Interrupted(Exception):
    """Stops an update, in every process alike."""


@dataclass(frozen=True)
class Case:
    """An update, and what is changed in its settings."""

    update: Callable[..., Checkpoint]
    changes: dict[str, Any]
    kinds: tuple[str, ...] = KINDS
    tolerance: float = 1e-4
    is_interrupted: bool = False
    """Whether it is also left by some processes and taken up by others."""

    def run(self, place: UpdateContext, model: Path, parallel: ParallelConfig) -> Checkpoint:
        """Train in the processes there are."""
        # Copies for snapshots are a third of the work; those that are taken up need some on the way.
        snapshots = {} if self.is_interrupted else {"snapshots": SnapshotPolicy(every_steps=1_000)}
        return self.update(place, model, {**snapshots, **self.changes, "parallel": parallel})


def sft(place: UpdateContext, model: Path, changes: dict[str, Any]) -> Checkpoint:
    rows = sft_rows(20)
    dataset = place.objects.put_bytes(to_jsonl(rows))
    held_out = place.objects.put_bytes(to_jsonl(rows[:5]))
    settings = sft_settings(evaluation=HeldOutRows.model_validate({"dataset": {"path": "x"}, "every_steps": 2}))
    settings = settings.model_copy(update=changes)
    return sft_update(place.objects.put_tree(model), dataset, settings, place, held_out=held_out)[0]


def sft_by_level(place: UpdateContext, model: Path, changes: dict[str, Any]) -> Checkpoint:
    """Easy rows first."""
    rows = [row.model_copy(update={"extras": {"level": 7 * n % 20}}) for n, row in enumerate(sft_rows(20))]
    curriculum = Curriculum(by="key", key="level", initial=0.4, until=0.8)
    settings = sft_settings(curriculum=curriculum, **changes)
    return sft_update(place.objects.put_tree(model), place.objects.put_bytes(to_jsonl(rows)), settings, place)[0]


def taught(place: UpdateContext, model: Path, changes: dict[str, Any]) -> Checkpoint:
    """SFT towards a model of other weights."""
    teacher = load_causal_lm(model)
    for parameter in teacher.parameters():
        parameter.data.mul_(1.5)
    folder = place.cache / "teacher"
    if is_first():
        teacher.save_pretrained(folder)
        copy_tokenizer(model, folder)
        place.objects.put_tree(folder)
    if world_size() > 1:
        dist.barrier()
    distillation = Distillation.model_validate({"teacher": {"uri": "x"}})
    settings = sft_settings(distillation=distillation, **changes)
    dataset = place.objects.put_bytes(to_jsonl(sft_rows(20)))
    student, other = (place.objects.put_tree(which) for which in (model, folder))
    return sft_update(student, dataset, settings, place, teacher=other)[0]


def changed(settings: Any, changes: dict[str, Any]) -> Any:
    """Of the algorithm that ``kind`` names, where that is among the changes."""
    if "kind" in changes:
        return TypeAdapter(AnyGroupSettings).validate_python({**settings.model_dump(), **changes})
    return settings.model_copy(update=changes)


def on_policy(update: Callable[..., Checkpoint], settings: Any) -> Callable[..., Checkpoint]:
    def run(place: UpdateContext, model: Path, changes: dict[str, Any]) -> Checkpoint:
        start = place.objects.put_tree(model)
        policy, train_state, checkpoint = start, None, None
        for iteration in (1, 2):
            scores, samples = scored_completions(place.objects, seed=iteration)
            asked, again = changed(settings, changes), {}
            if asked.replaying is not None and iteration == 2:
                scores, samples, again["replayed"] = replayed_completions(place.objects)
            own = replace(place, key=hash_bytes(b"iteration %d" % iteration), seed=iteration)
            checkpoint = update(policy, train_state, start, scores, samples, asked, own, **again)
            policy, train_state = checkpoint.model, checkpoint.train_state
        assert checkpoint is not None
        return checkpoint

    return run


def preferences(kind: str) -> Callable[..., Checkpoint]:
    def run(place: UpdateContext, model: Path, changes: dict[str, Any]) -> Checkpoint:
        return preference_update(kind, model, place, **changes)

    return run


GRPO_SETTINGS = GRPOSettings(
    prompts=PPO_SETTINGS.prompts,
    optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1),
    samples_per_prompt=4,
    prompts_per_iteration=2,
    iterations=2,
    epochs=2,
    minibatch_size=4,
    gradient_accumulation=1,
    kl_coef=0.1,
    snapshots=PPO_SETTINGS.snapshots,
)
ppo = on_policy(ppo_update, PPO_SETTINGS)
grpo = on_policy(grpo_update, GRPO_SETTINGS)
CASES = {
    "sft": Case(sft, {}, is_interrupted=True),
    "sft, three minibatches": Case(sft, {"minibatch_size": 3, "gradient_accumulation": 3}, kinds=SHARING_ROWS),
    "sft, cut by tokens": Case(sft, {"max_tokens_per_microbatch": 40}),
    "sft, layers computed twice": Case(sft, {"gradient_checkpointing": True, "budget": BudgetConfig(max_steps=2)}),
    "sft, rates by layer": Case(
        sft, {"optimizer": OptimizerConfig(lr=1e-3, layer_decay=0.5), "budget": BudgetConfig(max_steps=2)}
    ),
    "sft, averaged weights": Case(sft, {"ema_decay": 0.5, "budget": BudgetConfig(max_steps=2)}),
    "sft, weights of bfloat16": Case(
        sft,
        {"weights": "bfloat16", "precision": "bfloat16", "budget": BudgetConfig(max_steps=2)},
        tolerance=0.02,  # bfloat16 rounds other sums otherwise
    ),
    "sft, offloaded": Case(sft, {"offload": True, "budget": BudgetConfig(max_steps=2)}, kinds=("fsdp2",)),
    "sft, taught": Case(taught, {"budget": BudgetConfig(max_steps=2)}),
    "sft, adapters": Case(
        sft, {"lora": LORA.model_copy(update={"dropout": 0.0})}, kinds=SHARING_ROWS, is_interrupted=True
    ),
    "sft, easy rows first": Case(sft_by_level, {"budget": BudgetConfig(max_steps=3)}, kinds=SHARING_ROWS),
    "sft, a row left for the last step": Case(
        sft, {"minibatch_size": 19, "budget": BudgetConfig(epochs=1), "evaluation": None}
    ),
    "sft, adapters on four bits": Case(
        sft,
        {
            "lora": LORA.model_copy(update={"dropout": 0.0, "quantization": "nf4"}),
            "budget": BudgetConfig(max_steps=2),
        },
        kinds=("ddp",),
    ),
    "rm": Case(preferences("rm"), {}),
    "dpo": Case(preferences("dpo"), {}),
    "dpo, adapters": Case(preferences("dpo"), {"lora": LORA}, kinds=SHARING_ROWS),
    "ipo": Case(preferences("ipo"), {"minibatch_size": 5, "gradient_accumulation": 1}, kinds=SHARING_ROWS),
    "kto": Case(preferences("kto"), {"minibatch_size": 8, "gradient_accumulation": 1}),
    "kto, two rows left for the last step": Case(
        preferences("kto"), {"minibatch_size": 11, "gradient_accumulation": 1, "budget": {"epochs": 1}}
    ),
    "ppo": Case(ppo, {}, is_interrupted=True),
    "ppo, value model": Case(ppo, {"values": "model", "minibatch_size": 8, "gradient_accumulation": 1}),
    "ppo, adapters": Case(ppo, {"lora": LORA}, kinds=SHARING_ROWS),
    "grpo": Case(grpo, {}),
    "grpo, bnpo": Case(
        grpo, {"loss_type": "bnpo", "minibatch_size": 3, "gradient_accumulation": 3}, kinds=SHARING_ROWS
    ),
    "grpo, dapo": Case(grpo, {"loss_type": "dapo"}, kinds=SHARING_ROWS),
    "grpo, replayed": Case(
        grpo,
        {"replay": Replay(groups=1), "correction": ImportanceCorrection(), "epochs": 1},
        kinds=SHARING_ROWS,
    ),
    "grpo, corrected over several steps": Case(grpo, {"correction": ImportanceCorrection()}, kinds=SHARING_ROWS),
    "grpo, spikes left out": Case(
        grpo, {"skip_spikes": SpikeRule(factor=1.05, after_steps=2)}, kinds=("ddp",), is_interrupted=True
    ),
    "grpo, online dpo": Case(grpo, {"kind": "online_dpo", "kl_coef": 0.0, "minibatch_size": 2}, kinds=SHARING_ROWS),
}
WHOLE = tuple((kind, name) for name, case in CASES.items() for kind in case.kinds)
"""Kinds of parallelism and updates."""
INTERRUPTED = tuple((kind, name) for kind, name in WHOLE if CASES[name].is_interrupted)
"""Those that are also left by some processes and taken up by others."""
BY_EVERY_KIND = ("sft", "sft, averaged weights", "dpo", "ppo", "grpo")
OFTEN = frozenset(
    (kind, name)
    for number, (name, case) in enumerate(CASES.items())
    for kind in (case.kinds if name in BY_EVERY_KIND else [case.kinds[number % len(case.kinds)]])
)
"""What `make test` has of them; `make campaigns` has the others. Every update is in it, by one kind at least."""
INTERRUPTED_OFTEN = frozenset(
    [("ddp", "sft"), ("tensor", "sft"), ("fsdp2", "sft, adapters"), ("fsdp2", "ppo"), ("ddp", "grpo, spikes left out")]
)


def leave(name: str, folder: Path, model: Path, parallel: ParallelConfig) -> None:
    """Stop update ``name`` after three optimizer steps."""

    def stop() -> None:
        raise Interrupted

    with contextlib.suppress(Interrupted):
        CASES[name].run(update_context(folder, on_step=StepCounter(3, stop)), model, parallel)


def found_apart() -> list[str]:
    """Which of some tensors this project finds to differ among the processes."""
    parallel.SLICE_NUMBERS = 4
    here = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    apart = here.clone()
    apart[1, 1] = torch.nextafter(apart[1, 1], torch.tensor(torch.inf)) if rank() else apart[1, 1]
    mesh = init_device_mesh("cpu", (world_size(),))
    own = {"cut": distribute_tensor(here, mesh, [Shard(0)]), "of few bits": here.bfloat16().T, "none": here[:0]}
    others = {"bfloat16, apart": (here + rank()).bfloat16(), "a number": here[1, 1], "its own": torch.tensor(rank())}
    return differing_replicas({"equal": here, "apart": apart, **own, **others})


def place_of(folder: Path, kind: str, name: str) -> Path:
    return folder / kind / name.replace(" ", "-").replace(",", "")


def by(kind: str) -> ParallelConfig:
    return ParallelConfig.model_validate({"nproc": world_size(), "kind": kind})


def main() -> None:
    from rollout_core.launch.rank import join

    folder, model = map(Path, sys.argv[1:3])
    whole, interrupted = map(json.loads, sys.argv[3:5])
    parallel.BUCKET_BYTES = 2**17  # so that these small models have several
    join()
    made: dict[str, dict[str, Any]] = {"whole": {}, "taken up": {}, "resumed": {}}
    for kind, name in whole:
        place, config = update_context(place_of(folder, kind, name)), by(kind)
        made["whole"][f"{kind} {name}"] = CASES[name].run(place, model, config).model_dump(mode="json")
    for kind, name in interrupted:
        config = by(kind)
        leave(name, place_of(folder / "left by two", kind, name), model, config)
        place = update_context(place_of(folder / "left by one", kind, name))
        made["taken up"][f"{kind} {name}"] = CASES[name].run(place, model, config).model_dump(mode="json")
        again = update_context(place_of(folder / "left by two", kind, f"{name}, again"))
        leave(name, again.cache.parent, model, config)
        dist.barrier()  # the first may still be writing what both are to take up
        made["resumed"][f"{kind} {name}"] = CASES[name].run(again, model, config).model_dump(mode="json")
    apart = found_apart()
    if is_first():
        (folder / "apart.json").write_text(json.dumps(apart))
        (folder / "checkpoints.json").write_text(json.dumps(made))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

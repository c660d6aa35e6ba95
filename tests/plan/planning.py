"""Sound configurations, and how tests plan or are refused with a change to one."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import CONFIG_KINDS, apply_overrides, parse_config
from rollout_core.plans.batch_plan import plan_batch
from rollout_core.plans.learner_plan import plan_nightly, plan_training
from rollout_core.store.reachable import plain_connections

PLANS: dict[str, Callable[..., dict[str, Any]]] = {
    "nightly": plan_nightly,
    "train-sft": plan_training,
    "train-ppo": plan_training,
    "train-grpo": plan_training,
    "infer-batch": functools.partial(plan_batch, thorough=True),
}
CHAT = {"messages": [{"role": "user", "content": "sort 2 1"}, {"role": "assistant", "content": "1 2"}]}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LONG = "sort " + "9 " * 300 + "="


def jsonl(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def document(kind: str) -> dict[str, Any]:
    """A sound configuration of each kind of run, in the files of `work`."""
    sft = {"dataset": {"path": "sft.jsonl"}, "sequence": {"max_length": 64}, "optimizer": {"lr": 1e-3}}
    ppo = {"prompts": {"path": "prompts.jsonl"}, "optimizer": {"lr": 1e-4}}
    backend, model = {"kind": "transformers"}, {"uri": "model"}
    return {
        "nightly": {
            "model": model,
            "backend": backend,
            "sft": sft,
            "ppo": ppo,
            "evaluation": {"prompts": {"path": "held-out.jsonl"}},
            "report_dir": "report",
        },
        "train-sft": {"algorithm": {**sft, "base_model": model}},
        "train-ppo": {"algorithm": {**ppo, "base_model": model}, "backend": backend},
        "train-grpo": {"algorithm": {**ppo, "base_model": model}, "backend": backend},
        "infer-batch": {
            "model": model,
            "backend": backend,
            "sampling": {"max_tokens": 16},
            "input": {"glob": "prompts.jsonl"},
            "output": {"dir": "out"},
        },
    }[kind]


def plan(kind: str, base: Path, **changes: Any) -> dict[str, Any]:
    """Parse and plan, as the command and the flows do. ``changes`` has __ for the dots of a key."""
    connections = plain_connections()
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    config = parse_config(apply_overrides(document(kind), overrides), CONFIG_KINDS[kind])
    return PLANS[kind](config, base, connections=connections)


def refusal(kind: str, base: Path, **changes: Any) -> str:
    """The one line that a plan refuses with."""
    with pytest.raises(ConfigError) as caught:
        plan(kind, base, **changes)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def files(folder: Path) -> Iterator[tuple[str, bytes]]:
    yield from sorted((str(path), path.read_bytes()) for path in folder.rglob("*") if path.is_file())


def cache_hub_model(work: Path, monkeypatch: pytest.MonkeyPatch, repository: str, revision: str = "main") -> None:
    """The model of ``work`` as what the hub's cache holds of a repository, at one revision."""
    cache = work / "hub" / f"models--{repository.replace('/', '--')}"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / revision).write_text("abc123")
    shutil.copytree(work / "model", cache / "snapshots" / "abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(work / "hub"))
